"""Calibration: what a network's values are like on a user's data, and the scales that follow.

The optimized graph is interpreted over some batches for histograms, from which each value gets the
largest magnitude that is told apart, and over the first of them again for what rounding does to
each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_tensors

from tessella.artifacts.files import from_document, to_document, write_atomic
from tessella.compiler.histogram import METHODS, Histogram
from tessella.compiler.layers import LAYERS
from tessella.compiler.rewrites.lower_quantization import moves_elements
from tessella.core.device import default_target
from tessella.core.dtype import dtype_name
from tessella.core.errors import ArtifactError, CompileError, UsageError
from tessella.device.x86 import code
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.interpret import interpret
from tessella.graph.value import fixed
from tessella.kernels.shared import onednn
from tessella.operations.reference.quant import dequantize, quantize, quantize_weight
from tessella.operations.table import operation

Tensors = dict[str, torch.Tensor]

DTYPES = {"int8": "int8", "fp8": "float8_e4m3fn"}
LARGEST = {"int8": 127.0, "fp8": 448.0}  # what the greatest quantized value stands for, in scales
LEAST = -128  # of int8
ONE_SIDED = 0.5  # of the largest number: values that reach less below zero have a zero point
VERSION = 2  # of the file: 2, as an activation behind views became its layer's
ERROR_SAMPLES = 64  # that errors are measured on: a mean over positions needs no more
SAMPLES = 3  # kept for the check of a plan
METHOD = "mse"  # unless a user says otherwise
PICTURE_AXES = 4  # or more: a batch of pictures or volumes


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was found out about a network on some data.

    Attributes:
        method: of ``histogram.METHODS``, for int8; fp8 has the range to keep the largest.
        samples: how many were seen.
        thresholds: by value name, the largest magnitude that int8 tells apart.
        largest: by value name, the largest magnitude seen.
        zero_points: by value name, what int8 writes zero as, if not as 0: of values that hardly
            reach below zero, which have 255 steps so instead of 127.
        snr_db: by kind (``int8``, ``fp8``) and name of a layer's result, 10·log₁₀ of the power of
            its product over that of the error which rounding its activations and weights makes.
        corrections: by kind and layer, what its bias gets so that the error is zero in the mean.
        weight_limit: the greatest magnitude of a quantized int8 weight: 127, or what the target
            multiplies at full speed where that is less.
        inputs: the first samples, with which a plan is checked.
    """

    method: str
    samples: int
    thresholds: dict[str, float]
    largest: dict[str, float]
    snr_db: dict[str, dict[str, float]]
    weight_limit: int = 127
    zero_points: dict[str, int] = field(default_factory=dict)
    corrections: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def scale(self, name: str, kind: str) -> float:
        """The step between neighbouring quantized values; 1 where the value was all zeros."""
        if kind == "int8":
            return self.thresholds[name] / (LARGEST[kind] - self.zero_point(name, kind)) or 1.0
        return self.largest[name] / LARGEST[kind] or 1.0

    def zero_point(self, name: str, kind: str) -> int:
        """What zero is written as."""
        return self.zero_points.get(name, 0) if kind == "int8" else 0

    def suiting(self, target: str) -> Calibration:
        """For a target that may be another than it was made for: without zero points, if it is no
        CPU that reads them as fast as none.
        """
        return self if shifts_zeros(target) else replace(self, zero_points={})

    def largest_weight(self, kind: str) -> float:
        """The magnitude that the largest weight of a channel becomes."""
        return self.weight_limit if kind == "int8" else LARGEST[kind]

    def snr_of(self, graph: Graph, kinds: Mapping[str, str]) -> dict[str, float]:
        """``snr_db`` of layers in these kinds, by module path: the worst where one runs twice."""
        found: dict[str, float] = {}
        for node in graph.nodes:
            name = node.outputs[0].name
            known = self.snr_db.get(kinds.get(name, ""), {})
            if name in known:
                key = node.layer or name
                found[key] = round(min(known[name], found.get(key, math.inf)), 2)
        return found

    def samples_for(self, graph: Graph) -> Mapping[str, torch.Tensor] | None:
        """``inputs``, if the graph reads such: one that takes images as bytes does not."""
        for value in graph.inputs:
            tensor = self.inputs.get(value.name)
            if (
                tensor is None
                or dtype_name(tensor.dtype) != value.dtype
                or tuple(tensor.shape[1:]) != tuple(value.shape[1:])
            ):
                return None
        return self.inputs

    def save(self, path: str | Path) -> Path:
        """Write it to one safetensors file, atomically."""
        path = Path(path)
        tensors = {f"input/{n}": t for n, t in self.inputs.items()} | {
            f"correction/{kind}/{layer}": t
            for kind, layers in self.corrections.items()
            for layer, t in layers.items()
        }
        numbers = _Numbers(**{name: getattr(self, name) for name in _Numbers.__annotations__})
        record = to_document("calibration", VERSION, numbers).decode()
        write_atomic(path, save_tensors(tensors, {"calibration": record}))
        return path


