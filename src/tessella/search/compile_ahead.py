"""Compiling many configurations at once: processes that send their machine code back.

Triton's compiler is Python for half of its time, so threads wait for each other: eight of them are
hardly faster than two. So one clean process without a GPU forks a worker for each core, and is told
line by line what to compile. Tensors are on the ``meta`` device: no memory, no GPU. What comes back
lies in ``ahead_of_time.kernel_cache``, and in Triton's cache on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

import torch

from tessella.core.compiled import CompiledKernels
from tessella.core.record import canonical_json, from_plain
from tessella.device.ahead_of_time import collecting, kernel_cache
from tessella.device.float32_math import float32_math
from tessella.device.launch import compile_launch, compiling
from tessella.kernels import catalog
from tessella.kernels.catalog import Config, Kernel
from tessella.operations.problem import Problem

Request = tuple[Problem, Kernel, Config]  # a candidate of a problem, to compile
# called when one is done: its number, its target, what it launches, whether it crashed the compiler
Answer = Callable[[int, str, CompiledKernels | None, bool], None]

FEW = 4  # with fewer to compile, starting the processes (3 s) takes longer than it saves
LONGEST_S = 300.0  # a compiler that takes longer is said to have crashed
META = torch.device("meta")


@dataclass(frozen=True)
class Answered:
    """What came of a request.

    Attributes:
        made: what it launches; None where it does not compile.
        crashed: whether compiling it crashed a compiling process.
    """

    made: CompiledKernels | None
    crashed: bool = False


class Compiling:
    """Requests that somebody has made, and that may not be compiled yet.

    Attributes:
        left: requests that no other process was given.
    """

    def __init__(self, asked: Sequence[Future[Answered]], left: Sequence[Request] = ()) -> None:
        self._asked = asked
        self.left = left

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether all requests are done, now or before the time is over."""
        return not wait(self._asked, timeout_s).not_done


def compile_ahead(requests: Collection[Request], target: str) -> Compiling:
    """Compile what these requests launch into the kernel cache.

    A candidate that does not compile fails when it is run.

    Kernels that users registered are left: their modules are known to this process only. So is
    everything where the GPU is only a relative of the target's: its code is compiled for itself.
    """
    if kernel_cache(target) is None:
        return Compiling((), list(requests))
    known = {_as_line(one, target): one for one in requests if _is_known_there(one[1])}
    with _lock:
        fresh = [line for line in known if line not in _asked]
        if len(fresh) >= FEW or (fresh and _running):
            _ask(fresh)
        left = [one for one in requests if not _is_known_there(one[1])]
        left += [one for line, one in known.items() if line not in _asked]
        return Compiling([_asked[line] for line in known if line in _asked], left)


def compile_absent(requests: Sequence[Request], target: str) -> list[CompiledKernels | None]:
    """What these requests launch on a GPU that need not be here; None for one that does not
    compile.
    """
    lines = [_as_line(one, target) for one in requests]
    with _lock:
        _ask([line for line in dict.fromkeys(lines) if line not in _asked])
        asked = [_asked[line] for line in lines]
    return [one.result().made for one in asked]


def _ask(lines: Sequence[str]) -> None:
    """Hand requests to the compiling process; inside ``_lock``."""
    if not _running or _running[-1].has_ended:
        _running.append(_Compilers())
    _asked.update(zip(lines, _running[-1].ask(lines), strict=True))


def compile_listed(launches: Mapping[str, bytes], target: str) -> Compiling:
    """Compile what ``device.listing`` has listed into Triton's cache on the disk, unless it was
    compiled on this machine before.

    Several processes may want the same: one compiles it, and the others wait for that.
    """
    folder = known_launches()
    fresh = [key for key in launches if not (folder / key).exists()]
    if len(fresh) < FEW:
        return Compiling(())
    random.Random(os.getpid()).shuffle(fresh)  # where others want them, too, not in their order
    lines = [_listed_line(launches[key], folder / key, target) for key in fresh]
    with _lock:
        _ask([line for line in lines if line not in _asked])
        return Compiling([_asked[line] for line in lines])


def start_compilers() -> None:
    """Start the compiling process before there is something to compile: until it is ready, 3 s, a
    network can be captured.
    """
    with _lock:
        if not _running or _running[-1].has_ended:
            _running.append(_Compilers())


