"""What is left of a model that was loaded, asked and unloaded: ``python -m benchmarks.leaks``.

Each cycle loads a plan through a server's repository, has one batch of each of its sizes computed,
and unloads it. After the first cycles, when allocators and caches have what they keep, memory,
file descriptors, threads and mappings are read, and again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.networks import workload
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.serving import BATCH, save_plan
from tessella.runtime import Engine
from tessella.server import Repository

NETWORK, MODEL = "lenet", "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--first", type=int, default=50, help="cycles before the first reading")
    parser.add_argument("--out", type=Path, default=RESULTS / "leaks-cpu.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.plan")
        save_plan(workload(NETWORK, BATCH.opt), path)
        before, after = measure(path, (args.first, args.cycles))
    rows = [
        {"what": what, "before": before[what], "after": after[what], "network": NETWORK}
        for what in before
    ]
    write(args.out, document("cpu", rows) | {"first": args.first, "cycles": args.cycles})
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    growth = after["rss_kb"] / before["rss_kb"] - 1
    print(f"{args.cycles} cycles: resident memory {growth:+.2%}; wrote {args.out}")


def measure(path: Path, cycles: Sequence[int]) -> list[dict[str, int]]:
    """What the process holds after so many cycles of a plan, for each of these numbers in turn."""
    return asyncio.run(_measure(path, cycles))


async def _measure(path: Path, cycles: Sequence[int]) -> list[dict[str, int]]:
    repository = Repository({MODEL: path})
    readings = []
    for count in cycles:
        for _ in range(count):
            await cycle(repository)
        gc.collect()
        readings.append(held())
    return readings


async def cycle(repository: Repository) -> None:
    """Load the model, ask it, unload it."""
    await repository.load(MODEL)
    model = repository.get(MODEL)
    assert isinstance(model.engine, Engine)
    for batch in model.engine.buckets:
        arrays = {s.name: np.zeros(s.at(batch), s.dtype) for s in model.engine.inputs}
        with model:
            await model.batcher.infer(arrays)
    await repository.unload(MODEL)


def held() -> dict[str, int]:
    """What this process has of the system: resident memory in kB, and numbers of others."""
    status = Path("/proc/self/status").read_text().splitlines()
    told = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        "rss_kb": int(told["VmRSS"].split()[0]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(told["Threads"]),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


if __name__ == "__main__":
    main()
