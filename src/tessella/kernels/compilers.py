"""Compiling many configurations at once: processes that fill Triton's cache on the disk.

Triton's compiler is Python for half of its time, so threads wait for each other: eight of them are
hardly faster than two. So one clean process (no GPU, no threads) forks a worker for each core, and
is told line by line what to compile. Tensors are on the ``meta`` device: no memory, no GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import IO, Any

import torch

from tessella.core.record import canonical_json, from_plain
from tessella.kernels import catalog
from tessella.kernels.catalog import Config, Kernel
from tessella.kernels.float32_math import float32_math
from tessella.kernels.launch import compiling
from tessella.kernels.problem import Problem

Bid = tuple[Problem, Kernel, Config]

FEW = 4  # with fewer to compile, starting the processes (3 s) takes longer than it saves
META = torch.device("meta")


def compile_ahead(bids: Collection[Bid], target: str) -> None:
    """Have what these bids launch in Triton's cache; what does not compile fails when it is run.

    Kernels that users registered are left out: their modules are known to this process only.
    """
    lines = [
        canonical_json({"problem": problem, "kernel": row.id, "config": config, "target": target})
        for problem, row, config in bids
        if row.id in catalog.BY_ID and row.source == "tessella"
    ]
    fresh = [line for line in dict.fromkeys(lines) if line not in _done]
    if len(fresh) < FEW:
        return
    with _lock:
        server = _server()
        answers = threading.Thread(target=_read, args=(server.stdout, len(fresh)))
        answers.start()  # while we write: else both ends could wait on full pipes
        server.stdin.writelines(line + "\n" for line in fresh)
        server.stdin.flush()
        answers.join()
    _done.update(fresh)


_done: set[str] = set()  # by this process
_lock = threading.Lock()
_started: list[subprocess.Popen[str]] = []


def _server() -> subprocess.Popen[str]:
    """The compiling process of this one; it ends when its input does."""
    if not _started or _started[-1].poll() is not None:
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        _started.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=hidden
            )
        )
    return _started[-1]


def _read(answers: IO[str], count: int) -> None:
    for _ in range(count):
        if not answers.readline():  # the process died: what is missing compiles where it is run
            return


def serve(requests: IO[str], answers: IO[str], *, workers: int) -> None:
    """Compile what each line asks for, and answer with a line when it is done, in any order."""

    def answer(done: Future[str]) -> None:
        answers.write(f"{done.exception() or done.result()}".replace("\n", " ") + "\n")
        answers.flush()

    with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
        for line in requests:
            pool.submit(compile_one, json.loads(line)).add_done_callback(answer)


def compile_one(request: dict[str, Any]) -> str:
    """One configuration, bound and called on tensors without memory."""
    problem = from_plain(Problem, request["problem"], where="a request to compile")
    row, config = catalog.kernel(request["kernel"]), request["config"]
    operands = {i: meta.empty(META) for i, meta in enumerate(problem.inputs) if meta is not None}
    buffers = {"out": problem.output.empty(META)} if row.load().WRITES_OUT else {}
    with compiling(request["target"]), torch.inference_mode(), float32_math(problem.math):
        constants = {i: operands.pop(i) for i in problem.constant}
        scratch = row.workspace_bytes(problem, config)
        if scratch:
            buffers["workspace"] = torch.empty(scratch, dtype=torch.uint8, device=META)
        call = row.load().bind(problem, constants, **config)
        call(*operands.values(), **buffers)
    return "compiled"


def main() -> None:
    """The compiling process."""
    # what a worker prints must not be taken for an answer
    to_parent, sys.stdout = sys.stdout, sys.stderr
    importlib.import_module("triton.compiler")  # once, before the workers are forked
    serve(sys.stdin, to_parent, workers=len(os.sched_getaffinity(0)))
