"""A network that is trained with the roundings of its INT8 plan: quantization-aware training.

It is made of a graph that says where it rounds, as the compiler and ONNX files write it. In
training it computes with floating numbers that are rounded by the very functions that define a
plan's steps; in evaluation it interprets what the compiler makes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tessella.core.errors import CompileError
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.interpret import interpret
from tessella.operations.reference.quant import along, dequantize, quantize, quantize_weight
from tessella.operations.table import operation

Lower = Callable[[Graph], Graph]

LEARNED = ("weight", "bias")  # operands that are trained where they are constants
PRODUCTS = ("conv1d", "conv2d", "conv3d", "linear")
WIDEST = 127  # what the largest weight of a channel becomes, where all are zero


class QuantizationAware(nn.Module):
    """A graph with ``quantize`` and ``dequantize`` nodes, as a module whose weights are trained.

    Activations keep the scales of the graph. The scales of weights follow the weights as the
    compiler computes them: the largest of each output channel becomes as much as the graph's own
    do, 127 or 64. Gradients pass a rounding as if it were not there (straight-through), but are
    zero where a number was out of range.

    It takes the graph's inputs in order, and returns its output, or a tuple of several.

    Args:
        graph: with constant scales. Weights in int8 that are rounded by channel are trained, and so
            are all floating constants that a node reads as its ``weight`` or ``bias``.
        floats: weights as they were before they were rounded, by the name of the rounded constant;
            without them training begins at the rounded ones.
        lower: what a compiler makes of a graph before it chooses kernels. Evaluation interprets its
            result; without it, the graph as it is.

    Raises:
        CompileError: the graph rounds nothing.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        floats: Mapping[str, Tensor] | None = None,
        lower: Lower | None = None,
    ) -> None:
        super().__init__()
        self._graph, self._lower = graph.copy(), lower
        if not any(node.op == "quantize" for node in self._graph.nodes):
            raise CompileError(
                "the network rounds nothing that it could be trained for",
                seen=f"{len(self._graph.nodes)} operations, none of them quantize",
                fix="choose layers that may be int8: those of 16 input channels or more, or others "
                "by precisions={NAME: 'int8'} (compiler.layers has the names)",
            )
        self._weights = {
            node.output: node["input"] for node in self._graph.nodes if self._is_weight(node)
        }
        self._keys = self._learned()
        self._weights = {made: read for made, read in self._weights.items() if read in self._keys}
        self._limits = {v: _limit(self._graph.constants[v]) for v in self._weights.values()}
        for number, (value, tensor) in enumerate(self._graph.constants.items()):
            if value not in self._keys:
                self._keys[value] = f"constant_{number}"
                self.register_buffer(self._keys[value], tensor, persistent=False)
                continue
            if value in self._limits:
                made = (floats or {}).get(value.name)
                tensor = self._as_floats(value) if made is None else made
            self.register_parameter(self._keys[value], nn.Parameter(tensor.detach().clone()))
        self._ready: tuple[Any, Graph] | None = None
        self._concrete: tuple[int, Graph] | None = None

    def forward(self, *given: Tensor) -> Tensor | tuple[Tensor, ...]:
        made = self._trained(given) if self.training else self._as_compiled(given)
        return made[0] if len(made) == 1 else made

    @torch.no_grad()
    def graph(self) -> Graph:
        """The graph with the weights of now, rounded: what is compiled, or written as ONNX."""
        made = self._graph.copy()
        by_name = {value.name: value for value in made.constants}
        for value, key in self._keys.items():
            tensor = getattr(self, key)
            if isinstance(tensor, nn.Parameter):
                tensor = tensor.detach().cpu()
                if value in self._limits:
                    tensor, scale = quantize_weight(
                        tensor, dtype=value.dtype, limit=self._limits[value]
                    )
                    for name in self._scales_of(value):
                        made.constants[by_name[name]] = scale
                made.constants[by_name[value.name]] = tensor.contiguous().clone()
        return made

    def layers(self) -> dict[str, nn.Parameter]:
        """The weights [K, C, …] of layers without groups, by parameter name."""
        found = {}
        for node in self._graph.nodes:
            if node.op not in PRODUCTS or node.attrs.get("groups", 1) != 1:
                continue
            read = node["weight"]
            key = self._keys.get(self._weights.get(read, read), "")
            parameter = self._parameters.get(key)
            if parameter is not None:
                found[key] = parameter
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizationAware:
        """A module of its own; a graph is a chain of nodes, too deep for Python's copying."""
        made = QuantizationAware(self._graph, lower=self._lower)
        made.load_state_dict({name: t.clone() for name, t in self.state_dict().items()})
        made.to(next(self.parameters()).device).train(self.training)
        for own, new in zip(self.parameters(), made.parameters(), strict=True):
            new.requires_grad_(own.requires_grad)
        return made

    # --- training

    def _trained(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        concrete = self._at(len(given[0]))
        live: dict[Value, Tensor] = dict(zip(self._graph.inputs, given, strict=True))
        for value, key in self._keys.items():
            live[value] = getattr(self, key)
        for node, attrs in zip(self._graph.nodes, (n.attrs for n in concrete.nodes), strict=True):
            read = [None if v is None else live[v] for v in node.inputs]
            if node.outputs[0] in self._weights:
                weight = self._weights[node.outputs[0]]
                made: tuple[Tensor, ...] = (_rounded_weight(live[weight], self._limits[weight]),)
            elif node.op == "quantize":
                x, scale, zero_point = read
                made = (_Rounded.apply(x, scale, zero_point, attrs["axis"], attrs["dtype"]),)
            else:
                made = operation(node.op).call(read, attrs)
            live.update(zip(node.outputs, made, strict=True))
        return tuple(live[value] for value in self._graph.outputs)

    def _at(self, batch: int) -> Graph:
        """The graph with the attributes of a batch size."""
        if self._concrete is None or self._concrete[0] != batch:
            self._concrete = batch, self._graph.at_batch(batch)
        return self._concrete[1]

    # --- evaluation

    def _as_compiled(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        graph = self._compiled(given[0].device)
        named = {value.name: tensor for value, tensor in zip(graph.inputs, given, strict=True)}
        made = interpret(graph, named, once=True)
        return tuple(made[value.name] for value in graph.outputs)

    def _compiled(self, device: torch.device) -> Graph:
        """The graph that evaluation interprets; made anew when a weight was changed."""
        state = (device, *(parameter._version for parameter in self.parameters()))
        state += tuple(id(parameter) for parameter in self.parameters())
        if self._ready is None or self._ready[0] != state:
            graph = self.graph()
            graph = graph if self._lower is None else self._lower(graph)
            for value, tensor in graph.constants.items():
                graph.constants[value] = tensor.to(device)
            self._ready = state, graph
        return self._ready[1]

    # --- what is trained

    def _is_weight(self, node: Node) -> bool:
        """Whether a node gives the numbers of a weight in int8, rounded for each output channel."""
        if node.op != "dequantize" or node.attrs["axis"] != 0:
            return False
        constants = self._graph.constants
        weight, scale = constants.get(node["input"]), constants.get(node["scale"])
        zero = node.get("zero_point")
        if weight is None or scale is None or weight.dtype != torch.int8 or weight.dim() < 2:
            return False
        centred = zero is None or (zero in constants and not constants[zero].any())
        return centred and scale.shape == weight.shape[:1]

    def _learned(self) -> dict[Value, str]:
        """Parameters' names, by the constants that nodes read as weights and biases.

        Layers are numbered: names of constants change a little when a file is written and read.
        """
        found: dict[Value, str] = {}
        layers = 0
        for node in self._graph.nodes:
            new = {}
            for name, value in zip(node.operation.operands, node.inputs, strict=False):
                if value is None or name not in LEARNED:
                    continue
                constant = self._weights.get(value, value)
                tensor = self._graph.constants.get(constant)
                if tensor is None or constant in found:
                    continue
                if constant is not value or tensor.is_floating_point():
                    new[constant] = f"layer_{layers}/{name}"
            layers += bool(new)
            found |= new
        return found

    def _scales_of(self, weight: Value) -> set[str]:
        return {node["scale"].name for node in self._readers_of(weight)}

    def _readers_of(self, weight: Value) -> list[Node]:
        """The nodes that give the numbers of a rounded weight."""
        return [n for n in self._graph.users(weight) if n.outputs[0] in self._weights]

    def _as_floats(self, weight: Value) -> Tensor:
        """A rounded weight's numbers."""
        scale = self._graph.constants[self._readers_of(weight)[0]["scale"]]
        return dequantize(self._graph.constants[weight], scale, axis=0, dtype="float32")


def _limit(weight: Tensor) -> int:
    """What the largest number of each channel was quantized to."""
    return int(weight.int().abs().max()) or WIDEST


def _rounded_weight(weight: Tensor, limit: float) -> Tensor:
    """A weight as the plan multiplies it; its gradient is that of the weight."""
    with torch.no_grad():
        quantized, scale = quantize_weight(weight, dtype="int8", limit=limit)
        numbers = dequantize(quantized, scale, axis=0, dtype="float32")
    made: Tensor = _Replaced.apply(weight, numbers)
    return made


class _Replaced(torch.autograd.Function):
    """Other numbers in place of a tensor's, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor) -> Tensor:
        return numbers.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Rounded(torch.autograd.Function):
    """``quantize``, whose integers are floating numbers here; out of range no gradient passes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, dtype: str
    ) -> Tensor:
        made = quantize(x, scale, zero_point, axis=axis, dtype=dtype)
        factor = along(scale, x, axis)
        place = x / factor
        if zero_point is not None:
            place = place + along(zero_point, x, axis).to(place.dtype)
        kind = getattr(torch, dtype)
        limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
        ctx.save_for_backward((place >= limits.min) & (place <= limits.max), factor)
        return made.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        within, factor = ctx.saved_tensors
        return gradients[0] / factor * within, None, None, None, None
