"""The search: the fastest plan whose metric on a user's data stays within a budget.

1. sensitivity: what each unit's precisions do to the answers, alone
2. costs: what they save, by the searches for their layers' kernels
3. path: gain per damage; bisected by the real metric of the interpreted network, then repaired
4. the candidates are built, measured side by side, and judged by running their plans
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tessella.artifacts.plan import Plan
from tessella.artifacts.receipt import Receipt
from tessella.compiler.budget import mixes, sensitivity
from tessella.compiler.budget.costs import Built, Costs, Measured, uniform
from tessella.compiler.budget.front import Front, Point, counted, undominated
from tessella.compiler.budget.judging import (
    Judge,
    Labelled,
    Metric,
    Predict,
    Tensors,
    answers,
)
from tessella.compiler.budget.mixes import Mix, Unit
from tessella.compiler.budget.path import Move, greedy, mix_of, reach, repair
from tessella.compiler.budget.sensitivity import CHUNK, interpreter
from tessella.compiler.calibration import DTYPES as KINDS
from tessella.compiler.calibration import Calibration
from tessella.compiler.pipeline import calibrate, compile_graph, optimized
from tessella.compiler.settings import Measuring
from tessella.core.errors import BuildStopped, CompileError, UsageError
from tessella.core.events import Emit, phase, silent
from tessella.core.spec import DimRange
from tessella.graph.graph import Graph
from tessella.graph.sample import one_sample

LADDER = (0.0, 0.1, 0.3, 1.0, 3.0)  # smaller budgets are searched too: they are points of the front
MIN_GAIN = 0.02  # of a layer's time; less may be a busy moment of the machine
WITHIN, BEYOND = 4, 3  # plans that are built of the candidates within the budget, and of others
OTHERS = 4  # and again so many, while none of those holds in reality what it promised

Run = Callable[[Plan], Predict]


@dataclass(kw_only=True)
class _Probe:
    """The interpreted network judged by the real metric, each mix once."""

    exact: Graph
    target: str
    calibration: Calibration
    judge: Judge
    emit: Emit
    loss: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)
    changed: dict[tuple[tuple[str, str], ...], bool] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def within(self, mix: Mix, budget: float) -> bool:
        key = tuple(sorted(mix.items()))
        if key not in self.loss:
            self._look(key, mix)
        return self.loss[key] <= budget + 1e-9 and not (budget == 0 and self.changed[key])

    def _look(self, key: tuple[tuple[str, str], ...], mix: Mix) -> None:
        try:
            graph = mixes.simulated(self.exact, mix, self.target, self.calibration)
            after = answers(interpreter(graph, self.target), self.judge.data, CHUNK)
        except CompileError as error:
            self.loss[key], self.changed[key] = float("inf"), True
            self.refused[_named(mix)] = str(error)
            return
        self.loss[key] = self.judge.loss(after)
        self.changed[key] = bool(self.judge.flipped(after))
        lost = f"{self.loss[key]:.2f} points of {self.judge.name}"
        self.emit(phase("evaluate", f"{_named(mix)}: loses {lost}"))


def search(
    graph: Graph,
    *,
    target: str,
    batch: DimRange,
    data: Labelled,
    run: Run,
    feed: Callable[[Tensors], Tensors] = lambda batch: batch,
    finish: Callable[[Plan], Plan] = lambda plan: plan,
    budget: float,
    metric: Metric | None = None,
    least: str = "fp32",
    calibration: Calibration | None = None,
    costs: Costs | None = None,
    measuring: Measuring = Measuring(),
    emit: Emit = silent,
    **settings: Any,
) -> Front:
    """Plans with a precision for each layer, none better than another in everything.

    Args:
        graph, target, batch, measuring, settings: as for ``compile_graph``.
        data: what the plans are judged by; without a ``calibration``, part of it is set aside for
            one.
        run: a plan as a function of inputs by name; what it answers is what counts.
        feed: inputs of the network as plans take them, where that is not the same.
        finish: what is done with a plan before it is run and handed out.
        budget: percentage points of the metric below the float32 plan. With 0 no answer may change.
        metric: of outputs by name and labels; higher is better, 1 is a hundred points. By default
            the score of the data's task, or top-1.
        least: the least exact precision that a layer may get; ``fp32``: all that suit the target.
        costs: what things cost, instead of measuring it here.

    Raises:
        UsageError: a negative budget, too little data, a metric that is no number, or a precision
            that is no choice here.
        CompileError: the float32 plan cannot be built.
    """
    if not 0 <= budget < 100:
        raise UsageError("a budget is percentage points of the metric", seen=budget, fix="0 to 100")
    kinds = mixes.offered(target, least)
    sampled = one_sample(graph, batch)
    exact = optimized(sampled)
    if calibration is None:
        data, shown = data.parted()
        emit(phase("calibrate", f"{len(shown)} samples; {len(data)} others judge"))
        small = tuple(k for k in kinds if k in KINDS)
        calibration = calibrate(sampled, list(shown.batches(CHUNK)), kinds=small, target=target)
    with ExitStack() as stack:
        cache = measuring.cache
        if cache is None:  # times are shared by all plans of the search
            cache = Path(stack.enter_context(TemporaryDirectory())) / "times.jsonl"
            measuring = replace(measuring, cache=cache)
        measured = Measured(
            exact,
            target=target,
            batch=batch.opt,
            calibration=calibration,
            cache=cache,
            budget_s=measuring.budget_s,
            time_limit_s=measuring.time_limit_s,
            emit=emit,
        )
        return _Search(
            graph=graph,
            exact=exact,
            target=target,
            batch=batch,
            data=data,
            run=run,
            feed=feed,
            finish=finish,
            budget=budget,
            metric=metric,
            kinds=kinds,
            calibration=calibration,
            costs=costs or measured,
            settings={**settings, "measuring": measuring},
            emit=emit,
        ).front()


@dataclass(kw_only=True)
class _Search:
    graph: Graph
    exact: Graph
    target: str
    batch: DimRange
    data: Labelled
    run: Run
    feed: Callable[[Tensors], Tensors]
    finish: Callable[[Plan], Plan]
    budget: float
    metric: Metric | None
    kinds: Sequence[str]
    calibration: Calibration
    costs: Costs
    settings: Mapping[str, Any]
    emit: Emit
    refused: dict[str, str] = field(default_factory=dict)

    def front(self) -> Front:
        units = mixes.units(self.exact, self.kinds, self.target, self.calibration)
        path = self._path(units)
        probe = self._probed(units, path)
        built, judge = self._built(probe)
        places = [self.data.places[i % len(self.data)] for i in range(self.batch.opt)]
        sample = self.feed(self.data.read(places))
        self.emit(phase("measure", f"{len(built)} plans side by side"))
        times = self.costs.plans_us([b for b, _ in built], sample)
        points = [
            self._point(b, receipt, time_us, units)
            for (b, receipt), time_us in zip(built, times, strict=True)
        ]
        kept = undominated(points)
        affordable = [p for p in kept if p.receipt.within]
        return Front(
            points=tuple(kept),
            chosen=kept.index(min(affordable, key=lambda p: p.time_us)),
            exact=points[0],
            batch=self.batch.opt,
            budget=self.budget,
            resolution=judge.resolution(),
            calibration=self.calibration,
            evaluations=len(probe.loss),
            refused=self.refused | probe.refused,
        )

    def _path(self, units: Sequence[Unit]) -> list[Move]:
        self.emit(phase("sensitivity", f"{len(units)} units of layers, {', '.join(self.kinds)}"))
        found = sensitivity.measure(
            self.exact,
            units,
            target=self.target,
            calibration=self.calibration,
            data=self.data,
            emit=self.emit,
        )
        self.refused |= {f"{name} in {k}": why for (name, k), why in found.refused.items()}
        self.emit(phase("costs", "each layer in each precision"))
        exact_us = self.costs.layers_us("fp32", units)
        gains: dict[tuple[int, str], float] = {}
        for kind in self.kinds:
            times = self.costs.layers_us(kind, units)
            for index, unit in enumerate(units):
                before = sum(exact_us[name] for name in unit.layers)
                gain = before - sum(times[name] for name in unit.layers)
                gains[index, kind] = gain if gain > MIN_GAIN * before else 0.0
        return greedy(units, gains, found.damage)

    def _probed(self, units: Sequence[Unit], path: Sequence[Move]) -> _Probe:
        """Judge mixes along the path: for the budget, for smaller ones, and whole networks."""
        before = answers(interpreter(self.exact, self.target), self.data, CHUNK)
        judge = Judge(data=self.data, before=before, metric=self.metric)
        if not math.isfinite(worth := judge.worth):
            raise UsageError(
                "the metric is no number for the float32 network",
                seen=worth,
                fix="give one that is higher for better answers, 1 for a hundred points",
            )
        probe = _Probe(
            exact=self.exact,
            target=self.target,
            calibration=self.calibration,
            judge=judge,
            emit=self.emit,
        )
        for rung in sorted({b for b in LADDER if b < self.budget} | {self.budget}):

            def within(mix: Mix, rung: float = rung) -> bool:
                return probe.within(mix, rung)

            reached = reach(path, within)
            # only for rungs that larger budgets have, too: these then find no slower plan
            if rung in LADDER:
                repair(path, reached, within)
        for kind in self.kinds:
            if mix := uniform(units, kind):
                probe.within(mix, self.budget)
        probe.within(mix_of([]), self.budget)
        return probe

    def _built(self, probe: _Probe) -> tuple[list[tuple[Built, Receipt]], Judge]:
        """Plans of the float32 network and of the best candidates, judged.

        Their answers may be large: those of one plan are held at a time.
        """
        exact = self._build({})
        before = self._answers(exact)
        judge = Judge(data=self.data, before=before, metric=self.metric)
        made = [(exact, judge.receipt(before, self.budget))]
        within, beyond = self._candidates(probe)
        waiting = [*beyond[:BEYOND], *within[:WITHIN]]
        rest = within[WITHIN:]
        while waiting:
            for mix in waiting:
                try:
                    one = self._build(mix)
                    made.append((one, judge.receipt(self._answers(one), self.budget)))
                except BuildStopped:
                    raise
                except CompileError as error:
                    self.refused[_named(mix)] = str(error)
            holds = any(receipt.within for _, receipt in made[1:])
            waiting, rest = ([], []) if holds else (rest[:OTHERS], rest[OTHERS:])
        return made, judge

    def _candidates(self, probe: _Probe) -> tuple[list[Mix], list[Mix]]:
        """Mixes within the budget, the fastest first, and others, the most exact first.

        Left out: what another mix is at least as good as in loss, time of all steps, and bytes.
        """
        seen = {
            key: (loss, self.costs.total_us(dict(key)), mixes.weight_bytes(self.exact, dict(key)))
            for key, loss in probe.loss.items()
            if key and loss < float("inf")
        }
        kept: list[tuple[tuple[str, str], ...]] = []
        for key in sorted(seen, key=lambda k: (seen[k][1], *seen[k])):
            flips = self.budget == 0 and probe.changed[key]
            beaten = any(all(a <= b for a, b in zip(seen[k], seen[key])) for k in kept)
            if not beaten or (self.budget == 0 and not flips):
                kept.append(key)
        within: list[Mix] = [dict(k) for k in kept if probe.within(dict(k), self.budget)]
        beyond = [k for k in kept if not probe.within(dict(k), self.budget)]
        return within, [dict(k) for k in sorted(beyond, key=lambda k: seen[k])]

    def _build(self, mix: Mix) -> Built:
        precision, precisions = mixes.spelled(self.exact, mix, self.target)
        self.emit(phase("build", _named(mix)))
        plan = compile_graph(
            self.graph,
            target=self.target,
            batch=self.batch,
            precision=precision,
            precisions=precisions,
            calibration=self.calibration,
            emit=lambda event: self.emit(event) if event.kind == "progress" else None,
            **self.settings,
        )
        plan = self.finish(plan)
        return Built(mix=mix, plan=plan, predict=self.run(plan))

    def _answers(self, built: Built) -> dict[str, torch.Tensor]:
        return answers(lambda batch: built.predict(self.feed(batch)), self.data, self.batch.opt)

    def _point(
        self,
        built: Built,
        receipt: Receipt,
        time_us: float,
        units: Sequence[Unit],
    ) -> Point:
        plan = replace(built.plan, manifest=replace(built.plan.manifest, receipt=receipt))
        held = plan.program.buckets[-1].held_bytes
        names = [name for unit in units for name in unit.layers]
        return Point(
            plan=plan,
            precision=plan.manifest.precision,
            precisions=plan.manifest.precisions,
            layers=counted(names, built.mix),
            receipt=receipt,
            time_us=time_us,
            nbytes=held + sum(t.numel() * t.element_size() for t in plan.weights.values()),
        )


def _named(mix: Mix) -> str:
    """``3 int8, 2 bf16``, for people."""
    counts = counted(list(mix), mix)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "float32"
