"""ResNet-50's blocks, forward and backward: ``python -m benchmarks.blocks``, on a GPU.

The four stages of torchvision's network, each between the tensors that it has in the network, 256
pictures, channels last: a pass makes the gradients of a stage's weights and of its input. The
convolutions are part of it; the stem, the classifier, the loss and the optimizer are not. Ours is
what a training calls (`training.ways`). Beside it run torch call by call and torch.compile, all as
CUDA graphs of one process for each stage and precision, interleaved. The processes compile at once
and are timed one after another; what is not ready in time is left out and told.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchvision import models

from benchmarks.intake import Row
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.steps import PEERS, gathered, kernels_of, turn
from tessella.artifacts.run import Precision
from tessella.core.device import default_target
from tessella.kernels.norm import projection
from tessella.training.precision import MixedPrecision, arithmetic
from tessella.training.ways import called

STAGES = {"layer1": (64, 56), "layer2": (256, 56), "layer3": (512, 28), "layer4": (1024, 14)}
OUT = {"layer1": (256, 56), "layer2": (512, 28), "layer3": (1024, 14), "layer4": (2048, 7)}
TUNED = "torch.compile max-autotune"
OURS = ("fused", "compile")
WHO = (*PEERS, "fused")
DEVICE = torch.device("cuda")
CUDA: Any = torch.cuda  # whose events and streams have no types
WARM = 3


@dataclass(frozen=True)
class Recorded:
    """A pass as a graph, and the function that holds the tensors that it reads."""

    graph: torch.cuda.CUDAGraph
    work: Callable[[], None]

    def __call__(self) -> None:
        self.graph.replay()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--precisions", default="fp16,bf16")
    parser.add_argument(
        "--who",
        default=",".join(WHO),
        help=f"torch's and our ways; {TUNED!r} takes minutes; 'fused 64': 1×1 convolutions of at"
        " most 64 channels are taken together with the norm behind them, 'fused 0' none",
    )
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--patience", type=float, default=100, help="seconds to compile")
    parser.add_argument("--profile", default="", help="ways whose kernels are told")
    parser.add_argument("--out", type=Path, default=RESULTS / "blocks-sm_90.json")
    parser.add_argument("--alone", type=Path, help="a folder: be one of the processes")
    args = parser.parse_args()
    if args.alone is not None:
        for row in rows_of(args):
            print(json.dumps(row), flush=True)
        return
    rows = gathered(started, args)
    rows += sums(rows)
    write(args.out, document(default_target(), rows))
    head = ["what", "who", "ms", "share of the best peer"]
    print(markdown(head, [[row.get(name) for name in head] for row in rows]))


def started(args: argparse.Namespace, folder: Path) -> list[subprocess.Popen[str]]:
    """A process for each stage and precision."""
    asked = [(s, p) for p in args.precisions.split(",") for s in args.stages.split(",")]
    (folder / "count").write_text(str(len(asked)))
    named = ("who", "batch", "rounds", "patience", "profile")
    same = [text for name in named for text in (f"--{name}", str(getattr(args, name)))]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.blocks", "--stages", stage, "--precisions",
             precision, "--alone", str(folder), *same],
            stdout=subprocess.PIPE, text=True,
        )
        for stage, precision in asked
    ]  # fmt: skip


def sums(rows: list[Row]) -> list[Row]:
    """All stages together, for who ran them all: the sixteen blocks."""
    made: list[Row] = []
    for precision in dict.fromkeys(str(row["precision"]) for row in rows):
        of = [row for row in rows if row["precision"] == precision]
        found = {
            who: sum(float(row["ms"]) for row in of if row["who"] == who)
            for who in dict.fromkeys(row["who"] for row in of)
            if {row["stage"] for row in of if row["who"] == who} == set(STAGES)
        }
        made += told("all", precision, {who: ms / 1e3 for who, ms in found.items()}, {})
    return made


def told(
    stage: str, precision: str, found: dict[str, float], spread: dict[str, list[float]]
) -> list[Row]:
    """Rows of one stage, from seconds."""
    best = min((found[who] for who in found if who.startswith(PEERS)), default=None)
    made = []
    for who, seconds in found.items():
        row: Row = {"what": f"{stage} {precision}", "stage": stage, "precision": precision}
        row |= {"who": f"tessella, {who}" if who.startswith(OURS) else who}
        row |= {"ms": round(1e3 * seconds, 4)}
        if who in spread:
            row |= {f"{name} ms": round(1e3 * of(spread[who]), 4) for name, of in
                    (("fastest", min), ("slowest", max))}  # fmt: skip
        made.append(
            row | {"share of the best peer": None if best is None else round(best / seconds, 3)}
        )
    return made


def rows_of(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one stage in one precision."""
    stage, precision, until = args.stages, args.precisions, time.monotonic() + args.patience
    passes: dict[str, Recorded] = {}
    with arithmetic(precision):
        pool = torch.cuda.graph_pool_handle()  # all graphs' memory: one runs at a time
        for who in args.who.split(","):
            if time.monotonic() > until:
                print(f"{stage} {precision} {who}: no time was left to compile it", flush=True)
                continue
            began = time.perf_counter()
            torch._dynamo.reset()  # it would take the last one's graph for this one
            way, _, most = who.partition(" ") if who.startswith(OURS) else (who, "", "")
            deeps = [deep for deep in (64, 128, 256, 512) if most and deep <= int(most)]
            pairs = frozenset((deep, 4 * deep) for deep in deeps) if most else projection.TAKEN
            with patch.object(projection, "TAKEN", pairs):
                passes[who] = recorded(stage, args.batch, precision, way, pool)
            torch.cuda.empty_cache()
            seconds = time.perf_counter() - began
            print(f"{stage} {precision} {who}: ready in {seconds:.0f} s", flush=True)
        times: dict[str, list[float]] = {who: [] for who in passes}
        with turn(args.alone, max(0.0, until - time.monotonic())):
            for number in range(args.rounds + 1):
                for who, run in passes.items():
                    taken = seconds_of(run, 10)
                    times[who] += [taken] if number else []  # the first round warms
            for who in filter(None, args.profile.split(",")):
                if who in passes:
                    print(f"{stage} {precision} {who}\n{kernels_of(passes[who], 30)}", flush=True)
            passes.clear()
    found = {who: statistics.median(each) for who, each in times.items()}
    yield from told(stage, precision, found, times)


