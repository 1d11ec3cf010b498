"""front/: what a search under a budget found: plans of which none is better than another in all.

``front.json`` says what each of them costs; the plans lie beside it.
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
        plan: its file, in the front's folder.
        layers: how many layers are in each precision, the commonest first.
        time_us: of the whole plan, from the call to the answer, at the usual batch size.
        nbytes: what it holds while it runs: constants and, at the largest batch, values.
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
        points: the fastest first.
        chosen: the place of the fastest one within the budget.
        exact: the float32 plan, which all are compared with.
        batch: the usual batch size, at which times were measured.
        budget: percentage points of the metric that a plan may lose.
        resolution: the points that a plan which changes no answer may still lose, for all that the
            samples can tell (95 %).
        evaluations: how often the whole network was judged on the way.
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
    """What ``front.json`` says; the plans are not looked at.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    return read_document(folder / FILE, FrontInfo, kind="front", version=VERSION)
