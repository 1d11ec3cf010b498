"""A network layer by layer: a table before training, activations and weights after it.

``write_view`` draws the layer that somebody looks at, ``write_views`` all of them into a folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tessella.artifacts.files import to_document, write_folder
from tessella.core.errors import UsageError, first_line
from tessella.nn.picture import write_png

VERSION = 1
BINS = 20


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics over the finite values of a tensor.

    Attributes:
        histogram: counts in 20 equal parts of min to max (all in the first if these are equal).
        not_finite: how many values are NaN or infinite; no other field counts them.
    """

    min: float
    max: float
    mean: float
    std: float
    histogram: tuple[int, ...]
    not_finite: int


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer at work.

    Attributes:
        name: path of the layer in the network.
        call: 1, or more for a further call of the same layer in one pass.
        type: class of the layer.
        output_shape: shape of the output, batch included.
        parameters: number of trainable values.
        activation: statistics of the output over the whole batch; None for another than a tensor.
        weights: statistics of each parameter, by name.
        activation_picture, weight_picture: PNG files beside ``layers.json``; the activation is
            that of the first example.
    """

    name: str
    call: int
    type: str
    output_shape: tuple[int, ...]
    parameters: int
    activation: Statistics | None
    weights: dict[str, Statistics]
    activation_picture: str | None = None
    weight_picture: str | None = None


@dataclass(frozen=True, kw_only=True)
class LayerLine:
    """One layer in a list: what is known of it without looking at its values."""

    name: str
    type: str
    output_shape: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, kw_only=True)
class LayerLook:
    """All layers in a list, and the one that somebody looks at; None where there is none."""

    parameters: int
    layers: tuple[LayerLine, ...]
    layer: LayerView | None


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """The content of ``layers.json``: the layers in the order in which they run."""

    input_shape: tuple[int, ...]
    parameters: int
    layers: tuple[LayerView, ...]


@dataclass(kw_only=True)
class KnownViews:
    """What of a network's layers is the same for every input.

    Attributes:
        statistics, pictures: of the weights, by layer.
        lines: the layers in a list, by the input's shape.
    """

    statistics: dict[str, dict[str, Statistics]] = field(default_factory=dict)
    pictures: dict[str, bytes] = field(default_factory=dict)
    lines: dict[tuple[int, ...], tuple[LayerLine, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One layer of a summary; ``macs`` are multiply-accumulates for one example."""

    name: str
    type: str
    output_shape: tuple[int, ...]
    parameters: int
    macs: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A network as a table. Its totals include parameters and products outside of the leaf layers,
    such as a transformer's position embedding."""

    input_shape: tuple[int, ...]
    parameters: int
    macs: int
    rows: tuple[SummaryRow, ...]


def statistics(tensor: Tensor) -> Statistics:
    """Minimum, maximum, mean, standard deviation and histogram of a tensor of any type."""
    values = tensor.detach().float().flatten()
    is_finite = values.isfinite()
    finite = values if bool(is_finite.all()) else values[is_finite]
    if finite.numel() == 0:
        empty = (0,) * BINS
        return Statistics(
            min=0.0, max=0.0, mean=0.0, std=0.0, histogram=empty, not_finite=values.numel()
        )
    low, high = float(finite.min()), float(finite.max())
    mean = finite.mean(dtype=torch.float64)
    variance = (finite - mean).square().mean(dtype=torch.float64)
    if high > low:
        counts = tuple(int(n) for n in finite.histc(BINS, low, high))
    else:
        counts = (finite.numel(), *(0,) * (BINS - 1))
    return Statistics(
        min=low,
        max=high,
        mean=float(mean),
        std=float(variance.sqrt()),
        histogram=counts,
        not_finite=values.numel() - finite.numel(),
    )


def layers(module: nn.Module, x: Tensor) -> list[LayerView]:
    """Run a batch ``[N, …]`` and describe every leaf layer, in the order in which they run."""
    views: list[LayerView] = []
    known = KnownViews()

    def end(layer: nn.Module, name: str, call: int, output: Any) -> None:
        views.append(_view(layer, name, call, output, known))

    _run(module, x, lambda layer, name: None, end)
    return views


class _SeenEnough(Exception):
    """Ends a pass behind the layer that somebody looks at."""


def write_view(
    module: nn.Module, x: Tensor, folder: Path, index: int, *, known: KnownViews
) -> LayerLook:
    """Run a batch ``[N, …]``, describe its layer number ``index``, and draw it into ``folder``.

    The others are only listed: of ResNet-18 at 224 pixels one layer takes 0.09 s, all of them 0.9 s
    (one core). Where the list is known, nothing runs behind the layer. The folder is a cache, whose
    files are not synced to disk.

    Args:
        known: what earlier calls saw of this module's layers; what is missing is added.
    """
    listed = known.lines.get(tuple(x.shape))
    lines: list[LayerLine] = []
    looked: list[LayerView] = []
    folder.mkdir(parents=True, exist_ok=True)

    def end(layer: nn.Module, name: str, call: int, output: Any) -> None:
        line = LayerLine(
            name=name,
            type=type(layer).__name__,
            output_shape=_shape(output),
            parameters=_parameters(layer),
        )
        lines.append(line)
        if len(lines) == index + 1:
            looked.append(_drawn(layer, name, call, output, known, folder, index))
            if listed is not None and listed[: index + 1] == tuple(lines):
                raise _SeenEnough

    try:
        _run(module, x, lambda layer, name: None, end)
        listed = known.lines[tuple(x.shape)] = tuple(lines)
    except _SeenEnough:
        assert listed is not None
    layer = looked[0] if looked else None
    return LayerLook(parameters=_parameters(module), layers=listed, layer=layer)


