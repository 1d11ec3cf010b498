"""Steps of networks other than ResNet-50: ``python -m benchmarks.steps``, on a machine with a GPU.

Each network steps on one batch that stays on the GPU: forward, loss, backward and a fused AdamW.
Beside ours, in every way of a step that a training may take, run plain loops of torch (channels
last, autocast) and torch.compile, all interleaved in one process for each network. The processes
compile at once and are timed one after another. Language models (`benchmarks.language`) have no
dataset: their steps are made of the same parts as a training's.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision import models

from benchmarks import eight_bits
from benchmarks.intake import CLASSES, SEEN, Row, importing, write_pictures
from benchmarks.language import BERT_LARGE, GPT2, LanguageModel
from benchmarks.loading import endless
from benchmarks.report import RESULTS, document, markdown, write
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Precision, Recipe, Solver
from tessella.core.device import default_target
from tessella.core.events import silent
from tessella.data.importing import ImportSettings, import_images
from tessella.nn import fp8
from tessella.quickstart.scattered import write_scattered
from tessella.training.captured import WARM, Captured
from tessella.training.feed import Fed
from tessella.training.parallel import alone
from tessella.training.precision import MixedPrecision, arithmetic
from tessella.training.prepare import begin
from tessella.training.solver import optimizer_for
from tessella.training.trainer import Trainer
from tessella.training.ways import Choice, Way, called

BATCHES = {
    "vit_b_16": 128, "convnext_tiny": 128, "efficientnet_b0": 128, "bert_large": 32, "gpt2": 32,
    "retinanet_r50": 32,
}  # fmt: skip
LANGUAGE = {"bert_large": BERT_LARGE, "gpt2": GPT2}
DETECTORS, SIDE = ("retinanet_r50",), 800  # pixels
PEERS = ("torch", "torch.compile")
OURS: tuple[Way, ...] = ("fused", "compile")
# behind a name: in 8 bits, beside others in 16. Of peers, with a factor a tensor or a row
EIGHT, ROWS = " fp8", " fp8 rows"
PEAK = 989e12  # products and sums of 16-bit numbers in a second, H100 and H200, dense
ROUNDS, STEPS = 5, 10
SOLVER = Solver(name="adamw", lr=1e-4, weight_decay=0.05)
DEVICE = torch.device("cuda")
NETWORK = """
from torch import nn
from torchvision import models

class Network(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.module = models.get_model("{network}", num_classes=classes)

    def forward(self, x):
        return self.module(x)
"""  # torchvision's, as a user's file
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default=",".join(BATCHES))
    parser.add_argument("--precisions", default="bf16")
    parser.add_argument(
        "--who",
        default=",".join((*PEERS, *OURS)),
        help="torch's and our ways; with fp8 or fp8 rows behind it, one in 8 bits",
    )
    parser.add_argument("--batch", type=int, help="instead of each network's own")
    parser.add_argument(
        "--patience", type=float, default=120, help="seconds for the other processes"
    )
    parser.add_argument("--profile", default="", help="ways whose kernels are told")
    parser.add_argument("--out", type=Path, default=RESULTS / "steps-sm_90.json")
    parser.add_argument("--alone", type=Path, help="a folder: be one of the processes")
    args = parser.parse_args()
    if args.alone is not None:
        for row in rows_of(args):
            print(json.dumps(row), flush=True)
        return
    rows = gathered(started, args)
    head = ["what", "who", "ms", "rate", "unit", "share of the best peer", "share of the peak"]
    print(markdown(head, [[row.get(name) for name in head] for row in rows]))


def gathered(
    start: Callable[[argparse.Namespace, Path], list[subprocess.Popen[str]]],
    args: argparse.Namespace,
) -> list[Row]:
    """The rows that processes print, told and written to ``args.out`` as they come.

    Args:
        start: begins them, in a folder where they wait for each other.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        lines: queue.Queue[str | None] = queue.Queue()
        processes = start(args, Path(folder))
        for process in processes:
            threading.Thread(
                target=forward_lines, args=(process, lines, Path(folder)), daemon=True
            ).start()
        for line in chain.from_iterable(iter(lines.get, None) for _ in processes):
            if not line.startswith('{"what"'):
                print(line, end="", flush=True)
                continue
            rows.append(json.loads(line))
            print(rows[-1], flush=True)
            write(args.out, document(default_target(), rows))
    return rows


def started(args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[str]]:
    """A process for each network and precision."""
    asked = [(n, p) for n in args.networks.split(",") for p in args.precisions.split(",")]
    more = ["--who", args.who, "--patience", str(args.patience), "--profile", args.profile]
    more += [] if args.batch is None else ["--batch", str(args.batch)]
    (folder / "count").write_text(str(len(asked)))
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.steps", "--networks", network, "--precisions",
             precision, "--alone", str(folder), *more],
            stdout=subprocess.PIPE, text=True,
        )
        for network, precision in asked
    ]  # fmt: skip


