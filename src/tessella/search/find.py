"""The auction: every kernel that fits a problem is run, the fastest wins, whoever wrote it.

Kernels bid with all their configurations; a first look drops those far behind in their own kernel,
and the others run in interleaved rounds. Who is refused, and why, is part of the answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from tessella.core.device import fingerprint, torch_device
from tessella.core.errors import CompileError, KernelError
from tessella.core.memory import is_out_of_memory
from tessella.device.ahead_of_time import kernel_cache, using_kernels
from tessella.device.float32_math import float32_math
from tessella.device.launch import preparing
from tessella.device.packing import forget
from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Config, Kernel
from tessella.operations.problem import Problem
from tessella.search.allowance import Allowance
from tessella.search.buffers import allocated
from tessella.search.compile_ahead import Compiling, compile_ahead, crashed
from tessella.search.inputs import joined, sample_inputs, tells
from tessella.search.inspection import exact_answers, inspect, wrong
from tessella.search.timing import Run, Timing, glance, race
from tessella.search.tuning import Inspection, TimingCache, Trial, Tried

Bid = tuple[Kernel, Config]
COMPILERS = 8  # threads that load what is compiled, and compile what users registered
OWN = ("tessella", "user")  # sources whose kernels go through ``launch``
UNPROVEN = "has not run on a GPU yet, and might hang; ask for its algorithm by name"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What an auction may use.

    Attributes:
        budget_s: about how long to measure.
        max_workspace_bytes: kernels that need more scratch memory are refused.
        algorithms: only kernels of these algorithms; None for all.
        sources: only kernels by these authors; None for all.
        far: a kernel whose first configuration takes this many times the fastest one's time does
            not try its others.
        inspect: also compare with float64, repeat, and read what the kernels take from the GPU;
            and try what has been far behind on problems like this one.
        allowance: of time, that several auctions share; ``find`` raises ``OutOfTime`` after it.
    """

    budget_s: float = 0.02
    max_workspace_bytes: int | None = None
    algorithms: Collection[str] | None = None
    sources: Collection[str] | None = None
    far: float = 2.0
    inspect: bool = False
    allowance: Allowance | None = None


def find(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    target: str,
    cache: TimingCache | None = None,
    terms: Terms = Terms(),
    inputs: Sequence[torch.Tensor] | None = None,
    near: Sequence[Bid] | None = None,
) -> tuple[Trial, ...]:
    """Every kernel of the catalog for this problem: the fastest first, refused ones last.

    Args:
        constants: the constant inputs by position, on the target's device.
        cache: times from here are believed; new ones are added.
        inputs: the other inputs, in order; random ones if left out, or where they would not show
            a wrong kernel: not finite, or zeros.
        near: what ``Looks`` found worth running, if it was asked.

    Raises:
        CompileError: no kernel can carry the problem out.
    """
    auction = _Auction(problem, constants, target, cache or TimingCache(), terms, inputs, near)
    rows = _admitted(problem, target, terms)
    refusals = _refusals(rows, problem, terms)
    fitting = _fitting(rows, refusals)
    large = {row.id: auction.over_limit(row) for row in fitting}
    fitting = [row for row in fitting if large[row.id] is None]
    refusals |= large
    trials = [Trial(kernel=k, refused=r) for k, r in refusals.items() if r is not None]
    trials += auction.trials(fitting)
    if all(trial.refused for trial in trials):
        last = [row for row in rows if row.last_resort]
        trials += auction.trials([row for row in last if row.refusal(problem) is None])
    if all(trial.refused for trial in trials):
        raise CompileError(
            f"no kernel on {target} can carry out {problem.op}",
            seen="; ".join(f"{t.kernel}: {t.refused}" for t in trials) or "no such kernel",
            fix="choose another algorithm, precision or target",
        )
    order = {row.id: i for i, row in enumerate(rows)}
    return tuple(
        sorted(trials, key=lambda t: (t.refused is not None, t.time_us or 0.0, order[t.kernel]))
    )


AHEAD = 16  # problems that are looked at before the first auction: some hundred to compile


