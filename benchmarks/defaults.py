"""How well the default recipe learns beside plain ones: ``python -m benchmarks.defaults``.

Sets of pictures drawn by rule (``pictures``), a network of each family, plain loops of PyTorch on
the same batches, and ``ts.train`` with nothing set but epochs, batch size and seed. A plain recipe
is written SOLVER-RATE-SCHEDULE, with ``-turn`` or ``-colour`` where the images are augmented and
``-smooth`` where the labels are smoothed by 0.1:
``adamw-2e-3-onecycle``, ``sgd-0.1-cosine``, ``adamw-1e-3-warm0.1-turn``. ``tessella`` is ours,
``tessella-5e-4`` ours with another rate, ``tessella-5e-4-hard`` without smoothed labels,
``tessella-central`` with ``Solver.centralize``. With
``--init textures`` each network has first learned that set by our defaults, and all recipes begin
with its weights; ``--init textures-4800`` draws so many pictures of it for that.
Accuracies are of the last step, on images held out; what is already in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.pictures import SETS
from benchmarks.report import RESULTS, document, markdown, write
from tessella.api.training import train
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Run, Solver
from tessella.core.device import default_target
from tessella.core.errors import TrainError, UsageError
from tessella.core.memory import is_out_of_memory
from tessella.core.policies import Policy
from tessella.data.importing import import_images
from tessella.data.loading import Batch, batches, steps_per_epoch
from tessella.nn import zoo
from tessella.training.feed import Fed
from tessella.training.precision import arithmetic
from tessella.training.solver import optimizer_for

OURS = "tessella"
PLAIN = (
    "sgd-0.01-cosine", "sgd-0.1-cosine", "adamw-5e-4-onecycle", "adamw-1e-3-onecycle",
    "adamw-2e-3-onecycle", "adamw-1e-3-cosine", "adamw-2e-3-cosine",
)  # fmt: skip
EPOCHS = {"resnet18": 8, "timm/convnext_atto": 16, "timm/vit_tiny_patch16_224": 12}
AUGMENTS = {
    "": Augment(),
    "turn": Augment(rotation=10.0, scale=0.1),
    "colour": Augment(rotation=10.0, scale=0.1, color=0.2),
    "flip": Augment(flip=True),
    "smooth": Augment(),
}
RATE = r"(\d[\d.]*(?:e-\d+)?)"
RECIPE = re.compile(rf"(\w+)-{RATE}-(\w[\w.]*)(?:-(\w+))?")
OWN = re.compile(rf"{OURS}(?:-{RATE})?(-hard)?(-central)?")
ADAMW_DECAY, SGD_DECAY, MOMENTUM = 0.05, 1e-4, 0.9
SAVE_S = 15.0
KEPT = 6  # sets by seeds: drawn once in each process
HEAD = ("set", "network", "recipe", "accuracy", "by seed", "train loss", "s")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training: ``epochs`` passes over ``images`` pictures of a set.

    Attributes:
        init: the set that the network has learned before, with the number of its pictures behind
            a dash where that is not the usual one; "" if none.
    """

    pictures: str
    images: int
    network: str
    recipe: str
    batch_size: int
    epochs: float
    seed: int
    init: str = ""

    @property
    def words(self) -> tuple[Any, float, str, str]:
        """Solver, rate, schedule and augmentation of a plain recipe."""
        found = RECIPE.fullmatch(self.recipe)
        if found is None:
            raise UsageError("a recipe is SOLVER-RATE-SCHEDULE[-AUGMENT]", seen=self.recipe)
        return found[1], float(found[2]), found[3], found[4] or ""


def dataset(folder: Path, name: str, images: int) -> Dataset:
    """The imported set of ``images`` pictures, which is made at the first call."""
    made = folder / f"{name}-{images}"
    if not (made / "dataset").exists():
        SETS[name].write(made / "pictures", images)
        import_images(made / "pictures", made / "dataset", SETS[name].settings)
    return Dataset(made / "dataset")


