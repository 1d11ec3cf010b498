"""tune: a plan's kernels are measured and chosen again on the machine that it shall run on."""

from __future__ import annotations

from pathlib import Path

from tessella import compiler
from tessella.api.compiling import finished
from tessella.artifacts.plan import Plan, load_plan
from tessella.core.device import using
from tessella.core.events import Emit
from tessella.core.reporter import reported


def tune(
    plan: str | Path | Plan,
    *,
    device: str | None = None,
    cache: str | Path | None = None,
    time_limit_s: float | None = None,
    emit: Emit | None = None,
) -> Plan:
    """Measure a plan's kernels on this machine, and give each step the fastest.

    Weights, graph, preprocessing, labels and self-test stay, so that neither the network nor its
    checkpoint is needed. It makes a plan of what ``compile(untuned=True)`` built elsewhere, and
    suits a plan for a CPU to this one.

    >>> ts.tune("flowers.plan").save("flowers.plan")

    Args:
        plan: a plan, or its file, for this machine's GPU or for any CPU.
        device: ``cpu``, or a GPU by its number, ``cuda:1``; by default the current GPU. Of several
            programs in the plan the one for it is measured; the others stay.
        cache: timing cache file, read and added to.
        time_limit_s: how long to measure at most; the next call with the same ``cache`` goes on.
        emit: told what happens; by default bars show it on a terminal and in a notebook.

    Raises:
        WrongDevice: the plan is for a GPU that is not here; the message has the rebuild command.
        CompileError: the plan does not compute here what it recorded.
    """
    measuring = compiler.Measuring(
        cache=None if cache is None else Path(cache), time_limit_s=time_limit_s
    )
    with using(device), reported(emit) as told:
        given = plan if isinstance(plan, Plan) else load_plan(plan)
        return finished(compiler.retune(given, measuring=measuring, emit=told), told)
