"""How fast a training is fed and steps: ``python -m benchmarks.train``, on a machine with a GPU.

Four questions, each beside its peer in the same run:

- *import*: JPEG files of 500×375 to a dataset of 256×256, images a second (`benchmarks.intake` says
  more of it);
- *loading*: crops of 224×224 of that dataset as normalized float32 on the GPU, channels last,
  beside torch's DataLoader with as many processes, on the same pictures, and beside torchvision's
  nvJPEG, which decodes them and does nothing else;
- *step*: a ResNet-50 on one batch that stays on the GPU, beside plain loops of torch (channels
  last, autocast, fused optimizer) and torch.compile;
- *training*: ``tessella train`` on the dataset, as it says itself; with several GPUs each has a
  batch of the same size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import closing
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Literal

import torch
from torchvision import models
from torchvision.io import decode_jpeg, read_file

from benchmarks.intake import CLASSES, SEEN, Row, importing, write_pictures
from benchmarks.loading import endless, theirs
from benchmarks.report import RESULTS, document, markdown, write
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Precision, Recipe, Solver
from tessella.core.device import default_target
from tessella.core.events import Event
from tessella.core.preprocess import Store
from tessella.training.feed import Feed
from tessella.training.loop import train
from tessella.training.parallel import alone
from tessella.training.precision import MixedPrecision, arithmetic
from tessella.training.prepare import begin
from tessella.training.trainer import Trainer

ROUNDS = 5
# how a dataset stores its pictures, and who decodes them
WAYS: dict[str, tuple[Store, Literal["host", "gpu"]]] = {
    "pixels": ("pixels", "host"),
    "png": ("png", "host"),
    "jpeg": ("original", "host"),
    "jpeg on the gpu": ("original", "gpu"),
}
DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precisions", default="bf16,fp16")
    parser.add_argument("--seconds", type=float, default=8, help="of each training and loading")
    parser.add_argument("--ways", default=",".join(WAYS), help="of the pictures")
    parser.add_argument("--gpus", default="1", help="numbers of them that train together")
    parser.add_argument("--without", default="", help="parts: import,loading,step,training,compile")
    parser.add_argument("--out", type=Path, default=RESULTS / "train-sm_90.json")
    args = parser.parse_args()
    without = set(args.without.split(","))
    ways = args.ways.split(",")
    rows: list[Row] = []

    def told(row: Row) -> None:
        rows.append(row)
        print(row, flush=True)
        made = document(default_target(), rows) | {"cores": len(os.sched_getaffinity(0))}
        write(args.out, made)  # after each row: what was measured is kept if time ends

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        nbytes = write_pictures(root / "jpeg", args.pictures)
        print(f"{args.pictures} JPEG files of {nbytes / 1e3:.0f} kB")
        stores: dict[Store, None] = {"pixels": None, **{WAYS[way][0]: None for way in ways}}
        for store in stores:
            told(importing(root, store))
        if "loading" not in without:
            for row in loading(root, ways, args.batch, args.seconds):
                told(row)
        for precision in args.precisions.split(","):
            if "step" not in without:
                for row in stepping(root, args.batch, precision, compiled="compile" not in without):
                    told(row)
            if "training" not in without:
                for way, gpus in product(ways, map(int, args.gpus.split(","))):
                    told(training(root, way, args.batch, precision, args.seconds, gpus))
    head = ["what", "who", "images_per_s", "data_wait"]
    print(markdown(head, [[row.get(name) for name in head] for row in rows]))


# --- loading --------------------------------------------------------------------------------------


def loading(root: Path, ways: list[str], batch: int, seconds: float) -> Iterator[Row]:
    """Images a second on the GPU, from each kind of storage, and the peer's."""
    threads = len(os.sched_getaffinity(0))
    for way in ways:
        store, decoder = WAYS[way]
        dataset, decodes = Dataset(root / store), decoder == "gpu"
        feed = Feed(dataset.preprocess, DEVICE, torch.channels_last, decodes=decodes)
        made = endless(dataset, batch, threads, for_gpu=True, decodes=decodes)
        with closing(made), closing(feed.stream(made)) as stream:
            rate = images_per_s((fed.images for fed in stream), seconds)
        yield {"what": "loading", "who": f"tessella, {way}", "images_per_s": rate}
    files = sorted((root / "jpeg").rglob("*.jpg"))
    record = Dataset(root / "pixels").preprocess
    moved = theirs(files, record, batch, threads)
    rate = images_per_s(moved, seconds)
    yield {"what": "loading", "who": "DataLoader, JPEG to float32", "images_per_s": rate}
    rate = images_per_s(decoded_by_torchvision(files, batch, DEVICE), seconds)
    yield {"what": "loading", "who": "torchvision on the GPU, decoding alone", "images_per_s": rate}


