"""What mixes cost in time, by the kernel searches that their plans will be built with.

All times lie in the timing cache: a layer is measured once in each precision, whatever mixes it is
in, and so is each cast between two layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tessella.artifacts.plan import Plan
from tessella.compiler.budget import mixes
from tessella.compiler.budget.judging import Predict, Tensors
from tessella.compiler.budget.mixes import Mix, Unit
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices import choose_kernels
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.choices.variants import layouts_to_try, with_layout
from tessella.compiler.layers import PRODUCTS
from tessella.compiler.rewrites.assign_layout import Layout
from tessella.compiler.stopping import stopping
from tessella.core.device import torch_device
from tessella.core.dtype import plain_precision
from tessella.core.events import Emit, silent
from tessella.graph.graph import Graph
from tessella.search.allowance import Allowance
from tessella.search.timing import latency
from tessella.search.tuning import TimingCache

SECONDS = 0.5  # of measuring plans side by side, for each of them


@dataclass(frozen=True, kw_only=True)
class Built:
    """A plan, the mix that it was built from, and how it is run."""

    mix: Mix
    plan: Plan
    predict: Predict


class Costs(Protocol):
    """Times in microseconds, at the usual batch size."""

    def layers_us(self, precision: str, units: Sequence[Unit]) -> Mapping[str, float]:
        """The time of each layer, by its result's name, in the mix ``uniform`` of one precision."""

    def total_us(self, mix: Mix) -> float:
        """All steps of a mix's plan, each by itself."""

    def plans_us(self, built: Sequence[Built], sample: Tensors) -> list[float]:
        """Whole plans, from the call to the answer, on a batch that lies on their device."""


class Measured:
    """The cost of layers in each precision, measured on this machine.

    Args:
        exact: the optimized graph.
        batch: the usual batch size.
        cache: the timing cache's file, which the plans are built with as well.
    """

    def __init__(
        self,
        exact: Graph,
        *,
        target: str,
        batch: int,
        calibration: Calibration,
        cache: Path,
        budget_s: float,
        time_limit_s: float | None = None,
        emit: Emit = silent,
    ) -> None:
        self._exact, self._target, self._batch = exact, target, batch
        self._calibration, self._file, self._emit = calibration, cache, emit
        self._cache = TimingCache(cache)
        self._budget_s, self._allowance = budget_s, Allowance(time_limit_s)
        self._known: dict[str, list[Choice]] = {}

    def layers_us(self, precision: str, units: Sequence[Unit]) -> dict[str, float]:
        mix = {} if precision == "fp32" else uniform(units, precision)
        choices = [c for c in self._choices(mix) if c.node.op in PRODUCTS]
        names = [n.outputs[0].name for n in mixes.layer_nodes(self._exact)]
        wanted = {layer for unit in units for layer in unit.layers}
        times = (c.trials[0].time_us or 0.0 for c in choices)
        return {n: t for n, t in zip(names, times, strict=True) if n in wanted}

    def total_us(self, mix: Mix) -> float:
        return choose_kernels.cost_us(self._choices(mix))

    def plans_us(self, built: Sequence[Built], sample: Tensors) -> list[float]:
        device, seconds = torch_device(self._target), SECONDS * len(built)
        sample = {name: tensor.to(device) for name, tensor in sample.items()}
        runs = {str(i): lambda predict=b.predict: predict(sample) for i, b in enumerate(built)}
        timings = latency(runs, device=device, seconds=seconds)
        return [timings[name].time_us for name in runs]

    def _choices(self, mix: Mix) -> list[Choice]:
        """The kernels that win each step of a mix, in the layout where they are fastest."""
        key = repr(sorted(mix.items()))
        if key not in self._known:
            graph = mixes.lowered(self._exact, mix, self._target, self._calibration)
            precision, _ = mixes.spelled(self._exact, mix, self._target)
            with stopping(self._file, self._allowance):
                ways = [
                    self._chosen(graph, layout)
                    for layout in layouts_to_try(graph, precision, self._target)
                ]
            self._known[key] = min(ways, key=choose_kernels.cost_us)
        return self._known[key]

    def _chosen(self, graph: Graph, layout: Layout) -> list[Choice]:
        laid_out, formats = with_layout(graph, layout)
        device = torch_device(self._target)
        tuner = Tuner(
            target=self._target,
            math="ieee",
            constants={v.name: t.to(device) for v, t in laid_out.constants.items()},
            cache=self._cache,
            budget_s=self._budget_s,
            allowance=self._allowance,
        )
        concrete = laid_out.at_batch(self._batch)
        return choose_kernels.apply(concrete, formats, tuner, self._emit, f"{layout} steps")


def uniform(units: Sequence[Unit], precision: str) -> dict[str, str]:
    """The mix in which every unit that can is in one precision, dense where it cannot be sparse."""
    choices = (precision, plain_precision(precision))
    best = ((unit, next((k for k in choices if k in unit.kinds), None)) for unit in units)
    return {name: kind for unit, kind in best if kind is not None for name in unit.layers}