def end_compilers() -> None:
    """End the compiling process, if there is one, whose workers keep memory; what is asked later
    starts another.
    """
    with _lock:
        while _running:
            _running.pop().end()


def known_launches() -> Path:
    """The folder with an empty file for each launch that was compiled, by its key."""
    # CPUs come without Triton
    triton = importlib.import_module("triton")
    return Path(triton.knobs.cache.dir) / f"tessella-{triton.__version__}"


def crashed(request: Request, target: str) -> bool:
    """Whether compiling this crashed the process that did so; here it would crash the caller's."""
    if not _asked:
        return False
    asked = _asked.get(_as_line(request, target))
    return asked is not None and asked.done() and asked.result().crashed


def _as_line(request: Request, target: str) -> str:
    problem, row, config = request
    return canonical_json(
        {"problem": problem, "kernel": row.id, "config": config, "target": target}
    )


def _listed_line(launch: bytes, known: Path, target: str) -> str:
    return canonical_json({"launch": launch.hex(), "known": str(known), "target": target})


def _is_known_there(row: Kernel) -> bool:
    return row.id in catalog.BY_ID and row.source == "tessella"


_asked: dict[str, Future[Answered]] = {}  # by this process
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
            env={**os.environ, **quiet},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()  # of what follows
        self._futures: list[Future[Answered]] = []  # by the request's number
        self.has_ended = False
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def ask(self, requests: Sequence[str]) -> list[Future[Answered]]:
        """Compile these; each future ends when it is done, or when the process dies."""
        made: list[Future[Answered]] = [Future() for _ in requests]
        with self._lock:
            first = len(self._futures)
            self._futures += made
            if self.has_ended:
                self._end()
                return made
        with contextlib.suppress(BrokenPipeError):  # then its end is heard
            lines = (f"{first + i} {request}\n" for i, request in enumerate(requests))
            self._requests.write("".join(lines).encode())
            self._requests.flush()
        return made

    def end(self) -> None:
        """End the process, and its workers with it, and wait for that; what it has not answered is
        not compiled.
        """
        self._process.kill()
        self._process.wait()
        self._listening.join()  # a file cannot be closed while a thread reads it
        self._answers.close()
        with contextlib.suppress(BrokenPipeError):  # of what it has not read
            self._requests.close()

    def _listen(self) -> None:
        try:
            while True:
                number, target, made, crashed = pickle.load(self._answers)
                store = kernel_cache(target)
                if store is not None and made is not None:
                    store.add(made)
                self._futures[number].set_result(Answered(made, crashed))
        except (EOFError, ValueError, pickle.UnpicklingError):
            pass  # it has ended, perhaps in the middle of an answer
        finally:  # whatever came of it, nobody waits any longer
            with self._lock:
                self.has_ended = True
                self._end()

    def _end(self) -> None:
        """End all open futures without a result, after the processes that worked on them are
        gone.
        """
        for future in self._futures:
            if not future.done():
                future.set_result(Answered(CompiledKernels()))


_running: list[_Compilers] = []


def main() -> None:
    """The compiling process: requests from stdin, each answered with its number when it is done."""
    said = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a worker prints is no answer
    answers = os.fdopen(said, "wb")

    def answer(number: int, target: str, made: CompiledKernels | None, crashed: bool) -> None:
        pickle.dump((number, target, made, crashed), answers)
        answers.flush()

    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        _Workers(answer, inherited=[sys.stdin.fileno(), said]).serve(sys.stdin.fileno())
    os._exit(0)  # whatever still compiles ends by itself


@dataclass(frozen=True)
class _Worker:
    """A forked process, which compiles one request at a time.

    Where Triton's compiler crashes it, the request at hand is the one that did so. (A pool of
    ``concurrent.futures`` loses all of its processes then, does not say by which request, and has
    once waited for ever while it was replaced.)
    """

    pid: int
    wire: Connection

    def end(self) -> None:
        self.wire.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


@dataclass(frozen=True)
class _Compilation:
    worker: _Worker
    number: int
    target: str
    until: float  # of ``time.monotonic``


