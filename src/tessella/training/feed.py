"""Batches on their way to the network: uploaded one ahead, scaled on the device, and their wait."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessella.core.preprocess import Preprocess
from tessella.data.loading import Batch
from tessella.data.scaling import Scaling
from tessella.training.parallel import World

MOST_THREADS = 32


def loading_threads(asked: int | None, world: World) -> int:
    """How many threads load images: as asked, or on a GPU one for each of the process's cores.

    On a CPU none: they would take their time from the step.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) // world.size
    return min(max(cores, 1), MOST_THREADS) if world.device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Fed:
    """A batch on the device: what the network takes, [N, C, H, W], and its targets."""

    images: Tensor
    labels: Any


class Feed:
    """Moves batches to a device and measures how long the device waits for them.

    On a GPU the next batch is uploaded, by a stream of its own, while it computes the step.

    Attributes:
        waited_s: so long the device had nothing to do but wait for images; as far as is known.
    """

    def __init__(
        self, record: Preprocess, device: torch.device, layout: torch.memory_format
    ) -> None:
        self._device, self._layout = device, layout
        self._scaling = Scaling(record, device)
        self.waited_s = 0.0
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def __call__(self, batch: Batch) -> Fed:
        """A batch alone."""
        return self._scaled(*self._all_moved(batch))

    def stream(self, batches: Iterator[Batch]) -> Iterator[Fed]:
        """The batches in order; the caller computes a step between one and the next."""
        return self._uploaded(batches) if self._device.type == "cuda" else self._waited(batches)

    def _waited(self, batches: Iterator[Batch]) -> Iterator[Fed]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield self(batch)

    def _uploaded(self, batches: Iterator[Batch]) -> Iterator[Fed]:
        own: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        computing = torch.cuda.current_stream(self._device)
        idle: torch.cuda.Event | None = None
        while (batch := next(batches, None)) is not None:
            with torch.cuda.stream(own):
                parts = self._all_moved(batch)
                there = own.record_event(_timed())
            if idle is not None:
                self._waits.append((idle, there))
            computing.wait_event(there)
            for tensor in parts:
                if isinstance(tensor, Tensor):
                    tensor.record_stream(computing)  # its memory is not given to the next upload
            yield self._scaled(*parts)
            idle = computing.record_event(_timed())
            self._add_waits()

    def _add_waits(self) -> None:
        while self._waits and all(map(torch.cuda.Event.query, self._waits[0])):
            idle, there = self._waits.popleft()
            self.waited_s += max(0.0, idle.elapsed_time(there) / 1e3)

    def _all_moved(self, batch: Batch) -> tuple[Tensor, Tensor | None, Any]:
        return self._moved(batch.pixels), self._moved(batch.cuts), self._moved(batch.labels)

    def _moved(self, data: Any) -> Any:
        return data.to(self._device, non_blocking=True) if isinstance(data, Tensor) else data

    def _scaled(self, pixels: Tensor, cuts: Tensor | None, labels: Any) -> Fed:
        images = self._scaling(pixels, cuts).contiguous(memory_format=self._layout)
        return Fed(images=images, labels=labels)


def _timed() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event
