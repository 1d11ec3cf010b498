"""The search: every kernel that fits a problem is run, and the fastest is taken, whoever wrote it.

A candidate is a kernel with one of its configurations. A first sample of each drops candidates that
are much slower than the best of the same kernel; the others run in interleaved rounds. Which
kernels are refused, and why, is part of the answer.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tessella.artifacts.outline import WRONG
from tessella.core.device import fingerprint, torch_device
from tessella.core.errors import CompileError, KernelError, first_line
from tessella.core.memory import is_out_of_memory
from tessella.device.launch import preparing
from tessella.device.packing import forget
from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Config, Kernel
from tessella.operations.problem import Problem
from tessella.operations.user_operators import as_tuple
from tessella.search.allowance import Allowance
from tessella.search.buffers import allocated
from tessella.search.compile_ahead import compile_ahead, crashed
from tessella.search.evidence import NEAR, Candidate, Evidence, Shortlist
from tessella.search.fewer_images import with_fewer_images
from tessella.search.inputs import expose_errors, joined, place, sample_inputs, touch
from tessella.search.inspection import (
    Exact,
    deviation,
    exact_answers,
    inspect,
    some_images,
    too_far,
    wrong,
)
from tessella.search.timing import Run, Sample, Timing, glance, time_interleaved, watched
from tessella.search.trying import as_in_a_plan, other_results, own_inputs, runs
from tessella.search.tuning import Inspection, TimingCache, Trial, Tried, require_one

COMPILERS = 8  # threads that load what is compiled, and compile what users registered
OWN = ("tessella", "user")  # sources whose kernels go through ``launch``
FAR = 1.5  # a kernel whose first sample takes this many times the best one's is sampled once
UNPROVEN = "has not run on a GPU yet, and might hang; ask for its algorithm by name"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a search may use.

    Attributes:
        budget_s: about how long to measure.
        max_workspace_bytes: kernels that need more scratch memory are refused.
        algorithms: only kernels of these algorithms; None for all.
        sources: only kernels by these authors; None for all.
        cutoff: a kernel whose first configuration takes this many times the fastest one's time
            does not try its others.
        inspect: also compare with float64, repeat, and read what the kernels take from the GPU;
            and try kernels that have been far behind on problems like this one.
        allowance: of time, that several searches share; ``find`` raises ``OutOfTime`` after it.
        refused: kernels that take no part, with the reason.
    """

    budget_s: float = 0.02
    max_workspace_bytes: int | None = None
    algorithms: Collection[str] | None = None
    sources: Collection[str] | None = None
    cutoff: float = 2.0
    inspect: bool = False
    allowance: Allowance | None = None
    refused: Mapping[str, str] = field(default_factory=dict)


def find(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    target: str,
    cache: TimingCache | None = None,
    options: SearchOptions = SearchOptions(),
    inputs: Sequence[torch.Tensor] | None = None,
    candidates: Sequence[Candidate] | None = None,
    evidence: Evidence | None = None,
) -> tuple[Trial, ...]:
    """Every kernel of the catalog for this problem: the fastest first, refused ones last.

    Args:
        constants: the constant inputs by position, on the target's device.
        cache: times from here are believed; new ones are added.
        inputs: the other inputs, in order; random ones if left out, or where they would not show
            a wrong kernel: not finite, or zeros.
        candidates: what ``Prefetch`` found worth running, if it was asked.
        evidence: what other searches have shown; this one's trials are added.

    Raises:
        CompileError: no kernel can carry the problem out.
    """
    cache = cache or TimingCache()
    search = Search(problem, constants, target, cache, options, inputs, candidates, evidence)
    rows = _admitted(problem, target, options)
    refusals = search.refusals(rows)
    fitting = _fitting(rows, refusals)
    trials = [Trial(kernel=k, refused=r) for k, r in refusals.items() if r is not None]
    trials += search.trials(fitting)
    left_out = [row for row in fitting for t in trials if t.kernel == row.id and t.behind]
    if left_out and all(trial.refused for trial in trials):  # so it is not what the others showed
        alone = Search(problem, constants, target, cache, options, inputs)
        trials = [t for t in trials if not t.behind] + alone.trials(left_out)
    if all(trial.refused for trial in trials):
        last = [row for row in rows if row.last_resort]
        trials += search.trials([row for row in last if row.refusal(problem) is None])
    require_one(trials, problem.op, target)
    order = {row.id: i for i, row in enumerate(rows)}
    found = tuple(
        sorted(trials, key=lambda t: (t.refused is not None, t.time_us or 0.0, order[t.kernel]))
    )
    if evidence is not None:
        evidence.add(problem, found)
    if not options.inspect:  # who inspects is shown it
        _tell_wrong(found, [row.id for row in rows if row.source in OWN], problem)
    return found


