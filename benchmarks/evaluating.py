"""The measures of boxes and masks beside faster-coco-eval's: ``python -m benchmarks.evaluating``.

Pictures as COCO has them: 7.3 things on the mean, of 80 classes and of every size, a hundredth of
them crowds, and 100 told things each, of which twice as many as there are things lie near one. The
peer gets the masks that are told as run lengths; ours draws them from the network's cells. Both run
in turns, in one process on one thread, and the averages must be equal.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from benchmarks.intake import Row
from benchmarks.report import document, markdown, write
from tessella.annotations import rle
from tessella.core.device import default_target
from tessella.tasks import named
from tessella.tasks.detection import metrics as boxes
from tessella.tasks.instances import metrics as masks
from tessella.tasks.instances.cells import SIDE, counts_of
from tessella.tasks.instances.examples import MaskSets
from tessella.tasks.instances.packing import LEVELS, WIDTH

HEIGHT, WIDE, CLASSES, TOLD = 480, 640, 80, 100
SIZE, SIDES = (HEIGHT, WIDE), np.array([WIDE, HEIGHT] * 2, np.float64)
THINGS, LEAST, MOST = 7.3, 150.0, 1e5  # of a picture; pixels of a thing's box
ROUNDS, SAME = 3, 1e-9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=1_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = measured(args.pictures)
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    if args.out is not None:
        write(args.out, document(default_target(), rows))


def measured(count: int) -> list[Row]:
    rng = np.random.default_rng(0)
    told, there = np.zeros((count, TOLD, WIDTH), np.float32), []
    known: dict[str, Any] = {
        "images": [{"id": i, "height": HEIGHT, "width": WIDE} for i in range(count)],
        "categories": [{"id": k, "name": str(k)} for k in range(CLASSES)],
        "annotations": [], "info": {},
    }  # fmt: skip
    answers: list[dict[str, Any]] = []
    for image in range(count):
        there.append(_things(rng))
        known["annotations"] += _entries(there[-1], image, len(known["annotations"]) + 1)
        answers += _tell(rng, there[-1], told[image], image)
    column = pa.chunked_array([pa.array(there, type=named("instances").examples.column())])
    targets, labels = MaskSets(column, CLASSES), tuple(map(str, range(CLASSES)))
    flat = told.reshape(count, -1)
    of_boxes = np.ascontiguousarray(told[..., :6]).reshape(count, -1)
    ways: dict[str, Callable[[], float]] = {
        "ours, boxes": lambda: boxes.measure(of_boxes, targets, labels).map,
        "faster-coco-eval, boxes": lambda: _peer(*peers, "bbox"),
        "ours, masks and boxes": lambda: masks.measure(flat, targets, labels).map,
        "faster-coco-eval, masks": lambda: _peer(*peers, "segm"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    found: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            if name.startswith("faster"):
                peers = copy.deepcopy((known, answers))  # it writes into what it is given
            began = time.process_time()
            found[name] = way()
            times[name].append(time.process_time() - began)
    for kind, (mine, theirs) in {
        "boxes": ("ours, boxes", "faster-coco-eval, boxes"),
        "masks": ("ours, masks and boxes", "faster-coco-eval, masks"),
    }.items():
        if abs(found[mine] - found[theirs]) > SAME:
            raise AssertionError(f"{kind}: {found[mine]} is not {found[theirs]}")
    return [
        {"who": name, "pictures": count, "processor s": round(statistics.median(each), 2),
         "map": round(found[name], 6)}
        for name, each in times.items()
    ]  # fmt: skip


def _blob(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Cells of a round thing with a few bulges."""
    rows, columns = np.mgrid[:SIDE, :SIDE] - (SIDE - 1) / 2
    angle, edge = np.arctan2(rows, columns), 0.75 + rng.uniform(0, 0.35)
    edge = 0.75 + (edge - 0.75) * np.sin(rng.integers(2, 6) * angle + rng.uniform(0, 6))
    return np.asarray(1 / (1 + np.exp(12 * (np.hypot(rows, columns) / (SIDE / 2) - edge))), "f4")


