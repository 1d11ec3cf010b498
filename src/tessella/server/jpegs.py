"""JPEG files of many requests, decoded together on the GPU that runs the engine.

Files gather while the GPU decodes, and have their turns as requests before an engine have them. The
pixels come back to the host: from there on they are a request's like any other.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tessella.core.errors import InputError, KernelError, ServeError, UsageError
from tessella.core.jpeg import Frame, frame_of
from tessella.core.preprocess import Preprocess, centre_crop
from tessella.device.nvjpeg import require_decoding
from tessella.device.page_locked import locked_or
from tessella.device.scaling import Scaling
from tessella.runtime import Engine
from tessella.server.fairness import Waiting
from tessella.server.lane import copy_bytes
from tessella.server.waiting import DEFAULT_PRIORITY

# Files; an H200 decodes 27,700 pictures of 500 × 375 a second so, and no more in larger batches.
MOST_TOGETHER = 64
THREADS = 2
KEPT_BYTES = 16 << 20  # of copied files, by each thread
END = b"\xff\xd9"

HOST = "serve with decode='host' (--decode host)"

Contents = Sequence[bytes | memoryview]
# Pixels of files; their frames, or None of views of memory that others may change.
Decode = Callable[[Contents, Sequence[Frame] | None], np.ndarray]


def frames_of(files: Contents) -> list[Frame] | None:
    """The frames of files that a GPU may decode; None if any is for the host.

    A file that ends early is for the host, which refuses it: nvJPEG makes a picture of it.
    """
    frames = []
    for content in files:
        frame = frame_of(content) if content[-2:] == END else None
        if frame is None:
            return None
        frames.append(frame)
    return frames


def gpu_decoder(record: Preprocess, device: torch.device, *, pixels: bool) -> Any:
    """Decodes files with their frames on a GPU to a network's inputs as the host makes them; for
    one thread. A third argument is the array that they are written to, if they have a place.

    Args:
        pixels: uint8 [N, H, W, C], for a plan that scales them itself; else float32 [N, C, H, W].

    Raises:
        UsageError: as ``require_decoding``.
        KernelError: it does not start.
    """
    require_decoding(record, device, fix=HOST)
    name = "to_host" if pixels else "decode"
    found = importlib.import_module(f"tessella.kernels.pictures.{name}")
    if pixels:
        return found.HostDecoder(record, device)
    return _Scaled(found.PictureDecoder(record, device, host=False), record, device)


def gpu_decode(record: Preprocess, device: torch.device, *, pixels: bool) -> Decode:
    """As ``gpu_decoder``, for any threads.

    Raises:
        UsageError, KernelError: as ``gpu_decoder``.
    """

    def make() -> Decode:
        decoder, copies = gpu_decoder(record, device, pixels=pixels), _Copies()

        def decode(files: Contents, frames: Sequence[Frame] | None) -> np.ndarray:
            if frames is None:
                files = copies.of(files)
                frames = _read(files)
            made: np.ndarray = decoder(files, frames)
            return made

        return decode

    return OfEachThread([make()], make)  # here it is seen whether it starts


class OfEachThread:
    """Decodes by one of the first decoders, or by another one, which stays the calling thread's.

    Attributes:
        threads: that there should be.
    """

    def __init__(
        self, first: list[Decode], make: Callable[[], Decode], *, threads: int = THREADS
    ) -> None:
        self._first, self._make, self.threads = first, make, threads
        self._mine = threading.local()

    def __call__(self, files: Contents, frames: Sequence[Frame] | None) -> np.ndarray:
        if not hasattr(self._mine, "decoder"):
            self._mine.decoder = _another(self._first, self._make)
        made: np.ndarray = self._mine.decoder(files, frames)
        return made


class _Scaled:
    """Decoded pictures as a network without stages of its own takes them, scaled on the GPU."""

    def __init__(self, decoder: Any, record: Preprocess, device: torch.device) -> None:
        self._decoder, self._record, self._device = decoder, record, device
        self._scaling = Scaling(record, device)
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def __call__(
        self, files: Contents, frames: Sequence[Frame], into: np.ndarray | None = None
    ) -> np.ndarray:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            fitted: Any = centre_crop(self._decoder(files, frames), self._record)
            made = self._scaling(fitted)
            # locked memory, from which the engine copies by itself; into ordinary memory 128
            # pictures took as long as their decoding
            host = locked_or(into, made.shape, made.dtype)
            host.copy_(made, non_blocking=True)
            self._stream.synchronize()
            return host.numpy()


def _another(first: list[Decode], make: Callable[[], Decode]) -> Decode:
    """A decoder that was made first, or another one.

    Raises:
        ServeError: 503, it does not start: that is no fault of a client's.
    """
    with suppress(IndexError):
        return first.pop()
    try:
        return make()
    except KernelError as error:
        raise ServeError(
            "the GPU's decoder does not start",
            status=503,
            seen=str(error),
            fix="free memory of the GPU, or serve with --decode host",
        ) from error


def host_decodes(engine: Engine) -> None:
    """No GPU decodes for this engine."""


def gpu_decodes(engine: Engine) -> Decode | None:
    """The function that decodes on the GPU of an engine; None if it takes no pictures.

    Raises:
        UsageError: as ``gpu_decode``.
    """
    if engine.preprocess is None:
        return None
    pixels = any(spec.dtype == "uint8" for spec in engine.inputs)
    return gpu_decode(engine.preprocess, engine.device, pixels=pixels)


def decoder_for(decode: Literal["host", "gpu"]) -> Callable[[Engine], Decode | None]:
    """Who decodes JPEG files for the engines of a server.

    Raises:
        UsageError: none of the two.
    """
    if decode not in ("host", "gpu"):
        raise UsageError(
            "JPEG files are decoded on the host or the gpu",
            seen=decode,
            fix="decode='host' or 'gpu'",
        )
    return gpu_decodes if decode == "gpu" else host_decodes


@dataclass(eq=False, slots=True)
class Files:
    """A request's files, which wait as ``fairness`` has it.

    Attributes:
        contents: they; views, if others may change the memory.
        frames: what ``frames_of`` read of them; None of views, which are copied first.
        deliver: called in the thread that decoded, with all of a batch that share it.
        tag: what ``deliver`` knows them by.
        priority, deadline_ns, client: as of ``waiting.Request``.
        batch: how many there are.
    """

    contents: Contents
    frames: Sequence[Frame] | None
    deliver: Callable[[Decoded], object]
    tag: Any = None
    priority: int = DEFAULT_PRIORITY
    deadline_ns: int | None = None
    client: int = 0
    batch: int = field(init=False)
    members: int = field(init=False, default=1)
    begun: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.batch = len(self.contents)


class Decoded(NamedTuple):
    """Requests whose files were decoded together, or the one that failed.

    Attributes:
        pixels: of all their files, one behind the other; None if there is an ``error``.
        ns: how long the batch took.
    """

    requests: list[Files]
    pixels: np.ndarray | None
    error: Exception | None
    ns: int

    def made(self) -> np.ndarray:
        """The pixels.

        Raises:
            Exception: why there are none.
        """
        if self.pixels is None:
            raise self.error or ServeError("a picture was not decoded", status=500)
        return self.pixels


class JpegQueue:
    """Decodes the files of requests in threads of its own, as many together as wait: while the GPU
    decodes for one, the other has its files read.

    Args:
        decode: the inputs of some files.
        most_waiting: requests that may wait; more are refused.
        threads: batches that are decoded at a time; None is as many as ``decode`` is for.
    """

    def __init__(self, decode: Decode, *, most_waiting: int, threads: int | None = None) -> None:
        if threads is None:
            threads = decode.threads if isinstance(decode, OfEachThread) else THREADS
        self._decode, self._most_waiting = decode, most_waiting
        self._waiting = Waiting[Files](MOST_TOGETHER)
        self._idle = 0  # threads that sleep
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name="JPEG files", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Files) -> None:
        """Decode a request's files. Where as many wait as may, the last request of the client that
        has most waiting gives its place.

        Raises:
            ServeError: 503, too many requests wait.
        """
        last = None
        with self._changed:
            if self._is_closed or len(self._waiting) >= self._most_waiting:
                error = ServeError(
                    "too many pictures wait for this model",
                    status=503,
                    seen=f"{len(self._waiting)} waiting",
                    fix="try again in a moment, or send fewer requests at once",
                )
                if self._is_closed or (last := self._waiting.last_of_greediest(request)) is None:
                    raise error
                self._waiting.drop([last])
            self._waiting.push(request, perf_counter_ns())
            if self._idle:
                self._changed.notify()
        if last is not None:
            _deliver([last], None, error, 0)

    def close(self) -> None:
        """Decode what waits, and end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while some := self._take():
            self._work(some)

    def _take(self) -> list[Files]:
        with self._changed:
            while not self._waiting and not self._is_closed:
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            some, count = list[Files](), 0
            while self._waiting:
                if some and count + self._waiting.first.batch > MOST_TOGETHER:
                    break
                some.append(self._waiting.pop())
                count += some[-1].batch
            return some

    def _work(self, some: list[Files]) -> None:
        began_ns = perf_counter_ns()
        try:
            contents: list[bytes | memoryview] = [one for files in some for one in files.contents]
            known = [files.frames for files in some if files.frames is not None]
            all_known = len(known) == len(some)
            frames = [frame for one in known for frame in one] if all_known else None
            pixels = self._decode(contents, frames)
        except Exception as error:
            half, ns = len(some) // 2, perf_counter_ns() - began_ns
            if not half or (isinstance(error, ServeError) and error.status == 503):
                _deliver(some, None, _told(error), ns)
            else:  # one of them may have caused it: 64 are 13 batches then
                self._work(some[:half])
                self._work(some[half:])
            return
        _deliver(some, pixels, None, perf_counter_ns() - began_ns)


