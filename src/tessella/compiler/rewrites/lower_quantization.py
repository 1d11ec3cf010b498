"""Layers between ``dequantize`` and ``quantize`` become layers on int8 or fp8.

The graph says with explicit nodes what is rounded where, whoever put them there: a file, a module,
or ``insert_quantization``. Here nothing is decided, and nothing is rounded that was not before::

    dequantize(x) → conv2d(·, dequantize(weight)) + residual → relu → quantize
    store(relu(scale · product + bias + beta · residual))

What only moves elements, or takes their maximum, changes places with the nodes, so that they meet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch

from tessella.compiler.layers import PRODUCTS
from tessella.compiler.rewrites import dead_code
from tessella.compiler.rewrites.worklist import until_done, values_of
from tessella.core.dtype import QUANTIZED
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import fixed
from tessella.operations.table import operation

# what commutes with rounding to one scale; of fp8 only what is a view
MOVES = ("reshape", "permute", "expand", "slice", "select", "split", "cat", "max_pool2d", "relu")
VIEWS = MOVES[:6]
# Of so many products fp8 sums may have 14 bits: an error of up to 2 % (arXiv:2412.19437, 3.3.2),
# where rounding to e4m3 costs each factor up to 6 %
FAST_PRODUCTS = 4096
# what writes its result in the order that the layer after it wants, behind permutes and reshapes
UNORDERED = ("scaled_dot_product_attention",)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How numbers are quantized, as ``store(x / scale + zero)``: what ``quantize`` nodes say.

    Attributes:
        scale: float64, one number, or one for each position on ``axis``.
        zero: what zero is written as.
    """

    dtype: str
    scale: torch.Tensor
    zero: int
    axis: int

    def same(self, other: Scheme | None) -> bool:
        return (
            other is not None
            and (self.dtype, self.zero) == (other.dtype, other.zero)
            and torch.equal(self.scale, other.scale)
            and (self.scale.numel() == 1 or self.axis == other.axis)
        )

    @property
    def factor(self) -> float:
        """The scale as a number; a scale for each channel is no number."""
        return float(self.scale)


def moves_elements(node: Node) -> bool:
    """Whether a node only moves elements, repeats them or takes the larger ones, so that it
    commutes with rounding to one scale.
    """
    return node.op in MOVES or (node.op == "interpolate" and node.attrs["mode"] == "nearest")


def apply(graph: Graph) -> int:
    """Lower what can be lowered; returns how many layers now work on int8 or fp8."""
    _shift_unsigned(graph)
    until_done(graph, _sink, _merge, _cancel)
    while until_done(
        graph, _sink, _merge, _cancel, partial(_lift, quantized=_from_quantized(graph))
    ):  # what was sunk meanwhile may let something be lifted far behind it
        pass
    lowered = sum(_lower(graph, n) for n in list(graph.nodes) if n.op in PRODUCTS)
    for node in [n for n in graph.nodes if n.op in PRODUCTS]:
        _requantize(graph, node)
        _take_relu(graph, node)
    _fold(graph)
    dead_code.apply(graph)
    until_done(graph, _settle)
    return lowered


def scheme_of(graph: Graph, node: Node | None, op: str) -> Scheme | None:
    """The scheme of a ``quantize`` or ``dequantize`` node, ``op``; None for any other."""
    if node is None or node.op != op:
        return None
    scale, zero = graph.constant(node["scale"]), graph.constant(node.get("zero_point"))
    if scale is None or (zero is None and node.get("zero_point") is not None):
        return None
    if zero is not None and len(set(zero.flatten().tolist())) > 1:
        return None
    return Scheme(
        dtype=(node.output if op == "quantize" else node["input"]).dtype,
        scale=scale.double().flatten(),
        zero=0 if zero is None else int(zero.flatten()[0]),
        axis=node.attrs["axis"],
    )


# ── uint8 ─────────────────────────────────────────────────────────────────────────────────────────


