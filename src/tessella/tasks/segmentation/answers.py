"""The classes in a picture, largest first, each with its mask as run lengths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from tessella.annotations import rle
from tessella.core.pictures import Pixels
from tessella.core.task import TaskRecord
from tessella.tasks.segmentation.examples import IGNORED, decoded, is_ground
from tessella.tasks.task import Outputs, Query
from tessella.tasks.thing import Thing

VERB = "segment"
SLOW = True
HEADER: tuple[str, ...] = ("class", "share of the picture")
ALIKE = 0.999  # of the pixels: two answers with so many in common say the same
SHOWN = 4


def answer(
    outputs: Outputs, labels: tuple[str, ...], record: TaskRecord, query: Query
) -> list[Any]:
    """Of scores [B, K, H, W] the classes that win a pixel, with their masks in H × W pixels.

    The masks are run lengths in COCO's compressed form, of the picture as the network sees it:
    ``box`` says where that lies, in pixels of the picture's own, and may reach over its edge.
    """
    answers = []
    for number, mask in enumerate(outputs.argmax(axis=1)):
        place: dict[str, Any] = {}
        if query.views:
            whole = np.array([[0.0, 0.0, 1.0, 1.0]])
            place = {"box": query.views[number].around_picture(whole)[0].tolist()}
        answers.append(answer_of(mask, outputs.shape[1], labels, query.top, place))
    return answers


def answer_of(
    mask: npt.NDArray[Any], classes: int, labels: tuple[str, ...], top: int | None,
    place: dict[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    """The classes of a mask [H, W]; ``place`` is added to each."""
    named = len(labels) == classes
    pixels = np.bincount(mask.ravel(), minlength=classes)
    order = np.argsort(-pixels, kind="stable")[:top]
    return [
        {
            "index": k,
            "label": labels[k] if named else None,
            "share": float(pixels[k] / mask.size),
            "mask": {
                "size": list(mask.shape),
                "counts": rle.compressed(rle.counts_of(mask == k)).decode(),
            },
            **place,
        }
        for k in order.tolist()
        if pixels[k]
    ]


def lines(answer: Any) -> list[tuple[str, ...]]:
    return [(str(a["label"]), f"{100 * a['share']:.1f} %") for a in answer]


def same(one: Outputs, other: Outputs, record: TaskRecord) -> npt.NDArray[np.bool_]:
    equal = one.argmax(1) == other.argmax(1)
    return np.asarray(equal.reshape(len(equal), -1).mean(axis=1) >= ALIKE)


def said(output: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    return _described(output.argmax(0), labels)


def changes(one: Outputs, other: Outputs, labels: tuple[str, ...], record: TaskRecord) -> str:
    """The share of pixels with another class, and the most frequent changes."""
    old, new = (output.argmax(0).ravel() for output in (one, other))
    pairs = Counter(zip(old[old != new].tolist(), new[old != new].tolist(), strict=True))
    share = 100 * sum(pairs.values()) / old.size
    told = [
        f"{labels[a]} → {labels[b]} {100 * n / old.size:.2f} %"
        for (a, b), n in pairs.most_common(SHOWN)
    ]
    return f"{share:.2f} % of the pixels have another class: {', '.join(told)}" if pairs else ""


def truth(target: dict[str, Any], labels: tuple[str, ...]) -> str:
    return _described(decoded(target["mask"]), labels)


def _described(mask: npt.NDArray[Any], labels: tuple[str, ...]) -> str:
    pixels = np.bincount(mask[mask != IGNORED], minlength=len(labels))
    behind = is_ground(labels[0])
    return ", ".join(
        f"{labels[k]} {100 * pixels[k] / mask.size:.0f} %" for k in of_interest(pixels, behind)
    )


def of_interest(counts_K: npt.NDArray[np.int64], behind: bool) -> list[int]:
    """A few classes that are there, the largest first; behind them the first class where that is
    what lies ``behind`` things."""
    order = [k for k in np.argsort(-counts_K, kind="stable").tolist() if counts_K[k]]
    if behind and 0 in order:
        order.remove(0)
        return [*order[: SHOWN - 1], 0]
    return order[:SHOWN]


def drawn(picture: Pixels, answer: Any) -> Pixels | None:
    """The picture, coloured as ``taught`` does it; None where nobody knows where a mask lies."""
    if not answer or "box" not in answer[0]:
        return None
    height, width = answer[0]["mask"]["size"]
    told = np.zeros((height, width), np.uint8)
    for one in answer:
        mask = rle.mask_of(rle.expanded(one["mask"]["counts"].encode()), height, width)
        told[mask > 0] = one["index"]
    x0, y0, x1, y1 = answer[0]["box"]
    along, down = (x1 - x0) / width, (y1 - y0) / height
    # OpenCV's pixels have their centres at whole numbers, boxes theirs at halves
    matrix = np.array([[along, 0, x0 + (along - 1) / 2], [0, down, y0 + (down - 1) / 2]])
    size = (picture.shape[1], picture.shape[0])
    placed = cv2.warpAffine(told, matrix, size, flags=cv2.INTER_NEAREST)
    return taught(picture, placed, ())


def things(answer: Any) -> tuple[Thing, ...]:
    return ()


def marked(target: Any, labels: tuple[str, ...]) -> tuple[Thing, ...]:
    return ()


def taught(picture: Pixels, target: Any, labels: tuple[str, ...]) -> Pixels:
    """The picture, half of which each class but the first colours; white is without a class."""
    hues = np.arange(256) * 137.5 % 180  # neighbours are far apart
    hsv = np.stack([hues, np.full(256, 220), np.full(256, 255)], axis=1).astype(np.uint8)
    colors = cv2.cvtColor(hsv[None], cv2.COLOR_HSV2RGB)[0]
    colors[IGNORED] = 255
    blended = (picture.astype(np.uint16) + colors[target]) // 2
    return np.where(target[:, :, None] == 0, picture, blended).astype(np.uint8)
