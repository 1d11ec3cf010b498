"""Where a step's time goes: each layer's forward and backward pass, beside the least they need.

Layers run call by call, whatever way the steps of a training take: only then are they apart. On a
GPU a time includes what the host takes to start a small layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

WARM, TIMED = 2, 5  # passes
ENOUGH_S = 3.0  # behind which no further pass begins, nor is one for warming
Layers = list[tuple[str, nn.Module]]


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """A layer's part of a step.

    Attributes:
        kind: its class.
        forward_s, backward_s: seconds, the medians.
        flops: operations of both passes: the forward pass's, and as many for each gradient that is
            asked for, of its input and of its weights.
        nbytes: that both must move: input, output and weights in the forward pass; in the backward
            pass the output and its gradient, the gradients that are asked for, the input for one of
            the weights, and these for one of the input.
    """

    name: str
    kind: str
    forward_s: float
    backward_s: float
    flops: int
    nbytes: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s

    def least_s(self, flops_s: float, bytes_s: float) -> float:
        """What a machine of these rates needs at least."""
        return max(self.flops / flops_s, self.nbytes / bytes_s)


@dataclass
class _Seen:
    """What the hooks of one pass note: a layer's number and a stamp, in the order of time."""

    starts: list[tuple[int, Any]] = field(default_factory=list)
    ends: list[tuple[int, Any]] = field(default_factory=list)
    back: list[tuple[int, Any]] = field(default_factory=list)


def layer_times(
    module: nn.Module, loss: Callable[[], Tensor], device: torch.device
) -> tuple[LayerTime, ...]:
    """The layers of a module in the order of their first call.

    A layer's backward pass reaches from the arrival of its output's gradient to that of the next
    layer's: what lies between two layers, such as a sum, counts to the one behind it.

    Args:
        loss: runs the forward pass and gives a number. The module's gradients are None afterwards.
    """
    layers = [(n, m) for n, m in module.named_modules() if not any(m.children())]
    work = _work(layers, loss)
    passes, began = [], time.perf_counter()
    with _watched(layers, device) as seen:
        for number in range(WARM + TIMED):
            seen.starts, seen.ends, seen.back = [], [], []
            made = loss()
            torch.autograd.backward(made)
            seen.back.append((-1, _stamp(device)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            late = time.perf_counter() - began > ENOUGH_S
            if number >= WARM or late:
                passes.append((_lasted(seen.starts, seen.ends), _lasted(seen.back, seen.back[1:])))
            module.zero_grad()
            if late:
                break
    found = []
    for number in dict.fromkeys(number for number, _ in seen.starts):
        name, layer = layers[number]
        forward, backward = (
            statistics.median(one[place].get(number, 0.0) for one in passes) for place in (0, 1)
        )
        flops, nbytes = work[number]
        found.append(
            LayerTime(
                name=name, kind=type(layer).__name__, forward_s=forward, backward_s=backward,
                flops=flops, nbytes=nbytes,
            )
        )  # fmt: skip
    return tuple(found)


def _stamp(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _lasted(starts: list[tuple[int, Any]], ends: list[tuple[int, Any]]) -> dict[int, float]:
    """Seconds from each start to its end, by layer; a layer may be called several times."""
    found: dict[int, float] = {}
    for (number, start), (_, end) in zip(starts, ends, strict=False):
        apart = end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3
        found[number] = found.get(number, 0.0) + apart
    return found


@contextmanager
def _hooked(
    layers: Layers, before: Callable[[int], None], behind: Callable[[int, Any, Any], None]
) -> Iterator[None]:
    """Inside, layers call these with their number, and behind with what they got and made."""

    def hooks_of(number: int, layer: nn.Module) -> tuple[Any, Any]:
        return (
            layer.register_forward_pre_hook(lambda _, given: before(number)),
            layer.register_forward_hook(lambda _, given, made: behind(number, given, made)),
        )

    hooks = [hook for n, (_, layer) in enumerate(layers) for hook in hooks_of(n, layer)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched(layers: Layers, device: torch.device) -> Iterator[_Seen]:
    seen = _Seen()

    def before(number: int) -> None:
        seen.starts.append((number, _stamp(device)))

    def behind(number: int, given: Any, made: Any) -> None:
        seen.ends.append((number, _stamp(device)))
        if isinstance(made, Tensor) and made.grad_fn is not None:
            made.grad_fn.register_prehook(lambda _: seen.back.append((number, _stamp(device))))

    with _hooked(layers, before, behind):
        yield seen


def _work(layers: Layers, loss: Callable[[], Tensor]) -> dict[int, tuple[int, int]]:
    """Operations and bytes of both passes of each layer, by one forward pass."""
    found: dict[int, tuple[int, int]] = {}
    begun: dict[int, int] = {}

    def before(number: int) -> None:
        begun[number] = counter.get_total_flops()

    def behind(number: int, given: Any, made: Any) -> None:
        flops, nbytes = found.get(number, (0, 0))
        inputs = [t for t in given if isinstance(t, Tensor)]
        weights = list(layers[number][1].parameters(recurse=False))
        passes_on = any(t.requires_grad for t in inputs)
        learns = any(w.requires_grad for w in weights) if weights else passes_on
        flops += (1 + passes_on + learns) * (counter.get_total_flops() - begun[number])
        nbytes += sum(t.nbytes * (1 + t.requires_grad + learns) for t in inputs)
        nbytes += sum(w.nbytes * (1 + w.requires_grad + passes_on) for w in weights)
        if isinstance(made, Tensor):
            nbytes += made.nbytes * (1 + 2 * (passes_on or learns))
        found[number] = flops, nbytes

    with FlopCounterMode(display=False) as counter:  # with gradients, which tensors say if they ask
        with _hooked(layers, before, behind):
            loss()
    return found