def _deliver(
    some: list[Files], pixels: np.ndarray | None, error: Exception | None, ns: int
) -> None:
    first = 0
    for deliver, which in itertools.groupby(some, lambda files: files.deliver):
        together = list(which)
        end = first + sum(files.batch for files in together)
        part = None if pixels is None else pixels[first:end]
        deliver(Decoded(together, part, error, ns))
        first = end


class _Copies:
    """Memory of one thread for files of a batch, which nobody else changes. It keeps that of a
    usual batch, as memory that was given back is slow to have again.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def of(self, contents: Contents) -> list[bytes | memoryview]:
        """Copies, which stay until the next call."""
        nbytes = sum(map(len, contents))
        memory = self._memory
        if memory.nbytes < nbytes:
            memory = np.empty(nbytes + nbytes // 4, np.uint8)
            if nbytes <= KEPT_BYTES:
                self._memory = memory
        whole, copies, first = memory.data, list[bytes | memoryview](), 0
        for one in contents:
            place = whole[first : first + len(one)]
            copy_bytes(place, one)
            copies.append(place)
            first += len(one)
        return copies


def _read(contents: Contents) -> list[Frame]:
    """The files' frames.

    Raises:
        ServeError: 500, who sent them should have seen that no GPU decodes them.
    """
    if (frames := frames_of(contents)) is None:
        raise ServeError("a ticket's files are none that a GPU decodes", status=500)
    return frames


def _told(error: Exception) -> Exception:
    if not isinstance(error, KernelError):
        return error
    return InputError("a picture cannot be decoded", seen=str(error), fix="send a whole JPEG file")