def _box(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    area, shape = np.exp(rng.uniform(np.log(LEAST), np.log(MOST))), np.exp(rng.normal(0, 0.4))
    sides = np.clip(np.sqrt([area * shape, area / shape]), 4, np.array([WIDE, HEIGHT]) - 2)
    corner = rng.uniform(0, np.array([WIDE, HEIGHT]) - sides)
    return np.concatenate([corner, corner + sides])


def _things(rng: np.random.Generator) -> dict[str, Any]:
    """A picture's target as a dataset of instances holds it, and the cells of its things."""
    count = max(1, int(rng.poisson(THINGS)))
    placed = [_box(rng).tolist() for _ in range(count)]
    cells = [_blob(rng) for _ in range(count)]
    counts = [counts_of(c, box, SIZE) for c, box in zip(cells, placed, strict=True)]
    return {
        "boxes": placed, "labels": rng.integers(0, CLASSES, count).tolist(),
        "crowds": (rng.random(count) < 0.01).tolist(), "size": [*SIZE], "view": [0, 0, *SIZE],
        "areas": [float(c[1::2].sum()) for c in counts], "zoom": 1.0,
        "masks": [rle.compressed(c) for c in counts], "cells": cells,
    }  # fmt: skip


def _entries(there: dict[str, Any], image: int, first: int) -> list[dict[str, Any]]:
    each = zip(*(there[n] for n in ("boxes", "labels", "crowds", "areas", "masks")), strict=True)
    return [
        {"id": first + n, "image_id": image, "category_id": label, "area": area,
         "bbox": _wide(box), "iscrowd": int(crowd),
         "segmentation": {"size": [*SIZE], "counts": mask.decode()}}
        for n, (box, label, crowd, area, mask) in enumerate(each)
    ]  # fmt: skip


def _wide(box: Sequence[float]) -> list[float]:
    x0, y0, x1, y1 = map(float, box)
    return [x0, y0, x1 - x0, y1 - y0]


def _tell(
    rng: np.random.Generator, there: dict[str, Any], rows: npt.NDArray[np.float32], image: int
) -> list[dict[str, Any]]:
    """Write what a network tells into its rows; the same for the peer."""
    count, said = len(there["boxes"]), []
    for number, row in enumerate(rows):
        label, score, cells = int(rng.integers(0, CLASSES)), rng.uniform(0.001, 0.3), _blob(rng)
        box = _box(rng)
        if number < 2 * count:
            of, off = number % count, 0.06 if number < count else 0.25
            box, label, score = np.array(there["boxes"][of]), there["labels"][of], rng.random()
            box = box + rng.normal(0, off, 4) * np.tile(box[2:] - box[:2], 2)
            box = np.concatenate([np.minimum(box[:2], box[2:]), np.maximum(box[:2], box[2:]) + 1])
            cells = (there["cells"][of] + rng.normal(0, 0.05, (SIDE, SIDE))).clip(0, 1)
        row[:4], row[4], row[5] = box.clip(0, SIDES) / SIDES, max(score, 1e-3), label
        steps = torch.from_numpy(np.round(cells.ravel() * LEVELS) / LEVELS)
        row[6:] = masks._packed(steps).numpy()
        at, drawn = row[:4].astype(np.float64) * SIDES, steps.numpy().reshape(SIDE, SIDE)
        counts = counts_of(drawn.astype(np.float32), at.tolist(), SIZE)
        mask = {"size": [*SIZE], "counts": rle.compressed(counts).decode()}
        said.append(
            {"image_id": image, "category_id": label, "score": float(row[4]), "bbox": _wide(at),
             "segmentation": mask}
        )  # fmt: skip
    return said


def _peer(known: dict[str, Any], answers: list[dict[str, Any]], kind: str) -> float:
    from faster_coco_eval import COCO, COCOeval_faster

    if kind == "bbox":
        answers = [{k: v for k, v in one.items() if k != "segmentation"} for one in answers]
    truth = COCO(known)
    run = COCOeval_faster(truth, truth.loadRes(answers), kind, print_function=lambda *_: None)
    run.evaluate()
    run.accumulate()
    run.summarize()
    return float(run.stats[0])


if __name__ == "__main__":
    main()