def _tell_wrong(trials: Sequence[Trial], own: Collection[str], problem: Problem) -> None:
    """Warn of kernels that were wrong though their rules accept the problem.

    Nobody saw that norms had lost all their searches: DenseNet-121 took 37 ms where it is 24.
    """
    for trial in trials:
        if trial.kernel in own and (trial.refused or "").startswith(WRONG):
            warnings.warn(
                f"kernel {trial.kernel} is {trial.refused}, on a problem that its rules accept: "
                "another one is taken, perhaps a slower one. Mend it if it is yours, else please "
                f"report it, with the file of tessella doctor --report and this: {problem}",
                stacklevel=3,
            )


def _admitted(problem: Problem, target: str, options: SearchOptions) -> list[Kernel]:
    """The rows that the options allow."""
    return [
        row
        for row in catalog.candidates(problem.op, target)
        if (options.algorithms is None or row.algorithm in options.algorithms)
        and (options.sources is None or row.source in options.sources)
    ]


def _refusal(row: Kernel, problem: Problem, options: SearchOptions) -> str | None:
    refused = options.refused.get(row.id) or row.refusal(problem)
    if refused or options.algorithms:
        return refused
    if row.unproven:
        return UNPROVEN
    return None if options.inspect else row.outclassed(problem)


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
        buffers["out"] = place(problem.output, device) if out is None else out
    scratch = row.workspace_bytes(problem, config)
    if scratch:
        buffers["workspace"] = torch.empty(scratch, dtype=torch.uint8, device=device)
    return call, buffers


@dataclass(frozen=True, kw_only=True)
class _Runnable:
    """One configuration of a kernel, run once and found to make what was promised."""

    row: Kernel
    config: Config
    run: Run
    run_first: Run  # of inputs that no earlier call has overwritten
    workspace_bytes: int
    first: Sample | None  # that first run, on a CPU


def _runnable(prepared: Mapping[str, _Runnable | Tried]) -> dict[str, _Runnable]:
    return {name: one for name, one in prepared.items() if isinstance(one, _Runnable)}


