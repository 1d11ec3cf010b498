"""The loss curve: one metric a step, without waiting for the GPU at each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """Numbers on their way: of each step, its rate beside it, a row; and a last one of all."""

    steps: list[tuple[int, float]]
    rows: Tensor
    there: torch.cuda.Event | None


class Meter:
    """Collects losses and emits them as metrics, averaged over all processes.

    Args:
        where: says which layer makes numbers that are not finite of a step's images.
        skipped: says how many of the last steps were skipped, on the device; None: none ever is.
        gradient: says which gradient of the last step is not finite.

    Attributes:
        step_s: the time of a step in the quickest report; the first one's steps were compiled, too.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        state: TrainState,
        feed: Feed,
        emit: Emit,
        where: Callable[[int], str | None] = lambda _: None,
        skipped: Callable[[], Tensor | None] = lambda: None,
        gradient: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._schedule, self._world, self._state, self._emit = schedule, world, state, emit
        self._feed, self._where, self._skipped, self._gradient = feed, where, skipped, gradient
        self._seconds = self._waited_s = 0.0
        self.step_s: float | None = None
        self._on_gpu = world.device.type == "cuda"
        self._pending: list[tuple[int, float, Tensor]] = []
        self._latest = 0  # the last step that was added: its gradients are there
        self._sent: _Sent | None = None
        self.asked = False  # a process was asked to stop: all learn it at the same step
        self.start_clock()

    def start_clock(self) -> None:
        """Start measuring speed; the time before was not spent on training."""
        self._since, self._steps = time.perf_counter(), 0
        self._waited_before_s = self._feed.waited_s

    def add(self, step: int, rate: float, measured: Tensor) -> None:
        """Add this process's loss and accuracy at ``step``, which may still be in computation.

        A GPU's are emitted in groups, each a step after its last: when the GPU has that to compute.
        """
        self._latest = step
        self._pending.append((step, rate, measured))
        self._receive()
        if len(self._pending) >= _GROUP or not self._on_gpu:
            self._send()
        if not self._on_gpu:
            self._receive()

    def flush(self) -> None:
        """Emit the metrics of all steps that were added.

        Raises:
            TrainError: a loss is NaN or infinite, or ``HOPELESS`` steps in a row were skipped.
        """
        self._receive()
        self._send()
        self._receive()

    def _send(self) -> None:
        """Let the pending numbers of all processes come to this host, without waiting for them."""
        if not self._pending:
            return
        pairs = [pair for *_, pair in self._pending]
        count = self._skipped()
        told = torch.full_like(pairs[0], float(self._world.asked()))
        told[1] = 0 if count is None else count
        rows = self._world.mean(torch.stack([*pairs, told])).to("cpu", non_blocking=True)
        there = torch.cuda.current_stream().record_event() if self._on_gpu else None
        self._sent = _Sent(
            steps=[(step, rate) for step, rate, _ in self._pending], rows=rows, there=there
        )
        self._pending.clear()

    def _receive(self) -> None:
        """Emit what was sent."""
        if (sent := self._sent) is None:
            return
        self._sent = None
        if sent.there is not None:
            sent.there.synchronize()
        *measured, (wished, count) = sent.rows.tolist()
        self.asked |= wished > 0
        for (step, rate), (loss, accuracy) in zip(sent.steps, measured, strict=True):
            if not math.isfinite(loss):
                raise not_finite(loss, step, rate, self._schedule.recipe, self._where(step))
            self._emit(metric(step, self._schedule.epoch_at(step), loss=loss, lr=rate))
            self._state.loss_sum += loss
            self._state.accuracy_sum += accuracy
            self._state.loss_count += 1
        self._steps += len(sent.steps)
        step = sent.steps[-1][0]
        if count >= HOPELESS:
            raise only_skipped(int(count), step, self._gradient(), seen_at=self._latest)
        self._report_speed(step)

    @property
    def data_wait(self) -> float:
        """The share of the time of all reported steps in which they waited for images, 0 to 1."""
        return self._waited_s / self._seconds if self._seconds else 0.0

    def _report_speed(self, step: int) -> None:
        seconds = time.perf_counter() - self._since
        if seconds < _REPORT_S:
            return
        images = self._steps * self._schedule.recipe.batch_size
        epoch = self._schedule.epoch_at(step)
        waited_s = self._feed.waited_s - self._waited_before_s
        self._seconds += seconds
        self.step_s = min(self.step_s or math.inf, seconds / self._steps)
        self._waited_s += waited_s
        speed = {"images_per_s": images / seconds, "data_wait": waited_s / seconds}
        self._emit(metric(step, epoch, **speed))
        self._emit(progress("train", step, self._schedule.total))
        self.start_clock()