def options(network: str, size: int) -> dict[str, Any] | None:
    """Options of a network: a transformer gets smaller patches, for 7×7 or 8×8 of them."""
    return {"patch_size": size // 8 if size % 7 else size // 7} if "vit_" in network else None


class Batches:
    """Batches on the device; those of the ``KEPT`` latest datasets and seeds are kept."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[object, tuple[list[Fed], Iterator[Fed]]] = {}

    def get(self, data: Dataset, cell: Cell, count: int) -> list[Fed]:
        """The first ``count`` batches that ``ts.train`` would take, with the cell's changes."""
        key = (data.path, cell.batch_size, cell.seed, AUGMENTS[cell.words[3]])
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = ([], self._endless(data, cell))
        made, more = self._kept[key]
        while len(made) < count:
            made.append(next(more))
        return made[:count]

    def _endless(self, data: Dataset, cell: Cell) -> Iterator[Fed]:
        epoch = 0
        while True:
            for batch in batches(
                data.train, data.preprocess, batch_size=cell.batch_size, seed=cell.seed,
                epoch=epoch, augment=AUGMENTS[cell.words[3]], training=True,
            ):  # fmt: skip
                yield self.move(batch)
            epoch += 1

    def move(self, batch: Batch) -> Fed:
        images, labels = batch.images.to(self._device), batch.labels.to(self._device)
        return Fed(images=images, labels=labels)


def learned_set(folder: Path, cell: Cell) -> Dataset:
    """The set that a cell's network learns before."""
    name, _, count = cell.init.partition("-")
    return dataset(folder, name, int(count or SETS[name].count))


def learned(folder: Path, cell: Cell) -> Path:
    """Where the run lies with whose weights a cell begins."""
    return folder / f"learned-{cell.init}-{cell.network.replace('/', '-')}"


def learn(cell: Cell, folder: Path, threads: int) -> None:
    """The training before the cell's, by our defaults, on all pictures of its set."""
    torch.set_num_threads(threads)
    data = learned_set(folder, cell)
    train(
        cell.network,
        data,
        out=learned(folder, cell),
        epochs=EPOCHS.get(cell.network, 8),
        batch_size=cell.batch_size,
        network_options=options(cell.network, data.preprocess.input_shape[1]),
    )


def plain(
    cell: Cell, data: Dataset, source: Batches, device: torch.device, folder: Path
) -> dict[str, Any]:
    """The cell in a plain loop: accuracy on the held-out images and the last epoch's mean loss."""
    module = _module(cell, data)
    if cell.init:
        mine, known = module.state_dict(), Run(learned(folder, cell)).latest().weights()
        fits = {k: v for k, v in known.items() if k in mine and v.shape == mine[k].shape}
        module.load_state_dict(fits, strict=False)
    module = module.to(device)
    count = steps_per_epoch(len(data.train), cell.batch_size)
    total = round(cell.epochs * count)
    made = source.get(data, cell, total)
    optimizer, schedule = _optimizer(cell, module, total)
    smoothing = 0.1 if cell.words[3] == "smooth" else 0.0
    since, losses = time.perf_counter(), []
    for fed in made:
        loss = F.cross_entropy(module(fed.images), fed.labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-count:]).mean().item()
    seconds = time.perf_counter() - since
    module.eval()
    with torch.inference_mode():
        right: list[Tensor] = []
        for batch in batches(
            data.val, data.preprocess, batch_size=256, augment=None, training=False
        ):
            fed = source.move(batch)
            right.append((module(fed.images).argmax(1) == fed.labels).float())
    return {"accuracy": torch.cat(right).mean().item(), "train_loss": last, "seconds": seconds}


