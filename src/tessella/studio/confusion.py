"""What a classifier takes for what: the matrix, the pairs mixed up most, and the images; and tables
of measures by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from nicegui import ui

from tessella.studio import charts, parts, pictures
from tessella.studio.context import Context
from tessella.studio.theme import text
from tessella.studio.workspace import open_dataset

MISTAKES = 30  # pairs of classes that are listed
SAMPLES = 48  # shown of a cell of the matrix


class ClassFigures(TypedDict):
    label: str
    precision: float
    recall: float
    f1: float
    support: int


class Report(TypedDict):
    """A classification's report as commands write it, as far as it is shown.

    ``confusion`` counts images by true class and answer; ``predictions`` has the answer to each
    image of the split, and older files lack it.
    """

    accuracy: float
    labels: list[str]
    confusion: list[list[int]]
    per_class: list[ClassFigures]
    predictions: NotRequired[list[int]]


class Confusion:
    """The matrix, whose cells show their images when they are clicked.

    Args:
        data: the dataset's folder, where it is in the workspace.
        split: of it, which was measured.
    """

    def __init__(self, context: Context, report: Report, data: Path | None, split: str) -> None:
        self._context, self._report, self._data, self._split = context, report, data, split
        labels, matrix = report["labels"], report["confusion"]
        text("p", "Rows are the truth, columns what the network said. Click a cell to see "
             "its images.").classes("muted small")  # fmt: skip
        chart = ui.echart(charts.confusion(labels, matrix)).classes("chart tall")
        chart.style(charts.confusion_size(labels))
        chart.on_point_click(lambda e: self._samples(e.value[1], e.value[0]))
        self._cell = ui.element("div").classes("stack")

    def mistakes(self) -> None:
        """What is taken for what, most often first: of 200 classes nobody finds it in a matrix."""
        labels, matrix = self._report["labels"], np.asarray(self._report["confusion"])
        wrong = np.where(np.eye(len(labels), dtype=bool), 0, matrix)
        order = np.argsort(-wrong, axis=None, kind="stable")[:MISTAKES]
        pairs = [divmod(int(i), len(labels)) for i in order if wrong.flat[i]]
        if not pairs:
            parts.note("It took no class for another.")
            return
        most = int(wrong.max())
        parts.table(
            [parts.Column(title=t) for t in ("truth", "taken for", "images")],
            [
                (
                    labels[r],
                    labels[c],
                    parts.Bar(fraction=wrong[r, c] / most, text=str(wrong[r, c])),
                )
                for r, c in pairs
            ],
        )

    def _samples(self, truth: int, answer: int) -> None:
        """The images of one cell of the matrix, if the report has all predictions."""
        report = self._report
        labels = report["labels"]
        self._cell.clear()
        with self._cell:
            text(
                "h2",
                f"{labels[truth]} taken for {labels[answer]}: {report['confusion'][truth][answer]}",
            )
            predictions = report.get("predictions")
            if not predictions or self._data is None:
                text("p", "This report does not say which images these are.").classes("muted small")
                return
            dataset = open_dataset(self._data)
            ref = self._context.workspace.ref(self._data)
            split = dataset.split(self._split)
            hits = np.flatnonzero((split.labels == truth) & (np.asarray(predictions) == answer))
            with parts.box("thumbs"):
                for index in hits[:SAMPLES]:
                    pictures.thumb(dataset, ref, self._split, int(index))


def figures(
    classes: Sequence[ClassFigures], precisions: Sequence[float | None] | None = None
) -> None:
    """Precision, recall, F1 and images of each class.

    Args:
        precisions: the average precision of each, where it was computed; None: the class does not
            occur.
    """
    titles = ["precision", "recall", "F1", *["average precision"] * (precisions is not None)]
    columns = [parts.Column(title="class", classes="mid")]
    columns += [parts.Column(title=t, classes="r") for t in (*titles, "images")]
    rows = []
    for number, c in enumerate(classes):
        shown = [f"{c['precision']:.3f}", f"{c['recall']:.3f}", f"{c['f1']:.3f}"]
        if precisions is not None:
            average = precisions[number]
            shown.append("–" if average is None else f"{average:.3f}")
        rows.append((c["label"], *shown, f"{c['support']:,}"))
    parts.table(columns, rows)


def measures(classes: list[dict[str, Any]]) -> None:
    """A table of what another task measures of each class."""
    names = [name for name in classes[0] if name != "label"]
    columns = [parts.Column(title="class")]
    columns += [parts.Column(title=n.replace("_", " "), classes="r") for n in names]
    parts.table(columns, [(c["label"], *(_figure(c[name]) for name in names)) for c in classes])


def _figure(value: float | None) -> str:
    """A count, or a measure with three digits; a dash where there is nothing to count."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
