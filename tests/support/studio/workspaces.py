"""A workspace made with the artifacts' own writers: what the studio shows without any engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from tessella.artifacts.checkpoint import Checkpoint, Network, Position, save_checkpoint
from tessella.artifacts.dataset import Dataset, DatasetInfo, SkippedFile, write_info
from tessella.artifacts.files import to_document
from tessella.artifacts.front import FrontInfo, FrontPoint, write_front
from tessella.artifacts.outline import Candidate, Manifest
from tessella.artifacts.plan import Plan
from tessella.artifacts.program import Bucket, Buffer, Program, Step
from tessella.artifacts.receipt import Flip, Receipt
from tessella.artifacts.run import Recipe, RunInfo, write_run
from tessella.artifacts.shards import Example, SplitWriter
from tessella.artifacts.sweep import (
    Scalar,
    Sweep,
    SweepInfo,
    Trial,
    axis_of,
    folder_of,
    note_all,
    open_sweep,
)
from tessella.core.device import fingerprint
from tessella.core.events import Event, EventLog, metric, phase, progress
from tessella.core.preprocess import Preprocess, encode
from tessella.core.record import digest
from tessella.core.spec import DimRange, TensorSpec
from tessella.tasks import column_of, named, of, targets_of
from tessella.tasks.task import Rows

HOSTILE = "<img src=x onerror=alert(1)>"
RECORD = Preprocess(height=28, width=28, channels=1, mean=(0.3,), std=(0.35,))
CLASSES = ("zero", "one", HOSTILE, "../three")


def digits(count: int = 400) -> list[tuple[np.ndarray, int]]:
    """Real handwritten digits, HWC uint8 28×28 (enlarged), of the first four classes."""
    found = load_digits(n_class=len(CLASSES))
    enlarged = np.repeat(np.repeat(found.images * 16.0, 4, axis=1), 4, axis=2)[:, 2:30, 2:30]
    pixels = np.clip(enlarged, 0, 255).astype(np.uint8)[:, :, :, None]
    return list(zip(pixels, (int(t) for t in found.target), strict=True))[:count]


def make_dataset(path: Path, *, hostile: bool = True) -> None:
    """A dataset of 4 classes with train and val, skipped files, a duplicate and a note."""
    path.mkdir(parents=True)
    classes = CLASSES if hostile else ("zero", "one", "two", "three")
    examples = [
        Example(content=encode(pixels), label=label, path=f"{classes[label]}/{i:04d}.png")
        for i, (pixels, label) in enumerate(digits())
    ]
    splits = {}
    for name, part in (("train", examples[:320]), ("val", examples[320:])):
        writer = SplitWriter(path, name, column_of(named("classification"), classes))
        for example in part:
            writer.add(example)
        splits[name] = writer.close()
    write_info(
        path,
        DatasetInfo(
            name=path.name,
            classes=classes,
            preprocess=RECORD,
            splits=splits,
            source=f"/data/{path.name}",
            content_hash="ab" * 32,
            created="2026-11-21T10:00:00",
            skipped=(SkippedFile(path=f"{HOSTILE}.png", reason="it is empty (0 bytes)"),),
            skipped_count=1,
            duplicates=(("zero/0001.png", "zero/0370.png"),),
            duplicate_count=1,
            notes=(f"{HOSTILE} has a tenth of the images of the largest class.",),
        ),
    )


def make_run(
    path: Path, *, dataset: str, epochs: int = 5, steps: int = 40, done: bool = True
) -> None:
    """A run with a loss curve and a checkpoint of random weights."""
    network = Network(name="lenet", classes=4, channels=1, height=28, width=28, options={})
    recipe = Recipe(network="lenet", dataset=dataset, epochs=float(epochs))
    info = RunInfo(
        recipe=recipe,
        network=network,
        preprocess=RECORD,
        labels=CLASSES,
        dataset_hash="ab" * 32,
        created="2026-11-21T10:05:00",
    )
    path.mkdir(parents=True)
    write_run(path, info)
    log = EventLog(path / "events.jsonl")
    log(phase("way", "steps: torch, call by call (nothing is fused: our kernels run on a GPU)"))
    log(phase("train", "training"))
    for step in range(epochs * steps):
        tell_step(log, step, steps, epochs * steps)
    if done:
        log(Event(kind="result", values={"run": str(path)}))
    log.close()
    weights = {"conv1.weight": torch.randn(6, 1, 5, 5)}
    for epoch in (epochs - 1, epochs):
        save_checkpoint(
            path / "checkpoints" / f"step-{epoch * steps:08d}",
            network=network,
            preprocess=RECORD,
            labels=CLASSES,
            weights=weights,
            metrics={"val/accuracy": accuracy_at(epoch), "val/loss": 1 / (epoch + 1)},
            position=Position(step=epoch * steps, epoch=float(epoch)),
            dataset_hash="ab" * 32,
        )


def accuracy_at(epoch: float) -> float:
    return 1 - 0.9 * math.exp(-1.1 * epoch)


def tell_step(log: EventLog, step: int, steps: int, total: int) -> None:
    """The events of one step, as the trainer writes them."""
    epoch = (step + 1) / steps
    loss = 2.3 * math.exp(-epoch) + 0.05 + 0.05 * math.sin(7 * step)
    log(metric(step, epoch, loss=loss, lr=0.005 * (1 + math.cos(math.pi * step / total))))
    log(progress("train", step + 1, total))
    if (step + 1) % steps == 0:
        values = {"val/loss": 2.2 * math.exp(-epoch) + 0.08, "val/accuracy": accuracy_at(epoch)}
        log(Event(kind="metric", step=step, epoch=epoch, values=values))


def make_plan(path: Path, *, built_from: str, receipt: Receipt | None = None) -> Plan:
    """A plan of two steps whose tuning names candidates with times and refusals.

    Args:
        receipt: what a budget's search found out; its layers then have precisions of their own.
    """
    image = TensorSpec(
        name="image", dtype="float32", shape=(DimRange(min=1, opt=8, max=8), 1, 28, 28)
    )
    scores = TensorSpec(name="scores", dtype="float32", shape=(DimRange(min=1, opt=8, max=8), 4))
    buckets = []
    tuning = []
    for batch in (1, 8):
        buffers = (
            Buffer(name="image", dtype="float32", shape=(batch, 1, 28, 28)),
            Buffer(name="conv1", dtype="float32", shape=(batch, 6, 24, 24), offset=0),
            Buffer(name="scores", dtype="float32", shape=(batch, 4)),
        )
        steps = (
            Step(kernel="conv2d.onednn", op="conv2d", inputs=("image", "w"), outputs=("conv1",),
                 attrs={}, layer="features.conv1"),
            Step(kernel="linear.onednn", op="linear", inputs=("conv1",), outputs=("scores",),
                 attrs={}, layer="classifier"),
        )  # fmt: skip
        buckets.append(
            Bucket(
                batch=batch,
                buffers=buffers,
                steps=steps,
                arena_bytes=1 << 17,
                held_bytes=1 << 17,
                peak_bytes=1 << 17,
            )
        )
        tuning += [
            Candidate(batch=batch, step="conv1", kernel="conv2d.onednn", chosen=True,
                      time_us=21.5 * batch, spread_us=0.4),
            Candidate(batch=batch, step="conv1", kernel="conv2d.im2col", chosen=False,
                      time_us=64.2 * batch, spread_us=1.1),
            Candidate(batch=batch, step="conv1", kernel="conv2d.winograd", chosen=False,
                      refused="needs a 3×3 filter, this one is 5×5"),
            Candidate(batch=batch, step="scores", kernel="linear.onednn", chosen=True,
                      time_us=6.25 * batch, spread_us=0.1),
        ]  # fmt: skip
    plan = Plan(
        manifest=Manifest(
            fingerprint=fingerprint("cpu"),
            inputs=(image,),
            outputs=(scores,),
            precision="fp32",
            preprocess=RECORD,
            preprocess_hash=RECORD.hash,
            labels=CLASSES,
            accuracy={"val/accuracy": 0.981},
            built_from=built_from,
            built_with={"torch": torch.__version__},
            rebuild=f"tessella compile {built_from} --out digits.plan --target cpu --batch 1,4,8",
            tolerance=1e-4,
            members={},
            precisions={"conv1": "int8"} if receipt else {},
            snr_db={"features.conv1": 41.25} if receipt else {},
            receipt=receipt,
        ),
        program=Program(inputs=("image",), outputs=("scores",), buckets=tuple(buckets)),
        weights={"w": torch.zeros(6, 1, 5, 5)},
        golden={},
        tuning=tuple(tuning),
    )
    plan.save(path)
    return plan


def make_receipt(flipped: int) -> Receipt:
    """Of 80 samples, the first ``flipped`` of the validation split got another answer."""
    flips = tuple(
        Flip(index=i, path=f"{CLASSES[label]}/{320 + i:04d}.png", label=CLASSES[label],
             before=CLASSES[label], after=HOSTILE, probability_before=0.61, probability=0.52)
        for i, (_, label) in enumerate(digits()[320 : 320 + flipped])
    )  # fmt: skip
    return Receipt(
        metric="top1",
        samples=80,
        before=0.975,
        after=0.975 - flipped / 80,
        loss=100 * flipped / 80,
        low=-1.0,
        high=100 * flipped / 80 + 4,
        p_value=0.5,
        budget=3.0,
        flipped=flipped,
        flips=flips,
    )


def make_front(folder: Path, *, built_from: str) -> None:
    """Three plans: the fastest loses too much, the next is chosen, float32 is exact."""
    plans, points = {}, []
    for name, flipped, time_us in (("0.plan", 4, 90.0), ("1.plan", 2, 120.0), ("2.plan", 0, 240.0)):
        receipt = make_receipt(flipped)
        plan = make_plan(folder.with_suffix(".plan"), built_from=built_from, receipt=receipt)
        plans[name] = plan
        layers = {"int8": flipped, "fp32": 4 - flipped}
        points.append(
            FrontPoint(plan=name, layers={k: n for k, n in layers.items() if n}, time_us=time_us,
                       nbytes=int(4000 * time_us), receipt=receipt)
        )  # fmt: skip
    info = FrontInfo(
        points=tuple(points),
        chosen=1,
        exact=points[-1],
        batch=8,
        budget=3.0,
        resolution=4.5,
        evaluations=17,
        refused={f"conv1 in {HOSTILE}": "the values leave its range"},
    )
    write_front(folder, info, plans)
    plans["1.plan"].save(folder.with_suffix(".plan"))


def make_workspace(root: Path) -> None:
    """A dataset, two runs, a sweep, a plan, one of a search with its front, and a damaged one."""
    make_dataset(root / "datasets" / "digits")
    make_run(root / "runs" / "first", dataset="datasets/digits")
    make_run(root / "runs" / "second", dataset="datasets/digits", epochs=2, done=False)
    sweep = make_sweep(root / "sweeps" / "rates", 30, total=40)
    make_run(folder_of(sweep.path, sweep.best.number), dataset="datasets/digits", epochs=4, steps=5)
    (root / "plans").mkdir()
    make_plan(root / "plans" / "digits.plan", built_from="runs/first")
    make_front(root / "plans" / "small.front", built_from="runs/first")
    (root / "plans" / "broken.plan").write_bytes(b"not a plan")


def make_sweep(folder: Path, trials: int, *, total: int | None = None, seed: int = 0) -> Sweep:
    """A search over four settings, one with hostile choices; the score prefers 1e-3 and the first.

    Of each ten trials five are complete, three ended early, one failed; the last two run.
    """
    axes = (
        axis_of("lr", "1e-4..1e-1 log"), axis_of("batch_size", "16, 32, 64"),
        axis_of("augment.rotation", "0..20"), axis_of("network", ["lenet", HOSTILE]),
    )  # fmt: skip
    folder.mkdir(parents=True)
    info = SweepInfo(
        settings=json.dumps({"network": "lenet", "dataset": "datasets/digits", "epochs": 4.0}),
        axes=axes, trials=total or trials, sampler="tpe", pruner="asha", seed=0,
        score="val/accuracy", dataset_hash="ab" * 32, created="2026-11-21T10:05:00",
    )  # fmt: skip
    (folder / "sweep.json").write_bytes(to_document("sweep", 1, info))
    random, made = np.random.default_rng(seed), []
    states = ("complete", "pruned", "complete", "complete", "pruned", "complete", "failed",
              "pruned", "complete", "pruned")  # fmt: skip
    for number in range(trials):
        rate = float(10 ** random.uniform(-4, -1))
        values: dict[str, Scalar] = {
            "solver.lr": rate, "batch_size": int(random.choice([16, 32, 64])),
            "augment.rotation": float(random.uniform(0, 20)),
            "network": "lenet" if random.random() < 0.5 else HOSTILE,
        }  # fmt: skip
        worse = 0.1 * abs(math.log10(rate) + 3) + 0.1 * (values["network"] == HOSTILE)
        score = round(0.97 - worse - 0.02 * random.random(), 5)
        state = "running" if number >= trials - 2 else states[number % 10]
        failed = state == "failed"
        made.append(Trial(
            number=number, state=state, values=values, score=None if failed else score,
            validations={"complete": 4, "failed": 0}.get(state, 1), seconds=12.5 * (1 + number % 3),
            error=f"out of memory {HOSTILE}" if failed else None,
        ))  # fmt: skip
    note_all(folder, made)
    shares = {"solver.lr": 0.7, "network": 0.25, "batch_size": 0.03, "augment.rotation": 0.02}
    (folder / "importance.json").write_text(json.dumps(shares))
    return open_sweep(folder)[1]


def write_evaluation(
    root: Path, checkpoint: Checkpoint, labels: Sequence[str], confusion: np.ndarray
) -> None:
    """The report of ``tessella run --data``, where the studio keeps that of a checkpoint."""
    ref = checkpoint.path.relative_to(root.resolve()).as_posix()
    key = digest([ref, checkpoint.info.files["model.safetensors"].sha256])[:24]
    figures = {"precision": 0.5, "recall": 0.5, "f1": 0.5}
    report = {
        "accuracy": 0.25,
        "labels": list(labels),
        "confusion": confusion.tolist(),
        "per_class": [
            {"label": label, "support": int(row.sum()), **figures}
            for label, row in zip(labels, confusion, strict=True)
        ],
    }
    write_report(root, "evaluations", key, report)


def write_box_answers(root: Path, checkpoint: Checkpoint, dataset: Dataset) -> Rows:
    """The report and the rows of a detector that finds all but the first thing of each picture,
    and takes the second for another class.

    Each picture's last box is told of nothing, in the corner, with score 0.4.
    """
    count = len(dataset.classes)
    rows_NPF = np.zeros((len(dataset.val), 100, 6), np.float32)
    targets = targets_of(dataset.val)
    for image, told in enumerate(rows_NPF):
        boxes = targets.evaluated(image)[1:, :5]
        boxes[:1, 4] = (boxes[:1, 4] + 1) % count
        for place, (*box, label) in enumerate(boxes.tolist()):
            told[place] = [*box, 0.9 - 0.02 * place, label]
        told[len(boxes)] = [0, 0, 0.05, 0.05, 0.4, 0]
    rows_NR = rows_NPF.reshape(len(rows_NPF), -1)
    ref = checkpoint.path.relative_to(root.resolve()).as_posix()
    key = digest([ref, checkpoint.info.files["model.safetensors"].sha256])[:24]
    report = of(dataset.info.task).metrics.measure(rows_NR, targets, dataset.classes)
    write_report(root, "evaluations", key, report.to_json())
    np.save(root / ".studio" / "evaluations" / f"{key}.npy", rows_NR)
    return rows_NR


def write_trace(root: Path, plan: str, batch: int, steps: Sequence[tuple[str, str, str]]) -> None:
    """The trace of ``tessella profile``: the layer, the kernel and the bound of each step."""
    stat = (root / plan).stat()
    events = [
        {"ph": "X", "tid": 1, "name": layer, "dur": 345.6,
         "args": {"kernel": kernel, "alone_us": 345.6, "limit_us": 120.0, "bytes": 1 << 20,
                  "flops": 1e9, "bound": bound, "share_of_peak": 0.512}}
        for layer, kernel, bound in steps
    ]  # fmt: skip
    document = {"otherData": {"batch": batch, "whole_program_us": 1234.5}, "traceEvents": events}
    key = digest([plan, stat.st_mtime_ns, stat.st_size, batch])[:24]
    write_report(root, "traces", key, document)


def write_report(root: Path, folder: str, key: str, plain: object) -> None:
    """A file among the studio's own."""
    path = root / ".studio" / folder / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain))
