"""Pictures of strangers, decoded within a budget of pixels, memory and time.

A decoder in C cannot be interrupted, and what a thread has taken does not always come back: 16 MB
of lossless WebP held one for 22 s and 690 MB. So only files whose header bounds their cost
(``headers.is_plain``) are decoded in the calling thread. All others go to processes that can be
ended: each has an address-space limit and an alarm, which end it from within, whatever its decoder
does, and another one takes its place. The pixels are the same in both ways.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

from tessella.core.errors import DataError
from tessella.core.headers import is_plain
from tessella.core.pictures import MAX_SAMPLES, Pixels, out_of_memory, read_pixels
from tessella.core.preprocess import Preprocess, fitted, to_depth
from tessella.core.record import canonical_json, from_plain

# Freed memory goes back at once instead of staying in the allocator's heap; one thread each, since
# thread pools of libraries count against the limit and there are several processes.
_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(32 << 20),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_READY = b"ready"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The limits for decoding one picture.

    Attributes:
        pixels: the most pixels that the header may promise.
        nbytes: address space of the decoder beyond the file itself. 2²⁶ pixels take 0.7 GB of it in
            every format but WebP, whose decoder takes twice as much.
        seconds: by the clock. 2²⁶ pixels take 1.5 s as JPEG, 3 s as PNG or TIFF with LZW.
    """

    pixels: int = 1 << 26
    nbytes: int = 1 << 30
    seconds: float = 10.0


DEFAULT_BUDGET = Budget()


