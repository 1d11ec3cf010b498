"""A process that decodes JPEG files on a GPU for the engine's, which has requests to read.

    a thread of ``JpegQueue`` ── files into memory of both, their sizes ──▶ a thread of this process
                              ◀── pixels in memory that the engine's GPU copies from, a word ──

Python's lock is what the threads of one process share: beside a thread that reads 10,000 requests a
second, a batch of 43 files took 7.1 ms, of which the GPU's decoders needed 3.3 (H200). And a file
that ends the decoder ends this process alone. Of the GPU, processes have turns: what a batch waits
for its turns, its threads wait for together.
"""

from __future__ import annotations

import ctypes
import io
import json
import logging
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from PIL import Image

from tessella.core.errors import KernelError, ServeError, TessellaError, UsageError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess, centre_crop, denormalize, fitted
from tessella.core.record import from_plain, to_plain
from tessella.device.driver import brief_driver
from tessella.device.nvjpeg import require_decoding
from tessella.device.page_locked import CHUNK_BYTES
from tessella.runtime import Engine
from tessella.server import tickets
from tessella.server.child import END_S, Child, start_python, told_error
from tessella.server.instances import InstanceLost
from tessella.server.jpegs import (
    HOST,
    MOST_TOGETHER,
    Contents,
    Decode,
    OfEachThread,
    frames_of,
    gpu_decoder,
    gpu_decodes,
)
from tessella.server.lane import Lane, Places, copy_bytes, make_memory
from tessella.server.listening import keep_what_is_loaded

FILES_BYTES = 512 << 20  # that lie in memory at once, twice the largest body
KEPT_BYTES = 16 << 20  # of them; what a larger batch took is given back
THREADS = 4  # that decode in the process, each a batch at a time
# Of a thread, whose pixels may wait for the engine where they are; those of more are copied.
BATCHES = 4
log = logging.getLogger(__name__)

ANSWER_S = 60.0  # for a batch, but for the first
MOST_OFF = 9  # of 255: kernels decode with other roundings than the host, 8 at most, and scale
_PAGE = 4096
_PR_SET_NAME = 15  # linux/prctl.h
NAME = "tessella-jpeg"  # for ps and top