def _shift_unsigned(graph: Graph) -> None:
    """uint8 → int8, 128 less, its zero point too, wherever only ``dequantize`` reads it."""
    shifted = {
        v
        for n in graph.nodes
        for v in n.outputs
        if v.dtype == "uint8"
        and (scheme_of(graph, n, "quantize") or n.op in MOVES)
        and v not in graph.outputs
    } | {v for v in graph.constants if v.dtype == "uint8" and _only_dequantized(graph.users(v))}
    waiting = list(shifted)
    while waiting:  # a move's inputs and outputs, all or none
        value = waiting.pop()
        users, maker = graph.users(value), graph.producer(value)
        read = [] if maker is None else [v for v in maker.inputs if v is not None]
        moved = maker is not None and maker.op in MOVES
        if value not in shifted or (
            all(_may_shift(graph, n, value, shifted) for n in users)
            and not (moved and not shifted.issuperset(read))
        ):
            continue
        shifted.remove(value)
        waiting += [v for n in users for v in n.outputs]
        waiting += read
    for value in shifted:
        value.dtype = "int8"
        if value in graph.constants:
            graph.constants[value] = (graph.constants[value].int() - 128).to(torch.int8)
    for node in graph.nodes:
        if node.op == "quantize" and node.output in shifted:
            node.attrs["dtype"] = "int8"
        if (node.op == "quantize" and node.output in shifted) or (
            node.op == "dequantize" and node["input"] in shifted
        ):
            _shift_zero(graph, node)


def _only_dequantized(users: list[Node]) -> bool:
    return bool(users) and all(n.op == "dequantize" for n in users)


def _may_shift(graph: Graph, node: Node, value: Value, shifted: set[Value]) -> bool:
    if node.op in MOVES and node.op != "relu":
        return set(node.outputs) <= shifted
    return scheme_of(graph, node, "dequantize") is not None and node["input"] is value


def _shift_zero(graph: Graph, node: Node) -> None:
    zero, scale = graph.constant(node.get("zero_point")), graph.constants[node["scale"]]
    moved = torch.zeros(scale.shape, dtype=torch.int32) if zero is None else zero.int()
    name = f"{node['scale'].name}.zero"
    node.rebind(zero_point=graph.add_constant(name, (moved - 128).to(torch.int8)))


# ── meeting ───────────────────────────────────────────────────────────────────────────────────────


def _sink(graph: Graph, node: Node) -> Collection[Value]:
    """``move(dequantize(x))`` → ``dequantize(move(x))``."""
    if node.op not in MOVES:
        return ()
    makers = [graph.producer(v) for v in node.inputs]
    schemes = [scheme_of(graph, m, "dequantize") for m in makers]
    first = schemes[0]
    if first is None or not all(first.same(c) for c in schemes) or not _moves(node, first):
        return ()
    axis = _moved_axis(node, first)
    if axis is None:
        return ()
    return _sink_one(graph, node, [m for m in makers if m is not None], axis)


def _moves(node: Node, scheme: Scheme) -> bool:
    """Whether moving elements of this scheme is the same as moving the numbers."""
    if scheme.dtype not in (*QUANTIZED, "uint8"):
        return False
    if scheme.dtype == "float8_e4m3fn":
        return node.op in VIEWS
    return node.op != "relu" or (scheme.zero == 0 and scheme.dtype == "int8")


def _moved_axis(node: Node, scheme: Scheme) -> int | None:
    """Where the scale's axis lies after the move; None if it cannot follow."""
    if scheme.scale.numel() == 1:
        return 0
    if node.op == "permute":
        dims = [int(d) for d in node.attrs["dims"]]
        rank = len(dims)
        return [d % rank for d in dims].index(scheme.axis % rank)
    return None


