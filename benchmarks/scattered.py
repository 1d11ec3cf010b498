"""Digits scattered on textures, learned on this machine: ``python -m benchmarks.scattered``.

Pictures with one to four real digits (``quickstart.scattered``), whose boxes a ``centernet`` learns
and whose masks a ``unet``; validation has digits that training has not. A GPU learns from 2,000 of
96 × 96, a CPU what its quick starts learn. The minutes are those of ``train``, validations and the
kernels' compilation included. With ``--plans fp16,int8`` the network is then judged as a plan of
each precision, on the same pictures.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.tables import scattered
from tessella import api, compiler, runtime
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.core.device import default_target
from tessella.core.events import silent
from tessella.data.importing import ImportSettings, import_images
from tessella.quickstart import detection, segmentation
from tessella.quickstart.annotated import HELD_OUT
from tessella.quickstart.scattered import write_scattered

TURNED = {"scale": 0.15, "rotation": 8.0}
DIGITS = {"size": 96, "sides": (16, 32)}
# By task: pictures for training and for validation, how they are drawn, network, recipe.
Problem = tuple[int, int, dict[str, Any], str, dict[str, Any]]
ON_GPU: dict[str, Problem] = {
    "detection": (2000, 200, DIGITS, "centernet", {
        "network_options": {"backbone": "test_resnet", "width": 32}, "batch_size": 16,
        "augment": TURNED | {"mosaic": 0.5}, "epochs": 40}),
    "segmentation": (2000, 200, DIGITS, "unet", {
        "batch_size": 32, "augment": TURNED, "epochs": 24}),
}  # fmt: skip
ON_CPU: dict[str, Problem] = {
    "detection": (
        detection.PICTURES, HELD_OUT, {"size": detection.SIZE, "sides": detection.SIDES},
        detection.NETWORK, detection.RECIPE | {"epochs": detection.EPOCHS}),
    "segmentation": (
        segmentation.PICTURES, HELD_OUT, {"size": segmentation.SIZE, "sides": segmentation.SIDES},
        segmentation.NETWORK, segmentation.RECIPE | {"epochs": segmentation.EPOCHS}),
}  # fmt: skip
BATCH = 8  # of a plan
RESAMPLES = 10  # scores are told without their intervals
SCORES = {"detection": ("map50", "map"), "segmentation": ("miou", "dice")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="detection,segmentation")
    parser.add_argument("--epochs", type=int, help="instead of each recipe's own")
    parser.add_argument("--pictures", type=int, help="instead of each recipe's own")
    parser.add_argument("--plans", default="", help="precisions of plans that are judged, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = default_target()
    problems = ON_CPU if target == "cpu" else ON_GPU
    out = args.out or RESULTS / f"scattered-{target}.json"
    rows = []
    for task in args.tasks.split(","):
        count, held_out, drawn, network, recipe = problems[task]
        count = args.pictures or count
        recipe = recipe | ({"epochs": args.epochs} if args.epochs else {})
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            pictures = write_scattered(
                root / "pictures", count=count, val=min(count, held_out), **drawn
            )
            settings = ImportSettings(task=task, size=drawn["size"], val_folder=pictures[1])
            dataset = import_images(pictures[0], root / "data", settings, emit=silent)
            plans = [name for name in args.plans.split(",") if name]
            rows.append(learned(root, dataset, task, network, recipe, plans))
        print(rows[-1], flush=True)
        write(out, document(target, rows))
    print(markdown(*scattered(rows)))


def learned(
    root: Path,
    dataset: Dataset,
    task: str,
    network: str,
    recipe: dict[str, Any],
    plans: Sequence[str] = (),
) -> dict[str, Any]:
    """Minutes until the last validation, and what the best checkpoint and its plans scored."""
    begun = time.monotonic()
    run = api.train(
        network, dataset, out=root / "run", val_interval=max(1, recipe["epochs"] // 8),
        emit=silent, **recipe,
    )  # fmt: skip
    minutes = (time.monotonic() - begun) / 60
    metrics = api.open_checkpoint(run).info.metrics
    scores = {name: round(metrics[f"val/{name}"], 4) for name in SCORES[task]}
    return {
        "task": task, "network": network, "pictures": len(dataset.train),
        "epochs": recipe["epochs"], "minutes": round(minutes, 2), **scores,
        **({"plans": {name: judged(run, dataset, task, name) for name in plans}} if plans else {}),
    }  # fmt: skip


def judged(run: Run, dataset: Dataset, task: str, precision: str) -> dict[str, float]:
    """What a plan scores on the pictures for validation; those for training calibrate it."""
    calibration = dataset if precision in compiler.KINDS else None
    plan = api.compile(run, batch=BATCH, precision=precision, calibration=calibration, emit=silent)
    measures = api.evaluate(runtime.load(plan), dataset, split="val", resamples=RESAMPLES).measures
    return {name: round(measures[name].value, 4) for name in SCORES[task]}


if __name__ == "__main__":
    main()
