"""The program of one batch size: kernels for all steps, their memory, and the check of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tessella.artifacts.outline import Candidate
from tessella.artifacts.program import Bucket
from tessella.compiler import verify
from tessella.compiler.choices import choose_kernels, join_in_place, plan_memory
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.passes import of_stage
from tessella.compiler.rewrites.assign_layout import Formats
from tessella.core.events import Emit, phase
from tessella.graph.graph import Graph
from tessella.operations import user_operators as registry

Check = Callable[[Sequence[Choice], Bucket], None]  # raises ``verify.WrongKernel`` for a kernel

WRONG_KERNELS = 8  # that one batch size may turn out to have before the build is given up


def built(
    graph: Graph, formats: Formats, batch: int, tuner: Tuner, emit: Emit, check: Check
) -> tuple[Bucket, list[Candidate]]:
    """The bucket of a graph with concrete shapes, and every trial of every step.

    Where the check finds a kernel wrong, or some too rough for the network, the next best is taken.

    Raises:
        CompileError: no kernel fits, or the check fails otherwise.
    """
    emit(phase("tune" if tuner.measures else "estimate", f"batch {batch}"))
    choices = _chosen(graph, formats, tuner, emit, batch)
    for left in reversed(range(WRONG_KERNELS)):
        bucket = plan_memory.apply(graph, choices, batch)
        try:
            check(choices, bucket)
            break
        except verify.RoughKernels as rough:
            if not left and rough.bearable:
                break
            if not left:
                raise
            emit(phase("verify", f"{rough.wrong}, {rough.seen}: others are taken"))
            tuner.too_rough.update(dict.fromkeys(rough.kernels, choose_kernels.TOO_ROUGH))
            choices = _chosen(graph, formats, tuner, emit, batch)
        except verify.WrongKernel as wrong:
            if not left or wrong.choice.kernel == "reference":
                raise
            emit(phase("verify", f"{wrong.wrong}, {wrong.seen}: the next best is taken"))
            tuner.refuse(wrong.choice, wrong.reason)
            choices = _chosen(graph, formats, tuner, emit, batch)
    return bucket, _candidates(choices, batch)


def _chosen(graph: Graph, formats: Formats, tuner: Tuner, emit: Emit, batch: int) -> list[Choice]:
    """A kernel for each step of a graph with concrete shapes, by the passes for a batch size."""
    name, stages = f"batch {batch}", ["choose"]
    choices = join_in_place.again(graph, formats, tuner, emit, name)
    if choices is None:
        stages = ["join", "choose"]
        choices = choose_kernels.apply(graph, formats, tuner, emit, name)
    for step in of_stage(*stages) if tuner.measures else ():
        choices = step.apply(graph, choices, tuner, emit)
        if step.stage == "join" and not tuner.joined:
            # a split's results are slices or not by the size: of one picture they are dense
            joins = (c for c in choices if c.node.op != "split")
            tuner.joined.append({n: s for c in joins for n, s in c.slices.items()})
    return choices


def _candidates(choices: Sequence[Choice], batch: int) -> list[Candidate]:
    """``tuning.jsonl``: every trial of every step."""
    return [
        Candidate(
            batch=batch,
            step=choice.node.outputs[0].name,
            kernel=trial.kernel,
            chosen=trial is choice.trials[0],
            time_us=trial.time_us,
            spread_us=trial.spread_us,
            refused=trial.refused,
            workspace_bytes=trial.workspace_bytes,
            program_us=choice.raced_us.get(trial.kernel),
            noisy=trial.noisy,
            estimate_us=trial.estimate_us,
        )
        for choice in choices
        for trial in choice.trials
    ]


def outwards(sizes: Sequence[int], usual: int) -> list[int]:
    """Batch sizes in the order of their searches: each beside one that is done.

    >>> outwards([1, 2, 4, 8, 16], 4)
    [4, 8, 16, 2, 1]
    """
    return [s for s in sizes if s >= usual] + [s for s in reversed(sizes) if s < usual]


def imports(buckets: Sequence[Bucket]) -> dict[str, str]:
    """What of a user's own the steps run, and the modules that define it."""
    steps = [step for bucket in buckets for step in bucket.steps]
    names = {step.attrs["target"] if step.op == "user" else step.kernel for step in steps}
    return {name: module for name in sorted(names) if (module := registry.module(name))}