@dataclass(frozen=True, kw_only=True)
class _Numbers:
    """The part of a ``Calibration`` that is written as JSON."""

    method: str
    samples: int
    thresholds: dict[str, float]
    largest: dict[str, float]
    snr_db: dict[str, dict[str, float]]
    weight_limit: int = 127
    zero_points: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 1 <= self.weight_limit <= LARGEST["int8"]:
            raise ValueError(f"int8 weights reach from 1 to 127, not {self.weight_limit}")
        if wrong := [z for z in self.zero_points.values() if not LEAST <= z <= 0 or z % 2]:
            raise ValueError(
                f"int8 writes zero as an even number from {LEAST} to 0, not {wrong[0]}"
            )


def load_calibration(path: str | Path) -> Calibration:
    """Read what ``Calibration.save`` wrote.

    Raises:
        ArtifactError: there is no such file, or it is another one.
    """
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get("calibration", "")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ArtifactError(
            "this is not a calibration", seen=f"{path}: {error}", fix="calibrate again"
        ) from error
    numbers = from_document(
        text.encode(), _Numbers, kind="calibration", version=VERSION, where=str(path)
    )
    corrections: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        if name.startswith("correction/"):
            _, kind, layer = name.split("/", 2)
            corrections.setdefault(kind, {})[layer] = tensor
    inputs = {n.removeprefix("input/"): t for n, t in tensors.items() if n.startswith("input/")}
    return Calibration(**vars(numbers), corrections=corrections, inputs=inputs)


def calibrate(
    graph: Graph,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    method: str = METHOD,
    kinds: Iterable[str] = ("int8",),
    target: str | None = None,
) -> Calibration:
    """Run an optimized graph over batches and choose its scales.

    Args:
        graph: float32, as the passes leave it; it is not changed.
        batches: the inputs by name; read twice. They should be like what the plan will see, and
            apart from what it is judged by.
        method: ``min-max``, ``percentile`` (99.99), ``entropy`` or ``mse``; of pictures that are
            inputs always ``min-max``.
        kinds: what rounding is tried with, for ``snr_db`` and ``corrections``.
        target: the device of the plan, by default this machine's: see ``weight_limit``.

    Raises:
        UsageError: an unknown method or kind.
        CompileError: no samples, or values that are not finite.
    """
    _require_known(method, kinds)
    layers = lowerable(graph)
    ends = {v for n in layers for v in (n["input"], n.get("residual"), n.output) if v}
    groups = _groups(graph, ends)
    watcher = _Watcher(groups)
    samples = 0
    for batch in batches:
        samples += len(next(iter(batch.values())))
        for value in graph.inputs:
            watcher.count(value, batch[value.name])
        interpret(graph, batch, watch=watcher)
    if not samples:
        raise CompileError("there is nothing to calibrate with", fix="give some samples")
    # a picture's numbers have bounds, and often lie there: entropy cut blobs down to 7 dB
    pictures = {groups[v] for v in graph.inputs if v in groups and len(v.shape) >= PICTURE_AXES}
    target = target or default_target()
    shifted = _may_shift(graph, layers, groups) if shifts_zeros(target) else frozenset()
    chosen, zeros = dict[Value, float](), dict[Value, int]()
    for root, histogram in watcher.histograms.items():
        choose = METHODS["min-max" if root in pictures else method]
        zero = _zero_point(histogram.lowest, histogram.largest) if root in shifted else 0
        chosen[root] = reach = choose(histogram, int(LARGEST["int8"]) - zero)
        if zero := zero and _zero_point(histogram.lowest, reach):
            zeros[root] = zero
    found = Calibration(
        method=method,
        samples=samples,
        thresholds={v.name: chosen[root] for v, root in groups.items() if root in chosen},
        largest={
            v.name: watcher.histograms[root].largest
            for v, root in groups.items()
            if root in watcher.histograms
        },
        snr_db={},
        weight_limit=weight_limit(target),
        zero_points={v.name: zeros[root] for v, root in groups.items() if root in zeros},
        inputs=_first_samples(batches),
    )
    errors = {kind: _errors(graph, layers, batches, found, kind) for kind in kinds}
    return Calibration(
        **{
            **vars(found),
            "snr_db": {k: {n: e.snr_db for n, e in made.items()} for k, made in errors.items()},
            "corrections": {
                k: {n: e.correction for n, e in made.items()} for k, made in errors.items()
            },
        }
    )