def write_views(module: nn.Module, x: Tensor, folder: Path) -> LayerReport:
    """Like ``layers``, into a folder: ``layers.json`` and two PNGs a layer. Replaces the folder.

    Args:
        x: a batch ``[N, …]``; the pictures show its first example.
    """
    views: list[LayerView] = []
    known = KnownViews()

    def fill(temporary: Path) -> None:
        def end(layer: nn.Module, name: str, call: int, output: Any) -> None:
            # at once after each layer: a later in-place layer changes what it made
            views.append(_drawn(layer, name, call, output, known, temporary, len(views)))

        _run(module, x, lambda layer, name: None, end)
        (temporary / "layers.json").write_bytes(to_document("layers", VERSION, report()))

    def report() -> LayerReport:
        return LayerReport(
            input_shape=tuple(x.shape), parameters=_parameters(module), layers=tuple(views)
        )

    write_folder(folder, fill)
    return report()


def summary(module: nn.Module, input_shape: tuple[int, ...]) -> Summary:
    """The network as a table, by running one black input ``[1, *input_shape]``.

    A module built under ``torch.device("meta")`` is summarized without memory or arithmetic.
    """
    rows: list[SummaryRow] = []
    flops_before: dict[nn.Module, int] = {}
    first = next(module.parameters(), None)
    x = torch.zeros(1, *input_shape, device=None if first is None else first.device)

    def begin(layer: nn.Module, name: str) -> None:
        flops_before[layer] = counter.get_total_flops()

    def end(layer: nn.Module, name: str, call: int, output: Any) -> None:
        rows.append(
            SummaryRow(
                name=name,
                type=type(layer).__name__,
                output_shape=_shape(output),
                parameters=_parameters(layer) if call == 1 else 0,
                macs=(counter.get_total_flops() - flops_before[layer]) // 2,
            )
        )

    # attention as its products: older torch does not count the fused kernel of the CPU
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        _run(module, x, begin, end)
    return Summary(
        input_shape=tuple(input_shape),
        parameters=_parameters(module),
        macs=counter.get_total_flops() // 2,
        rows=tuple(rows),
    )


# --- running with hooks -------------------------------------------------------------------------


def _view(layer: nn.Module, name: str, call: int, output: Any, known: KnownViews) -> LayerView:
    """A call of a layer: its output's shape and statistics, without pictures."""
    if name not in known.statistics:
        known.statistics[name] = {k: statistics(p) for k, p in layer.named_parameters()}
    return LayerView(
        name=name,
        call=call,
        type=type(layer).__name__,
        output_shape=_shape(output),
        parameters=_parameters(layer),
        activation=statistics(output) if isinstance(output, Tensor) else None,
        weights=known.statistics[name],
    )


def _drawn(
    layer: nn.Module,
    name: str,
    call: int,
    output: Any,
    known: KnownViews,
    folder: Path,
    index: int,
) -> LayerView:
    """What one layer made, with pictures of it and of its weights in ``folder``."""
    activation, weight = folder / f"{index:04d}-activation.png", folder / f"{index:04d}-weight.png"
    first = output[0] if isinstance(output, Tensor) and output.ndim else None
    if name in known.pictures:
        weight.write_bytes(known.pictures[name])
    elif _draw(getattr(layer, "weight", None), weight):
        known.pictures[name] = weight.read_bytes()
    return replace(
        _view(layer, name, call, output, known),
        activation_picture=activation.name if _draw(first, activation) else None,
        weight_picture=weight.name if name in known.pictures else None,
    )


def _draw(tensor: Any, file: Path) -> bool:
    """Draw a tensor; False where it is no tensor, or has no element."""
    if not isinstance(tensor, Tensor) or not tensor.numel():
        return False
    write_png(tensor, file)
    return True


def _run(
    module: nn.Module,
    x: Tensor,
    begin: Callable[[nn.Module, str], None],
    end: Callable[[nn.Module, str, int, Any], None],
) -> None:
    """One pass in evaluation mode, with ``begin`` before and ``end`` after each leaf layer."""
    calls: Counter[str] = Counter()

    def before(name: str, layer: nn.Module, inputs: Any) -> None:
        begin(layer, name)

    def after(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        calls[name] += 1
        end(layer, name, calls[name], output)

    handles = []
    for name, layer in module.named_modules():
        if not any(True for _ in layer.children()):
            handles.append(layer.register_forward_pre_hook(partial(before, name)))
            handles.append(layer.register_forward_hook(partial(after, name)))
    try:
        with _evaluation(module), torch.no_grad():
            module(x)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            "the network cannot take this input",
            seen=f"{list(x.shape)}: {first_line(error)}",
            fix="give the shape that the network was made for",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode, and restore each layer's own mode afterwards."""
    modes = {layer: layer.training for layer in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for layer, training in modes.items():
            layer.training = training


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _shape(output: Any) -> tuple[int, ...]:
    return tuple(output.shape) if isinstance(output, Tensor) else ()
