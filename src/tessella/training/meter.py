"""The loss curve: one metric a step, without waiting for the GPU at each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tessella.core.events import Emit, metric, progress
from tessella.training.feed import Feed
from tessella.training.loss import not_finite, only_skipped
from tessella.training.parallel import World
from tessella.training.schedule import Schedule
from tessella.training.state import TrainState

_GROUP = 16  # losses fetched from a GPU together: reading one waits for its step
_REPORT_S = 1.0
# Skipped steps in a row behind which there is no hope: fp16's scale, 65,536 at first, is 2⁻³⁴ then
HOPELESS = 50


class Meter:
    """Collects losses and emits them as metrics, averaged over all processes.

    Args:
        where: says which layer makes numbers that are not finite, where a loss is such.
        skipped: says how many of the last steps were skipped, and which gradient is not finite.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        state: TrainState,
        feed: Feed,
        emit: Emit,
        where: Callable[[], str | None] = lambda: None,
        skipped: Callable[[], tuple[int, str | None]] = lambda: (0, None),
    ) -> None:
        self._schedule, self._world, self._state, self._emit = schedule, world, state, emit
        self._feed, self._where, self._skipped = feed, where, skipped
        self._seconds = self._waited_s = 0.0
        self._reported = 0
        self._group = _GROUP if world.device.type == "cuda" else 1
        self._pending: list[tuple[int, float, Tensor]] = []
        self.asked = False  # a process was asked to stop: all learn it at the same step
        self.start_clock()

    def start_clock(self) -> None:
        """Start measuring speed; the time before was not spent on training."""
        self._since, self._steps = time.perf_counter(), 0
        self._waited_before_s = self._feed.waited_s

    def add(self, step: int, rate: float, measured: Tensor) -> None:
        """Add this process's loss and accuracy at ``step``, which may still be in computation."""
        self._pending.append((step, rate, measured))
        if len(self._pending) >= self._group:
            self.flush()

    def flush(self) -> None:
        """Emit the metrics of all steps that were added.

        Raises:
            TrainError: a loss is NaN or infinite, or ``HOPELESS`` steps in a row were skipped.
        """
        if not self._pending:
            return
        pairs = [pair for *_, pair in self._pending]
        wish = torch.full_like(pairs[0], float(self._world.asked()))
        *measured, (wished, _) = self._world.mean(torch.stack([*pairs, wish])).tolist()
        self.asked |= wished > 0
        for (step, rate, _), (loss, accuracy) in zip(self._pending, measured, strict=True):
            if not math.isfinite(loss):
                raise not_finite(loss, step, rate, self._schedule.recipe, self._where())
            self._emit(metric(step, self._schedule.epoch_at(step), loss=loss, lr=rate))
            self._state.loss_sum += loss
            self._state.accuracy_sum += accuracy
            self._state.loss_count += 1
        self._steps += len(self._pending)
        step = self._pending[-1][0]
        self._pending.clear()
        count, gradient = self._skipped()
        if count >= HOPELESS:
            raise only_skipped(count, step, gradient)
        self._report_speed(step)

    @property
    def data_wait(self) -> float:
        """The share of the time of all reported steps in which they waited for images, 0 to 1."""
        return self._waited_s / self._seconds if self._seconds else 0.0

    @property
    def step_s(self) -> float | None:
        """The mean time of all reported steps."""
        return self._seconds / self._reported if self._reported else None

    def _report_speed(self, step: int) -> None:
        seconds = time.perf_counter() - self._since
        if seconds < _REPORT_S:
            return
        images = self._steps * self._schedule.recipe.batch_size
        epoch = self._schedule.epoch_at(step)
        waited_s = self._feed.waited_s - self._waited_before_s
        self._seconds += seconds
        self._reported += self._steps
        self._waited_s += waited_s
        speed = {"images_per_s": images / seconds, "data_wait": waited_s / seconds}
        self._emit(metric(step, epoch, **speed))
        self._emit(progress("train", step, self._schedule.total))
        self.start_clock()