def lowerable(graph: Graph) -> list[Node]:
    """The layers of an optimized graph that may work on int8 or fp8: with constant weights."""
    return [
        n
        for n in graph.nodes
        if n.op in LAYERS
        and n.get("scale") is None
        and n.output.dtype == n["input"].dtype == "float32"
        and n["input"] not in graph.constants
        and n["weight"] in graph.constants
        and (n.get("bias") is None or n["bias"] in graph.constants)
    ]


def weight_limit(target: str) -> int:
    """The greatest quantized int8 weight that a target multiplies at full speed.

    127; 64 on a CPU whose products saturate (``kernels.onednn``): one bit of the weights for
    twice the speed.
    """
    return onednn.NARROW if target == "cpu" and onednn.narrow_sums() else 127


def shifts_zeros(target: str) -> bool:
    """Whether a target's layers read int8 with a zero point as fast as without: a CPU's do whose
    products are added in 32 bits.

    Elsewhere what is not below zero is known to have 7 bits (``mark_non_negative``).
    """
    return target == "cpu" and code.adds_in_32_bits()


def _may_shift(graph: Graph, layers: list[Node], groups: Mapping[Value, Value]) -> frozenset[Value]:
    """The groups that may have a zero point: only layers read them that pad nothing.

    There the zero point is a part of the bias. Around an image it would have to be padded with.
    Layers that write int8 behind another activation than a ReLU would write float32, and a step
    round it: that is worth it before the network's results, where no layer evens errors out.
    """
    last = {groups.get(n["input"]) for n in layers if n.output in graph.outputs}
    kept = set()
    for value, root in groups.items():
        maker = graph.producer(value)
        if (
            value in graph.outputs
            or (maker in layers and _writes_behind(maker) and root not in last)
            or not all(
                (moves_elements(node) and node.op != "relu")
                or (node in layers and _pads_nothing(node) and node.get("residual") is not value)
                for node in graph.users(value)
            )
        ):
            kept.add(root)
    return frozenset(groups.values()) - kept


def _writes_behind(layer: Node) -> bool:
    """Whether a layer, as int8, has an activation that its result's zero point cannot pass."""
    grouped = layer.attrs.get("groups", 1) > 1  # these stay float32
    return not grouped and layer.attrs["activation"] not in (None, "relu")


def _pads_nothing(node: Node) -> bool:
    return node.op != "conv2d" or not (any(node.attrs["padding"]) or node.attrs["groups"] > 1)


def _zero_point(lowest: float, reach: float) -> int:
    """What zero is written as where numbers lie between ``lowest`` and ``reach``; 0 where so much
    lies below zero that a zero point would gain little.

    It is even: behind an odd one ties fall the other way, and layers would not write such values.
    """
    below = -lowest / reach if reach else 1.0
    if below > ONE_SIDED:
        return 0
    return LEAST + 2 * round((127 - LEAST) * below / (1 + below) / 2)


