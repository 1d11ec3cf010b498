"""What a network of boxes or masks gets wrong on the validation split: kinds, curve, classes, and
the pictures.

Everything is computed from the rows that one pass of the network left in a file, by the functions
of ``tessella evaluate``: a slider asks no network.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from nicegui import ui

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.core.errors import ArtifactError
from tessella.studio import charts, parts, pictures
from tessella.studio.boxes import boxed
from tessella.studio.theme import text
from tessella.tasks import of, targets_of
from tessella.tasks.detection import errors
from tessella.tasks.detection.errors import KINDS, TITLES, ErrorReport, Kind, Matched
from tessella.tasks.thing import Thing

SHOWN = 24  # errors in the gallery
SPLIT = "val"
GOOD, BAD, THERE = (27, 154, 138), (195, 81, 63), (100, 120, 207)
PAUSE_S = 0.15  # between two looks at a slider that moves


def read_rows(path: Path, split_count: int, numbers: int) -> npt.NDArray[np.float32]:
    """The rows that ``tessella run --rows`` wrote, of so many numbers for each told thing.

    Raises:
        ArtifactError: the file is not one of these, or of another split.
    """
    try:
        rows: npt.NDArray[np.float32] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            "the answers cannot be read", seen=f"{path.name}: {error}", fix="measure again"
        ) from error
    fits = rows.ndim == 2 and rows.dtype == np.float32 and rows.shape[1] % numbers == 0
    if not fits or len(rows) != split_count:
        raise ArtifactError(
            "these are not the answers of this split",
            seen=f"{rows.dtype} {list(rows.shape)}, {split_count} images",
            fix="measure again",
        )
    return rows


@dataclass
class _Asked:
    """What the page's fields say; ``threshold`` None: each class has its own."""

    threshold: float | None = None
    overlap: float = errors.OVERLAP
    label: int | None = None
    kind: Kind | None = None