def forward_lines(
    process: subprocess.Popen[str], lines: queue.Queue[str | None], folder: Path
) -> None:
    """What a process prints, and None behind it; nobody waits for one that has failed."""
    for line in process.stdout or ():
        lines.put(line)
    process.wait()
    (folder / f"ready-{process.pid}").touch()
    lines.put(None)


@contextmanager
def turn(folder: Path, patience: float) -> Iterator[None]:
    """Wait until all processes are ready, or for so many seconds; then for one's own turn."""
    (folder / f"ready-{os.getpid()}").touch()
    count, until = int((folder / "count").read_text()), time.monotonic() + patience
    while len(list(folder.glob("ready-*"))) < count and time.monotonic() < until:
        time.sleep(0.1)
    with open(folder / "turn", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one network in one precision."""
    network, precision = args.networks, args.precisions
    batch, who = args.batch or BATCHES[network], args.who.split(",")
    make = (
        language_step if network in LANGUAGE
        else box_step if network in DETECTORS
        else picture_step
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, arithmetic(precision):
        steps: dict[str, Step] = {}
        for name in who:
            if name == "fused" and network in LANGUAGE:
                continue  # nothing in them is fused
            began = time.perf_counter()
            eight = name.endswith((EIGHT, ROWS))
            steps[name] = make(Path(folder), network, batch, "fp8" if eight else precision, name)
            _seconds(steps[name], 2)
            torch.cuda.empty_cache()  # others compile, too
            seconds = time.perf_counter() - began
            print(f"{network} {precision} {name}: ready in {seconds:.0f} s", flush=True)
        with turn(args.alone, args.patience):
            times: dict[str, list[float]] = {name: [] for name in steps}
            for step in steps.values():
                _seconds(step, WARM + 2)
            before = _times_without_memory()
            for _ in range(ROUNDS):
                for name, step in steps.items():
                    times[name].append(_seconds(step, STEPS))
            if (often := _times_without_memory() - before) > 0:
                print(f"{network}: memory was full {often} times, so times are too long")
            for name in filter(None, args.profile.split(",")):
                print(f"{network} {precision} {name}\n{kernels_of(steps[name])}", flush=True)
            for name, step in steps.items():
                if why := getattr(getattr(step, "graph", lambda: None)(), "refused", None):
                    print(f"{network} {precision} {name}: no graph, {why}", flush=True)
            found = {name: statistics.median(each) for name, each in times.items()}
            steps.clear()
            torch.cuda.empty_cache()
    best = min((found[name] for name in found if _way_of(name) in PEERS), default=None)
    for name, seconds in found.items():
        ratio = None if best is None else round(best / seconds, 3)
        row: Row = {"what": f"{network} {precision} b{batch}", "who": _title(name)}
        row |= {"ms": round(1e3 * seconds, 3), "rate": round(batch / seconds, 1)}
        row |= {"slowest ms": round(1e3 * max(times[name]), 3)}
        yield (
            row
            | {"unit": "rows/s", "share of the best peer": ratio}
            | _share(network, batch, seconds)
        )


def _title(name: str) -> str:
    return name if _way_of(name) in PEERS else f"tessella, {name}"


def _way_of(name: str) -> str:
    return name.removesuffix(ROWS).removesuffix(EIGHT)


def _share(network: str, batch: int, seconds: float) -> Row:
    if network not in LANGUAGE:
        return {}
    with torch.device("meta"):
        flops = LanguageModel(LANGUAGE[network]).flops_of_row()
    return {"share of the peak": round(batch * flops / seconds / PEAK, 4)}


def _seconds(step: Step, count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _times_without_memory() -> int:
    """How often torch had to give memory back to the GPU, waiting for it, to get other memory."""
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def kernels_of(step: Step, count: int = 16) -> str:
    """The kernels of a step that take longest: milliseconds, how often, and their names."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        found.setdefault(event.name, []).append(event.device_time_total / 1e3)
    order = sorted(found, key=lambda name: -sum(found[name]))
    lines = [f"{sum(map(sum, found.values())):8.2f} ms in {sum(map(len, found.values()))} kernels"]
    lines += [f"{sum(found[n]):8.3f} {len(found[n]):4d} {n[:150]}" for n in order[:count]]
    return "\n".join(lines)


# --- steps ----------------------------------------------------------------------------------------


def picture_step(root: Path, network: str, batch: int, precision: Precision, who: str) -> Step:
    """A step of a classifier on images of the usual size."""
    if _way_of(who) not in PEERS:
        return _trained(root, network, batch, precision, _way(who))
    module = models.get_model(network, num_classes=CLASSES)
    module = module.to(DEVICE, memory_format=torch.channels_last)
    images = torch.randn(batch, 3, SEEN, SEEN, device=DEVICE)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=DEVICE)
    call = _peer(module, who)

    def loss() -> Tensor:
        return F.cross_entropy(call(images), labels)

    return _torchs(module, precision, loss)


