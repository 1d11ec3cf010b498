"""The front: plans of which none is better than another in all of accuracy, time and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tessella.artifacts.front import FrontInfo, FrontPoint, write_front
from tessella.artifacts.plan import Plan
from tessella.artifacts.receipt import Receipt
from tessella.compiler.calibration import Calibration
from tessella.core.record import to_plain


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A plan, judged and measured.

    Attributes:
        precision, precisions: what ``compile_graph`` builds this plan from, byte for byte, with the
            front's calibration and the plan as lock.
        layers: how many layers are in each precision.
        time_us: of the whole plan, from the call to the answer, at the usual batch size.
        nbytes: what it holds while it runs: constants and, at the largest batch, values.
    """

    plan: Plan
    precision: str
    precisions: Mapping[str, str]
    layers: Mapping[str, int]
    receipt: Receipt
    time_us: float
    nbytes: int

    @property
    def costs(self) -> tuple[float, float, float, float]:
        """The costs, of which less is better: points lost, answers changed, time, bytes."""
        return self.receipt.loss, self.receipt.flipped, self.time_us, self.nbytes

    @property
    def mixed(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.layers.items())


@dataclass(frozen=True, kw_only=True, eq=False)
class Front:
    """What precision buys, and the plan that a budget pays for.

    >>> print(front); front[2].plan.save("small.plan")

    Attributes:
        points: the fastest first; none is worse than another in everything.
        chosen: the place of the fastest one within the budget.
        exact: the float32 plan, which all are compared with.
        batch: the usual batch size, at which times were measured.
        budget: percentage points of the metric.
        resolution: the points that a plan which changes no answer may still lose, for all that the
            samples can tell (95 %).
        calibration: of the int8 and fp8 layers, from other samples than those that judged.
        evaluations: how often the whole network was judged on the way.
        refused: what was no choice, and why.
    """

    points: tuple[Point, ...]
    chosen: int
    exact: Point
    batch: int
    budget: float
    resolution: float
    calibration: Calibration
    evaluations: int
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        """The fastest plan within the budget."""
        return self.points[self.chosen].plan

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Point:
        return self.points[index]

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __str__(self) -> str:
        head = (
            "",
            "point",
            f"{self.exact.receipt.metric} %",
            "points lost",
            "95 %",
            "changed",
            "time_us",
            "speed",
            "bytes",
            "layers",
        )
        rows = [head, *(self._row(i, p) for i, p in enumerate(self.points))]
        if self.exact not in self.points:
            rows.append(self._row(None, self.exact))
        widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if c in (0, len(head) - 1) else cell.rjust(w)
                for c, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self.notes()])

    def notes(self) -> list[str]:
        """Notes under the table, on how its numbers were found and how far they can be trusted."""
        receipt = self.points[self.chosen].receipt
        notes = [
            f"* the fastest that loses at most {self.budget:g} points of {receipt.metric} on "
            f"{receipt.samples:,} samples; {receipt.flipped} answers changed"
        ]
        if self.resolution > self.budget:
            notes.append(
                f"these samples cannot resolve a budget of {self.budget:g} points of "
                f"{receipt.metric}: a plan that "
                f"changes none of their answers may still lose {self.resolution:.2f} (95 %)"
            )
            if self.budget > 0:
                needed = math.ceil(receipt.samples * self.resolution / self.budget)
                notes.append(f"about {needed:,} samples would")
        notes += [f"refused: {what}: {why}" for what, why in self.refused.items()]
        return notes

    def to_json(self) -> dict[str, Any]:
        """The table, its mixes and flips, ready for ``json.dumps``."""
        return {
            "budget": self.budget,
            "chosen": self.chosen,
            "resolution": self.resolution,
            "evaluations": self.evaluations,
            "refused": dict(self.refused),
            "points": [
                {
                    "precision": p.precision,
                    "precisions": dict(p.precisions),
                    "layers": dict(p.layers),
                    "time_us": p.time_us,
                    "nbytes": p.nbytes,
                    "receipt": to_plain(p.receipt),
                }
                for p in self.points
            ],
        }

    def save(self, folder: str | Path) -> Path:
        """Write all plans and what they cost into a folder; see ``artifacts.front``."""
        folder = Path(folder)
        names = {id(p): f"{i}.plan" for i, p in enumerate(self.points)}
        names.setdefault(id(self.exact), "fp32.plan")

        def told(point: Point) -> FrontPoint:
            return FrontPoint(
                plan=names[id(point)],
                layers=dict(point.layers),
                time_us=point.time_us,
                nbytes=point.nbytes,
                receipt=point.receipt,
            )

        info = FrontInfo(
            points=tuple(map(told, self.points)),
            chosen=self.chosen,
            exact=told(self.exact),
            batch=self.batch,
            budget=self.budget,
            resolution=self.resolution,
            evaluations=self.evaluations,
            refused=dict(self.refused),
        )
        plans = {names[id(p)]: p.plan for p in (*self.points, self.exact)}
        write_front(folder, info, plans)
        return folder

    def _row(self, index: int | None, point: Point) -> tuple[str, ...]:
        receipt = point.receipt
        speed = self.exact.time_us / point.time_us if point.time_us else math.nan
        return (
            "*" if index == self.chosen else "",
            "fp32" if index is None else str(index),
            f"{100 * receipt.after:.2f}",
            f"{receipt.loss:.2f}",
            f"{receipt.low:.2f}…{receipt.high:.2f}",
            str(receipt.flipped),
            f"{point.time_us:,.1f}",
            f"{speed:.2f}×",
            f"{point.nbytes:,}",
            point.mixed,
        )


def counted(layers: Sequence[str], mix: Mapping[str, str]) -> dict[str, int]:
    """How many of the layers a mix has in each precision, the commonest first."""
    return dict(Counter(mix.get(name, "fp32") for name in layers).most_common())


def undominated(points: Sequence[Point]) -> list[Point]:
    """Without those that another one is at least as good as in all costs, the fastest first."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.time_us, *p.costs)):
        if not any(all(a <= b for a, b in zip(k.costs, point.costs)) for k in kept):
            kept.append(point)
    return kept
