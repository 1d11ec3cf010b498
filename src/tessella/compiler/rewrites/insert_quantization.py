"""Chosen layers round their activations and weights to int8 or fp8: ``quantize``, ``dequantize``.

The graph stays one of floating numbers that says where it rounds; ``lower_quantization`` makes
layers on int8 of it. A tensor of activations has one scale, and perhaps a zero point, by
calibration; each output channel of a weight has a scale, by its largest magnitude.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import torch

from tessella.compiler.calibration import DTYPES, Calibration, rounded_weight
from tessella.compiler.rewrites import fold_floors
from tessella.compiler.rewrites.lower_quantization import moves_elements
from tessella.core.errors import CompileError
from tessella.graph.graph import Graph, Node, Value


def apply(
    graph: Graph, kinds: Mapping[str, str], calibration: Calibration, *, floors: bool = False
) -> int:
    """Insert the quantization of what the layers read; returns how many layers there are.

    Args:
        kinds: ``int8`` or ``fp8`` by the name of a layer's result.
        floors: a factor and a sum behind a layer's ReLU will be its own (``fold_floors``), so that
            what they make is what the layer makes.

    Raises:
        CompileError: the calibration has not seen a layer: it is of another network.
    """
    layers = {n: None for n in graph.nodes if n.outputs[0].name in kinds}  # a set in order
    rounder = _Rounder(graph, calibration, {n.output: kinds[n.output.name] for n in layers})
    if floors:
        rounder.made |= {b.plus.output for n in layers if (b := fold_floors.behind(graph, n))}
    for value, wanted in rounder.activations(layers).items():
        rounder.round(value, wanted, layers)
    for node in layers:
        kind = kinds[node.output.name]
        node.rebind(weight=rounder.weight(node["weight"], kind), bias=rounder.bias(node, kind))
    return len(layers)


class _Rounder:
    def __init__(
        self, graph: Graph, calibration: Calibration, kind_of_layer: Mapping[Value, str]
    ) -> None:
        self._graph, self._calibration = graph, calibration
        self._kind_of_layer = kind_of_layer
        self.made = {*kind_of_layer}  # by layers
        self._weights: dict[tuple[Value, str], Value] = {}
        self._rounds_residual: set[Node] = set()  # layers whose residual is rounded

    def activations(self, layers: Collection[Node]) -> dict[Value, set[str]]:
        """What is rounded, and to what: all that layers read, and residuals of layers between.

        A residual is rounded where the layer's own result will be, or where it is read by a layer
        as well and made by one: then it exists in 8 bits only. The sums between transformer blocks
        are neither, nor is what a norm makes: it writes both, and the sum adds what was not
        rounded.
        """
        wanted: dict[Value, set[str]] = {}
        for node in layers:
            wanted.setdefault(node["input"], set()).add(self._kind_of_layer[node.output])
        moved = set(self._moved_from(*wanted))
        for node in layers:
            residual = node.get("residual")
            if residual is None:
                continue
            if node.output in moved or (residual in moved and self._by_layers(residual)):
                wanted.setdefault(residual, set()).add(self._kind_of_layer[node.output])
                self._rounds_residual.add(node)
        return wanted

    def _by_layers(self, value: Value) -> bool:
        """Whether layers make a value, or what it is moved from."""
        return any(v in self.made for v in self._moved_from(value))

    def _moved_from(self, *values: Value) -> Iterator[Value]:
        """Values, and those that they are made of by moving elements only, each once."""
        found, open_ = set(values), list(values)
        while open_:
            yield (value := open_.pop())
            maker = self._graph.producer(value)
            if maker is not None and moves_elements(maker):
                before = [v for v in dict.fromkeys(maker.inputs) if v is not None]
                open_ += [v for v in before if v not in found]
                found.update(before)

    def round(self, value: Value, kinds: set[str], layers: Collection[Node]) -> None:
        """Let the layers read the rounded value; all readers, where a layer makes it.

        The result of a layer is then stored only once, in 8 bits. Where layers of two kinds read
        it, others read it as it is.
        """
        by_layers = self._by_layers(value)
        readers = self._graph.users(value)
        for kind in sorted(kinds):
            rounded = self._rounded(value, kind)
            for node in readers:
                if self._kind_of_layer.get(node.outputs[0]) == kind:
                    if node["input"] is value:
                        node.rebind(input=rounded)
                    if node in self._rounds_residual and node["residual"] is value:
                        node.rebind(residual=rounded)
                elif node not in layers and by_layers and len(kinds) == 1:
                    node.inputs = tuple(rounded if v is value else v for v in node.inputs)

    def _rounded(self, value: Value, kind: str) -> Value:
        graph = self._graph
        number, shift = self._scale(value, kind)
        scale = graph.add_constant(f"{value.name}.{kind}.scale", torch.tensor(number))
        zero = (
            graph.add_constant(f"{value.name}.{kind}.zero", torch.tensor(shift, dtype=torch.int8))
            if shift
            else None
        )
        small = Value(graph.fresh_name(f"{value.name}.{kind}"), DTYPES[kind], value.shape)
        back = Value(graph.fresh_name(f"{value.name}.rounded"), value.dtype, value.shape)
        nodes = [
            Node(
                op="quantize",
                inputs=(value, scale, zero),
                outputs=(small,),
                attrs={"axis": 0, "dtype": DTYPES[kind]},
            ),
            Node(
                op="dequantize",
                inputs=(small, scale, zero),
                outputs=(back,),
                attrs={"axis": 0, "dtype": value.dtype},
            ),
        ]
        maker = graph.producer(value)
        if maker is None:
            graph.nodes.insert_first(*nodes)
        else:
            graph.nodes.insert_after(maker, *nodes)
        return back

    def _scale(self, value: Value, kind: str) -> tuple[float, int]:
        """The scale and the zero point."""
        maker = self._graph.producer(value)
        if maker is not None and maker.op == "image_to_tensor":
            value = maker["input"]  # bytes have the name of the image that was calibrated
        if value.name not in self._calibration.thresholds:
            raise CompileError(
                "the calibration has not seen this value",
                seen=repr(value),
                fix="calibrate the network that is compiled, with compiler.calibrate",
            )
        name, known = value.name, self._calibration
        return known.scale(name, kind), known.zero_point(name, kind)

    def weight(self, value: Value, kind: str) -> Value:
        graph = self._graph
        if (value, kind) not in self._weights:
            limit = self._calibration.largest_weight(kind)
            quantized, scale = rounded_weight(graph.constants[value], kind, limit)
            small = graph.add_constant(f"{value.name}.{kind}", quantized)
            factor = graph.add_constant(f"{value.name}.{kind}.scale", scale)
            back = Value(graph.fresh_name(f"{value.name}.rounded"), value.dtype, value.shape)
            node = Node(
                op="dequantize",
                inputs=(small, factor, None),
                outputs=(back,),
                attrs={"axis": 0, "dtype": value.dtype},
            )
            graph.nodes.insert_first(node)
            self._weights[value, kind] = back
        return self._weights[value, kind]

    def bias(self, node: Node, kind: str) -> Value | None:
        """The bias, corrected by the mean error that the calibration found."""
        correction = self._calibration.corrections.get(kind, {}).get(node.output.name)
        if correction is None:
            return node.get("bias")
        known = self._graph.constant(node.get("bias"))
        total = correction.double() if known is None else known.double() + correction.double()
        name = f"{node['weight'].name}.{kind}.bias"
        return self._graph.add_constant(name, total.to(getattr(torch, node.output.dtype)))