def seconds_of(run: Callable[[], None], count: int) -> float:
    """Seconds of a pass on the GPU, in the mean of so many."""
    start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def recorded(stage: str, batch: int, precision: Precision, who: str, pool: Any) -> Recorded:
    """A stage's pass as a CUDA graph."""
    torch.manual_seed(0)
    module = getattr(models.resnet50(), stage).to(DEVICE, memory_format=torch.channels_last)
    call = call_of(module, who)
    mixed = MixedPrecision(precision, DEVICE)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    x = tensor(batch, *STAGES[stage]).relu().to(dtype).requires_grad_()
    cotangent = tensor(batch, *OUT[stage]).mul(1e-3).to(dtype)
    leaves = [x, *module.parameters()]

    def work() -> None:
        for leaf in leaves:
            leaf.grad = None
        with mixed.autocast():
            made = call(x)
        torch.autograd.backward(made, cotangent)

    stream = CUDA.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return Recorded(graph, work)


def tensor(batch: int, channels: int, side: int) -> Tensor:
    made = torch.randn(batch, channels, side, side, device=DEVICE)
    return made.contiguous(memory_format=torch.channels_last)


def call_of(module: nn.Module, who: str) -> Callable[[Tensor], Tensor]:
    """What a pass calls for a module."""
    if who == "torch":
        return module
    if who == TUNED:
        made: Callable[[Tensor], Tensor] = torch.compile(
            module, mode="max-autotune-no-cudagraphs", dynamic=False
        )
        return made
    if who == "torch.compile":
        return torch.compile(module, dynamic=False)
    return called(module, "compile" if who == "compile" else "fused")


if __name__ == "__main__":
    main()