def _sink_one(graph: Graph, node: Node, makers: list[Node], axis: int) -> Collection[Value]:
    changed, small = values_of(node), makers[0]["input"].dtype
    attrs = {"axis": axis, "dtype": makers[0].attrs["dtype"]}
    parameters, outputs = makers[0].inputs[1:], node.outputs
    node.inputs = tuple(m["input"] for m in makers)
    node.outputs = tuple(
        Value(graph.fresh_name(f"{v.name}.{small}"), small, v.shape) for v in outputs
    )
    made = [
        Node(op="dequantize", inputs=(inner, *parameters), outputs=(value,), attrs=dict(attrs))
        for inner, value in zip(node.outputs, outputs, strict=True)
    ]
    graph.nodes.insert_after(node, *made)
    return [*changed, *values_of(node)]


def _merge(graph: Graph, node: Node) -> Collection[Value]:
    """Drop a node that equals an earlier node on the same value."""
    scheme = scheme_of(graph, node, node.op) if node.op in ("quantize", "dequantize") else None
    if scheme is None or node.output in graph.outputs:
        return ()
    for other in graph.users(node["input"]):
        if not other < node:
            break
        alike = other.op == node.op and other.attrs == node.attrs
        alike = alike and other["input"] is node["input"] and other.output not in graph.outputs
        if alike and scheme.same(scheme_of(graph, other, other.op)):
            return _drop(graph, node, other.output)
    return ()


def _cancel(graph: Graph, node: Node) -> Collection[Value]:
    """``quantize(dequantize(x))`` with one scheme is ``x``: float32 is off by much less than ½."""
    scheme = scheme_of(graph, node, "quantize")
    if scheme is None or node.output in graph.outputs:
        return ()
    maker = graph.producer(node["input"])
    if maker is None or not scheme.same(scheme_of(graph, maker, "dequantize")):
        return ()
    return _drop(graph, node, maker["input"])


def _drop(graph: Graph, node: Node, instead: Value) -> Collection[Value]:
    """Let another value be read for what a node makes."""
    changed = [*values_of(node, *graph.users(node.output)), instead]
    graph.replace_uses(node.output, instead)
    graph.nodes.remove(node)
    return changed


def _lift(graph: Graph, node: Node, quantized: Collection[Value]) -> Collection[Value]:
    """``quantize(move(x))`` → ``move(quantize(x))``, where nothing else reads what is moved."""
    scheme = scheme_of(graph, node, "quantize")
    if scheme is None or scheme.scale.numel() > 1:
        return ()
    move = graph.producer(node["input"])
    if move is None or not moves_elements(move) or not _moves(move, scheme):
        return ()
    rounds = [graph.only_reader(v) for v in move.outputs]  # of a split all parts are rounded
    if not all(n and scheme.same(scheme_of(graph, n, "quantize")) for n in rounds):
        return ()
    if move.op not in VIEWS and not any(
        v in quantized or (v and _is_rounded(graph, v, scheme)) for v in move.inputs
    ):
        return ()  # a pooling leaves less to round
    parts = [n for n in rounds if n is not None]
    changed, inputs = values_of(move, *parts), list[Value]()
    for value in filter(None, move.inputs):
        small = Value(graph.fresh_name(f"{value.name}.{scheme.dtype}"), scheme.dtype, value.shape)
        inputs.append(small)
        made = Node(
            op="quantize",
            inputs=(value, *node.inputs[1:]),
            outputs=(small,),
            attrs=dict(node.attrs),
        )
        graph.nodes.insert_before(move, made)
    move.inputs, move.outputs = tuple(inputs), tuple(n.output for n in parts)
    for part in parts:
        graph.nodes.remove(part)
    return [*changed, *inputs]


def _is_rounded(graph: Graph, value: Value, scheme: Scheme) -> bool:
    """Whether a step rounds a value so, for somebody else."""
    return any(scheme.same(scheme_of(graph, node, "quantize")) for node in graph.users(value))


