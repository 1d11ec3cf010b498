"""front/: the Pareto front that a search under a budget found, a folder of plans.

No plan of the front is better than another one in every respect. ``front.json`` says what each
plan costs; the plans lie beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessella.artifacts.files import read_document, to_document, write_folder
from tessella.artifacts.plan import Plan
from tessella.artifacts.receipt import Receipt
from tessella.core.errors import UsageError

VERSION = 1
FILE = "front.json"


@dataclass(frozen=True, kw_only=True)
class FrontPoint:
    """A plan of the front.

    Attributes:
        plan: name of the plan's file in the front's folder.
        layers: how many layers are in each precision, the commonest first.
        time_us: of the whole plan, from the call to the answer, at the usual batch size.
        nbytes: memory of the running plan: constants and, at the largest batch, values.
    """

    plan: str
    layers: dict[str, int]
    time_us: float
    nbytes: int
    receipt: Receipt

    def __post_init__(self) -> None:
        if Path(self.plan).name != self.plan or not self.plan.endswith(".plan"):
            raise UsageError("a front's plan is a file beside it", seen=self.plan[:120])


@dataclass(frozen=True, kw_only=True)
class FrontInfo:
    """``front.json``.

    Attributes:
        points: the plans, the fastest first.
        chosen: index of the fastest plan within the budget.
        exact: the float32 plan, with which all others are compared.
        batch: the usual batch size, at which times were measured.
        budget: percentage points of the metric that a plan may lose.
        resolution: the loss, in percentage points, that these samples cannot exclude with 95 %
            confidence even for a plan that changes no answer.
        evaluations: how often the search judged a whole network.
        refused: what was no choice, and why.
    """

    points: tuple[FrontPoint, ...]
    chosen: int
    exact: FrontPoint
    batch: int
    budget: float
    resolution: float
    evaluations: int
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.chosen < len(self.points):
            raise UsageError(
                "a front that contradicts itself",
                seen=f"point {self.chosen} chosen of {len(self.points)}",
            )


def write_front(folder: Path, info: FrontInfo, plans: Mapping[str, Plan]) -> None:
    """Write a front's folder, atomically; ``plans`` by file name."""

    def fill(path: Path) -> None:
        for name, plan in plans.items():
            plan.save(path / name)
        (path / FILE).write_bytes(to_document("front", VERSION, info))

    write_folder(folder, fill)


def read_front(folder: Path) -> FrontInfo:
    """The record in ``front.json``; the plans are not read.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    return read_document(folder / FILE, FrontInfo, kind="front", version=VERSION)