def decoded_by_torchvision(
    files: list[Path], batch: int, device: torch.device
) -> Iterator[list[torch.Tensor]]:
    """Batches of some files, read before, without end: neither resized nor cut nor scaled."""
    contents = [read_file(str(file)) for file in files[: 4 * batch]]
    for first in cycle(range(0, len(contents), batch)):
        yield decode_jpeg(contents[first : first + batch], device=device)


def images_per_s(stream: Iterator[Sized], seconds: float) -> float:
    """After the first few batches, which wait for threads and processes to begin."""
    for _ in islice(stream, 12):
        pass
    torch.cuda.synchronize()
    began, count = time.perf_counter(), 0
    for images in stream:
        count += len(images)
        if time.perf_counter() - began > seconds:
            break
    torch.cuda.synchronize()
    return count / (time.perf_counter() - began)


# --- steps ----------------------------------------------------------------------------------------


def stepping(root: Path, batch: int, precision: Precision, *, compiled: bool) -> Iterator[Row]:
    """Images a second of steps on one batch: ours, and torch's as people write them."""
    names = ["tessella", "torch", *(["torch.compile"] if compiled else [])]
    with arithmetic(precision):
        ways = {"tessella": _our_step(root, batch, precision)}
        for name in names[1:]:
            ways[name] = _torch_step(batch, precision, compiled=name == "torch.compile")
        times: dict[str, list[float]] = {name: [] for name in names}
        for step in ways.values():
            _seconds(step, 12)
        for _ in range(ROUNDS):
            for name, step in ways.items():
                times[name].append(_seconds(step, 20))
    for name in names:
        rate = batch / statistics.median(times[name])
        yield {"what": f"step {precision}", "who": name, "images_per_s": rate}


def _seconds(step: Callable[[], object], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _our_step(root: Path, batch: int, precision: Precision) -> Callable[[], object]:
    dataset = Dataset(root / "pixels")
    run, _ = begin(
        recipe(root, "pixels", batch, precision), root / f"step-{precision}", resume=False
    )
    trainer = Trainer(run.info, dataset.train.info, alone())
    with closing(endless(dataset, batch, 8, for_gpu=True)) as made:
        fed = next(trainer.feed.stream(made))
    return lambda: trainer.step(fed.images, fed.labels, done=0, rate=0.01, momentum=0.9)


def _torch_step(batch: int, precision: Precision, *, compiled: bool) -> Callable[[], object]:
    module = models.resnet50(num_classes=CLASSES).to(DEVICE, memory_format=torch.channels_last)
    called = torch.compile(module) if compiled else module  # max-autotune: over 5 minutes
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9, fused=True)
    for parameter in module.parameters():  # torch leaves them uninitialized, see training.solver
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    mixed = MixedPrecision(precision, DEVICE)
    images = torch.randn(batch, 3, SEEN, SEEN, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with mixed.autocast():
            loss = torch.nn.functional.cross_entropy(called(images), labels)
        mixed.update(loss, optimizer)

    return step


# --- a training -----------------------------------------------------------------------------------


def recipe(
    root: Path, way: str, batch: int, precision: Precision, epochs: float = 1, gpus: int = 1
) -> Recipe:
    return Recipe(
        network="resnet50",
        dataset=str(root / WAYS[way][0]),
        decode=WAYS[way][1],
        epochs=epochs,
        batch_size=batch * gpus,
        gpus=gpus,
        precision=precision,
        solver=Solver(lr=0.01),
        val_interval=1e6,  # epochs: with so few pictures it would come every second
        snapshot_interval=1e6,
    )


def training(
    root: Path, way: str, batch: int, precision: Precision, seconds: float, gpus: int
) -> Row:
    """What a run says of its own speed, without its first two seconds."""
    told: list[dict[str, Any]] = []

    def listen(event: Event) -> None:
        if "images_per_s" in event.values:
            told.append(dict(event.values))

    epochs = max(1.0, seconds * 8000 * gpus / len(Dataset(root / WAYS[way][0]).train))
    out = root / f"run, {way}, {precision}, {gpus}"
    train(recipe(root, way, batch, precision, epochs, gpus), out, emit=listen)
    told = told[2:] or told
    return {
        "what": f"training {precision}",
        "who": f"tessella, {way}" + (f", {gpus} GPUs" if gpus > 1 else ""),
        "images_per_s": statistics.median(row["images_per_s"] for row in told),
        "data_wait": statistics.median(row["data_wait"] for row in told),
    }


if __name__ == "__main__":
    main()
