"""A kernel on a problem: its result beside that in float64, its time beside torch's.

It runs in a process that may end (``child``), so it says what it is about to do.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tessella.artifacts.outline import WRONG
from tessella.core.errors import first_line
from tessella.core.memory import is_out_of_memory
from tessella.device.packing import forget
from tessella.kernels import catalog
from tessella.kernels.catalog import Config, Kernel
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.user_operators import as_tuple
from tessella.search.find import bind
from tessella.search.inspection import Exact, deviates, exact_answers, inspect, tolerance, wrong
from tessella.search.kernel_report.problems import draw, problems_of
from tessella.search.kernel_report.record import Row
from tessella.search.timing import Run, Timing, measure
from tessella.search.trying import as_in_a_plan, other_results, own_inputs, runs

Doing = Callable[[str], None]

BUDGET_S = 0.05  # to time a kernel and its peer
KEPT = 8  # problems whose numbers are kept: float64's answer takes longer than most kernels


class Gone(Exception):
    """The GPU is lost to this process: no call of it survives."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A problem with its numbers on a device, and float64's answer."""

    problem: Problem
    constants: dict[int, torch.Tensor]
    inputs: list[torch.Tensor]
    exact: tuple[Exact, ...]


class Bench:
    """A device, and the numbers of the problems on it.

    Args:
        doing: called with what begins.
    """

    def __init__(self, target: str, device: torch.device, doing: Doing) -> None:
        self._target, self._device, self._doing = target, device, doing
        self._problems = problems_of(target)
        self._subject = functools.lru_cache(KEPT)(self._drawn)

    def try_kernel(self, row: Kernel, name: str, place: int) -> tuple[Row, int]:
        """What a kernel does with a problem, and how many configurations it has for it.

        Args:
            name: of the problem.
            place: of the configuration among those that the kernel proposes.

        Raises:
            ImportError: its module needs what is not installed.
            Gone: the kernel crashed the GPU.
        """
        problem = self._problems[name]
        family = operation(problem.op).family
        told = Row(kernel=row.id, source=row.source, family=family, problem=name, outcome="refused")
        self._doing("when asked whether it takes the problem")
        if why := row.refusal(problem):
            return replace(told, why=why), 0
        configs = row.configs(problem)
        if place >= len(configs):
            return replace(told, why="it has no configuration for this problem"), 0
        told = replace(told, config=configs[place])
        self._doing("in the float64 reference")
        asked = self._subject(name)
        self._doing("when it ran")
        try:
            with as_in_a_plan(problem, self._target):
                return self._compared(row, asked, told), len(configs)
        except torch.AcceleratorError as error:
            raise Gone(first_line(error)) from error
        except Exception as error:  # told in the row, whatever it is
            return replace(told, outcome="failed", why=_said(error)), len(configs)
        finally:
            forget(asked.constants.values())

    def _drawn(self, name: str) -> Subject:
        problem = self._problems[name]
        with torch.inference_mode():
            constants, inputs = draw(problem, self._device)
            exact = exact_answers(problem, constants, inputs)
        return Subject(problem=problem, constants=constants, inputs=inputs, exact=exact)

    def _compared(self, row: Kernel, asked: Subject, told: Row) -> Row:
        """The row of a kernel that takes the problem."""
        bound = self._bound(row, asked, told.config)
        if why := other_results(bound.run_first(), asked.problem):
            return replace(told, outcome="wrong", why=why)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        found = inspect(bound.run_first, asked.exact, bound.out, sliced=False)
        told = replace(
            told,
            outcome="right",
            error=found.max_rel_error if math.isfinite(found.max_rel_error) else None,
            bound=tolerance(asked.problem),
            repeatable=found.repeatable,
            registers=found.registers,
            shared_bytes=found.shared_bytes,
            occupancy=found.occupancy,
        )
        if why := wrong(found, asked.problem):
            return replace(told, outcome="wrong", why=why.removeprefix(WRONG))
        runs = {row.id: bound.run} | self._beside(row, asked)
        self._doing("when it was timed")
        return _timed(told, self._timings(runs, row.id))

    def _timings(self, runs: dict[str, Run], own: str) -> dict[str, Timing]:
        """The times of a kernel and its peer, or the kernel's alone where the peer has none."""
        if len(runs) > 1:
            # on a GPU, what waits for its answer cannot be captured in a graph
            with contextlib.suppress(RuntimeError):
                return measure(runs, device=self._device, budget_s=BUDGET_S)
        return measure({own: runs[own]}, device=self._device, budget_s=BUDGET_S)

    def _beside(self, row: Kernel, asked: Subject) -> dict[str, Run]:
        """What torch has for the problem; nothing where that is the kernel itself, or is wrong."""
        if row.source == "aten":
            return {}
        rows = catalog.candidates(asked.problem.op, self._target)
        others = (other for other in rows if other.source == "aten")
        peer = next((one for one in others if one.refusal(asked.problem) is None), None)
        if peer is None:
            return {}
        self._doing(f"when {peer.id} ran beside it")
        try:
            bound = self._bound(peer, asked, peer.configs(asked.problem)[0])
            made = as_tuple(bound.run_first())
        except (RuntimeError, ValueError, TypeError):
            return {}
        return {} if deviates(asked.problem, made, asked.exact) else {peer.id: bound.run}

    def _bound(self, row: Kernel, asked: Subject, config: Config) -> _Bound:
        call, buffers = bind(row, asked.problem, asked.constants, self._device, config)
        inputs = own_inputs(row, asked.problem, asked.inputs)
        run, run_first = runs(call, inputs, asked.inputs, buffers)
        return _Bound(run=run, run_first=run_first, out=buffers.get("out"))


@dataclass(frozen=True, kw_only=True)
class _Bound:
    """A kernel as a call without arguments, and where its result goes if it is told."""

    run: Run
    run_first: Run  # of inputs that no earlier call has overwritten
    out: torch.Tensor | None


def _timed(told: Row, timings: dict[str, Timing]) -> Row:
    """The row with the kernel's time, and that of the peer if there is one."""
    own, *others = timings.items()
    timing = own[1]
    told = replace(told, time_us=timing.time_us, spread_us=timing.spread_us, noisy=timing.noisy)
    for peer, its in others:
        ratio = round(its.time_us / max(timing.time_us, 1e-3), 3)
        noisy = told.noisy or its.noisy
        told = replace(told, peer=peer, peer_us=its.time_us, ratio=ratio, noisy=noisy)
    return told


def _said(error: Exception) -> str:
    if is_out_of_memory(error):
        return "out of memory"
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