def _module(cell: Cell, data: Dataset) -> nn.Module:
    channels, height, width = data.preprocess.input_shape
    torch.manual_seed(cell.seed)
    return zoo.build(
        zoo.network(
            cell.network,
            classes=len(data.classes),
            channels=channels,
            size=(height, width),
            options=options(cell.network, height),
        )
    )


def _optimizer(
    cell: Cell, module: nn.Module, total: int
) -> tuple[optim.Optimizer, optim.lr_scheduler.LRScheduler]:
    """Optimizer and schedule as people write them: one parameter group, torch's own schedules."""
    name, rate, schedule, _ = cell.words
    optimizer: optim.Optimizer
    if name == "adamw":
        optimizer = optim.AdamW(module.parameters(), lr=rate, weight_decay=ADAMW_DECAY)
    elif name == "sgd":
        optimizer = optim.SGD(
            module.parameters(), lr=rate, momentum=MOMENTUM, weight_decay=SGD_DECAY
        )
    else:
        optimizer = optimizer_for(module, Solver(name=name, lr=rate, weight_decay=SGD_DECAY))
    if schedule == "onecycle":
        return optimizer, optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=total + 1)
    if schedule == "cosine":
        return optimizer, optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    policy = Policy(warmup=float(schedule.removeprefix("warm")))
    factor = optim.lr_scheduler.LambdaLR(optimizer, lambda done: policy.factor(done / total))
    return optimizer, factor


def ours(cell: Cell, data: Dataset, learned_before: Path) -> dict[str, Any]:
    """The cell trained by ``ts.train``, with its defaults for everything else."""
    found = OWN.fullmatch(cell.recipe)
    if found is None:
        raise UsageError("a recipe of ours is tessella[-RATE][-hard][-central]", seen=cell.recipe)
    given: dict[str, Any] = {"label_smoothing": 0.0} if found[2] else {}
    solver: dict[str, Any] = {"lr": float(found[1])} if found[1] else {}
    since = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = train(
            cell.network,
            data,
            out=Path(folder) / "run",
            epochs=cell.epochs,
            batch_size=cell.batch_size,
            seed=cell.seed,
            solver=solver | ({"centralize": True} if found[3] else {}),
            init=str(Run(learned_before).latest().path) if cell.init else "random",
            network_options=options(cell.network, data.preprocess.input_shape[1]),
            val_interval=cell.epochs,
            snapshot_interval=cell.epochs,
            **given,
        )
        last = run.metrics()[-1].values
        losses = [m.values["loss"] for m in run.metrics()]
    count = steps_per_epoch(len(data.train), cell.batch_size)
    return {
        "accuracy": last["val/accuracy"],
        "train_loss": mean(losses[-count:]),
        "seconds": time.perf_counter() - since,
    }


# --- processes side by side -----------------------------------------------------------------------

_source: dict[str, Batches] = {}


def measured(cell: Cell, folder: Path, threads: int) -> dict[str, Any] | None:
    """One row, measured in a process of the pool; None where a GPU had no room beside others."""
    torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = _source.setdefault("here", Batches(device))
    data = dataset(folder, cell.pictures, cell.images)
    try:
        with arithmetic("fp32"):
            row = (
                ours(cell, data, learned(folder, cell))
                if cell.recipe.startswith(OURS)
                else plain(cell, data, source, device, folder)
            )
    except (TrainError, RuntimeError) as error:  # a loss that is no number is a result, too
        if is_out_of_memory(error):
            print(f"{cell}: {str(error).splitlines()[0]}: use fewer --processes", flush=True)
            return None
        row = {"accuracy": 0.0, "train_loss": None, "seconds": 0.0, "error": str(error)}
    return {**asdict(cell), **row}


