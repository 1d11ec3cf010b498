"""Batches on their way to the network: uploaded one ahead, scaled on the device, and their wait."""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessella.artifacts.run import Recipe
from tessella.core.events import Event, phase, warning
from tessella.core.preprocess import Preprocess
from tessella.data.loading import Batch
from tessella.device.nvjpeg import decodes_as_host, has_own_decoders, require_decoding
from tessella.device.scaling import Scaling, has_one_pass
from tessella.training.parallel import World

MOST_THREADS = 32
# Held by who gives work to the GPU: an upload, or a step that is being recorded. Of three
# trainings in which nvJPEG may have worked beside a recording, one did not go on.
gpu_asked = threading.Lock()


def loading_threads(asked: int | None, world: World) -> int:
    """How many threads load images, or ask processes to: as asked, or on a GPU one for each core.

    On a CPU none: they would take their time from the step.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) // world.local_size
    return min(max(cores, 1), MOST_THREADS) if world.device.type == "cuda" else 0


def decodes_on_gpu(recipe: Recipe, record: Preprocess, device: torch.device) -> bool:
    """Whether the device decodes JPEG files: as the recipe says, by default to the host's bits."""
    if recipe.decode is not None:
        return recipe.decode == "gpu"
    return decodes_as_host(record, device)


def decoding_told(decodes: bool, device: torch.device) -> list[Event]:
    """What a run's record says of pixels: which decoder the network sees, and whether a plan, whose
    pictures the host decodes, sees others."""
    if not decodes:
        return []
    if has_own_decoders(device):
        return [phase("decode", "the GPU decodes JPEG files, to the bits of the host")]
    return [
        warning(
            "this GPU decodes JPEG files with samples that differ from the host's by some of "
            "255, and evaluations, plans and servers see the host's unless told otherwise: leave "
            "decode out to train on those"
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Fed:
    """A batch on the device: what the network takes, [N, C, H, W], and its targets."""

    images: Tensor
    labels: Any


class Feed:
    """Moves batches to a device and measures how long the device waits for them.

    On a GPU the next batch is uploaded, by a stream of its own, while it computes the step.

    Args:
        decodes: the device decodes JPEG files of batches.

    Attributes:
        decodes: as given.
        waited_s: so long the device had nothing to do but wait for images; as far as is known.

    Raises:
        UsageError: nothing decodes for this record here.
    """

    def __init__(
        self,
        record: Preprocess,
        device: torch.device,
        layout: torch.memory_format,
        *,
        decodes: bool = False,
    ) -> None:
        self._device, self._layout = device, layout
        self._scaling = _scaling(record, device)
        self.decodes = decodes
        if decodes:
            require_decoding(record, device, fix="leave decode out: the host decodes")
        # of a stream, and of batches beside it: each is for one thread. nvJPEG takes memory of the
        # GPU, which a dataset without JPEG files, or one that is kept decoded, has other uses for
        self._decoder = functools.cache(lambda: _decoder(record, device))
        self._other = functools.cache(lambda: _decoder(record, device))
        self.waited_s = 0.0
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __call__(self, batch: Batch) -> Fed:
        """A batch alone, also while a stream goes on."""
        return self._scaled(*self._all_moved(batch, self._other))

    def stream(self, batches: Iterator[Batch]) -> Generator[Fed, None, None]:
        """The batches in order, a step computed between one and the next; to be closed."""
        return self._uploaded(batches) if self._device.type == "cuda" else self._waited(batches)

    def _waited(self, batches: Iterator[Batch]) -> Generator[Fed, None, None]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield self(batch)

    def _uploaded(self, batches: Iterator[Batch]) -> Generator[Fed, None, None]:
        # its kernels go before the step's: those of a decoder are short and wait for each other
        own: torch.cuda.Stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        idle: torch.cuda.Event | None = None

        def upload() -> tuple[Batch, tuple[Any, ...], torch.cuda.Event] | None:
            batch = next(batches, None)
            if batch is None:
                return None
            with gpu_asked, torch.cuda.device(self._device), torch.cuda.stream(own):
                return batch, self._all_moved(batch, self._decoder), own.record_event(timed_event())

        # in a thread: 256 files keep nvJPEG for 17 ms, in which a step could be started
        with ThreadPoolExecutor(1, thread_name_prefix="uploading") as thread:
            held: deque[tuple[torch.cuda.Event, Batch]] = deque()
            coming = thread.submit(upload)
            while (found := coming.result()) is not None:
                coming = thread.submit(upload)
                batch, parts, there = found
                held.append((there, batch))  # the files' bytes may still be read
                while held and held[0][0].query():  # type: ignore[no-untyped-call]
                    held.popleft()
                if idle is not None:
                    self._waits.append((idle, there))
                computing.wait_event(there)
                for tensor in parts:
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(computing)  # the next upload must not get its memory
                yield self._scaled(*parts)
                idle = computing.record_event(timed_event())
                self._add_waits()

    def _add_waits(self) -> None:
        while self._waits and all(map(torch.cuda.Event.query, self._waits[0])):
            idle, there = self._waits.popleft()
            self.waited_s += max(0.0, idle.elapsed_time(there) / 1e3)

    def _all_moved(self, batch: Batch, decoder: Any) -> tuple[Any, ...]:
        words, settings = (None, None) if batch.changes is None else batch.changes[:2]
        return (
            self._pixels(batch, decoder), self._moved(batch.cuts), self._moved(words), settings,
            self._moved(batch.labels),
        )  # fmt: skip

    def _pixels(self, batch: Batch, decoder: Any) -> Tensor:
        pixels: Tensor = self._moved(batch.pixels)
        if batch.files is None:
            return pixels
        decoded: Tensor = decoder()(batch.files.contents, batch.files.frames)
        if not len(pixels):
            return decoded
        rows = set(batch.files.rows)
        others = [row for row in range(len(batch.indices)) if row not in rows]
        both = torch.cat([decoded, pixels])
        return both[torch.tensor([*batch.files.rows, *others], device=both.device).argsort()]

    def _moved(self, data: Any) -> Any:
        return data.to(self._device, non_blocking=True) if isinstance(data, Tensor) else data

    def _scaled(
        self, pixels: Tensor, cuts: Tensor | None, words: Tensor | None, settings: Any, labels: Any
    ) -> Fed:
        scaling: Any = self._scaling
        images = (
            scaling(pixels, cuts) if words is None
            else scaling.changed(pixels, cuts, words, settings)
        ).contiguous(memory_format=self._layout)  # fmt: skip
        return Fed(images=images, labels=labels)


def timed_event() -> torch.cuda.Event:
    """An event whose time is kept."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def _scaling(record: Preprocess, device: torch.device) -> Scaling:
    """What normalizes on the device: one kernel where Triton is, which CPUs come without."""
    if device.type != "cuda" or not has_one_pass():
        return Scaling(record, device)
    module = importlib.import_module("tessella.kernels.pictures.scale")
    made: Scaling = module.OnePassScaling(record, device)
    return made


def _decoder(record: Preprocess, device: torch.device) -> Any:
    """What decodes JPEG files on the device."""
    return importlib.import_module("tessella.kernels.pictures.decode").PictureDecoder(
        record, device
    )
