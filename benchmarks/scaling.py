"""What the exchange of gradients costs a step: ``torchrun --nproc-per-node 2 -m
benchmarks.scaling``, on a machine with so many GPUs (or a CPU, with GPUs hidden and a small batch).

A ResNet-50 on one batch that stays on each GPU, in turns: each process for itself, and together
with buckets of gradients of each size (`training.exchange`); 0 is the usual one, and 1000 all of
them behind the backward pass. NCCL's share of the processors is bounded by NCCL_MAX_CTAS, which it
reads once: a call for each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.intake import importing, write_pictures
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.train import recipe
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Precision
from tessella.core.device import default_target
from tessella.training.parallel import World, joined
from tessella.training.precision import arithmetic
from tessella.training.prepare import describe_run
from tessella.training.trainer import Trainer

ALONE = "alone"
WARM = 12  # steps: what is compiled, and the graph
HEAD = ("who", "ms", "images_per_s", "efficiency", "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-mb", default="0,1000", help="sizes to compare")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch", type=int, default=256, help="of each process")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling-sm_90.json")
    args = parser.parse_args()
    with joined() as world, arithmetic(args.precision), tempfile.TemporaryDirectory() as folder:
        rows = measured(args, world, Path(folder))
        if world.rank == 0:
            made = document(default_target(), rows) | {"processes": world.size}
            write(args.out, made | {"NCCL_MAX_CTAS": os.environ.get("NCCL_MAX_CTAS")})
            print(markdown(HEAD, [[row[name] for name in HEAD] for row in rows]))


def measured(args: argparse.Namespace, world: World, root: Path) -> list[dict[str, object]]:
    """A row for each way to exchange; the slowest process decides a round's time."""
    write_pictures(root / "jpeg", 32)
    importing(root, "pixels")
    single = replace(world, rank=0, size=1)
    worlds = {ALONE: single}
    for size in map(int, args.bucket_mb.split(",")):
        worlds[f"{size} MB" if size else "usual"] = replace(
            world, bucket_bytes=(size << 20) or None
        )
    steps = {name: step_of(args, one, root) for name, one in worlds.items()}
    losses = {name: [step() for _ in range(WARM)][-1].tolist() for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step, args.steps, world))
    found = {name: statistics.median(each) for name, each in times.items()}
    steps.clear()  # graphs that hold exchanges end before the processes part
    return [
        {
            "what": f"{args.network} {args.precision} b{args.batch}",
            "who": name,
            "ms": round(1e3 * one, 3),
            "images_per_s": round(args.batch * (1 if name == ALONE else world.size) / one, 1),
            "efficiency": round(found[ALONE] / one, 4),
            "loss": losses[name],
        }
        for name, one in found.items()
    ]


def step_of(args: argparse.Namespace, world: World, root: Path) -> Callable[[], torch.Tensor]:
    """A step on noise, which is the same for all ways of a process; its answer is the loss."""
    precision: Precision = args.precision
    asked = recipe(root, "pixels", args.batch, precision, gpus=world.size)
    trainer = Trainer(
        describe_run(replace(asked, network=args.network)), Dataset(root / "pixels").train.info,
        world,
    )  # fmt: skip
    fed = trainer.blank(args.batch)
    made = torch.Generator(world.device).manual_seed(dist.get_rank())
    images = torch.empty_like(fed.images).normal_(generator=made)
    labels = torch.randint(2, fed.labels.shape, generator=made, device=world.device)
    return lambda: trainer.step(images, labels, done=0, rate=0.01, momentum=0.9)


def seconds(step: Callable[[], torch.Tensor], count: int, world: World) -> float:
    """Of a step, for the slowest process."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        last = step()
    last.tolist()  # waits for the GPU
    slowest = torch.tensor((time.perf_counter() - began) / count, device=world.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    main()