class Decoder:
    """Decodes, in the calling thread or in a process; may be called from many threads at once.

    Args:
        processes: how many costly pictures are decoded at a time; further callers wait.
    """

    def __init__(self, budget: Budget = DEFAULT_BUDGET, *, processes: int) -> None:
        self.budget = budget
        self._slots = threading.Semaphore(processes)
        self._idle: list[_Process] = []  # the last one used is the first one used again
        self._lock = threading.Lock()
        self._is_closed = False

    def __call__(self, content: bytes, record: Preprocess | None, *, name: str) -> Pixels:
        """The picture, HWC: as a dataset with ``record`` stores it, or in its own size at 8 bits.

        Raises:
            DataError: not an image that can be decoded, or not within the budget.
        """
        if is_plain(content, record):
            return self.decode_here(content, record, name=name)
        return self.decode_apart(content, record, name=name)

    def decode_here(self, content: bytes, record: Preprocess | None, *, name: str) -> Pixels:
        """Decode in the calling thread, which is safe for a file that ``is_plain``."""
        return _decode(content, record, name, self.budget.pixels)

    def decode_apart(self, content: bytes, record: Preprocess | None, *, name: str) -> Pixels:
        """Decode in a process with the budget's limits."""
        with self._slots:
            process = self._take()
            try:
                pixels = process.decode(content, record, name)
            except DataError as error:  # told by a process that lives on
                self._give_back(process)
                raise error
            except BaseException as error:
                process.end()
                if isinstance(error, EOFError | OSError):
                    raise process.reason(name, content) from error
                raise
            self._give_back(process)
        return pixels

    def close(self) -> None:
        """End the idle processes now, and every busy process when its picture is decoded."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _take(self) -> _Process:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_alive:
                    return process
        return _Process(self.budget)

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
                return
        process.end()


def _decode(content: bytes, record: Preprocess | None, name: str, most_pixels: int) -> Pixels:
    if record is not None:
        return fitted(content, record, name=name, most_pixels=most_pixels)
    try:
        return to_depth(read_pixels(content, name=name, most_pixels=most_pixels), 8)
    except MemoryError as error:
        raise out_of_memory(name, content) from error


class _Process:
    """One decoding process, as its parent sees it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._connection, theirs = Pipe()
        limits = [str(budget.pixels), str(budget.nbytes), str(budget.seconds)]
        # A plain program, not ``multiprocessing``'s: that runs the parent's main module again,
        # which may import torch or lack a guard. It starts in 0.25 s and holds 40 MB.
        with theirs:
            handle = theirs.fileno()
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "tessella.core.decoding", str(handle), *limits],
                env=os.environ
                | _ENVIRONMENT
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=(handle,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        try:
            if self._connection.recv_bytes(len(_READY)) != _READY:
                raise EOFError("another greeting")
        except (EOFError, OSError) as error:
            self.end()
            raise RuntimeError(
                "a decoding process does not start; see its message above"
            ) from error

    def decode(self, content: bytes, record: Preprocess | None, name: str) -> Pixels:
        """Decode in this process.

        Raises:
            DataError: the process says why the picture cannot be decoded.
            EOFError, OSError: the process has ended.
        """
        order = {"record": None if record is None else _text_of(record), "name": name}
        self._connection.send_bytes(json.dumps(order).encode())
        self._connection.send_bytes(content)
        reply = json.loads(self._connection.recv_bytes(1 << 20))
        if "wrong" in reply:
            raise DataError(reply["wrong"], seen=reply["seen"], fix=reply["fix"])
        if reply["dtype"] not in ("uint8", "uint16") or math.prod(reply["shape"]) > MAX_SAMPLES:
            raise EOFError("no pixels")  # it decodes foreign bytes: not even it is believed
        out = np.empty(reply["shape"], reply["dtype"])
        self._connection.recv_bytes_into(out.data.cast("B"))
        return out

    def reason(self, name: str, content: bytes) -> DataError:
        """Why the process has ended without an answer."""
        code = self._popen.wait()
        if code == -signal.SIGALRM:
            return DataError(
                f"{name} takes longer than {self._budget.seconds:g} s to decode",
                seen=f"a file of {len(content):,} bytes",
                fix="shrink it first, or save it as JPEG or PNG",
            )
        seen = f"exit code {code}"
        with contextlib.suppress(ValueError):
            seen = signal.Signals(-code).name
        return DataError(
            f"{name} made its decoder fail", seen=seen, fix="save it again, as JPEG or PNG"
        )

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> None:
        self._connection.close()
        self._popen.kill()
        self._popen.wait()


_text_of = functools.lru_cache(maxsize=64)(canonical_json)


# --- inside the process ---------------------------------------------------------------------------


def main() -> None:
    """Decode one picture after another until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    most_pixels, nbytes, seconds = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    import cv2  # before the limit and the first alarm
    import tifffile  # noqa: F401

    cv2.setNumThreads(1)
    connection.send_bytes(_READY)
    # Decoders print what they think of a hostile file; nobody may fill the parent's log with that.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(EOFError):
        while True:
            _serve_one(connection, Budget(pixels=most_pixels, nbytes=nbytes, seconds=seconds))


def _serve_one(connection: Connection, budget: Budget) -> None:
    order = json.loads(connection.recv_bytes())
    content = connection.recv_bytes()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = _virtual_bytes() + budget.nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_REAL, budget.seconds)  # unhandled: it ends the process
    reply, pixels = _answer(content, order["record"], order["name"], budget)
    signal.setitimer(signal.ITIMER_REAL, 0)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    connection.send_bytes(json.dumps(reply).encode())
    if pixels is not None:
        connection.send_bytes(pixels.data.cast("B"))


def _answer(
    content: bytes, text: str | None, name: str, budget: Budget
) -> tuple[dict[str, Any], Pixels | None]:
    try:
        record = None if text is None else _record_of(text)
        pixels = np.ascontiguousarray(_decode(content, record, name, budget.pixels))
    except DataError as error:
        if isinstance(error.__cause__, MemoryError):
            error.wrong = f"{name} takes more than {budget.nbytes:,} bytes to decode"
        return error.to_json(), None
    return {"shape": pixels.shape, "dtype": str(pixels.dtype)}, pixels


@functools.lru_cache(maxsize=64)
def _record_of(text: str) -> Preprocess:
    return from_plain(Preprocess, json.loads(text), where="the record")


def _virtual_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