class Looks:
    """What the auctions of a network will run, looked at and being compiled while others are held.

    One auction after another would leave most of the compiling processes idle. Not all are looked
    at before the first is held: where time ends, something was measured.

    Args:
        problems: each with its constants, by a name, in the order of their auctions.
    """

    def __init__(
        self,
        problems: Mapping[str, tuple[Problem, Mapping[int, torch.Tensor]]],
        *,
        target: str,
        cache: TimingCache,
        terms: Terms = Terms(),
    ) -> None:
        self._target, self._allowance = target, terms.allowance or Allowance()
        self._waiting: dict[str, tuple[_Auction, list[Kernel], Compiling]] = {}
        self._found: dict[str, tuple[list[Bid], Compiling]] = {}
        if torch_device(target).type != "cuda":
            return
        self._problems = {name: problem for name, (problem, _) in problems.items()}
        wanted = {}
        for name, one in problems.items():
            auction = _Auction(*one, target, cache, terms, None)
            if rows := auction.unknown_rows():
                wanted[name] = auction, rows, self._bids(name, auction.openers(rows))
        compile_ahead([bid for *_, bids in wanted.values() for bid in bids], target)
        for name, (auction, rows, bids) in wanted.items():  # they have been asked for
            self._waiting[name] = auction, rows, compile_ahead(bids, target)

    def _bids(self, name: str, wanted: Sequence[Bid]) -> list[tuple[Problem, Kernel, Config]]:
        return [(self._problems[name], *bid) for bid in wanted]

    def near(self, name: str) -> list[Bid] | None:
        """What is worth running in an auction, compiled if there was time; None if it was not
        looked at, as the cache has the answer or the time is over.
        """
        if name not in self._waiting and name not in self._found:
            return None
        while self._waiting and (name in self._waiting or len(self._found) < AHEAD):
            first = next(iter(self._waiting))
            auction, rows, compiling = self._waiting[first]
            if not compiling.wait(self._allowance.left_s) or self._allowance.left_s == 0.0:
                break
            del self._waiting[first]
            found = auction.look(rows)
            self._found[first] = found, compile_ahead(self._bids(first, found), self._target)
        if name not in self._found:
            return None
        found, compiling = self._found.pop(name)
        compiling.wait(self._allowance.left_s)
        return found


def _admitted(problem: Problem, target: str, terms: Terms) -> list[Kernel]:
    """The rows that the terms let bid."""
    return [
        row
        for row in catalog.candidates(problem.op, target)
        if (terms.algorithms is None or row.algorithm in terms.algorithms)
        and (terms.sources is None or row.source in terms.sources)
    ]


def _refusals(rows: Sequence[Kernel], problem: Problem, terms: Terms) -> dict[str, str | None]:
    """Why each row but the last resorts does not take part; None where it does."""
    return {row.id: _refusal(row, problem, terms) for row in rows if not row.last_resort}


def _refusal(row: Kernel, problem: Problem, terms: Terms) -> str | None:
    refused = row.refusal(problem)
    if refused or terms.algorithms:
        return refused
    if row.unproven:
        return UNPROVEN
    return None if terms.inspect else row.outclassed(problem)


def _fitting(rows: Sequence[Kernel], refusals: Mapping[str, str | None]) -> list[Kernel]:
    return [row for row in rows if row.id in refusals and refusals[row.id] is None]


def bind(
    row: Kernel,
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    device: torch.device,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Call, dict[str, torch.Tensor]]:
    """A kernel ready to run, and its ``out=`` and ``workspace=`` buffers where it wants them.

    Args:
        out: where the result shall lie; a new tensor if left out.
    """
    config = config or {}
    call = row.load().bind(problem, constants, **config)
    buffers = {}
    if row.writes_out:
        buffers["out"] = problem.output.empty(device) if out is None else out
    scratch = row.workspace_bytes(problem, config)
    if scratch:
        buffers["workspace"] = torch.empty(scratch, dtype=torch.uint8, device=device)
    return call, buffers


