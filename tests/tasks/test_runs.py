"""Masks as runs of one line, beside pycocotools: areas and overlaps, of things and of crowds."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from tessella.annotations import rle
from tessella.tasks.instances.cells import PART, SIDE, areas_between, columns_of, runs_of
from tessella.tasks.instances.runs import of_counts

# of pycocotools' decoder with NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SIZE = (37, 53)


def told(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Cells and boxes: inside, over the edge, outside, and without area; some cells just PART."""
    cells = rng.random((count, SIDE, SIDE)).astype(np.float32)
    cells[::3] = np.where(cells[::3] > 0.3, 0.9, 0.1)
    cells[1::5, 4:9] = PART
    cells[2] = 0.0
    low = rng.uniform(-10, 45, (count, 2))
    boxes = np.concatenate([low, low + rng.uniform(0, 30, (count, 2))], axis=1)
    boxes[3] = [60, 60, 70, 70]
    boxes[4, 2] = boxes[4, 0]
    boxes[5] = [0, 0, SIZE[1], SIZE[0]]
    return cells, boxes


def test_areas_and_overlaps_are_pycocotools() -> None:
    rng = np.random.default_rng(0)
    cells, boxes = told(rng, 24)
    masks = runs_of(cells, boxes, SIZE)
    counts = [
        rle.of_runs(one.begins, one.ends, SIZE[0] * SIZE[1])
        for i in range(len(cells))
        for one in [runs_of(cells[i : i + 1], boxes[i : i + 1], SIZE)]
    ]
    assert (masks.firsts()[1:] == np.cumsum([len(c) // 2 for c in counts])).all()
    mine = [{"size": SIZE, "counts": rle.compressed(c)} for c in counts]
    assert (masks.areas() == coco_mask.area(mine)).all()
    assert (masks.areas()[2:5] == 0).all()
    drawn = rng.random((9, *SIZE)) > 0.6
    drawn[2] = False
    drawn[3] = True
    drawn[4, :, 20:] = drawn[5, :, :20] = False
    theirs = [coco_mask.encode(np.asfortranarray(m.astype(np.uint8))) for m in drawn]
    crowds = np.arange(9) % 3 == 1
    others = of_counts([rle.expanded(one["counts"]) for one in theirs], SIZE)
    assert (others.areas() == coco_mask.area(theirs)).all()
    chosen = rng.random((24, 9)) > 0.2
    found = masks.shares(others, crowds, chosen)
    expected = coco_mask.iou(mine, theirs, crowds.tolist())
    np.testing.assert_array_equal(found, np.where(chosen, expected, 0))
    assert (found > 0).sum() > 50


def test_areas_lie_between_what_cells_tell_without_drawing() -> None:
    rng = np.random.default_rng(2)
    rows, columns = np.mgrid[:SIDE, :SIDE] - SIDE / 2
    for size in (SIZE, (480, 640), (3, 2000)):
        cells, boxes = told(rng, 300)
        cells[6:] = (np.hypot(rows, columns) < rng.uniform(2, 16, (294, 1, 1))) * 0.8
        boxes[6:] *= np.tile(size[::-1], 2) / np.tile(SIZE[::-1], 2)
        boxes[7] = np.nan
        masks = runs_of(cells, boxes, size)
        least, most = areas_between(cells >= PART, boxes, size)
        areas = masks.areas()
        assert (least <= areas).all()
        assert (areas <= most).all()
        assert ((most - least) < 0.9 * areas).sum() > 100  # they tell something
        first, behind = columns_of(boxes, size[1])
        drawn = [np.flatnonzero(masks.begins // masks.stride == d) for d in range(300)]
        for mine, low, high in zip(drawn, first, behind, strict=True):
            places = masks.begins[mine] % masks.stride // size[0]
            assert ((low <= places) & (places < high)).all()


def test_no_masks_overlap_none_and_boxes_may_be_of_any_numbers() -> None:
    none = of_counts([], SIZE)
    masks = runs_of(*told(np.random.default_rng(1), 6), SIZE)
    assert masks.shares(none, np.zeros(0, bool), np.zeros((6, 0), bool)).shape == (6, 0)
    assert none.shares(masks, np.zeros(6, bool), np.zeros((0, 6), bool)).shape == (0, 6)
    far = [[-np.inf, 0, 10, 10], [0, -np.inf, 10, 10], [0, 0, np.inf, 10], [np.nan, 0, 9, 9]]
    cells = np.ones((4, SIDE, SIDE), np.float32)
    lost = runs_of(cells, np.array(far), SIZE)
    assert lost.areas().tolist() == [100, 100, 10 * SIZE[1], 0]
    empty = runs_of(np.zeros((0, SIDE, SIDE), np.float32), np.zeros((0, 4)), SIZE)
    assert empty.count == 0 == len(empty.begins)