def rounded_weight(
    weight: torch.Tensor, kind: str, limit: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [K, …] quantized, and the scale of each of its K output channels, float32.

    Args:
        limit: the magnitude that the largest weight of a channel becomes.
    """
    return quantize_weight(weight, dtype=DTYPES[kind], limit=limit)


def _require_known(method: str, kinds: Iterable[str]) -> None:
    if method not in METHODS:
        raise UsageError("unknown calibration", seen=method, fix=f"use {', '.join(METHODS)}")
    if unknown := sorted(set(kinds) - set(DTYPES)):
        raise UsageError("unknown rounding", seen=unknown, fix=f"use {', '.join(DTYPES)}")


def _first_samples(batches: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """One sample of each of the first batches, or several of the only one."""
    first = batches[: min(SAMPLES, len(batches))]
    each = math.ceil(SAMPLES / len(first))
    return {n: torch.cat([b[n][:each].cpu() for b in first])[:SAMPLES] for n in batches[0]}


def _groups(graph: Graph, wanted: set[Value]) -> dict[Value, Value]:
    """Each value with the one that stands for its group: values that share a scale.

    What is only moved keeps its quantized values, and so the scale.
    """
    above: dict[Value, Value] = {}

    def root(value: Value) -> Value:
        while above.get(value, value) is not value:
            value = above[value]
        return value

    for node in graph.nodes:
        # before relu there may be much that it cuts off
        if moves_elements(node) and node.op != "relu":
            for value in (*node.inputs, *node.outputs):
                if value is not None:
                    above[root(value)] = root(node.outputs[0])
    reached = {root(v) for v in wanted}
    return {v: root(v) for v in graph.values() if v not in graph.constants and root(v) in reached}


class _Watcher:
    """Histograms of each group of values, as the graph runs."""

    def __init__(self, groups: Mapping[Value, Value]) -> None:
        self._groups = groups
        self.histograms: dict[Value, Histogram] = {}

    def __call__(
        self,
        node: Node,
        read: Sequence[torch.Tensor | None],
        made: Sequence[torch.Tensor],
    ) -> None:
        moves = moves_elements(node) and node.op != "relu"
        # what is moved has been counted, but for constants
        if not moves or any(v is not None and v not in self._groups for v in node.inputs):
            for value, tensor in zip(node.outputs, made, strict=True):
                self.count(value, tensor)

    def count(self, value: Value, tensor: torch.Tensor) -> None:
        if value not in self._groups or not tensor.is_floating_point():
            return
        if not torch.isfinite(tensor).all():
            raise CompileError(
                "the network's values are not finite on this data",
                seen=f"NaN or infinity in {value}",
                fix="check the weights and the samples",
            )
        self.histograms.setdefault(self._groups[value], Histogram()).add(tensor)


@dataclass(frozen=True, kw_only=True)
class _Error:
    snr_db: float
    correction: torch.Tensor


class _Moments:
    """Sums over all samples and positions of a layer's product, and of its error, by channel."""

    def __init__(self, channels: int) -> None:
        self.count = 0
        self.power = 0.0
        self.error, self.squared = (torch.zeros(channels).double() for _ in range(2))

    def add(self, product: torch.Tensor, error: torch.Tensor, axis: int) -> None:
        """Add a batch; ``axis`` is that of the channels."""
        rows = error.double().movedim(axis, 0).flatten(1).cpu()
        self.count += rows.shape[1]
        self.power += float(product.double().square().sum())
        self.error += rows.sum(1)
        self.squared += rows.square().sum(1)

    def result(self) -> _Error:
        """What is left after each channel's mean error is taken off its bias."""
        mean = self.error / self.count
        noise = float((self.squared - self.count * mean.square()).clamp_min(0).sum())
        ratio = self.power / noise if noise > 0 else math.inf
        # JSON has no infinity: a layer without error is called 200 dB
        snr_db = min(200.0, 10 * math.log10(ratio)) if ratio > 0 else -200.0
        return _Error(snr_db=snr_db, correction=(-mean).float())


def _errors(
    graph: Graph,
    layers: list[Node],
    batches: Sequence[Mapping[str, torch.Tensor]],
    found: Calibration,
    kind: str,
) -> dict[str, _Error]:
    """What rounding one layer alone does to its product, by the name of its result."""
    moments = {n: _Moments(fixed(n["weight"].shape[0])) for n in layers}
    limit = found.largest_weight(kind)
    weights = {n["weight"]: _as_rounded(graph.constants[n["weight"]], kind, limit) for n in layers}

    def watch(
        node: Node, read: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> None:
        x, weight = read[:2] if node in moments else (None, None)
        if x is None or weight is None:
            return
        name = node["input"].name
        scale = torch.tensor(found.scale(name, kind), device=x.device)
        zero = torch.tensor(found.zero_point(name, kind), device=x.device)
        quantized = quantize(x, scale, zero, axis=0, dtype=DTYPES[kind])
        rounded = dequantize(quantized, scale, zero, axis=0, dtype="float32")
        product = _product(node)
        exact = product(x, weight)
        error = product(rounded, weights[node["weight"]].to(x.device)) - exact
        moments[node].add(exact, error, 1 if node.op == "conv2d" else -1)

    seen = 0
    for batch in batches:
        if seen < ERROR_SAMPLES:
            interpret(graph, batch, watch=watch)
            seen += len(next(iter(batch.values())))
    return {n.output.name: m.result() for n, m in moments.items()}


def _as_rounded(weight: torch.Tensor, kind: str, limit: float) -> torch.Tensor:
    quantized, scale = rounded_weight(weight, kind, limit)
    return dequantize(quantized, scale, axis=0, dtype="float32")


def _product(node: Node) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product of a layer, without its epilogue."""
    attrs = {k: v for k, v in node.attrs.items() if k != "activation"}
    return lambda x, weight: operation(node.op).call([x, weight], attrs)[0]
