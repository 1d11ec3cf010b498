"""What is left of a model that was loaded, asked and unloaded: ``python -m benchmarks.leaks``.

Each cycle loads a plan, has one batch of each of its sizes computed, and unloads it, or leaves it
to the next cycle to be replaced (``reload``). After the first cycles, when allocators and caches
have what they keep, memory, descriptors, threads and mappings are read, and after each quarter.

On a CPU they are those of a server's processes, which is asked over HTTP: of one process, and of
two acceptors and an engine's. On a GPU (``--target``) the cycles run in this process through a
server's repository, as they do behind acceptors: executions beside each other, and a JPEG file
decoded in each cycle; what the GPU's memory holds is read, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import httpx
import numpy as np
import psutil
import torch

from benchmarks import serve
from benchmarks.networks import workload
from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.serving import BATCH, save_plan
from tessella.core.architectures import is_gpu
from tessella.runtime import Engine, load
from tessella.server import Repository
from tessella.server.jpegs import frames_of, gpu_decodes, host_decodes
from tessella.server.repository import Model
from tessella.server.statistics import Stages
from tessella.server.waiting import Arrays

NETWORK, MODEL = "lenet", "model"
CHANGES = "unload", "reload"
QUARTERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--first", type=int, default=50, help="cycles before the first reading")
    parser.add_argument("--changes", default=",".join(CHANGES))
    parser.add_argument("--acceptors", default="0,2", help="of each server on a CPU")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or RESULTS / f"leaks-{args.target}.json"
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        cycles = (args.first, *[args.cycles // QUARTERS] * QUARTERS)
        for change, measured in _measured(Path(folder, "network.plan"), cycles, args):
            for name, readings in measured.items():
                for what, before in readings[0].items():
                    after = [reading[what] for reading in readings[1:]]
                    rows.append(
                        {
                            "process": name,
                            "change": change,
                            "what": what,
                            "before": before,
                            "after": after[-1],
                            "growth": round(after[-1] / max(1, before) - 1, 4),
                            "quarters": after,
                            "network": NETWORK,
                        }
                    )
            write(out, document(args.target, rows) | {"first": args.first, "cycles": args.cycles})
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"{args.cycles} cycles; wrote {out}")


def _measured(
    path: Path, cycles: Sequence[int], args: argparse.Namespace
) -> Iterator[tuple[str, dict[str, list[dict[str, int]]]]]:
    """Each change with the readings of each process."""
    changes = args.changes.split(",")
    if is_gpu(args.target):
        serve.save_plan(path, target=args.target, network=NETWORK, batch=8, untuned=True)
        for change in changes:
            yield change, {"engine": measure(path, cycles, change=change, on_gpu=True)}
        return
    save_plan(workload(NETWORK, BATCH.opt), path)
    for acceptors in (int(n) for n in args.acceptors.split(",")):
        for change in changes:
            yield change, measure_served(path, cycles, acceptors, change=change)


def measure_served(
    path: Path, cycles: Sequence[int], acceptors: int, *, change: str
) -> dict[str, list[dict[str, int]]]:
    """As ``measure``, of each process of a server of the plan that answers requests."""
    found: dict[str, list[dict[str, int]]] = {}
    with load(path) as engine:
        (spec,) = engine.inputs
        bodies = [np.zeros(spec.at(batch), spec.dtype).tobytes() for batch in engine.buckets]
    with (
        serve.serving(path, acceptors, "host", grpc=False) as (pid, url, _),
        httpx.Client(base_url=f"{url}/v2/", timeout=60) as client,
    ):
        for count in cycles:
            for _ in range(count):
                _served_cycle(client, bodies, change)
            for name, process in _processes(pid, acceptors).items():
                found.setdefault(name, []).append(held(process))
                print(name, change, found[name][-1], flush=True)
    return found


def _served_cycle(client: httpx.Client, bodies: Sequence[bytes], change: str) -> None:
    def post(way: str, content: bytes = b"", **headers: str) -> None:
        client.post(way, content=content, headers=headers).raise_for_status()

    post(f"repository/models/{serve.MODEL}/load")
    for body in bodies:
        post(f"models/{serve.MODEL}/infer", body, **{"Inference-Header-Content-Length": "0"})
    if change == "unload":
        post(f"repository/models/{serve.MODEL}/unload")


def _processes(pid: int, acceptors: int) -> dict[str, int]:
    """The processes of a server that answer requests, by name."""
    if not acceptors:
        return {"one process": pid}
    names = {"tessella-engine": "engine", "tessella-http": "acceptor"}
    family = psutil.Process(pid).children(recursive=True)
    numbered = sorted((child.pid, names[child.name()]) for child in family if child.name() in names)
    return {f"{name} {place}": number for place, (number, name) in enumerate(numbered)}


def measure(
    path: Path, cycles: Sequence[int], *, change: str = "unload", on_gpu: bool = False
) -> list[dict[str, int]]:
    """What this process holds after so many cycles of a plan, for each of these numbers in turn."""
    return asyncio.run(_measure(path, cycles, change, on_gpu))


async def _measure(
    path: Path, cycles: Sequence[int], change: str, on_gpu: bool
) -> list[dict[str, int]]:
    decoder_for = gpu_decodes if on_gpu else host_decodes
    repository = Repository({MODEL: path}, decoder_for=decoder_for, threads=not on_gpu)
    readings = []
    for count in cycles:
        for _ in range(count):
            await cycle(repository, change)
        gc.collect()
        readings.append(held(os.getpid()) | (held_by_gpu() if on_gpu else {}))
        print(change, readings[-1], flush=True)
    await repository.close()
    return readings


async def cycle(repository: Repository, change: str) -> None:
    """Load the model, which replaces one that is loaded, ask it, and unload it if that is asked."""
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
    if change == "unload":
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


def held(pid: int) -> dict[str, int]:
    """What a process has of the system: resident memory in kB, and numbers of others."""
    process = psutil.Process(pid)
    return {
        "rss_kb": process.memory_info().rss >> 10,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "mappings": len(process.memory_maps(grouped=False)),
    }


if __name__ == "__main__":
    main()
