"""Digits scattered on textures, learned on this machine: ``python -m benchmarks.scattered``.

Pictures of 96 × 96 with one to four real digits (``quickstart.scattered``), whose boxes a
``centernet`` learns and whose masks a ``unet``; validation has digits that training has not. The
minutes are those of ``train``, validations and the kernels' compilation included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.tables import scattered
from tessella import api
from tessella.core.device import default_target
from tessella.core.events import silent
from tessella.data.importing import ImportSettings, import_images
from tessella.quickstart.scattered import write_scattered

SIZE = 96
TURNED = {"scale": 0.15, "rotation": 8.0}
# By task and kind of machine: pictures for training and for validation, network, recipe.
RECIPES: dict[tuple[str, str], tuple[int, int, str, dict[str, Any]]] = {
    ("detection", "cuda"): (2000, 200, "centernet", {
        "network_options": {"backbone": "test_resnet", "width": 32}, "batch_size": 32,
        "augment": TURNED | {"mosaic": 0.5}, "epochs": 30}),
    ("segmentation", "cuda"): (2000, 200, "unet", {
        "batch_size": 32, "augment": TURNED, "epochs": 24}),
    ("detection", "cpu"): (300, 60, "centernet", {
        "network_options": {"backbone": "test_resnet", "width": 32}, "batch_size": 16,
        "augment": TURNED | {"mosaic": 0.5}, "epochs": 40}),
    ("segmentation", "cpu"): (300, 60, "unet", {
        "network_options": {"width": 12}, "batch_size": 4, "augment": TURNED, "epochs": 24}),
}  # fmt: skip
SCORES = {"detection": ("map50", "map"), "segmentation": ("miou", "dice")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="detection,segmentation")
    parser.add_argument("--epochs", type=int, help="instead of each recipe's own")
    parser.add_argument("--pictures", type=int, help="instead of each recipe's own")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = default_target()
    kind = "cpu" if target == "cpu" else "cuda"
    out = args.out or RESULTS / f"scattered-{target}.json"
    rows = []
    for task in args.tasks.split(","):
        count, held_out, network, recipe = RECIPES[task, kind]
        recipe = recipe | ({"epochs": args.epochs} if args.epochs else {})
        with tempfile.TemporaryDirectory() as folder:
            count = args.pictures or count
            rows.append(learned(Path(folder), task, count, min(count, held_out), network, recipe))
        print(rows[-1], flush=True)
        write(out, document(target, rows))
    print(markdown(*scattered(rows)))


def learned(
    root: Path, task: str, count: int, held_out: int, network: str, recipe: dict[str, Any]
) -> dict[str, Any]:
    """Minutes until the last validation, and what the best checkpoint scored."""
    train, val = write_scattered(root / "pictures", count=count, val=held_out, size=SIZE)
    settings = ImportSettings(task=task, size=SIZE, val_folder=val)
    dataset = import_images(train, root / "data", settings, emit=silent)
    begun = time.monotonic()
    run = api.train(
        network, dataset, out=root / "run", val_interval=max(1, recipe["epochs"] // 8),
        emit=silent, **recipe,
    )  # fmt: skip
    minutes = (time.monotonic() - begun) / 60
    metrics = api.open_checkpoint(run).info.metrics
    scores = {name: round(metrics[f"val/{name}"], 4) for name in SCORES[task]}
    return {
        "task": task, "network": network, "pictures": count, "epochs": recipe["epochs"],
        "minutes": round(minutes, 2), **scores,
    }  # fmt: skip


if __name__ == "__main__":
    main()
