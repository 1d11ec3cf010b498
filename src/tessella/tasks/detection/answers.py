"""The things in a picture, the surest first, each with its box in the picture's own pixels."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.detection.examples import overlap
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "detect"
SLOW = False
HEADER: tuple[str, ...] = ("class", "score", "x0", "y0", "x1", "y1")
USUAL = 0.3  # the least score that counts, where nothing was measured on a validation split
ALIKE, CLOSE = 0.9, 0.02  # overlap and score: two boxes with so much, and so little, say the same
PARTNER = 0.5  # the least overlap of what may be the same thing
SHOWN = 6
COLORS = (
    (230, 25, 75), (60, 180, 75), (0, 130, 200), (245, 130, 48), (145, 30, 180), (0, 160, 160),
    (240, 50, 230), (128, 128, 0), (170, 110, 40), (0, 0, 160),
)  # fmt: skip
GREY = 160, 160, 160  # of crowds


def thresholds(record: TaskRecord, classes: int) -> npt.NDArray[np.float64]:
    """The least score of each class that counts."""
    known = record.numbers.get("threshold", ())
    return np.array(known) if len(known) == classes else np.full(classes, USUAL)


def told(
    output: Outputs, least_K: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Row, class and score of the boxes of [D, 4 + K] that reach their threshold, best first."""
    scores_DK = output[:, 4:].astype(np.float64)
    rows, classes = np.nonzero((scores_DK >= least_K) & (scores_DK > 0))
    scores = scores_DK[rows, classes]
    order = np.argsort(-scores, kind="stable")
    return rows[order], classes[order], scores[order]


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of boxes [B, D, 4 + K] those at or above their thresholds.

    A box is x0, y0, x1, y1 in the pixels of the picture that ``query.views`` tells of.
    """
    classes = outputs.shape[2] - 4
    named = len(labels) == classes
    least_K = thresholds(record, classes)
    if query.threshold is not None:
        least_K = np.full(classes, query.threshold)
    answers = []
    for number, output in enumerate(outputs):
        rows, kinds, scores = told(output, least_K)
        boxes = output[rows, :4].astype(np.float64)
        if query.views:
            boxes = query.views[number].in_picture(boxes)
        each = zip(kinds.tolist(), scores.tolist(), boxes.tolist(), strict=True)
        answers.append(
            [
                {"index": k, "label": labels[k] if named else None, "score": score, "box": box}
                for k, score, box in list(each)[: query.top]
            ]
        )
    return answers


def lines(answer: Any) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (str(a["label"]), f"{100 * a['score']:.1f} %", *(f"{v:.1f}" for v in a["box"]))
        for a in answer
    ]
    return rows or [("(none)", "", "", "", "", "")]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    """Whether every box that one tells has one of its class, place and score in the other.

    A box within ``CLOSE`` of its threshold may be missing.
    """
    pairs = list(zip(one, other, strict=True))
    return np.array([_has(a, b, record) and _has(b, a, record) for a, b in pairs], bool)


def _has(one: Outputs, other: Outputs, record: TaskRecord) -> bool:
    return bool(alike(one, other, record)[0].any(axis=1).all())


def alike(
    one: Outputs, other: Outputs, record: TaskRecord
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Which boxes of two answers agree, [M, N], and the rows of these boxes in each answer."""
    least_K = thresholds(record, one.shape[1] - 4)
    rows, classes, scores = told(one, least_K + CLOSE)
    others, their, theirs = told(other, least_K - CLOSE)
    near = overlap(one[rows, :4].astype(np.float64), other[others, :4].astype(np.float64)) >= ALIKE
    near &= (classes[:, None] == their) & (abs(scores[:, None] - theirs) <= CLOSE)
    return near, rows, others


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    _, classes, scores = told(output, thresholds(record, len(labels)))
    words = [f"{labels[k]} {s:.2f}" for k, s in zip(classes.tolist(), scores.tolist(), strict=True)]
    more = [f"{len(words) - SHOWN} more"] if len(words) > SHOWN else []
    return ", ".join(words[:SHOWN] + more) or "(none)"


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    """Boxes that vanished, appeared, moved, or have another class or score.

    Two boxes are one that overlap by a half, those of one class first.
    """
    least_K = thresholds(record, len(labels))
    (rows, kinds, scores), (others, theirs, their) = told(one, least_K), told(other, least_K)
    common = overlap(one[rows, :4].astype(np.float64), other[others, :4].astype(np.float64))
    left, words = list(range(len(others))), list[str]()
    for place, (kind, score) in enumerate(zip(kinds.tolist(), scores.tolist(), strict=True)):
        name = f"{labels[kind]} {score:.2f}"
        near = [j for j in left if common[place, j] >= PARTNER]
        if not near:
            words.append(f"{name} vanished")
            continue
        best = max(near, key=lambda j: (theirs[j] == kind, common[place, j]))
        shared = common[place, best]
        left.remove(best)
        now = f"{their[best]:.2f}"
        if theirs[best] != kind:
            words.append(f"{name} → {labels[theirs[best]]} {now}")
        elif shared < ALIKE:
            words.append(f"{name} moved (overlap {shared:.2f})")
        elif abs(score - their[best]) > CLOSE:
            words.append(f"{name} → {now}")
    words += [f"{labels[theirs[j]]} {their[j]:.2f} appeared" for j in left]
    more = [f"{len(words) - SHOWN} more"] if len(words) > SHOWN else []
    return ", ".join(words[:SHOWN] + more)


