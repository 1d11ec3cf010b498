"""The quick start of a detection: digits scattered on textures, from COCO's JSON to served boxes.

Everything here goes through the public API and the public HTTP protocol, as in ``classification``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tessella import api
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_atomic
from tessella.core.device import default_target
from tessella.core.events import Emit, phase, progress
from tessella.core.record import to_plain
from tessella.data.importing import ImportSettings, import_images
from tessella.nn import zoo
from tessella.quickstart.scattered import write_scattered
from tessella.quickstart.workspace import measure_latency, prepare
from tessella.server import Server
from tessella.tasks import named, targets_of
from tessella.tasks.detection.examples import BoxSets, overlap
from tessella.tasks.finished import finished

SIZE = 96
PICTURES, HELD_OUT = 300, 60
NETWORK: dict[str, Any] = {"backbone": "test_resnet", "width": 32}  # 0.3 million parameters
# mosaics in half of the pictures: mAP@50 0.91 instead of 0.83 after these 40 epochs
AUGMENT = {"scale": 0.15, "rotation": 8.0, "mosaic": 0.5}
TRAINING: dict[str, Any] = {"batch_size": 16, "augment": AUGMENT}
EPOCHS = 40
HIT = 0.5  # the overlap from which a box is the digit's


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the quick start measured; ``report.json`` in the workspace.

    Attributes:
        map, map50: of the checkpoint on the pictures for validation; ``plan_map`` of the plan.
        agreement: fraction of these pictures in which plan and checkpoint tell the same boxes.
        max_abs_diff: largest difference between two boxes or scores of them.
        found: fraction of the digits that were told over HTTP, at their place and by their name;
            ``right``: of what was told, the fraction that is a digit.
        eager_ms, plan_ms: median latency from pixels to boxes, in interleaved rounds.
    """

    map: float
    map50: float
    plan_map: float
    agreement: float
    max_abs_diff: float
    found: float
    right: float
    eager_ms: float
    plan_ms: float
    plan_bytes: int
    seconds: float
    train_seconds: float
    compile_seconds: float
    images: int
    target: str


def quickstart(
    workspace: Path,
    *,
    emit: Emit,
    pictures: int = PICTURES,
    held_out: int = HELD_OUT,
    epochs: int = EPOCHS,
) -> Report:
    """Run the whole way in ``workspace``; an earlier quick start there is replaced."""
    started = time.perf_counter()
    prepare(workspace)
    emit(phase("digits", f"scattering real digits on {pictures + held_out} textures"))
    train, val = write_scattered(workspace / "digits", count=pictures, val=held_out, size=SIZE)

    emit(phase("import", f"importing {train} as a dataset"))
    settings = ImportSettings(task="detection", size=SIZE, val_folder=val)
    dataset = import_images(train, workspace / "datasets" / "digits", settings, emit=emit)

    emit(phase("train", "training centernet"))
    begun = time.perf_counter()
    run = api.train(
        "centernet", dataset, out=workspace / "runs" / "digits", epochs=epochs,
        val_interval=max(1, epochs // 8), network_options=NETWORK, emit=emit, **TRAINING,
    )  # fmt: skip
    train_seconds = time.perf_counter() - begun
    checkpoint = api.open_checkpoint(run)

    emit(phase("compile", f"compiling {checkpoint.path.name} for {default_target()}"))
    begun = time.perf_counter()
    plan = workspace / "plans" / "digits.plan"
    api.compile(run, batch=(1, 1, 8), emit=emit).save(plan)
    compile_seconds = time.perf_counter() - begun

    emit(phase("verify", "comparing the boxes of plan and checkpoint"))
    verification = api.verify(plan, against=run, data=dataset, emit=emit)

    emit(phase("serve", "serving the plan and detecting digits over HTTP"))
    told = detect_over_http(plan, workspace / "digits", dataset, workspace / "drawn.png", emit)
    found, right = hits(told, dataset)

    emit(phase("measure", "measuring the latency of one picture"))
    module = finished(zoo.load(checkpoint), named("detection").head, checkpoint.info.task.numbers)
    eager_ms, plan_ms = measure_latency(module, plan)
    report = Report(
        map=checkpoint.info.metrics["val/map"],
        map50=checkpoint.info.metrics["val/map50"],
        plan_map=verification.plan_score,
        agreement=verification.agreement,
        max_abs_diff=verification.max_abs_diff,
        found=found,
        right=right,
        eager_ms=eager_ms,
        plan_ms=plan_ms,
        plan_bytes=plan.stat().st_size,
        seconds=time.perf_counter() - started,
        train_seconds=train_seconds,
        compile_seconds=compile_seconds,
        images=len(dataset.val),
        target=default_target(),
    )
    write_atomic(workspace / "report.json", json.dumps(to_plain(report), indent=1).encode())
    return report


Answers = Sequence[Sequence[Mapping[str, Any]]]  # of each picture the things that were told


def detect_over_http(
    plan: Path, folder: Path, dataset: Dataset, drawn: Path, emit: Emit
) -> Answers:
    """What a server of the plan tells of each picture for validation; the first one is drawn."""
    files = [folder / example.path for example in dataset.val]
    address, told = "/v2/models/digits/detect", []
    with Server({"digits": plan}, port=0) as server, httpx.Client(base_url=server.url) as client:
        for index, file in enumerate(files):
            answer = client.post(address, content=file.read_bytes())
            answer.raise_for_status()
            told.append(answer.json()["predictions"][0])
            emit(progress("detect over HTTP", index + 1, len(files)))
        shown = client.post(f"{address}?draw=1", content=files[0].read_bytes())
        shown.raise_for_status()
    write_atomic(drawn, shown.content)
    return told


def hits(told: Answers, dataset: Dataset) -> tuple[float, float]:
    """The fraction of the things that was found, and the fraction of what was told that is one.

    Each thing counts once: for the surest box of its class that covers ``HIT`` of it.
    """
    targets = targets_of(dataset.val)
    assert isinstance(targets, BoxSets)
    found = things = boxes = 0
    for index, answer in enumerate(told):
        truth = targets.evaluated(index)
        left = np.ones(len(truth), bool)
        for one in answer:  # the surest first
            common = overlap(np.array([one["box"]]), truth[:, :4] * SIZE)[0]
            common *= left & (truth[:, 4] == one["index"])
            if len(common) and common.max() >= HIT:
                left[common.argmax()] = False
        found, things = found + int((~left).sum()), things + len(truth)
        boxes += len(answer)
    return found / max(1, things), found / max(1, boxes)
