"""Compiling many configurations at once: processes that fill Triton's cache on the disk.

Triton's compiler is Python for half of its time, so threads wait for each other: eight of them are
hardly faster than two. So one clean process without a GPU has a worker for each core, and is told
line by line what to compile. Tensors are on the ``meta`` device: no memory, no GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from typing import Any

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


def compile_ahead(bids: Collection[Bid], target: str) -> threading.Event:
    """Have what these bids launch in Triton's cache; what does not compile fails when it is run.

    Kernels that users registered are left out: their modules are known to this process only.

    Returns:
        An event that is set when all is done.
    """
    requests = [
        canonical_json({"problem": problem, "kernel": row.id, "config": config, "target": target})
        for problem, row, config in bids
        if row.id in catalog.BY_ID and row.source == "tessella"
    ]
    with _lock:
        fresh = [one for one in dict.fromkeys(requests) if one not in _asked]
        if len(fresh) < FEW:
            done = threading.Event()
            done.set()
            return done
        _asked.update(fresh)
        if not _running or _running[-1].has_ended:
            _running.append(_Compilers())
        return _running[-1].ask(fresh)


_asked: set[str] = set()  # by this process
_lock = threading.Lock()


class _Compilers:
    """The compiling process, which ends when its input does, and a thread that listens to it."""

    def __init__(self) -> None:
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-c", f"from {__name__} import main; main()"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet},
        )
        self._lock = threading.Lock()  # of what follows
        self._left: dict[int, int] = {}  # of each batch
        self._done: dict[int, threading.Event] = {}
        self.has_ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, requests: Sequence[str]) -> threading.Event:
        """Compile these; the event is set when the last is done, or when the process dies."""
        done = threading.Event()
        with self._lock:
            if self.has_ended:
                done.set()
                return done
            batch = len(self._done)
            self._left[batch], self._done[batch] = len(requests), done
        with contextlib.suppress(BrokenPipeError):  # then its end is heard
            self._process.stdin.writelines(f"{batch} {request}\n" for request in requests)
            self._process.stdin.flush()
        return done

    def _listen(self) -> None:
        for answer in self._process.stdout:
            with self._lock:
                batch = int(answer)
                self._left[batch] -= 1
                if self._left[batch] == 0:
                    self._done[batch].set()
        with self._lock:
            self.has_ended = True
            for done in self._done.values():
                done.set()


_running: list[_Compilers] = []


def main() -> None:
    """The compiling process: requests from stdin, each answered by its batch when it is done."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a worker prints is no answer
    workers = _Workers()

    def answer(batch: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
            print(batch, file=answers, flush=True)

    for line in sys.stdin:
        batch, request = line.split(" ", 1)
        workers.compile(json.loads(request), partial(answer, batch))
    workers.end()


class _Workers:
    """A process a core. Where a compiler crashes, all go with it, and others take their place."""

    def __init__(self) -> None:
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["triton.compiler", __name__])  # imported once
        self._lock = threading.Lock()
        self._pool = self._started(_cores())
        self._again = ThreadPoolExecutor(_cores())

    def _started(self, workers: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(workers, mp_context=self._context)

    def compile(self, request: dict[str, Any], then: Callable[[], None]) -> None:
        """Compile, and call ``then``, whatever came of it."""
        with self._lock:
            try:
                future = self._pool.submit(compile_one, request)
            except BrokenProcessPool:
                self._pool = self._started(_cores())
                future = self._pool.submit(compile_one, request)

        def ended(future: Future[None]) -> None:
            if not future.cancelled() and isinstance(future.exception(), BrokenProcessPool):
                self._again.submit(self._alone, request, then)
            else:
                then()

        future.add_done_callback(ended)

    def _alone(self, request: dict[str, Any], then: Callable[[], None]) -> None:
        """After a crash, by whomever: if it was this one, nobody else is hurt again."""
        with self._started(1) as pool:
            pool.submit(compile_one, request).exception()
        then()

    def end(self) -> None:
        """What has not begun is not wanted any more."""
        with self._lock:
            self._pool.shutdown(cancel_futures=True)
        self._again.shutdown(cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def compile_one(request: dict[str, Any]) -> None:
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