class BoxErrors:
    """The errors of a checkpoint: controls, numbers, curve, table and gallery.

    Args:
        ref: the dataset's, whose validation split the rows are of.
        report: the JSON of ``tessella run --data``, which has the measures over all overlaps.
    """

    def __init__(
        self, chosen: Checkpoint, dataset: Dataset, ref: str, rows: Path, report: dict[str, Any]
    ) -> None:
        self._dataset, self._ref, self._report = dataset, ref, report
        self._split = dataset.split(SPLIT)
        ways = of(dataset.info.task).errors
        assert ways is not None
        self._match = ways.match
        self._rows_NR = read_rows(rows, len(self._split), ways.FIELDS)
        self._targets = targets_of(self._split)
        self._own_K = ways.thresholds(chosen.info.task, len(dataset.classes))
        self._asked = _Asked()
        self._matched = self._made(errors.OVERLAP)
        measures = {k: v for k, v in report.items() if isinstance(v, float)}
        parts.stats([(name, parts.score(name, value)) for name, value in measures.items()])
        self._controls()
        self._kinds = parts.box("row-line wrap kinds")
        self._curve = ui.echart(charts.precision_recall([], None)).classes("chart")
        self._here = text("p", "").classes("muted small num")
        self._table = parts.box("stack")
        self._gallery, self._large = parts.box("thumbs flips"), parts.box("stack")
        self._show()

    def _made(self, overlap: float) -> Matched:
        """Boxes or masks, matched at an overlap."""
        made = self._match(self._rows_NR, self._targets, overlap)
        assert isinstance(made, Matched)
        return made

    def _controls(self) -> None:
        with parts.box("sliders"):
            with parts.box("stack").style("gap:2px"):
                self._score = text("label", "").classes("small")
                slider = parts.slider("Least score", 0.01, 0.99, 0.01, self._usual())
                slider.on("update:model-value", lambda e: self._scored(e.args), throttle=PAUSE_S)
            with parts.box("stack").style("gap:2px"):
                self._least = text("label", "").classes("small")
                slider = parts.slider("Least overlap", 0.3, 0.95, 0.05, errors.OVERLAP)
                slider.on("change", lambda e: self._overlapped(e.args))
            names: dict[int, str] = {-1: "all classes", **dict(enumerate(self._dataset.classes))}
            parts.field(ui.select(names, value=-1, label="Class", on_change=self._class_chosen))
            parts.plain_button("As it is served", lambda: self._scored(None)).props["title"] = (
                "Each class has the threshold at which its F1 is highest"
            )

    def _usual(self) -> float:
        return round(float(np.median(self._own_K)), 2)

    def _scored(self, threshold: Any) -> None:
        self._asked.threshold = None if threshold is None else float(threshold)
        self._show()

    async def _overlapped(self, overlap: Any) -> None:
        self._asked.overlap = round(float(overlap), 2)
        self._least.text = "Matching …"
        made = await asyncio.to_thread(self._made, self._asked.overlap)
        if made.overlap == self._asked.overlap and not self._least.is_deleted:
            self._matched = made
            self._show()

    def _class_chosen(self, event: Any) -> None:
        self._asked.label = None if event.value == -1 else int(event.value)
        self._show()

    def _kind_chosen(self, kind: Kind | None) -> None:
        self._asked.kind = kind
        self._show()

    # --- what is shown ------------------------------------------------------------------

    def _least_K(self) -> npt.NDArray[np.float64]:
        if self._asked.threshold is None:
            return self._own_K
        return np.full(len(self._own_K), self._asked.threshold)

    def _show(self) -> None:
        """Everything for the present values of the fields."""
        asked, least_K = self._asked, self._least_K()
        one = asked.threshold
        self._score.text = "Score: each class its own" if one is None else f"Score ≥ {one:.2f}"
        self._least.text = f"Overlap ≥ {asked.overlap:.2f}"
        report = self._matched.report(self._dataset.classes, least_K)
        self._show_kinds(report)
        self._show_curve(report)
        self._show_table(report)
        self._show_gallery(least_K)

    def _show_kinds(self, report: ErrorReport) -> None:
        counts = report.errors
        if self._asked.label is not None:
            counts = report.classes[self._asked.label].errors
        self._kinds.clear()
        with self._kinds:
            self._chip(None, f"all errors {sum(counts.values()):,}")
            for kind in KINDS:
                self._chip(kind, f"{TITLES[kind]} {counts[kind]:,}")

    def _chip(self, kind: Kind | None, label: str) -> None:
        here = kind == self._asked.kind
        chip = ui.element("button").classes("tag here" if here else "tag")
        chip.props["type"], chip.props["aria-pressed"] = "button", str(here).lower()
        chip.on("click", lambda: self._kind_chosen(kind))
        with chip:
            text("span", label)

    def _show_curve(self, report: ErrorReport) -> None:
        curve = self._matched.curve(self._asked.label)
        rows = report.classes if self._asked.label is None else [report.classes[self._asked.label]]
        hits, told, things = (sum(getattr(c, n) for c in rows) for n in ("hits", "told", "things"))
        precision, recall = hits / told if told else None, hits / things if things else None
        here = None if precision is None or recall is None else (recall, precision)
        points = list(zip(curve.recall, curve.precision, strict=True))
        self._curve.options.clear()
        self._curve.options.update(charts.precision_recall(points, here))
        self._curve.update()
        counts = f"{told:,} told, {hits:,} right, {things:,} there"
        self._here.text = f"precision {_share(precision)}, recall {_share(recall)}: {counts}"
        if self._asked.threshold is None and self._asked.label is None:
            self._here.text += "; the curve is of one score for all classes, the point not"

    def _show_table(self, report: ErrorReport) -> None:
        known = {c["label"]: c["average_precision"] for c in self._report["classes"]}
        numbers = ("AP", f"AP at {report.overlap:.2f}", "precision", "recall", "things", "score ≥")
        columns = [parts.Column(title="class")]
        columns += [parts.Column(title=t, classes="r") for t in numbers]
        rows = [
            (
                c.label, _share(known.get(c.label)), _share(c.average_precision),
                _share(c.precision), _share(c.recall), f"{c.things:,}", f"{c.threshold:.2f}",
            )
            for c in report.classes
        ]  # fmt: skip
        self._table.clear()
        with self._table:
            parts.table(columns, rows, [n == self._asked.label for n in range(len(rows))])

    def _show_gallery(self, least_K: npt.NDArray[np.float64]) -> None:
        found = self._matched.listed(
            least_K, kind=self._asked.kind, label=self._asked.label, most=SHOWN
        )
        self._gallery.clear()
        with self._gallery:
            if not found:
                text("p", "No such error at this score and overlap.").classes("muted small")
            for error in found:
                self._tile(error, least_K)

    def _tile(self, error: errors.Error, least_K: npt.NDArray[np.float64]) -> None:
        m = self._matched
        about = [self._told(error.told, BAD)] if error.told >= 0 else []
        if error.thing >= 0:
            about.append(self._thing(error.thing))
        told = "" if error.told < 0 else self._name(m.labels[error.told])
        there = "" if error.thing < 0 else self._name(m.there_labels[error.thing])
        words = f"{told} for {there}" if told and there and told != there else told or there
        tile = ui.element("button").classes("thumb plain-tile").props('type="button"')
        tile.props["title"] = f"{self._split[error.image].path}: {TITLES[error.kind]}: {words}"
        tile.on("click", lambda: self._beside(error.image, least_K))
        with tile:
            self._picture(error.image, about, f"{TITLES[error.kind]}: {words}", names=False)
            text("div", f"{TITLES[error.kind]}: {words}")
            text("div", f"loss {error.loss:.2f}")

    def _beside(self, image: int, least_K: npt.NDArray[np.float64]) -> None:
        """What is told of an image beside what is there, large."""
        m = self._matched
        mine = np.flatnonzero((m.images == image) & m.counted(least_K))
        told = [self._told(d, GOOD if m.verdicts[d] == errors.HIT else BAD) for d in mine.tolist()]
        there = [self._thing(t) for t in np.flatnonzero(m.there_images == image).tolist()]
        self._large.clear()
        with self._large:
            with parts.link("/image", dataset=self._ref, split=SPLIT, index=str(image)):
                text("span", self._split[image].path)
            with parts.box("beside"):
                for title, things in (("What it says", told), ("What is there", there)):
                    with parts.box("stack").style("gap:6px"):
                        text("b", title).classes("small")
                        self._picture(image, things, title, names=True)
        ui.run_javascript(f"getHtmlElement({self._large.id}).scrollIntoView({{block: 'nearest'}})")

    def _picture(self, image: int, things: list[Thing], alt: str, *, names: bool) -> None:
        record = self._dataset.preprocess
        most = pictures.LARGE if names else pictures.THUMB
        source = pictures.example_address(self._dataset, self._ref, SPLIT, image, most)
        boxed(source, alt, things, (record.height, record.width), names=names)

    def _told(self, place: int, color: tuple[int, int, int]) -> Thing:
        m = self._matched
        name = f"{self._name(m.labels[place])} {m.scores[place]:.2f}"
        x0, y0, x1, y1 = m.boxes[place].tolist()
        return Thing(
            box=(x0, y0, x1, y1), name=name, color=color, dashed=color == BAD,
            outlines=m.told_outlines(place),
        )  # fmt: skip

    def _thing(self, place: int) -> Thing:
        m = self._matched
        name = self._name(m.there_labels[place]) + " (crowd)" * bool(m.crowds[place])
        x0, y0, x1, y1 = m.there[place].tolist()
        return Thing(box=(x0, y0, x1, y1), name=name, color=THERE, outlines=m.thing_outlines(place))

    def _name(self, label: Any) -> str:
        return self._dataset.classes[int(label)]


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"
