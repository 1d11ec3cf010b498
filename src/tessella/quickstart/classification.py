"""The quick start of a classification: real digits, from a folder to a served network.

Everything here goes through the public API and the public HTTP protocol; nothing is special to it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from tessella import api
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Split
from tessella.core.device import default_target
from tessella.core.events import Emit, phase, progress
from tessella.core.preprocess import encode
from tessella.data.importing import ImportSettings, import_images
from tessella.nn import zoo
from tessella.quickstart.workspace import measure_latency, prepare, save
from tessella.server import Server

RECIPE: dict[str, Any] = {
    "epochs": 20, "batch_size": 32, "val_interval": 2, "snapshot_interval": 5,
    "solver": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05},
    "policy": {"name": "cosine", "warmup": 0.05},
    "augment": {"rotation": 15.0, "scale": 0.1},
    "label_smoothing": 0.0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the quick start measured; ``report.json`` in the workspace.

    Attributes:
        val_accuracy: of the checkpoint, in torch. http_accuracy: of the plan, over HTTP.
        top1_agreement: fraction of validation images with the same answer from both.
        max_abs_diff: largest difference between two probabilities.
        eager_ms, plan_ms: median latency of one image, in interleaved rounds.
        seconds: the whole quick start.
    """

    val_accuracy: float
    http_accuracy: float
    top1_agreement: float
    max_abs_diff: float
    eager_ms: float
    plan_ms: float
    plan_bytes: int
    seconds: float
    train_seconds: float
    compile_seconds: float
    images: int
    target: str


def quickstart(workspace: Path, *, emit: Emit) -> Report:
    """Run the whole way in ``workspace``; an earlier quick start there is replaced."""
    started = time.perf_counter()
    prepare(workspace)
    emit(phase("digits", "writing 1,797 real handwritten digits as a folder of PNGs"))
    write_digits(workspace / "digits")

    emit(phase("import", f"importing {workspace / 'digits'} as a dataset"))
    # stored at 32 × 32, seen at 28 × 28: training takes a random part, so it learns shifts too
    settings = ImportSettings(size=32, crop=28, channels=1, holdout=0.2)
    dataset = import_images(
        workspace / "digits", workspace / "datasets" / "digits", settings, emit=emit
    )

    emit(phase("train", "training lenet"))
    train_started = time.perf_counter()
    run = api.train("lenet", dataset, out=workspace / "runs" / "digits", emit=emit, **RECIPE)
    train_seconds = time.perf_counter() - train_started
    best = run.best("val/accuracy")

    emit(phase("compile", f"compiling {best.path.name} for {default_target()}"))
    compile_started = time.perf_counter()
    plan_path = workspace / "plans" / "digits.plan"
    api.compile(best, batch=(1, 8, 32), emit=emit).save(plan_path)
    compile_seconds = time.perf_counter() - compile_started

    emit(phase("verify", "comparing plan and checkpoint on the validation split"))
    verification = api.verify(plan_path, against=best, data=dataset, emit=emit)
    save(workspace / "verification.json", verification)

    emit(phase("serve", "serving the plan and classifying the validation split over HTTP"))
    files = [workspace / "digits" / example.path for example in dataset.val]
    over_http = classify_over_http(plan_path, files, len(dataset.classes), emit)
    in_torch = _eager_probabilities(best, dataset.val)
    truth = dataset.val.labels

    emit(phase("measure", "measuring the latency of one image"))
    eager_ms, plan_ms = measure_latency(zoo.load(best), plan_path)
    report = Report(
        val_accuracy=float((in_torch.argmax(1) == truth).mean()),
        http_accuracy=float((over_http.argmax(1) == truth).mean()),
        top1_agreement=float((over_http.argmax(1) == in_torch.argmax(1)).mean()),
        max_abs_diff=float(np.abs(over_http - in_torch).max()),
        eager_ms=eager_ms,
        plan_ms=plan_ms,
        plan_bytes=plan_path.stat().st_size,
        seconds=time.perf_counter() - started,
        train_seconds=train_seconds,
        compile_seconds=compile_seconds,
        images=len(truth),
        target=default_target(),
    )
    save(workspace / "report.json", report)
    return report


def write_digits(folder: Path) -> None:
    """scikit-learn's 1,797 handwritten digits (8×8, 17 greys) as PNGs, one subfolder a class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{index:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.rint(image * (255 / 16)).astype(np.uint8)[:, :, None]
        path.write_bytes(encode(pixels))


def classify_over_http(plan: Path, files: list[Path], classes: int, emit: Emit) -> np.ndarray:
    """Softmax probabilities [len(files), classes] from a served plan, one request an image.

    Each request carries the original file; the server prepares it by the plan's own record.
    """
    scores = np.empty((len(files), classes), np.float32)
    with Server({"digits": plan}, port=0) as server, httpx.Client(base_url=server.url) as client:
        for index, file in enumerate(files):
            content = file.read_bytes()
            header = {
                "inputs": [
                    {
                        "name": "image",
                        "datatype": "BYTES",
                        "shape": [1],
                        "parameters": {"binary_data_size": len(content) + 4},
                    }
                ],
                "parameters": {"binary_data_output": False},
            }
            text = json.dumps(header).encode()
            answer = client.post(
                "/v2/models/digits/infer",
                content=text + len(content).to_bytes(4, "little") + content,
                headers={
                    "Content-Type": "application/octet-stream",
                    "Inference-Header-Content-Length": str(len(text)),
                },
            )
            answer.raise_for_status()
            scores[index] = answer.json()["outputs"][0]["data"]
            emit(progress("classify over HTTP", index + 1, len(files)))
    return _softmax(scores)


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(1, keepdims=True))
    shares: np.ndarray = powers / powers.sum(1, keepdims=True)
    return shares


def _eager_probabilities(checkpoint: Checkpoint, split: Split) -> np.ndarray:
    predict = api.eager_predictor(checkpoint)
    record = checkpoint.info.preprocess
    images = np.stack([record(example.content) for example in split])
    return _softmax(predict(torch.from_numpy(images)).numpy())