class Search:
    """One problem with its tensors, and the buffers that all candidates share."""

    def __init__(
        self,
        problem: Problem,
        constants: Mapping[int, torch.Tensor],
        target: str,
        cache: TimingCache,
        options: SearchOptions,
        inputs: Sequence[torch.Tensor] | None,
        candidates: Sequence[Candidate] | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        self._problem, self._constants, self._options = problem, constants, options
        self._candidates, self._evidence = candidates, evidence
        self._target, self._cache = target, cache
        self._device = torch_device(target)
        self._inputs = inputs
        self._short_of_memory: set[str] = set()  # rows
        self._out: torch.Tensor | None = None
        self._listed: dict[tuple[str, ...], Shortlist] = {}  # by the rows that were asked for
        self._is_first_size = False  # of a layer that takes long: few images have told of it alone
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self._device)

    def trials(self, rows: list[Kernel]) -> list[Trial]:
        """A trial of each row: from the cache if it knows all of them, else side by side."""
        if self._target == "reference":
            return [Trial(kernel=row.id) for row in rows]
        if (known := self._known(rows)) is not None:
            return [self._within_limit(trial) for trial in known]
        if self._options.allowance is not None:
            self._options.allowance.spend()
        device, key = fingerprint(self._target).hash, self._problem.key
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

    def _known(self, rows: Sequence[Kernel]) -> list[Trial] | None:
        """The cache's trials of these rows, if it has all of them."""
        device, key = fingerprint(self._target).hash, self._problem.key
        known = [self._cache.get(device, key, row.id, row.version) for row in rows]
        enough = [trial for trial in known if trial and self._is_enough(trial)]
        return enough if len(enough) == len(known) else None

    def _is_enough(self, trial: Trial) -> bool:
        """Whether a trial from the cache answers this search."""
        if trial.behind:
            return self._evidence is not None
        return bool(trial.inspection or trial.refused or not self._options.inspect)

    def unknown_rows(self) -> list[Kernel]:
        """The rows that fit, if the cache does not know them all."""
        rows = _admitted(self._problem, self._target, self._options)
        fitting = _fitting(rows, self.refusals(rows))
        return fitting if self._known(fitting) is None else []

    def shortlist(self, rows: Sequence[Kernel]) -> list[Candidate] | None:
        """The candidates that may win by what problems of this kind have shown, if any were."""
        return list(self._shortlist(rows).candidates) or None

    def _shortlist(self, rows: Sequence[Kernel]) -> Shortlist:
        if self._evidence is None or self._options.inspect:
            return Shortlist()
        asked = tuple(row.id for row in rows)
        if asked not in self._listed:
            configs = {row: self.configs(row) for row in rows}
            images = torch.get_num_threads() if self._device.type == "cpu" else None
            found = self._evidence.shortlist(self._problem, configs, images=images)
            self._listed[asked] = found
        return self._listed[asked]

    def _search_fewer_images(self, rows: Sequence[Kernel]) -> None:
        """Search the same layer with few images before, where many take long and none are known.

        What loses clearly there does not run here.
        """
        if self._evidence is None or self._device.type != "cpu" or self._options.algorithms:
            return
        fewer = with_fewer_images(self._problem, torch.get_num_threads())
        if fewer is None or sum(len(self.configs(row)) for row in rows) < 2:
            return
        if self._shortlist(rows).steady:
            return
        with contextlib.suppress(CompileError):  # none can: then all run here
            find(
                fewer,
                self._constants,
                target=self._target,
                cache=self._cache.beside(),
                # of a time limit the first measurement is made in any case: the layer's own
                options=replace(self._options, allowance=None),
                evidence=self._evidence,
            )
            self._is_first_size = True
        self._listed = {}

    def first_candidates(self, rows: list[Kernel]) -> list[Candidate]:
        """The first configuration of each kernel."""
        return [(row, config) for row in rows for config in self.configs(row)[:1]]

    def preselect(self, rows: list[Kernel]) -> list[Candidate]:
        """The candidates worth running; the buffers with which they were found are let go."""
        if listed := self.shortlist(rows):
            return listed
        self._inputs = sample_inputs(self._problem, self._device)
        with as_in_a_plan(self._problem, self._target):
            candidates = self._worth_running(rows)
        forget(self._constants.values())
        self._inputs = self._out = None
        self._workspace = torch.empty(0, dtype=torch.uint8, device=self._device)
        return candidates

    def refusals(self, rows: Sequence[Kernel]) -> dict[str, str | None]:
        """Why each row but the last resorts does not take part; None where it does."""
        problem, options = self._problem, self._options
        return {
            row.id: _refusal(row, problem, options) or self._over_limit(row)
            for row in rows
            if not row.last_resort
        }

    def _over_limit(self, row: Kernel) -> str | None:
        """Why no configuration of a kernel may have the workspace that it needs, or None."""
        needs = [row.workspace_bytes(self._problem, c) for c in row.configs(self._problem)]
        return self._too_much(min(needs, default=0))

    def configs(self, row: Kernel) -> tuple[Config, ...]:
        """The configurations whose workspace is allowed."""
        return tuple(
            config
            for config in row.configs(self._problem)
            if not self._too_much(row.workspace_bytes(self._problem, config))
        )

    def _within_limit(self, trial: Trial) -> Trial:
        """A trial from the cache may be from a search with other limits."""
        refused = self._too_much(trial.workspace_bytes)
        return Trial(kernel=trial.kernel, refused=refused) if refused else trial

    def _too_much(self, needed: int) -> str | None:
        limit = self._options.max_workspace_bytes
        if limit is None or needed <= limit:
            return None
        return f"needs {needed} bytes of workspace, {limit} are allowed"

    def _measured(self, rows: list[Kernel]) -> list[Trial]:
        if self._inputs is None or not expose_errors(self._inputs):
            shared = None if self._evidence is None else self._evidence.numbers
            self._inputs = sample_inputs(self._problem, self._device, numbers=shared)
        if self._problem.in_place:
            self._inputs, self._out = joined(self._problem, self._inputs, self._device)
        with as_in_a_plan(self._problem, self._target):
            candidates = [one for one in self._candidates or () if one[0] in rows]
            # a last resort was not preselected
            tried = self._prepared(candidates or self._worth_running(rows))
            runnable = _runnable(tried)
            first = {name: one.first for name, one in runnable.items() if one.first is not None}
            # Few images tell which kernels are far behind, not which of the near ones is first: by
            # two runs each, a DenseNet-121's plan for 8 images was 4 to 7 % slower.
            is_known = self._shortlist(rows).steady and not self._is_first_size
            timings = time_interleaved(
                {name: one.run for name, one in runnable.items()},
                {name: one.row.id for name, one in runnable.items()},
                device=self._device,
                budget_s=self._options.budget_s,
                far=math.inf if self._options.inspect else FAR,
                first=first,
                is_known=is_known,
            )
            trials = [self._trial(row, rows, tried, timings) for row in rows]
            return trials if self._options.inspect else self._winner_checked(trials, runnable)

    def _worth_running(self, rows: list[Kernel]) -> list[Candidate]:
        """All configurations of kernels whose first one is fast enough; of the others the first.

        Where problems of this kind were searched, what may win by what they have shown.
        """
        self._search_fewer_images(rows)
        if listed := self.shortlist(rows):
            return listed
        configs = {row.id: self.configs(row) for row in rows}
        cutoff = self._options.cutoff
        if cutoff == math.inf or all(len(c) == 1 for c in configs.values()):
            return [(row, config) for row in rows for config in configs[row.id]]
        first = _runnable(self._prepared(self.first_candidates(rows))).values()
        first_us = glance({one.row.id: one.run for one in first}, device=self._device)
        limit_us = cutoff * min(first_us.values(), default=0.0)
        near = {id for id in configs if first_us.get(id, 0.0) <= limit_us}
        return [
            (row, config)
            for row in rows
            for config in (configs[row.id] if row.id in near else configs[row.id][:1])
        ]

    def _prepared(self, candidates: Sequence[Candidate]) -> dict[str, _Runnable | Tried]:
        """The candidates that could be compiled, run once and checked, by name."""
        if self._device.type == "cuda":
            self._compile([one for one in candidates if one[0].source in OWN])
        return {f"{row.id} {config}": self._prepare(row, config) for row, config in candidates}

    def _trial(
        self,
        row: Kernel,
        rows: Sequence[Kernel],
        prepared: Mapping[str, _Runnable | Tried],
        timings: Mapping[str, Timing],
    ) -> Trial:
        """The kernel's best configuration, with what is known about the others."""
        tried: list[Tried] = []
        ran: list[tuple[float, int, _Runnable]] = []
        for config in self.configs(row):
            name = f"{row.id} {config}"
            one = prepared.get(name)
            if isinstance(one, Tried):
                tried.append(one)
            if not isinstance(one, _Runnable):
                continue
            time_us = timings[name].time_us
            tried.append(Tried(config=config, time_us=time_us))
            ran.append((time_us, len(tried), one))
        if not ran and not tried and (behind := self._behind(row, rows)):
            far = f"takes {behind:.1f} times the fastest's time or more on a problem like this one"
            return Trial(kernel=row.id, refused=far, behind=behind)
        if not ran:
            none = "it has no configuration for this problem"
            return Trial(kernel=row.id, refused=tried[0].refused if tried else none)
        best = min(ran)[2]  # of equally fast ones that which is proposed first
        timing = timings[f"{row.id} {best.config}"]
        inspection = self._inspect(best) if self._options.inspect else None
        if inspection and (reason := wrong(inspection, self._problem)):
            return Trial(kernel=row.id, refused=reason)
        return Trial(
            kernel=row.id,
            config=best.config,
            time_us=timing.time_us,
            spread_us=timing.spread_us,
            workspace_bytes=best.workspace_bytes,
            inspection=inspection,
            tried=tuple(tried) if len(tried) > 1 else (),
            noisy=timing.noisy,
        )

    def _behind(self, row: Kernel, rows: Sequence[Kernel]) -> float | None:
        """How far a kernel of these is behind that was left out; None if it was not."""
        if self._evidence is None or not self.configs(row):
            return None
        return self._shortlist(rows).behind.get(row.id, NEAR)

    def _winner_checked(
        self, trials: list[Trial], runnable: Mapping[str, _Runnable]
    ) -> list[Trial]:
        """The trials; a winner of ours is compared with float64, and refused if it is wrong."""
        checked = {trial.kernel: trial for trial in trials}
        while ran := [t for t in checked.values() if t.refused is None]:
            best = min(ran, key=lambda t: t.time_us or 0.0)
            winner = runnable[f"{best.kernel} {best.config}"]
            if winner.row.source not in OWN or self._has_shown_right(winner):
                break
            reason = too_far(self._deviation(winner), self._problem)
            if reason is None:
                if self._evidence is not None:
                    self._evidence.add_right(self._problem, best.kernel, best.config)
                break
            checked[best.kernel] = Trial(kernel=best.kernel, refused=reason)
        return list(checked.values())

    def _has_shown_right(self, one: _Runnable) -> bool:
        known = self._evidence
        return known is not None and known.has_shown_right(self._problem, one.row.id, one.config)

    def _compile(self, candidates: list[Candidate]) -> None:
        """Compile candidates into the kernel cache; one that fails, fails again when it is run."""

        def compile_one(candidate: Candidate) -> None:
            # a new thread's GPU is the first one
            with torch.cuda.device(self._device), preparing(), torch.inference_mode():
                self._prepare(*candidate)

        for row, config in candidates:
            with contextlib.suppress(torch.OutOfMemoryError):  # told when the candidate is run
                self._reserve(row, config)
        asked = compile_ahead([(self._problem, *one) for one in candidates], self._target)
        asked.wait()
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(compile_one, [(row, config) for _, row, config in asked.left]))

    def _reserve(self, row: Kernel, config: Config) -> int:
        """Let the shared workspace be large enough; return how many bytes this candidate needs."""
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
                self._out = place(self._problem.output, self._device)
                touch(self._out)
            buffers["out"] = self._out
        return buffers

    def _prepare(self, row: Kernel, config: Config) -> _Runnable | Tried:
        """The candidate as a call without arguments, after a first run that made what it promised.

        Otherwise why it cannot run.
        """
        if self._device.type == "cuda" and crashed((self._problem, row, config), self._target):
            return Tried(config=config, refused="crashed the compiler")
        inputs = own_inputs(row, self._problem, self._inputs or ())
        try:
            buffers = self._buffers(row, config)
            call = row.load().bind(self._problem, self._constants, **config)
            run, run_first = runs(call, inputs, self._inputs or (), buffers)
            if self._device.type == "cuda":
                made, first = run(), None
                torch.cuda.synchronize()  # who crashes is named
            else:
                results: list[Any] = []
                first = watched(lambda: results.append(run()))
                (made,) = results
            if why := other_results(made, self._problem):
                raise ValueError(why)
        except torch.AcceleratorError as error:
            raise KernelError(
                f"kernel {row.id} crashed the GPU, which no call survives",
                seen=f"{config} on {self._problem}: {first_line(error)}",
                fix="report it, and leave the kernel out with algorithms=",
            ) from error
        except (KernelError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._short_of_memory.add(row.id)
            return Tried(config=config, refused=f"failed: {first_line(error)[:120]}")

        needed = row.workspace_bytes(self._problem, config)
        if row.source not in OWN and self._device.type == "cuda":
            needed = allocated(run, as_tuple(made))
        return _Runnable(
            row=row,
            config=config,
            run=run,
            run_first=run_first,
            workspace_bytes=needed,
            first=first,
        )

    @functools.cached_property
    def _exact(self) -> tuple[Exact, ...]:
        return exact_answers(self._problem, self._constants, self._inputs or ())

    def _inspect(self, candidate: _Runnable) -> Inspection:
        out = self._out if candidate.row.writes_out else None
        return inspect(candidate.run_first, self._exact, out, **self._lying)

    @property
    def _lying(self) -> dict[str, Any]:
        """Whether results lie in a slice of a larger tensor, and which inputs lie in a result."""
        sliced = self._out is not None and self._problem.output.strides is not None
        return {"sliced": sliced, "kept": [(self._inputs or ())[i] for i in self._problem.in_place]}

    @functools.cached_property
    def _some_exact(self) -> tuple[Exact, ...]:
        return exact_answers(self._problem, self._constants, self._inputs or (), self._some)

    @functools.cached_property
    def _some(self) -> list[int] | None:
        """The images whose exact answers are asked for: float64 takes a CPU long."""
        return some_images(self._problem) if self._device.type == "cpu" else None

    def _deviation(self, candidate: _Runnable) -> float:
        out = self._out if candidate.row.writes_out else None
        images = self._some
        return deviation(candidate.run_first, self._some_exact, out, images=images, **self._lying)
