"""The process of ``child`` as its parent sees it: an order, and what became of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from typing import Any

MODULE = "tessella.search.kernel_report.child"
START_S = 180.0  # to import torch and to meet the device: minutes, on a disk that just woke up
GRACE_S = 3.0  # between the process's own alarm and our patience; and to end
LAST_WORDS = 300  # letters of what it wrote last


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that ended, or had to be ended, instead of an answer.

    Attributes:
        why: a signal, an exit code, what it did and said last.
        in_time: False where it took too long.
        is_stuck: not even a kill ended it, as where a driver hangs.
    """

    why: str
    in_time: bool = True
    is_stuck: bool = False


class Process:
    """A process with one device, which serves orders until it ends.

    Args:
        device: ``cpu`` or ``cuda:N``.
        modules: that it imports first, as they register kernels.
    """

    def __init__(self, device: str, modules: Sequence[str]) -> None:
        self._connection, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  closed by ``end``
        paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        with theirs:
            handle = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(handle), device, json.dumps([*modules])],
                env={**os.environ, "PYTHONPATH": paths, **hidden},
                pass_fds=(handle,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self._doing = "when it started"

    def greeting(self) -> dict[str, Any] | Ended:
        """What the process says of its device."""
        return self._answer(START_S)

    def ask(self, kernel: str, problem: str, place: int, limit_s: float) -> dict[str, Any] | Ended:
        """What became of an order."""
        order = {"kernel": kernel, "problem": problem, "place": place, "limit_s": limit_s}
        self._doing = "when it was asked"
        try:
            self._connection.send_bytes(json.dumps(order).encode())
        except OSError:
            return self._ended()
        return self._answer(limit_s + GRACE_S)

    def _answer(self, limit_s: float) -> dict[str, Any] | Ended:
        until = time.monotonic() + limit_s
        try:
            while self._connection.poll(max(0.0, until - time.monotonic())):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                if "doing" not in answer:
                    return answer
                self._doing = answer["doing"]
        except (EOFError, OSError):
            return self._ended()
        why = f"it took more than {limit_s:.0f} s {self._doing}"
        return Ended(why=why, in_time=False, is_stuck=not self.end())

    def _ended(self) -> Ended:
        """Why a process has ended that has closed its connection."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(GRACE_S)
        words, is_stuck = self._last_words(), not self.end()
        code = self._popen.returncode
        if is_stuck or code == -signal.SIGALRM:
            return Ended(why=f"it took too long {self._doing}", in_time=False, is_stuck=is_stuck)
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return Ended(why=f"{how} {self._doing}{words}")

    def _last_words(self) -> str:
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - 8192))
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1][-LAST_WORDS:]}" if lines else ""

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> bool:
        """End the process; False where not even a kill does."""
        self._connection.close()
        self._said.close()
        self._popen.kill()
        try:
            self._popen.wait(10 * GRACE_S)
        except subprocess.TimeoutExpired:
            return False
        return True
