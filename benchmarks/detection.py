"""A detector the whole way, beside its peers: ``python -m benchmarks.detection``.

The quick start's pictures and recipe (``quickstart.detection``): how long training takes and how
good it gets; then the latency of one picture from pixels to the boxes that are told, what is behind
the network included, of the plan, eager PyTorch, torch.compile and ONNX Runtime, interleaved in one
process. On a GPU eager PyTorch is replayed from a CUDA graph, and ONNX Runtime is left out.

Another network, as large as it is used, after a step or two that make a checkpoint of it::

    python -m benchmarks.detection --network d_fine_n --size 640 --pictures 4 --epochs 1 \\
        --precisions fp16 --batches 1,32
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import engine
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.tables import detectors
from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.plan import Plan
from tessella.core.device import default_target, torch_device
from tessella.core.events import silent
from tessella.data.importing import ImportSettings, import_images
from tessella.nn import zoo
from tessella.quickstart import annotated, detection
from tessella.quickstart.scattered import write_scattered
from tessella.search.timing import latency
from tessella.tasks import named

Row = dict[str, Any]
HEAD = named("detection").head
CENTERNET = "centernet"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", default=CENTERNET)
    parser.add_argument("--size", type=int, default=detection.SIZE, help="of a picture's sides")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--epochs", type=int, default=detection.EPOCHS)
    parser.add_argument("--pictures", type=int, default=detection.PICTURES)
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each latency")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    target = default_target()
    subject = "detection" if args.network == CENTERNET else args.network
    out = args.out or RESULTS / f"{subject}-{target}.json"
    batches = tuple(map(int, args.batches.split(",")))
    with tempfile.TemporaryDirectory() as folder:
        rows = [training(Path(folder), args.network, args.size, args.pictures, args.epochs)]
        write(out, document(target, rows))  # what was measured is kept
        for precision in args.precisions.split(","):
            rows += from_pixels_to_boxes(Path(folder), precision, batches, args.seconds)
            write(out, document(target, rows))
    print(markdown(*detectors(rows[1:])))
    print({name: value for name, value in rows[0].items() if name != "what"})


def training(root: Path, network: str, size: int, pictures: int, epochs: int) -> Row:
    """Minutes until the last validation, and what it measured."""
    held_out = min(annotated.HELD_OUT, pictures)
    train, val = write_scattered(root / "pictures", count=pictures, val=held_out, size=size)
    settings = ImportSettings(task="detection", size=size, val_folder=val)
    dataset = import_images(train, root / "data", settings)
    recipe: dict[str, Any] = dict(detection.RECIPE)
    if network != CENTERNET:
        recipe = {"batch_size": min(2, pictures), "solver": {"name": "adamw", "lr": 1e-4}}
    begun = time.monotonic()
    run = api.train(
        network, dataset, out=root / "run", epochs=epochs, val_interval=max(1, epochs // 8),
        emit=silent, **recipe,
    )  # fmt: skip
    metrics = api.open_checkpoint(run).info.metrics
    return {
        "what": "training",
        "network": network,
        "pictures": pictures,
        "size": size,
        "epochs": epochs,
        "minutes": round((time.monotonic() - begun) / 60, 2),
        "map50": round(metrics["val/map50"], 4),
        "map": round(metrics["val/map"], 4),
    }


def from_pixels_to_boxes(
    root: Path, precision: str, batches: tuple[int, ...], seconds: float
) -> list[Row]:
    """The plan of the trained network and each peer, on pictures of random numbers."""
    checkpoint = api.open_checkpoint(root / "run")
    usual = (1, 1, 4) if batches == (1,) else (batches[0], batches[0], batches[-1])
    plan = api.compile(root / "run", batch=usual, precision=precision)
    return [_at(root, checkpoint, plan, precision, batch, seconds) for batch in batches]


def _at(
    root: Path, checkpoint: Checkpoint, plan: Plan, precision: str, batch: int, seconds: float
) -> Row:
    """A row: one batch size."""
    device = torch_device(default_target())
    loaded = api.load(plan)
    image = torch.randn(batch, *checkpoint.info.preprocess.input_shape, device=device)
    module = FromPixels(zoo.load(checkpoint)).eval()
    inputs = (image,)
    runs: dict[str, Callable[[], object]] = {
        "plan": lambda: loaded(image),
        "eager": engine.PEERS["eager"](module, inputs, precision),
    }
    if device.type != "cpu" or shutil.which("g++") or shutil.which("clang++"):
        runs["torch_compile"] = engine.PEERS["torch_compile"](module, inputs, precision)
    if device.type == "cpu" and precision == "fp32" and importlib.util.find_spec("onnxruntime"):
        runs["onnxruntime"] = onnxruntime(checkpoint, root / "net.onnx", image.numpy())
    with torch.inference_mode():
        right = module.to(device)(image).cpu()
        found = loaded(image)[HEAD.OUTPUT].float().cpu()
        timings = latency(runs, device=device, seconds=seconds)
    times = {
        name: {"median_ms": t.time_us / 1e3, "spread_ms": (t.spread_us or 0.0) / 1e3}
        for name, t in timings.items()
    }
    best = min((name for name in runs if name != "plan"), key=lambda n: times[n]["median_ms"])
    steps = min((b.batch, len(b.steps)) for b in plan.program.buckets if b.batch >= batch)[1]
    return {
        "what": "latency",
        "precision": precision,
        "batch": batch,
        "times": times,
        "best_peer": best,
        "ratio": round(times[best]["median_ms"] / times["plan"]["median_ms"], 3),
        "steps": steps,
        "box_error": float((HEAD.aligned(found, right) - right).abs().max()),
    }


class FromPixels(torch.nn.Module):
    """The network and what follows it: as ``tasks.finished``, but peers can be copied."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return HEAD.finish(self.network(images), {})


def onnxruntime(checkpoint: Checkpoint, path: Path, image: np.ndarray) -> Callable[[], object]:
    """The ONNX file that ``tessella export`` writes, whose outputs are boxes too."""
    import onnxruntime as ort

    api.export(checkpoint, path)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # by default its threads spin after a run, and steal the cores from whatever runs next
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    fed = {session.get_inputs()[0].name: image}
    return lambda: session.run(None, fed)


if __name__ == "__main__":
    main()