class _Workers:
    """A worker a core, and the requests that wait for one.

    This process has one thread, so that it may fork: a worker has Triton and torch from the start.
    """

    def __init__(self, answer: Answer, inherited: Sequence[int], count: int | None = None) -> None:
        self._answer = answer
        self._inherited = inherited  # descriptors that are this process's alone
        self._count = count or _cores()
        self._waiting: deque[bytes] = deque()
        self._idle: list[_Worker] = []
        self._busy: dict[Connection, _Compilation] = {}

    def serve(self, requests: int) -> None:
        """Answer the lines of a descriptor until it ends; then drop what has not begun."""
        rest = b""
        while True:
            while self._waiting and len(self._busy) < self._count:
                self._begin(*self._waiting.popleft().split(b" ", 1))
            soonest = min((one.until for one in self._busy.values()), default=None)
            limit = None if soonest is None else max(0.0, soonest - time.monotonic())
            for ready in wait_for([requests, *self._busy], limit):
                if isinstance(ready, Connection):
                    self._hear(self._busy.pop(ready))
                    continue
                said = os.read(requests, 1 << 16)
                if not said:
                    return
                *lines, rest = (rest + said).split(b"\n")
                self._waiting += lines
            for one in [one for one in self._busy.values() if one.until < time.monotonic()]:
                self._crashed(self._busy.pop(one.worker.wire))

    def _begin(self, number: bytes, text: bytes) -> None:
        request = json.loads(text)
        worker = self._idle.pop() if self._idle else self._forked()
        try:
            worker.wire.send(request)
        except OSError:  # somebody ended it while it had nothing to do
            worker.end()
            worker = self._forked()
            worker.wire.send(request)
        until = time.monotonic() + LONGEST_S
        self._busy[worker.wire] = _Compilation(worker, int(number), request["target"], until)

    def _hear(self, one: _Compilation) -> None:
        try:
            made = one.worker.wire.recv()
        except (EOFError, OSError):
            self._crashed(one)
        else:
            self._idle.append(one.worker)
            self._answer(one.number, one.target, made, False)

    def _crashed(self, one: _Compilation) -> None:
        one.worker.end()
        self._answer(one.number, one.target, None, True)

    def _forked(self) -> _Worker:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid, ours)
        try:  # a worker's wire ends when this process does only if no other worker holds it
            for held in [ours, *(one.wire for one in self._idle), *self._busy]:
                held.close()
            for descriptor in self._inherited:
                os.close(descriptor)
            _work(theirs)
        finally:
            os._exit(1)


def _work(wire: Connection) -> None:
    """The loop of a worker: it reads requests and answers with their launches until its input
    ends.
    """
    while True:
        try:
            request = wire.recv()
        except EOFError:
            return
        try:
            made = compile_one(request)
        except Exception:  # told where the candidate is run
            made = None
        wire.send(made)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def compile_one(request: dict[str, Any]) -> CompiledKernels:
    """The launches of one configuration, found by calling it on tensors without memory; of a listed
    launch nothing, as Triton starts it.
    """
    # torch's way to nvrtc warns that there is no GPU, which is meant
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    target = request["target"]
    if "launch" in request:
        _compile_known(bytes.fromhex(request["launch"]), target, Path(request["known"]))
        return CompiledKernels()
    problem = from_plain(Problem, request["problem"], where="a request to compile")
    with compiling(target), collecting(target) as made:
        launch_without_memory(catalog.kernel(request["kernel"]), problem, request["config"])
    return made.compiled


def _compile_known(launch: bytes, target: str, known: Path) -> None:
    """Compile a listed launch, if no other process did so meanwhile."""
    known.parent.mkdir(parents=True, exist_ok=True)
    with open(known.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with this process
        if not known.exists():
            compile_launch(launch, target)
            known.touch()


def launch_without_memory(row: Kernel, problem: Problem, config: Config) -> None:
    """Call a configuration on tensors that have a shape only: inside ``compiling``."""
    operands = {i: meta.empty(META) for i, meta in enumerate(problem.inputs) if meta is not None}
    buffers = {"out": problem.output.empty(META)} if row.writes_out else {}
    with torch.inference_mode(), float32_math(problem.math):
        constants = {i: operands.pop(i) for i in problem.constant}
        scratch = row.workspace_bytes(problem, config)
        if scratch:
            buffers["workspace"] = torch.empty(scratch, dtype=torch.uint8, device=META)
        call = row.load().bind(problem, constants, **config)
        call(*operands.values(), **buffers)