def truth(target: dict[str, Any], labels: tuple[str, ...]) -> str:
    counts = Counter(target["labels"]).most_common()
    words = [labels[k] if n == 1 else f"{n} × {labels[k]}" for k, n in counts]
    more = [f"{len(words) - SHOWN} classes more"] if len(words) > SHOWN else []
    return ", ".join(words[:SHOWN] + more) or "(none)"


def drawn(picture: Pixels, answer: Any) -> Pixels:
    """The picture with a frame around each thing, and its class and score above."""
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    made = np.ascontiguousarray(picture)
    made = made.copy() if made is picture else made
    thick = max(1, round(min(made.shape[:2]) / 200))
    size = max(0.35, min(made.shape[:2]) / 900)
    for a in reversed(answer):  # the surest last, over the others
        x0, y0, x1, y1 = (round(v) for v in a["box"])
        color, name = color_of(a["index"]), name_of(a)
        cv2.rectangle(made, (x0, y0), (max(x0, x1 - 1), max(y0, y1 - 1)), color, thick)
        (wide, high), low = cv2.getTextSize(name, cv2.FONT_HERSHEY_SIMPLEX, size, thick)
        y = y0 - low if y0 - low - high >= 0 else min(y0 + high + low, made.shape[0] - low)
        x = max(0, min(x0, made.shape[1] - wide))
        cv2.rectangle(made, (x, y - high - 1), (x + wide, y + low), color, cv2.FILLED)
        at, white = (x, y), (255, 255, 255)
        cv2.putText(made, name, at, cv2.FONT_HERSHEY_SIMPLEX, size, white, thick, cv2.LINE_AA)
    return made


def things(answer: Any) -> tuple[Thing, ...]:
    return tuple(
        Thing(box=tuple(a["box"]), name=name_of(a), color=color_of(a["index"])) for a in answer
    )


def marked(target: dict[str, Any], labels: tuple[str, ...]) -> tuple[Thing, ...]:
    each = zip(target["boxes"], target["labels"], target["crowds"], strict=True)
    return tuple(
        Thing(
            box=(x0, y0, x1, y1),
            name=f"{labels[k]} (crowd)" if crowd else labels[k],
            color=color_of(k),
        )
        for (x0, y0, x1, y1), k, crowd in each
    )


def name_of(one: dict[str, Any]) -> str:
    return f"{one['index'] if one['label'] is None else one['label']} {one['score']:.2f}"


def color_of(index: int) -> tuple[int, int, int]:
    return COLORS[index % len(COLORS)]


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    """The picture with a thin frame around each thing; that of a crowd is grey."""
    import cv2  # not above: a plan is loaded without OpenCV, which holds 15 MB

    made = np.ascontiguousarray(picture).copy()
    height, width = made.shape[:2]
    for x0, y0, x1, y1, label, crowd in target.tolist():
        if label < 0:
            continue
        low = round(x0 * width), round(y0 * height)
        high = max(low[0], round(x1 * width) - 1), max(low[1], round(y1 * height) - 1)
        cv2.rectangle(made, low, high, GREY if crowd else color_of(int(label)), 1)
    return made