def _from_quantized(graph: Graph) -> set[Value]:
    """The values that are computed from quantized values, and so may be stored quantized."""
    found: set[Value] = set()
    for node in graph.nodes:
        if moves_elements(node):
            known = any(v in found for v in node.inputs)
        else:
            source = graph.producer(node["input"]) if node.op in PRODUCTS else node
            known = source is not None and source.op == "dequantize"
        if known:
            found.update(node.outputs)
    return found


def _settle(graph: Graph, node: Node) -> Collection[Value]:
    """``view(quantize(x))`` → ``quantize(view(x))`` behind attention, if a step is to round.

    Attention's heads are permuted and reshaped to rows without moving them, as they lie in this
    order: there the rounding reads and writes dense memory. Before the views it would bring its
    result into the heads' order, which would have to be turned back.
    """
    scheme = scheme_of(graph, node, "quantize")
    view = None if scheme is None else graph.only_reader(node.output)
    if scheme is None or view is None or view.op not in ("permute", "reshape"):
        return ()
    maker = _before_views(graph, node["input"])
    if maker is None or maker.op not in UNORDERED or scheme.scale.numel() > 1:
        return ()
    changed, x, last = values_of(node, view), node["input"], view.output
    moved = Value(graph.fresh_name(f"{x.name}.{view.op}"), x.dtype, last.shape)
    view.inputs, view.outputs = (x,), (moved,)
    node.rebind(input=moved)
    node.outputs = (last,)
    graph.nodes.remove(node)
    graph.nodes.insert_after(view, node)
    return [*changed, moved]


def _before_views(graph: Graph, value: Value) -> Node | None:
    """The node that made the elements of a value, before they were permuted and reshaped."""
    maker = graph.producer(value)
    while maker is not None and maker.op in ("permute", "reshape"):
        maker = graph.producer(maker["input"])
    return maker


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


def _lower(graph: Graph, node: Node) -> bool:
    """Let a layer that reads dequantized activations and weights read the quantized ones."""
    matmul = node.op == "matmul"
    source = graph.producer(node["input"])
    weights = graph.producer(node["other" if matmul else "weight"])
    scheme, of_weight = (scheme_of(graph, n, "dequantize") for n in (source, weights))
    if scheme is None or of_weight is None or source is None or weights is None:
        return False
    weight, bias = graph.constant(weights["input"]), graph.constant(node.get("bias"))
    if (
        scheme.dtype not in QUANTIZED
        or of_weight.dtype != scheme.dtype
        or weight is None
        or scheme.scale.numel() > 1
        or of_weight.zero != 0
        or (matmul and weight.ndim != 2)
        or (of_weight.scale.numel() > 1 and of_weight.axis % weight.ndim != int(matmul))
        or (node.get("bias") is not None and bias is None)
    ):
        return False
    if matmul:  # [K, N] → a linear layer's [N, K]
        weight = weight.T.contiguous()
        node.op, node.attrs = "linear", {"activation": None}
    channels = len(weight)
    scale = (of_weight.scale * scheme.scale).expand(channels)
    total = torch.zeros(channels).double() if bias is None else bias.double()
    x = source["input"]
    if scheme.zero:
        total = total - scale * scheme.zero * weight.double().flatten(1).sum(1)
        x = _padded(graph, node, x, scheme.zero)
    quantized, name = weights["input"], weights["input"].name
    node.rebind(input=x, weight=graph.add_constant(f"{name}.rows", weight) if matmul else quantized)
    if bias is not None or scheme.zero:
        node.rebind(bias=graph.add_constant(f"{name}.bias", total.float()))
    node.rebind(scale=graph.add_constant(f"{name}.factor", scale.float()))
    node.attrs["dtype"] = node.output.dtype
    if scheme.dtype == "float8_e4m3fn" and weight[0].numel() <= FAST_PRODUCTS:
        node.attrs["fast_accumulation"] = True
    return True