@dataclass(frozen=True, kw_only=True)
class _Bid:
    """One configuration of a kernel, run once and found to make what was promised."""

    row: Kernel
    config: Config
    run: Run
    run_first: Run  # of inputs that no earlier call has overwritten
    workspace_bytes: int


class _Auction:
    """One problem with its tensors, and the buffers that all bids share."""

    def __init__(
        self,
        problem: Problem,
        constants: Mapping[int, torch.Tensor],
        target: str,
        cache: TimingCache,
        terms: Terms,
        inputs: Sequence[torch.Tensor] | None,
        near: Sequence[Bid] | None = None,
    ) -> None:
        self._problem, self._constants, self._terms = problem, constants, terms
        self._near = near
        self._target, self._cache = target, cache
        self._device = torch_device(target)
        self._inputs = inputs
        self._short_of_memory: set[str] = set()  # rows
        self._out: torch.Tensor | None = None
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self._device)

    def trials(self, rows: list[Kernel]) -> list[Trial]:
        """A trial of each row: from the cache if it knows all of them, else side by side."""
        if self._target == "reference":
            return [Trial(kernel=row.id) for row in rows]
        device, key = fingerprint(self._target).hash, self._problem.key
        known = [self._cache.get(device, key, row.id, row.version) for row in rows]
        if all(t and (t.inspection or t.refused or not self._terms.inspect) for t in known):
            return [self._within_limit(trial) for trial in known if trial is not None]
        if self._terms.allowance is not None:
            self._terms.allowance.spend()
        trials, lasting = self._measured(rows), True
        forget(self._constants.values())
        if self._problem.op == "fallback" and all(t.refused for t in trials):
            # It may not take random numbers, and nothing competes: a plan's check runs it on real
            # ones.
            trials, lasting = [Trial(kernel=row.id) for row in rows], False
        for row, trial in zip(rows, trials, strict=True):
            enough = row.id not in self._short_of_memory  # another time there may be more
            self._cache.put(device, key, row.version, trial, lasting=lasting and enough)
        return [self._within_limit(trial) for trial in trials]

    def unknown_rows(self) -> list[Kernel]:
        """The rows that fit, if the cache does not know them all."""
        rows = _admitted(self._problem, self._target, self._terms)
        fitting = [
            row
            for row in _fitting(rows, _refusals(rows, self._problem, self._terms))
            if self.over_limit(row) is None
        ]
        device, key = fingerprint(self._target).hash, self._problem.key
        known = [self._cache.get(device, key, row.id, row.version) for row in fitting]
        return [] if all(known) else fitting

    def openers(self, rows: list[Kernel]) -> list[Bid]:
        """The first configuration of each kernel."""
        return [(row, config) for row in rows for config in self.configs(row)[:1]]

    def look(self, rows: list[Kernel]) -> list[Bid]:
        """What is worth running; the buffers of the look are let go."""
        self._inputs = sample_inputs(self._problem, self._device)
        with self._running():
            near = self._worth_running(rows)
        forget(self._constants.values())
        self._inputs = self._out = None
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self._device)
        return near

    def over_limit(self, row: Kernel) -> str | None:
        """Why no configuration of a kernel may have the workspace that it needs, or None."""
        needs = [row.workspace_bytes(self._problem, c) for c in row.configs(self._problem)]
        return self._too_much(min(needs, default=0))

    def configs(self, row: Kernel) -> tuple[Config, ...]:
        """Those whose workspace is allowed."""
        return tuple(
            config
            for config in row.configs(self._problem)
            if not self._too_much(row.workspace_bytes(self._problem, config))
        )

    def _within_limit(self, trial: Trial) -> Trial:
        """A trial from the cache may be from an auction with other limits."""
        refused = self._too_much(trial.workspace_bytes)
        return Trial(kernel=trial.kernel, refused=refused) if refused else trial

    def _too_much(self, needed: int) -> str | None:
        limit = self._terms.max_workspace_bytes
        if limit is None or needed <= limit:
            return None
        return f"needs {needed} bytes of workspace, {limit} are allowed"

    def _measured(self, rows: list[Kernel]) -> list[Trial]:
        if self._inputs is None or not tells(self._inputs):
            self._inputs = sample_inputs(self._problem, self._device)
        if self._problem.in_place:
            self._inputs, self._out = joined(self._problem, self._inputs, self._device)
        with self._running():
            near = [bid for bid in self._near or () if bid[0] in rows]
            bids = self._bids(near or self._worth_running(rows))  # a last resort was not looked at
            ran = {name: bid for name, bid in bids.items() if isinstance(bid, _Bid)}
            timings = race(
                {name: bid.run for name, bid in ran.items()},
                {name: bid.row.id for name, bid in ran.items()},
                device=self._device,
                budget_s=self._terms.budget_s,
            )
            trials = [self._trial(row, bids, timings) for row in rows]
            return trials if self._terms.inspect else self._winner_checked(trials, bids)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Inside, kernels run as in a plan."""
        with (
            using_kernels(kernel_cache(self._target)),
            torch.inference_mode(),
            float32_math(self._problem.math),
        ):
            yield

    def _worth_running(self, rows: list[Kernel]) -> list[Bid]:
        """All configurations of kernels whose first is not far behind; of the others, that one."""
        configs = {row.id: self.configs(row) for row in rows}
        far = self._terms.far
        if far == math.inf or all(len(c) == 1 for c in configs.values()):
            return [(row, config) for row in rows for config in configs[row.id]]
        bids = self._bids(self.openers(rows)).values()
        look_us = glance(
            {bid.row.id: bid.run for bid in bids if isinstance(bid, _Bid)}, device=self._device
        )
        limit_us = far * min(look_us.values(), default=0.0)
        near = {id for id in configs if look_us.get(id, 0.0) <= limit_us}
        return [
            (row, config)
            for row in rows
            for config in (configs[row.id] if row.id in near else configs[row.id][:1])
        ]

    def _bids(self, wanted: Sequence[Bid]) -> dict[str, _Bid | Tried]:
        """Each kernel and configuration, compiled, run once and checked, by a name."""
        if self._device.type == "cuda":
            self._compile([bid for bid in wanted if bid[0].source in OWN])
        return {f"{row.id} {config}": self._bid(row, config) for row, config in wanted}

    def _trial(
        self, row: Kernel, bids: Mapping[str, _Bid | Tried], timings: Mapping[str, Timing]
    ) -> Trial:
        """The kernel's best configuration, with what is known about the others."""
        tried: list[Tried] = []
        ran: list[tuple[float, int, str]] = []
        for config in self.configs(row):
            name = f"{row.id} {config}"
            bid = bids.get(name)
            if isinstance(bid, Tried):
                tried.append(bid)
            if not isinstance(bid, _Bid):
                continue
            time_us = timings[name].time_us
            tried.append(Tried(config=config, time_us=time_us))
            ran.append((time_us, len(tried), name))
        if not ran:
            none = "it has no configuration for this problem"
            return Trial(kernel=row.id, refused=tried[0].refused if tried else none)
        best = bids[name := min(ran)[2]]
        inspection = self._inspect(best) if self._terms.inspect else None
        if inspection and (reason := wrong(inspection, self._problem)):
            return Trial(kernel=row.id, refused=reason)
        return Trial(
            kernel=row.id,
            config=best.config,
            time_us=timings[name].time_us,
            spread_us=timings[name].spread_us,
            workspace_bytes=best.workspace_bytes,
            inspection=inspection,
            tried=tuple(tried) if len(tried) > 1 else (),
        )

    def _winner_checked(self, trials: list[Trial], bids: Mapping[str, Any]) -> list[Trial]:
        """Where one of our kernels wins it is compared with float64; a wrong one is refused."""
        checked = {trial.kernel: trial for trial in trials}
        while ran := [t for t in checked.values() if t.refused is None]:
            best = min(ran, key=lambda t: t.time_us or 0.0)
            bid = bids[f"{best.kernel} {best.config}"]
            if bid.row.source not in OWN:
                break
            reason = wrong(self._inspect(bid), self._problem)
            if reason is None:
                break
            checked[best.kernel] = Trial(kernel=best.kernel, refused=reason)
        return list(checked.values())

    def _compile(self, wanted: list[Bid]) -> None:
        """Have what is to run in the kernel cache; what fails, fails again when it is run."""

        def compile_one(bid: Bid) -> None:
            with preparing(), torch.inference_mode():
                self._bid(*bid)

        for row, config in wanted:
            with contextlib.suppress(torch.OutOfMemoryError):  # told when the bid is run
                self._reserve(row, config)
        asked = compile_ahead([(self._problem, *bid) for bid in wanted], self._target)
        asked.wait()
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(compile_one, [(row, config) for _, row, config in asked.left]))

    def _reserve(self, row: Kernel, config: Config) -> int:
        """Let the shared workspace be large enough; returns what this bid needs of it."""
        needed = row.workspace_bytes(self._problem, config)
        if needed > self._workspace.nbytes:
            self._workspace = torch.empty(0, device=self._device)  # let go before asking for more
            self._workspace = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return needed

    def _buffers(self, row: Kernel, config: Config) -> dict[str, torch.Tensor]:
        needed = self._reserve(row, config)
        buffers = {"workspace": self._workspace[:needed]} if needed else {}
        if row.writes_out:
            if self._out is None:
                self._out = self._problem.output.empty(self._device)
            buffers["out"] = self._out
        return buffers

    def _inputs_for(self, row: Kernel) -> Sequence[torch.Tensor]:
        """The problem's tensors; a kernel that takes an operand's memory gets a copy of it."""
        inputs = list(self._inputs or ())
        if row.overwrites is not None:
            metas, constant = self._problem.inputs, self._problem.constant
            given = [i for i, m in enumerate(metas) if m is not None and i not in constant]
            place = given.index(row.overwrites)
            inputs[place] = inputs[place].clone()
        return inputs

    def _bid(self, row: Kernel, config: Config) -> _Bid | Tried:
        """The kernel as a call without arguments, after a first run that made what it promised."""
        if self._device.type == "cuda" and crashed((self._problem, row, config), self._target):
            return Tried(config=config, refused="crashed the compiler")
        inputs = self._inputs_for(row)
        try:
            buffers = self._buffers(row, config)
            call = row.load().bind(self._problem, self._constants, **config)
            made = call(*inputs, **buffers)
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # who crashes is named
            made = (made,) if isinstance(made, torch.Tensor) else made
            for tensor, meta in zip(made, self._problem.outputs, strict=True):
                if not meta.matches(tensor):
                    seen = f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
                    raise ValueError(f"made {seen} instead of {meta}")
        except torch.AcceleratorError as error:
            raise KernelError(
                f"kernel {row.id} crashed the GPU, which no call survives",
                seen=f"{config} on {self._problem}: {str(error).splitlines()[0]}",
                fix="report it, and leave the kernel out with algorithms=",
            ) from error
        except (KernelError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._short_of_memory.add(row.id)
            return Tried(config=config, refused=f"failed: {str(error).splitlines()[0][:120]}")

        def run() -> Any:
            return call(*inputs, **buffers)

        def run_first() -> Any:
            for given, mine in zip(self._inputs or (), inputs, strict=True):
                if mine is not given:  # what earlier calls have overwritten
                    mine.copy_(given)
            return run()

        needed = row.workspace_bytes(self._problem, config)
        if row.source not in OWN and self._device.type == "cuda":
            needed = allocated(run, made)
        return _Bid(row=row, config=config, run=run, run_first=run_first, workspace_bytes=needed)

    @functools.cached_property
    def _exact(self) -> tuple[torch.Tensor, ...]:
        return exact_answers(self._problem, self._constants, self._inputs or ())

    def _inspect(self, bid: _Bid) -> Inspection:
        out = self._out if bid.row.writes_out else None
        sliced = out is not None and self._problem.output.strides is not None
        return inspect(bid.run_first, self._exact, out, sliced=sliced)