def _peer(module: nn.Module, who: str) -> nn.Module:
    """A call of a module as a peer makes it."""
    if who.endswith((EIGHT, ROWS)):
        eight_bits.convert(module, rows=who.endswith(ROWS))
    return cast(nn.Module, torch.compile(module)) if _way_of(who) == "torch.compile" else module


def _torchs(module: nn.Module, precision: Precision, loss: Callable[[], Tensor]) -> Step:
    """A loop as people write it."""
    mixed = MixedPrecision(precision, DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.05, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        with mixed.autocast():
            made = loss()
        mixed.update(made, optimizer)

    return step


def _trained(root: Path, network: str, batch: int, precision: Precision, way: Way) -> Step:
    """A training's step, on a batch of its dataset."""
    if not (root / "jpeg").exists():
        write_pictures(root / "jpeg", 2 * batch)
        importing(root, "pixels")
    source = root / "network.py"
    source.write_text(NETWORK.format(network=network))
    return _ours(root, Dataset(root / "pixels"), f"{source}:Network", batch, precision, way)


def _ours(
    root: Path, dataset: Dataset, network: str, batch: int, precision: Precision, way: Way
) -> Step:
    recipe = Recipe(
        network=network, dataset=str(dataset.path), batch_size=batch, precision=precision,
        solver=SOLVER,
    )  # fmt: skip
    run, _ = begin(recipe, root / f"run-{way}-{precision}", resume=False)
    chosen = Choice(way=way, why="it is measured")
    trainer = Trainer(run.info, dataset.train.info, alone(), way=chosen)
    fed = _fed(trainer, dataset, batch)

    def step() -> None:
        trainer.step(fed.images, fed.labels, done=0, rate=1e-4, momentum=0.9)

    step.graph = lambda: trainer._captured  # type: ignore[attr-defined]
    return step


def _fed(trainer: Trainer, dataset: Dataset, batch: int) -> Fed:
    with closing(endless(dataset, batch, 4, for_gpu=True)) as made:
        return next(trainer.feed.stream(made))


def box_step(root: Path, network: str, batch: int, precision: Precision, who: str) -> Step:
    """A step of a detector on pictures of digits; a peer's is torchvision's network, whose loss is
    taken picture by picture, and torch.compile has its backbone and its heads."""
    if not (root / "boxes").exists():
        drawn = write_scattered(
            root / "drawn", count=batch, val=2, size=SIDE, most=12, sides=(60, 300)
        )
        settings = ImportSettings(task="detection", size=SIDE, val_folder=drawn[1], store="pixels")
        import_images(drawn[0], root / "boxes", settings, emit=silent)
    dataset = Dataset(root / "boxes")
    if _way_of(who) not in PEERS:
        return _ours(root, dataset, network, batch, precision, _way(who))
    recipe = Recipe(network=network, dataset=str(dataset.path), batch_size=batch)
    run, _ = begin(recipe, root / f"run-{who}", resume=False)
    fed = _fed(Trainer(run.info, dataset.train.info, alone()), dataset, batch)
    module = models.detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=len(dataset.classes), min_size=SIDE,
        max_size=SIDE, image_mean=[0.0] * 3, image_std=[1.0] * 3, trainable_backbone_layers=5,
    ).to(DEVICE, memory_format=torch.channels_last)  # fmt: skip
    if who == "torch.compile":
        module.backbone, module.head = map(torch.compile, (module.backbone, module.head))
    things = [
        {"boxes": row[:, :4] * SIDE, "labels": row[:, 4].long()}
        for row in (boxes[boxes[:, 4] >= 0] for boxes in fed.labels)
    ]
    images = list(fed.images.float())
    return _torchs(module, precision, lambda: sum(module(images, things).values()))


def language_step(root: Path, network: str, batch: int, precision: Precision, who: str) -> Step:
    """A step of a language model."""
    torch.manual_seed(0)
    module = LanguageModel(LANGUAGE[network]).to(DEVICE)
    tokens, targets = module.batch(batch, DEVICE)
    if _way_of(who) in PEERS:
        call = _peer(module, who)
        return _torchs(module, precision, lambda: call(tokens, targets))
    mixed = MixedPrecision(precision, DEVICE)
    optimizer = optimizer_for(module, SOLVER)
    if precision == "fp8":
        fp8.to_fp8(module)
    ours = called(module, _way(who))

    def work(tokens: Tensor, targets: Tensor) -> Tensor:
        with mixed.autocast():
            loss = ours(tokens, targets)
        mixed.backward(loss)
        measured: Tensor = loss.detach()
        return measured

    captured = Captured(work, module.parameters())

    def step() -> None:
        captured(tokens, targets)
        mixed.step(optimizer)

    step.graph = lambda: captured  # type: ignore[attr-defined]
    return step


def _way(who: str) -> Way:
    return next(way for way in OURS if way == _way_of(who))


if __name__ == "__main__":
    main()
