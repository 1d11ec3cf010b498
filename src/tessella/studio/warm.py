"""Processes that keep a model open and answer pictures: the studio itself loads no engine.

Each is a ``tessella ask``. A fresh process takes 4 s to its first answer (torch, the weights, the
libraries' preparations), an open one 20 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tessella.core.errors import TessellaError
from tessella.studio.quick import NoAnswer

MOST_PROCESSES = 2  # a ResNet-18 holds 0.9 GB, most of it torch
MOST_BYTES = 4 << 30  # a process that holds more ends after its answer
IDLE_S = 300.0
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 120.0
LINE_BYTES = 64 << 20  # a hundred ragged masks of a photo of 12 megapixels take 7 MB


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a process has open: a checkpoint as it was at ``stamp``, with or without its code."""

    path: Path
    stamp: int
    trust_code: bool = False


class Answers:
    """The open processes, the one that was asked last at the end.

    Args:
        folder: the workspace, where relative paths start.
        idle_s: a process that was asked nothing for so long ends.
    """

    def __init__(self, folder: Path, *, idle_s: float = IDLE_S) -> None:
        self._folder, self._idle_s = folder, idle_s
        self._open: dict[Opened, _Process] = {}
        # the loop itself holds tasks weakly
        self._waiting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()

    def prepare(self, opened: Opened) -> None:
        """Start the process now, so that the first question finds it ready; problems show then."""

        async def start() -> None:
            with contextlib.suppress(TessellaError):
                await self._process(opened).ready()

        _keep(start(), self._waiting)

    async def ask(self, opened: Opened, request: dict[str, object]) -> dict[str, Any]:
        """The answer to one request (see ``tessella ask``).

        Raises:
            NoAnswer: the command's own words, or it ended or took too long.
        """
        process = self._process(opened)
        try:
            answer = await process.ask(request)
        except NoAnswer:
            if process.ended:
                self._open.pop(opened, None)
            raise
        if process.nbytes() > MOST_BYTES:
            self._retire(opened)
        self._end_spare(opened)  # of many at once, those that were busy before are not now
        return answer

    async def close(self) -> None:
        """End every process."""
        for task in self._waiting:
            task.cancel()
        for opened in list(self._open):
            self._retire(opened)
        await asyncio.gather(*self._ending)

    def pids(self) -> list[int]:
        """The ids of the living processes, the one that was asked last at the end."""
        return [p.pid for p in self._open.values() if p.pid and not p.ended]

    def _process(self, opened: Opened) -> _Process:
        process = self._open.pop(opened, None)
        if process is None or process.ended:
            process = _Process(opened, self._folder)
        self._open[opened] = process  # at the end: asked last
        self._end_spare(opened)
        _keep(self._end_idle(opened, process), self._waiting)
        return process

    def _end_spare(self, kept: Opened) -> None:
        """End those beyond ``MOST_PROCESSES`` that nobody waits for, the longest unasked first."""
        spare = [o for o, p in self._open.items() if not p.busy and o != kept]
        for other in spare[: max(0, len(self._open) - MOST_PROCESSES)]:
            self._retire(other)

    async def _end_idle(self, opened: Opened, process: _Process) -> None:
        """End a process that nobody asks any more."""
        asked = process.asked = process.asked + 1
        await asyncio.sleep(self._idle_s)
        while process.busy:
            await asyncio.sleep(1.0)
        if process.asked == asked and self._open.get(opened) is process:
            self._retire(opened)

    def _retire(self, opened: Opened) -> None:
        process = self._open.pop(opened, None)
        if process is not None:
            _keep(process.end(), self._ending)


def _keep(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Do some work in the background, as a task of this set."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


@dataclass(eq=False)
class _Process:
    """One ``tessella ask``; questions to it wait for each other."""

    opened: Opened
    folder: Path
    asked: int = 0
    _child: asyncio.subprocess.Process | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def busy(self) -> bool:
        return self._lock.locked()

    @property
    def ended(self) -> bool:
        return self._child is not None and self._child.returncode is not None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def nbytes(self) -> int:
        """The memory that the process holds."""
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    async def ready(self) -> None:
        async with self._lock:
            await self._start()

    async def ask(self, request: dict[str, object]) -> dict[str, Any]:
        async with self._lock:
            await self._start()
            assert self._child is not None
            assert self._child.stdin is not None
            with contextlib.suppress(ConnectionError):  # it has ended: the missing answer tells
                self._child.stdin.write(json.dumps(request).encode() + b"\n")
                await self._child.stdin.drain()
            return await self._line(ANSWER_TIMEOUT_S)

    async def _start(self) -> None:
        if self._child is not None:
            return
        trust = ("--trust-code",) if self.opened.trust_code else ()
        self._child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file in the workspace must not shadow a module
            *("-m", "tessella", "ask", str(self.opened.path), *trust),
            cwd=self.folder,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # GPUs belong to jobs
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=LINE_BYTES,
        )
        try:
            await self._line(START_TIMEOUT_S)
        except NoAnswer:
            await self.end()
            raise

    async def _line(self, timeout_s: float) -> dict[str, Any]:
        """The next answer; an error that the command tells is raised."""
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            line = await asyncio.wait_for(self._child.stdout.readline(), timeout_s)
        except TimeoutError:
            await self.end()
            raise NoAnswer(f"the network did not answer in {timeout_s:.0f} s") from None
        except asyncio.CancelledError:  # its page went away: the next answer would be this one's
            await self.end()
            raise
        except ValueError:  # what is left of the line would be the next answer
            await self.end()
            raise NoAnswer(
                "the network's answer is too long",
                seen=f"a line of more than {LINE_BYTES:,} bytes",
                fix="ask for fewer things: run the command shown on the page",
            ) from None
        if not line:
            await self.end()
            raise NoAnswer(
                "the process that holds the network ended",
                seen=f"exit code {self._child.returncode}",
                fix="ask again; if it ends again, run the command shown on the page",
            )
        answer: dict[str, Any] = json.loads(line)
        if "wrong" in answer:
            raise NoAnswer(answer["wrong"], seen=answer.get("seen"), fix=answer.get("fix"))
        return answer

    async def end(self) -> None:
        if self._child is None:
            return
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in this very moment
                self._child.kill()
        await self._child.wait()