class _Shared:
    """The process of several decoders, started again when it has ended."""

    def __init__(self, module: str, asked: dict[str, Any]) -> None:
        self._module, self._asked = module, asked
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket
        self._end: Callable[[], object] = lambda: None

    def join(self, descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
        """The process, a thread of which decodes for who has the other end of a socket.

        Args:
            descriptors: of the socket, of the files' memory and of the pixels'.

        Raises:
            OSError: the system does not let it start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._door, theirs = socket.socketpair()
                with theirs:
                    self._process = start_python(
                        self._module, self._asked, theirs.fileno(), threads=1
                    )
                end = weakref.finalize(self, _end, self._process, self._door)
                end.atexit = False  # its sockets close then
                self._end = end
            socket.send_fds(self._door, [b"m"], descriptors)
            return self._process


class DecodingProcess(Child):
    """A decoder in another process, started again when that has ended; for one thread.

    Args:
        record, device, pixels: as of ``jpegs.gpu_decode``.
        beside: another one, whose process has a thread for this one, too.

    Attributes:
        module: whose ``main`` the process runs.
    """

    module = __name__

    def __init__(
        self,
        record: Preprocess,
        device: torch.device,
        *,
        pixels: bool,
        beside: DecodingProcess | None = None,
    ) -> None:
        self._record, self._device, self._pixels = record, device, pixels
        self._shape, self._element = picture(record, pixels=pixels)
        asked = {"record": to_plain(record), "device": str(device), "pixels": pixels}
        self._shared: _Shared = _Shared(self.module, asked) if beside is None else beside._shared
        self._begin()

    def _begin(self) -> None:
        """Start the process; ``ready`` waits for it.

        Raises:
            ServeError: 503, the system does not let it.
        """
        batch_bytes = MOST_TOGETHER * math.prod(self._shape) * self._element.itemsize
        order = (BATCHES * batch_bytes - 1).bit_length()
        try:
            ours, theirs = socket.socketpair()
            # other memory than that of an earlier process, from which an engine may still read
            memory = make_memory(FILES_BYTES), make_memory(1 << order)
            with theirs:
                self._process = self._shared.join([theirs.fileno(), *memory])
        except OSError as error:
            raise _does_not_start(error) from error
        self._talk(ours)
        self._end = weakref.finalize(self, _hang_up, ours)
        self._end.atexit = False  # its socket closes then
        self._files, self._made = Lane(memory[0]), Lane(memory[1], lock_bytes=_locked(batch_bytes))
        self._places, self._given_back = Places(order), deque[tuple[int, int]]()
        self._spare, _ = self._places.take(batch_bytes)
        self._is_ready = self._is_over = False

    def ready(self) -> None:
        """Wait until it can decode.

        Raises:
            TessellaError: what it says that is wrong.
            ServeError: 503, it has ended.
        """
        try:
            letter, content = self._next()
        except InstanceLost as error:
            raise _does_not_start(error) from error
        if letter == b"e":
            self._is_over = True
            raise told_error(json.loads(content))
        self._is_ready = True

    def _ready_again(self) -> None:
        """As ``ready``; that it does not start is no fault of a client's.

        Raises:
            ServeError: 503, it does not.
        """
        try:
            self.ready()
        except (KernelError, UsageError) as error:
            raise _does_not_start(error) from error

    def check(self) -> None:
        """Decode some files as the host does; and have the kernels compiled.

        Raises:
            KernelError: they are others.
        """
        record, sides = self._record, (self._record.width + 14, self._record.height + 9)
        coarse = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)
        out = io.BytesIO()
        Image.fromarray(coarse).resize(sides).save(out, "JPEG", quality=90)
        content = out.getvalue()
        made, wanted = self([content] * 5, None), centre_crop(fitted(content, record), record)
        seen = made if self._pixels else denormalize(made, record)
        off = int(np.abs(seen.astype(np.int64) - wanted).max())
        if off > MOST_OFF:
            raise KernelError(
                "a process decodes pictures otherwise than the host",
                seen=f"pixels are up to {off} of 255 apart, at most {MOST_OFF} is usual",
                fix="serve with --decode host, and report the GPU and its driver",
            )

    def __call__(self, files: Contents, frames: Sequence[Frame] | None) -> np.ndarray:
        """As ``jpegs.Decode``; the process reads the frames again, of its own copies.

        Raises:
            KernelError: one of the files is damaged.
            ServeError: 503, the process has ended; the next call starts it again.
        """
        try:
            if self._is_over or self._process.poll() is not None:
                self._end()
                self._begin()
            if not self._is_ready:
                self._ready_again()
            return self._decoded(files)
        except InstanceLost as error:
            raise ServeError(
                "the process that decodes pictures has ended",
                status=503,
                seen=str(error),
                fix="send it again; if it ends again, serve with --decode host",
                retry_after_s=1,
            ) from error

    def _decoded(self, files: Contents) -> np.ndarray:
        pieces = list(_pieces(files))
        if len(pieces) == 1 and (place := self._place(len(files))) is not None:
            try:
                made = self._ask(files, place[0])
            except BaseException:
                self._given_back.append(place)
                raise
            # with the last view of them, in whatever thread: the places are this thread's
            weakref.finalize(made, self._given_back.append, place).atexit = False
            return made
        whole = np.empty((len(files), *self._shape), self._element)
        for some in pieces:
            whole[some] = self._ask(files[some], self._spare)
        return whole

    def _place(self, count: int) -> tuple[int, int] | None:
        """A free place for so many pictures, if there is one."""
        while self._given_back:
            self._places.give_back(*self._given_back.popleft())
        try:
            return self._places.take(count * math.prod(self._shape) * self._element.itemsize)
        except ServeError:
            return None

    def _ask(self, files: Contents, start: int) -> np.ndarray:
        """Have some files decoded to a place."""
        sizes = list(map(len, files))
        for place, content in zip(self._files.parts(0, sizes), files, strict=True):
            copy_bytes(place, content)
        made = self._made.array(start, (len(files), *self._shape), self._element)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                brief_driver().require_context(torch.cuda.current_device())
                self._made.page_lock(start, start + made.nbytes)
        try:
            self._socket.sendall(tickets.frame(b"p", tickets.pack_sizes([start // _PAGE, *sizes])))
        except OSError as error:
            raise InstanceLost(self._ended()) from error
        letter, content = self._next()
        self._socket.settimeout(ANSWER_S)  # the first one waited for kernels that were compiled
        if sum(sizes) > KEPT_BYTES:
            self._files.give_back(KEPT_BYTES)
        if letter == b"e":
            raise told_error(json.loads(content))
        return made


def decodes_apart(engine: Engine) -> Decode | None:
    """As ``jpegs.gpu_decodes``, by a process with a thread for each that asks; by threads of this
    one where it does not start or decodes otherwise than the host, which is logged.

    Raises:
        UsageError: as ``jpegs.gpu_decode``.
    """
    record = engine.preprocess
    if record is None or len(engine.inputs) != 1:
        return None
    require_decoding(record, engine.device, fix=HOST)
    pixels = any(spec.dtype == "uint8" for spec in engine.inputs)
    try:
        first = DecodingProcess(record, engine.device, pixels=pixels)

        def another() -> DecodingProcess:
            return DecodingProcess(record, engine.device, pixels=pixels, beside=first)

        each = [first, *(another() for _ in range(THREADS - 1))]
        for one in each:
            one.ready()
            one.check()
    except TessellaError as error:
        log.warning("JPEG files are decoded by threads of the engine's process: %s", error)
        return gpu_decodes(engine)
    return OfEachThread(list[Decode](each), another, threads=THREADS)


def picture(record: Preprocess, *, pixels: bool) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and element type of a decoded picture, as ``jpegs.gpu_decode`` says."""
    height, width = record.crop or (record.height, record.width)
    if pixels:
        return (height, width, record.channels), np.dtype(np.uint8)
    return (record.channels, height, width), np.dtype(np.float32)


def _locked(batch_bytes: int) -> int:
    """How many bytes are page-locked at once: no place may lie partly in others."""
    return max(CHUNK_BYTES, 1 << (batch_bytes - 1).bit_length())


def _pieces(files: Contents) -> Iterator[slice]:
    """Cuts files into those that lie in memory at once."""
    first, nbytes = 0, 0
    for place, content in enumerate(files):
        nbytes += len(content)
        if place > first and (nbytes > FILES_BYTES or place - first == MOST_TOGETHER):
            yield slice(first, place)
            first, nbytes = place, len(content)
    yield slice(first, len(files))


def _does_not_start(error: Exception) -> ServeError:
    return ServeError(
        "a process that decodes pictures does not start",
        status=503,
        seen=str(error),
        fix="free memory of the GPU, or serve with --decode host",
    )


def _hang_up(ours: socket.socket) -> None:
    with suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
    ours.close()


def _end(process: subprocess.Popen[bytes], door: socket.socket) -> None:
    """Let a process end; a thread waits for it, as a context on a GPU takes a second to end and who
    drops the last of its users may be an event loop.
    """
    _hang_up(door)
    threading.Thread(target=_wait, args=[process], daemon=True).start()


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# --- the process ----------------------------------------------------------------------------------


def main() -> None:
    """Decode what comes, as the one argument says, until nothing will."""
    run(json.loads(sys.argv[1]), gpu_decoder)


def run(asked: dict[str, Any], decoder: Callable[..., Any]) -> None:
    """As ``main``, by ``decoder``, which is called as ``gpu_decoder``."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode())
    door = socket.socket(fileno=asked["socket"])
    while True:
        _, descriptors, _, _ = socket.recv_fds(door, 1, 3)
        if len(descriptors) < 3:  # nobody will come any more
            return
        threading.Thread(target=_work, args=[asked, decoder, *descriptors]).start()


def _work(asked: dict[str, Any], decoder: Callable[..., Any], *descriptors: int) -> None:
    """Be a thread that decodes; what it does not expect ends the process."""
    try:
        with socket.socket(fileno=descriptors[0]) as connection, suppress(ConnectionError):
            _serve(asked, decoder, connection, descriptors[1:])
    except BaseException:
        log.exception("a process that decodes pictures ends")
        os._exit(1)


def _serve(
    asked: dict[str, Any],
    decoder: Callable[..., Any],
    connection: socket.socket,
    memory: Sequence[int],
) -> None:
    """Decode what one connection asks for, until it is closed."""
    record, device = from_plain(Preprocess, asked["record"], where="a server"), asked["device"]
    shape, element = picture(record, pixels=asked["pixels"])
    batch_bytes = MOST_TOGETHER * math.prod(shape) * element.itemsize
    files, made = Lane(memory[0]), Lane(memory[1], lock_bytes=_locked(batch_bytes))
    try:
        decode = decoder(record, torch.device(device), pixels=asked["pixels"])
    except TessellaError as error:
        connection.sendall(tickets.frame(b"e", json.dumps(error.to_json()).encode()))
        return
    keep_what_is_loaded()
    connection.sendall(tickets.frame(b"d", b""))
    frames = tickets.Frames()
    while data := connection.recv(1 << 16):
        for _, content in frames.feed(data):
            page, *sizes = struct.unpack(f"<{len(content) // 4}I", content)
            contents = files.parts(0, sizes)
            place = made.array(page * _PAGE, (len(sizes), *shape), element)
            try:
                if (read := frames_of(contents)) is None:
                    raise KernelError("a file is none that a GPU decodes")
                if device != "cpu":
                    made.page_lock(page * _PAGE, page * _PAGE + place.nbytes)
                decode(contents, read, place)
                answer = tickets.frame(b"o", b"")
            except KernelError as error:
                if device != "cpu":
                    torch.cuda.synchronize()  # a GPU that has failed ends this process
                answer = tickets.frame(b"e", json.dumps(error.to_json()).encode())
            connection.sendall(answer)
