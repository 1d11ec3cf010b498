"""How long plans take to set up and to load on a CPU: ``python -m benchmarks.setup``.

Each is built from nothing in a new process, and loaded in others: seconds of the processor and of
the clock. With ``--other``, the sources of another tree build it too, in turns, and both plans are
timed in one process in interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tessella as ts
from benchmarks.networks import workload
from benchmarks.report import markdown
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tessella.search.timing import latency

IMAGENET = Preprocess(height=224, width=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
SECONDS = 3.0  # that the plans of one batch size are timed


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    if args.build:
        network, out = args.build
        print(json.dumps(build(network, out, args.batch)))
    elif args.load:
        print(json.dumps(load(args.load, args.every_size)))
    else:
        for network in args.networks.split(","):
            compare(network, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", default="densenet121,resnet50+uint8",
                        help="``+uint8`` for a plan that takes images as bytes")  # fmt: skip
    parser.add_argument("--batch", default="1,8,32", help="the smallest, the usual, the largest")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--other", type=Path, help="src of another tree, to compare with")
    parser.add_argument("--rounds", type=int, default=1, help="builds by each tree, in turns")
    parser.add_argument("--loads", type=int, default=5, help="loads of each plan, in turns")
    parser.add_argument("--keep", type=Path, help="folder for the plans")
    # what child processes are told
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--every-size", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def build(network: str, out: str, batch: str) -> dict[str, float]:
    """Build a plan from nothing, and write it."""
    name, _, kind = network.partition("+")
    work, sizes = workload(name, 1), [int(size) for size in batch.split(",")]
    span = DimRange(min=sizes[0], opt=sizes[len(sizes) // 2], max=sizes[-1])
    inputs = tuple(
        TensorSpec(name=spec.name, dtype=spec.dtype, shape=(span, *spec.shape[1:]))
        for spec in work.inputs
    )
    begun, begun_cpu = time.monotonic(), time.process_time()
    plan = ts.compile(
        work.module, batch=(span.min, span.opt, span.max), inputs=inputs, target="cpu",
        emit=lambda event: None, input="uint8" if kind == "uint8" else "float32",
        preprocess=IMAGENET if kind == "uint8" else None,
    )  # fmt: skip
    taken = {"s": time.monotonic() - begun, "cpu_s": time.process_time() - begun_cpu}
    plan.save(out)
    return taken


def load(path: str, every_size: bool) -> dict[str, float]:
    """Load a plan; torch is there already."""
    begun, begun_cpu = time.monotonic(), time.process_time()
    engine = ts.load(path)
    if every_size:
        for batch in engine.buckets:
            engine.bound(batch)
    return {"s": time.monotonic() - begun, "cpu_s": time.process_time() - begun_cpu}


def compare(network: str, args: argparse.Namespace) -> None:
    """Build and load a network by all trees in turns, and print the medians."""
    here = Path(ts.__file__).parents[1]
    trees = {"here": here, **({"other": args.other.resolve()} if args.other else {})}
    taken: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        plans = {name: Path(args.keep or folder) / f"{network}.{name}.plan" for name in trees}
        for _ in range(args.rounds):
            for name, src in trees.items():
                asked = ["--build", network, str(plans[name]), "--batch", args.batch]
                taken.setdefault((name, "set-up"), []).append(_child(src, asked, args.threads))
        for what in ("load", "load every size"):
            for _ in range(args.loads):
                for name, src in trees.items():
                    asked = ["--load", str(plans[name])]
                    asked += ["--every-size"] if what == "load every size" else []
                    taken.setdefault((name, what), []).append(_child(src, asked, args.threads))
        body = [
            [network, what, name, *(_middle(told, unit) for unit in ("cpu_s", "s"))]
            for (name, what), told in taken.items()
        ]
        print(markdown(["network", "what", "tree", "processor s", "clock s"], body), flush=True)
        print(markdown(["network", "batch", *plans, "other / here"], _times(network, plans)))


def _child(src: Path, asked: list[str], threads: int) -> dict[str, float]:
    root = Path(__file__).parents[1]
    paths = os.pathsep.join(map(str, (src, root)))
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.setup"]
    ran = subprocess.run(
        [*command, "--threads", str(threads), *asked],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)},
        capture_output=True, text=True, check=True, cwd=root,
    )  # fmt: skip
    told: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return told


def _middle(told: list[dict[str, float]], unit: str) -> str:
    values = sorted(one[unit] for one in told)
    spread = f" ({values[0]:.2f} to {values[-1]:.2f})" if len(values) > 1 else ""
    return f"{statistics.median(values):.2f}{spread}"


def _times(network: str, plans: Mapping[str, Path]) -> list[list[object]]:
    """Milliseconds of a call at each batch size, by interleaved rounds in this process."""
    engines = {name: ts.load(path) for name, path in plans.items()}
    rows: list[list[object]] = []
    for batch in next(iter(engines.values())).buckets:
        fed: dict[str, Any] = {
            spec.name: torch.randint(0, 256, spec.at(batch), dtype=torch.uint8)
            if spec.dtype == "uint8"
            else torch.randn(spec.at(batch))
            for spec in next(iter(engines.values())).inputs
        }
        runs = {name: partial(engine, **fed) for name, engine in engines.items()}
        found = latency(runs, device=torch.device("cpu"), seconds=SECONDS)
        times = {name: timing.time_us / 1e3 for name, timing in found.items()}
        ratio = f"{times['other'] / times['here']:.3f}" if "other" in times else ""
        rows.append([network, batch, *(f"{t:.2f}" for t in times.values()), ratio])
    return rows


if __name__ == "__main__":
    main()
