"""What is left of a model that was loaded, asked and unloaded: ``python -m benchmarks.leaks``.

Each cycle loads a plan through a server's repository, has one batch of each of its sizes computed,
and unloads it. After the first cycles, when allocators and caches have what they keep, memory,
file descriptors, threads and mappings are read, and again at the end.

On a GPU (``--target``) a model runs as it does behind acceptors, executions beside each other, and
decodes a JPEG file in each cycle; what the GPU's memory holds is read, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch

from benchmarks import serve
from benchmarks.networks import workload
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.serving import BATCH, save_plan
from tessella.core.architectures import is_gpu
from tessella.runtime import Engine
from tessella.server import Repository
from tessella.server.jpegs import frames_of, gpu_decodes, host_decodes
from tessella.server.repository import Model
from tessella.server.statistics import Stages
from tessella.server.waiting import Arrays

NETWORK, MODEL = "lenet", "model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--first", type=int, default=50, help="cycles before the first reading")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or RESULTS / f"leaks-{args.target}.json"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "network.plan")
        if is_gpu(args.target):
            serve.save_plan(path, target=args.target, network=NETWORK, batch=8, untuned=True)
        else:
            save_plan(workload(NETWORK, BATCH.opt), path)
        before, after = measure(path, (args.first, args.cycles), on_gpu=is_gpu(args.target))
    rows = [
        {"what": what, "before": before[what], "after": after[what], "network": NETWORK}
        for what in before
    ]
    write(out, document(args.target, rows) | {"first": args.first, "cycles": args.cycles})
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    growth = after["rss_kb"] / before["rss_kb"] - 1
    print(f"{args.cycles} cycles: resident memory {growth:+.2%}; wrote {out}")


def measure(path: Path, cycles: Sequence[int], *, on_gpu: bool = False) -> list[dict[str, int]]:
    """What the process holds after so many cycles of a plan, for each of these numbers in turn."""
    return asyncio.run(_measure(path, cycles, on_gpu))


async def _measure(path: Path, cycles: Sequence[int], on_gpu: bool) -> list[dict[str, int]]:
    decoder_for = gpu_decodes if on_gpu else host_decodes
    repository = Repository({MODEL: path}, decoder_for=decoder_for, threads=not on_gpu)
    readings = []
    for count in cycles:
        for _ in range(count):
            await cycle(repository)
        gc.collect()
        readings.append(held() | (held_by_gpu() if on_gpu else {}))
        print(readings[-1], flush=True)
    return readings


async def cycle(repository: Repository) -> None:
    """Load the model, ask it, unload it."""
    await repository.load(MODEL)
    model = repository.get(MODEL)
    assert isinstance(model.engine, Engine)
    for batch in model.engine.buckets:
        arrays = {s.name: np.zeros(s.at(batch), s.dtype) for s in model.engine.inputs}
        with model:
            await _stepped(model, model.batcher.infer(arrays))
    if model.decodes:
        files = [cv2.imencode(".jpg", np.zeros(serve.SIDES, np.uint8))[1].tobytes()]
        frames = frames_of(files)
        assert frames is not None
        asked = model.infer_files(
            files, frames, timeout_us=None, priority=2, client=0, stages=Stages()
        )
        with model:
            await _stepped(model, asked)
    await repository.unload(MODEL)


async def _stepped(model: Model, asked: Coroutine[None, None, Arrays]) -> None:
    """Wait for outputs, and be who calls a batcher that has no thread."""
    task = asyncio.ensure_future(asked)
    while not task.done():
        await asyncio.sleep(0)
        if not model.batcher.has_thread:
            model.batcher.step()
    task.result()


def held_by_gpu() -> dict[str, int]:
    """Memory of the GPU in kB: what all have taken, and what torch keeps of that."""
    torch.cuda.synchronize()
    free, all_bytes = torch.cuda.mem_get_info()
    return {
        "gpu_kb": (all_bytes - free) >> 10,
        "gpu_reserved_kb": torch.cuda.memory_reserved() >> 10,
        "gpu_allocated_kb": torch.cuda.memory_allocated() >> 10,
    }


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
