"""Kinds of a detector's errors: numbers as pycocotools has them, kinds as TIDE defines them."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tessella.tasks import named
from tessella.tasks.detection.errors import KINDS, Matched, match

TASK = named("detection")
HEIGHT, WIDTH = 40, 60
Boxes = list[tuple[list[float], int, float]]  # box, label, score or whether it is a crowd


def matched(told: list[Boxes], there: list[Boxes], overlap: float) -> Matched:
    """Boxes in pixels of pictures of which a network sees all, but for a frame of 10 pixels."""
    rows = [
        {
            "boxes": [b for b, _, _ in picture], "labels": [k for _, k, _ in picture],
            "crowds": [bool(crowd) for _, _, crowd in picture], "areas": [1.0] * len(picture),
            "zoom": 1.0, "size": [HEIGHT + 20, WIDTH + 20], "view": [10, 10, HEIGHT, WIDTH],
        }
        for picture in there
    ]  # fmt: skip
    column = pa.chunked_array([pa.array(rows, TASK.examples.column())])
    rows_NPF = np.zeros((len(told), 100, 6))
    for image, picture in enumerate(told):
        for place, (box, label, score) in enumerate(picture):
            inside = (np.array(box) - 10) / [WIDTH, HEIGHT, WIDTH, HEIGHT]
            rows_NPF[image, place] = [*inside, score, label]
    # in float64, which float32 rows become: equal to the last bit with pycocotools' input
    return match(rows_NPF.reshape(len(told), -1), TASK.examples.targets(column, 3), overlap)  # type: ignore[arg-type]


def coco_of(told: list[Boxes], there: list[Boxes]) -> COCOeval:
    def entries(pictures: list[Boxes]) -> list[dict[str, Any]]:
        return [
            {"image_id": i, "category_id": k, "score": v, "iscrowd": int(v), "area": 1.0,
             "bbox": [x0, y0, x1 - x0, y1 - y0]}
            for i, boxes in enumerate(pictures) for (x0, y0, x1, y1), k, v in boxes
        ]  # fmt: skip

    with contextlib.redirect_stdout(io.StringIO()):
        known = COCO()
        known.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(len(there))],
            "categories": [{"id": k} for k in range(3)],
            "annotations": [e | {"id": n} for n, e in enumerate(entries(there), 1)],
        }
        known.createIndex()
        run = COCOeval(known, known.loadRes(entries(told)), "bbox")
        run.evaluate()
        run.accumulate()
    return run


def test_average_precision_recall_and_hits_are_pycocotools() -> None:
    """On 40 pictures with crowds, doubles, misses, strangers and equal scores."""
    rng = np.random.default_rng(3)
    told, there = [], []
    for _ in range(40):
        count = int(rng.integers(0, 6))
        low = rng.uniform(10, 35, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(4, 14, (count, 2))], axis=1)
        labels = rng.integers(0, 3, count)
        crowds = rng.random(count) < 0.15
        there.append(list(zip(boxes.tolist(), labels.tolist(), crowds.tolist(), strict=True)))
        strangers = rng.uniform(12, 20, (2, 4))
        strangers[:, 2:] += 20
        made = np.concatenate([boxes, boxes[:2], strangers])
        made = made + rng.normal(size=made.shape)
        said = np.concatenate([labels, labels[:2], rng.integers(0, 3, 2)])
        scores = rng.uniform(0.1, 1, len(made)).round(1)
        told.append(list(zip(made.tolist(), said.tolist(), scores.tolist(), strict=True)))
    run = coco_of(told, there)
    for place, overlap in ((0, 0.5), (5, 0.75)):
        seen = matched(told, there, overlap)
        report = seen.report(("a", "b", "c"), np.zeros(3))
        for k, row in enumerate(report.classes):
            precision = run.eval["precision"][place, :, k, 0, 2]
            assert row.average_precision == pytest.approx(precision.mean(), abs=1e-9)
            assert row.recall == pytest.approx(run.eval["recall"][place, k, 0, 2], abs=1e-12)
            every = [
                e for e in run.evalImgs if e and e["category_id"] == k and e["aRng"][1] == 1e10
            ]
            hits = sum(
                ((e["dtMatches"][place] > 0) & ~e["dtIgnore"][place].astype(bool)).sum()
                for e in every
            )
            assert row.hits == hits > 0
            curve = seen.curve(k)
            assert curve.recall[-1] == row.recall
            assert curve.precision[-1] == row.precision


BOX = [20.0, 20.0, 30.0, 30.0]
HALF = [20.0, 20.0, 30.0, 24.0]  # overlaps with BOX by 0.4
FAR = [50.0, 30.0, 60.0, 40.0]


@pytest.mark.parametrize(
    ("told", "kinds"),
    [
        ([], ["missed"]),
        ([(BOX, 0, 0.9)], []),
        ([(BOX, 0, 0.9), (BOX, 0, 0.8)], ["twice"]),
        ([(BOX, 1, 0.9)], ["class"]),  # a thing that an error tells of is not missed, too
        ([(HALF, 0, 0.9)], ["place"]),
        ([(HALF, 1, 0.9)], ["both", "missed"]),
        ([(FAR, 0, 0.9)], ["false", "missed"]),
        ([(BOX, 0, 0.2)], ["missed"]),  # below the threshold
        ([(BOX, 0, 0.9), (BOX, 1, 0.2)], []),
        ([([10.0, 40.0, 20.0, 50.0], 2, 0.9)], ["missed"]),  # in a crowd nothing is wrong
    ],
)
def test_each_kind_of_error(told: Boxes, kinds: list[str]) -> None:
    there: Boxes = [(BOX, 0, 0.0), ([10.0, 40.0, 30.0, 50.0], 2, 1.0)]
    seen = matched([told], [there], 0.5)
    least = np.full(3, 0.3)
    found = seen.listed(least, most=9)
    assert sorted(e.kind for e in found) == kinds
    counts = seen.report(("a", "b", "c"), least).errors
    assert {k: n for k, n in counts.items() if n} == {k: kinds.count(k) for k in kinds}
    assert [e.kind for e in seen.listed(least, most=9, label=2)] == []
    if kinds == ["class"]:  # it is about the class that is told and the one that is there
        assert len(seen.listed(least, most=9, label=0)) == 1
        assert len(seen.listed(least, most=9, label=1, kind="class")) == 1
    np.testing.assert_allclose(seen.there[0], BOX)


def test_the_worst_come_first() -> None:
    told: list[Boxes] = [[(FAR, 0, 0.6), (BOX, 0, 0.25)], [], [(FAR, 1, 0.9)]]
    seen = matched(told, [[(BOX, 0, 0.0)], [(BOX, 1, 0.0)], []], 0.5)
    found = seen.listed(np.full(3, 0.3), most=9)
    assert [(e.kind, e.image) for e in found] == [
        ("missed", 1), ("false", 2), ("missed", 0), ("false", 0),
    ]  # fmt: skip
    assert [e.loss for e in found] == pytest.approx([1.0, 0.9, 0.75, 0.6])
    assert seen.listed(np.full(3, 0.3), most=1) == found[:1]
    # 1 − F1 of an image, of the boxes that reach the thresholds
    assert seen.losses(np.full(3, 0.3), 4) == pytest.approx([1.0, 1.0, 1.0, 0.0])
    assert seen.losses(np.array([0.2, 0.3, 0.3]), 4) == pytest.approx([1 / 3, 1.0, 1.0, 0.0])
    assert seen.losses(np.full(3, 0.95), 4) == pytest.approx([1.0, 1.0, 0.0, 0.0])
    assert TASK.errors is not None
    assert tuple(TASK.errors.TITLES) == KINDS
    assert named("regression").errors is None