def _padded(graph: Graph, node: Node, x: Value, zero: int) -> Value:
    """The input with its zero point around it, where a convolution would pad with 0."""
    if node.op != "conv2d" or not any(node.attrs["padding"]):
        return x
    (top, left), (height, width) = node.attrs["padding"], x.shape[2:]
    shape = (*x.shape[:2], height + 2 * top, width + 2 * left)
    made = Value(graph.fresh_name(f"{x.name}.padded"), x.dtype, shape)
    attrs = {"pad": (left, left, top, top), "mode": "constant", "value": float(zero)}
    pad = Node(op="pad", inputs=(x,), outputs=(made,), attrs=attrs, layer=node.layer)
    graph.nodes.insert_before(node, pad)
    node.attrs["padding"] = (0, 0)
    return made


def _requantize(graph: Graph, node: Node) -> None:
    """Let a layer whose result is only quantized write the quantized values.

    An odd zero point stays an explicit step: rounding after it is added takes ties the other way.
    """
    if node.get("scale") is None or node.output in graph.outputs:
        return
    readers = graph.users(node.output)
    scheme = scheme_of(graph, readers[0], "quantize") if len(readers) == 1 else None
    if scheme is None or scheme.scale.numel() > 1 or scheme.dtype != node["input"].dtype:
        return
    activation = _activation_of_quantized(node.attrs["activation"], scheme)
    residual = graph.producer(node.get("residual"))
    added = scheme_of(graph, residual, "dequantize")
    alone = added is not None and added.scale.numel() == 1 and added.dtype == scheme.dtype
    if scheme.zero % 2 or activation == "" or (node.get("residual") is not None and not alone):
        return
    weight, bias, scale = node["weight"], node.get("bias"), node["scale"]
    known = graph.constant(bias)
    shift = torch.zeros(fixed(weight.shape[0])).double() if known is None else known.double()
    if added is not None and residual is not None:
        shift = shift - added.factor * added.zero
        node.attrs["beta"] = added.factor / scheme.factor
        node.rebind(residual=residual["input"])
    shift = shift / scheme.factor + scheme.zero
    # both are this layer's own: ``_lower`` has made them
    graph.constants[scale] = (graph.constants[scale].double() / scheme.factor).float()
    if bias is None and shift.any():
        node.rebind(bias=graph.add_constant(f"{weight.name}.bias", shift.float()))
    elif bias is not None:
        graph.constants[bias] = shift.float()
    node.attrs |= {"dtype": scheme.dtype, "activation": activation}
    node.outputs = readers[0].outputs
    graph.nodes.remove(readers[0])


def _take_relu(graph: Graph, node: Node) -> None:
    """Take a relu of quantized values into the layer before it: rounding keeps signs."""
    readers = graph.users(node.output)
    if node.output.dtype != "int8" or node.attrs["activation"] or node.output in graph.outputs:
        return
    if len(readers) == 1 and readers[0].op == "relu":
        node.attrs["activation"] = "relu"
        node.outputs = readers[0].outputs
        graph.nodes.remove(readers[0])


def _activation_of_quantized(activation: str | None, scheme: Scheme) -> str | None:
    """The activation of ``x / scale + zero`` that is that of ``x``; empty if there is none.

    Where zero is the least scheme, what relu cuts off is out of range anyway; so is what relu6 cuts
    off above, if the greatest scheme stands for 6 or less.
    """
    if activation == "relu6" and scheme.dtype == "int8":
        within = (127 - scheme.zero) * scheme.factor <= 6.0
        activation = "relu" if within else activation
    if activation is None:
        return None
    if activation == "relu" and scheme.zero == 0:
        return "relu"
    if activation == "relu" and scheme.dtype == "int8" and scheme.zero == -128:
        return None
    return ""


def _fold(graph: Graph) -> None:
    """Dequantize weights that layers in floating numbers read."""
    for node in list(graph.nodes):
        values = [graph.constant(v) for v in node.inputs]
        if node.op == "dequantize" and values[0] is not None and node.output not in graph.outputs:
            (graph.constants[node.output],) = operation(node.op).call(values, node.attrs)
            graph.nodes.remove(node)