def cells(arguments: argparse.Namespace) -> list[Cell]:
    """All selected trainings, seed by seed, so that a time limit only cuts off repetitions."""
    return [
        Cell(
            pictures=name,
            images=arguments.images or SETS[name].count,
            network=network,
            recipe=recipe,
            batch_size=arguments.batch_size,
            epochs=arguments.epochs or EPOCHS.get(network, 8),
            seed=seed,
            init=arguments.init if arguments.init != name else "",
        )
        for seed in range(arguments.seeds)
        for name in arguments.sets.split(",")
        for network in arguments.networks.split(",")
        for recipe in arguments.recipes.split(",")
    ]


def run(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """New rows, as trainings end; none begins after ``--seconds``."""
    names = list(Cell.__dataclass_fields__)
    known = {tuple({"init": "", **row}[n] for n in names) for row in rows}
    remaining = [c for c in cells(arguments) if tuple(asdict(c)[n] for n in names) not in known]
    for cell in remaining:  # drawn here, once
        dataset(arguments.cache, cell.pictures, cell.images)
    before = {learned(arguments.cache, cell): cell for cell in remaining if cell.init}
    before = {path: cell for path, cell in before.items() if not path.exists()}
    for cell in before.values():
        learned_set(arguments.cache, cell)
    end = time.monotonic() + arguments.seconds
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, spawn) as pool:
        list(
            pool.map(
                partial(learn, folder=arguments.cache, threads=arguments.threads), before.values()
            )
        )
        pending: set[Future[dict[str, Any] | None]] = set()
        while pending or remaining:
            while remaining and len(pending) < arguments.processes and time.monotonic() < end:
                cell = remaining.pop(0)
                pending.add(pool.submit(measured, cell, arguments.cache, arguments.threads))
            if time.monotonic() >= end and remaining:
                print(f"{len(remaining)} trainings left out: the time is over")
                remaining.clear()
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            yield from (row for future in done if (row := future.result()) is not None)


def table(rows: list[dict[str, Any]]) -> str:
    """A table of means over the seeds, the best recipe of each set and network first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        network = row["network"] + (f" after {row['init']}" if row.get("init") else "")
        key = (row["pictures"], row["images"], network, row["batch_size"], row["epochs"])
        groups.setdefault((*key, row["recipe"]), []).append(row)
    lines = []
    for (name, images, network, batch, epochs, recipe), found in groups.items():
        scores = [row["accuracy"] for row in found]
        setting = f"{network}, batch {batch}, {epochs:g} epochs"
        losses = [row["train_loss"] for row in found if row["train_loss"] is not None]
        each = " ".join(f"{100 * score:.1f}" for score in scores)
        loss = f"{mean(losses):.2f}" if losses else "-"
        seconds = f"{mean(row['seconds'] for row in found):.1f}"
        average = f"{100 * mean(scores):.1f}"
        lines.append((f"{name} {images}", setting, recipe, average, each, loss, seconds))
    lines.sort(key=lambda line: (line[0], line[1], -float(line[3])))
    return markdown(HEAD, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--networks", default=",".join(EPOCHS))
    parser.add_argument("--recipes", default=",".join((OURS, *PLAIN)))
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0 on")
    parser.add_argument("--epochs", type=float, default=0.0, help="0: as many as the table says")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--init", default="", help="a set that the networks learn before")
    parser.add_argument("--images", type=int, default=0, help="0: as many as the set has")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of a process")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after these")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "pictures")
    parser.add_argument("--out", type=Path, default=RESULTS / "defaults.json")
    arguments = parser.parse_args()
    rows = json.loads(arguments.out.read_text())["rows"] if arguments.out.exists() else []
    saved = time.monotonic()
    for row in run(arguments, rows):
        rows.append(row)
        print(f"{row['pictures']} {row['network']} {row['recipe']} seed {row['seed']}: "
              f"{100 * row['accuracy']:.1f} % in {row['seconds']:.1f} s", flush=True)  # fmt: skip
        if time.monotonic() > saved + SAVE_S:
            write(arguments.out, document(default_target(), rows))
            saved = time.monotonic()
    write(arguments.out, document(default_target(), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
