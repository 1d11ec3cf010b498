"""A search within a budget that measures nothing: layers at the prices of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tessella import runtime
from tessella.artifacts.plan import Plan
from tessella.compiler.budget import Built
from tessella.compiler.budget.mixes import Unit

PRICES = {"fp32": 100.0, "bf16": 60.0, "int8": 30.0}


@dataclass
class Table:
    """Every layer costs the same in one precision: nothing is measured."""

    names: Sequence[str] = ()
    asked: list[str] = field(default_factory=list)

    def layers_us(self, precision: str, units: Sequence[Unit]) -> dict[str, float]:
        self.names = [name for unit in units for name in unit.layers]
        self.asked.append(precision)
        return {
            name: PRICES[precision if precision in (*unit.kinds, "fp32") else "fp32"]
            for unit in units
            for name in unit.layers
        }

    def total_us(self, mix: Mapping[str, str]) -> float:
        return sum(PRICES[mix.get(name, "fp32")] for name in self.names)

    def plans_us(self, built: Sequence[Built], sample: object) -> list[float]:
        return [self.total_us(one.mix) for one in built]


def run(plan: Plan):
    engine = runtime.load(plan)
    return lambda batch: engine(**batch)
