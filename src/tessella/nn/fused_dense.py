"""Transformers' parts of a captured forward pass: attention without copies, windows side
by side as rows, and layer norms and GELUs whose gradients come, with those of the sums and biases
before them, out of one pass.

For graphs of which torch's compiler makes code: what is left of these operations is its work.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tessella.nn import fp8

_LINEAR: Any = torch._C._nn.linear
_LINEARS = (_LINEAR, fp8.linear)
_GELU: Any = torch._C._nn.gelu
_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_OFTEN_NONE = (
    "bias_k", "bias_v", "key_padding_mask", "attn_mask", "static_k", "static_v",
)  # fmt: skip
_LAYER_NORM = inspect.signature(F.layer_norm)
_DROPOUT = inspect.signature(F.dropout)
CONVOLUTION = inspect.Signature([
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for name, default in (
        ("input", inspect.Parameter.empty), ("weight", inspect.Parameter.empty), ("bias", None),
        ("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1),
    )
])  # fmt: skip
LEAST_PATCH = 256  # numbers: shorter rows are left to cuDNN
_ADDS = (operator.add, torch.add, "add")
_IN_PLACE = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.setitem,
}  # fmt: skip


class Found(NamedTuple):
    """What a batch norm of a graph is given; nodes, but for the last two."""

    input: Any
    weight: Any
    bias: Any
    running_mean: Any
    running_var: Any
    momentum: float
    eps: float


def fuse_dense(graph: fx.Graph) -> None:
    """Rewrite a captured graph, in place."""
    for node in list(graph.nodes):
        if node.target is F.dropout:
            _drop_idle(graph, node)
    for node in list(graph.nodes):
        if node.target is F.multi_head_attention_forward:
            _heads_at(graph, node)
        elif node.target in _LINEARS:
            _projection_at(graph, node)
        elif node.target is torch.conv2d:
            _patches_at(node)
        elif node.target is _GELU:
            _gelu_at(graph, node)
    places = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is F.layer_norm:
            _norm_at(graph, node, places)
    for node in list(graph.nodes):
        if node.target is _LINEAR:
            node.target = _calls().linear
        elif node.target is fp8.linear:
            _dense_at(graph, node)


def _calls() -> ModuleType:
    """The functions that rewritten graphs call, imported late: they need Triton."""
    return importlib.import_module("tessella.nn.fused_dense_calls")


def _given(signature: inspect.Signature, node: fx.Node) -> dict[str, Any]:
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _drop_idle(graph: fx.Graph, node: fx.Node) -> None:
    """A dropout that drops nothing."""
    given = _given(_DROPOUT, node)
    if given["p"] == 0 or not given["training"]:
        node.replace_all_uses_with(given["input"])
        graph.erase_node(node)


def shape_of(node: Any) -> tuple[int, ...] | None:
    """Of what a node makes, as Dynamo has seen it."""
    seen = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return tuple(seen.shape) if isinstance(seen, Tensor) else None


# --- attention ------------------------------------------------------------------------------------


def _heads_at(graph: fx.Graph, node: fx.Node) -> None:
    """Self-attention of ``nn.MultiheadAttention`` with rows first: no copy of what it turns."""
    given = _given(_MULTI_HEAD, node)
    x, out = _turned(given["query"]), _rows_first(node)
    plain = (
        given["query"] is given["key"] is given["value"]
        and given["in_proj_weight"] is not None
        and (given["dropout_p"] == 0 or not given["training"])
        and not (given["need_weights"] or given["add_zero_attn"] or given["is_causal"])
        and not given["use_separate_proj_weight"]
        and all(given[name] is None for name in _OFTEN_NONE)
    )
    if not plain or x is None or out is None or len(shape_of(x) or ()) != 3:
        return
    with graph.inserting_before(node):
        projection = (x, given["in_proj_weight"], given["in_proj_bias"], given["num_heads"])
        context = graph.call_function(_calls().heads_attended, projection)
        made = graph.call_function(
            _LINEAR, (context, given["out_proj_weight"], given["out_proj_bias"])
        )
    made.meta.update(out.meta)
    out.replace_all_uses_with(made)
    for gone in (out, out.args[0], node):
        graph.erase_node(gone)


def _turned(node: Any) -> Any:
    """What a node turns, if it swaps the first two dimensions."""
    if not isinstance(node, fx.Node) or node.target not in ("transpose", torch.transpose):
        return None
    x, *turned = node.args
    return x if turned in ([0, 1], [1, 0]) and isinstance(x, fx.Node) else None


def _rows_first(node: fx.Node) -> Any:
    """What turns the first of a node's two results, if that is all that is read of them."""
    item = next(iter(node.users)) if len(node.users) == 1 else None
    if item is None or item.target is not operator.getitem or item.args[1] != 0:
        return None
    found = next(iter(item.users)) if len(item.users) == 1 else None
    return found if _turned(found) is item else None


def _projection_at(graph: fx.Graph, node: fx.Node) -> None:
    """A linear layer whose result is cut into queries, keys and values of heads."""
    chain: list[fx.Node] = [node]
    for names in (("view", "reshape", "unflatten"), ("permute",), ("unbind",)):
        found = next(iter(chain[-1].users)) if len(chain[-1].users) == 1 else None
        if found is None or found.op != "call_method" or found.target not in names or found.kwargs:
            return
        chain.append(found)
    _, cut, turned, parts = chain
    whole, shape = shape_of(node), shape_of(cut)
    if whole is None or shape is None or len(shape) != 5 or shape[2] != 3 or len(whole) != 3:
        return
    order: Any = turned.args[1:] if len(turned.args) > 2 else turned.args[1]
    if (
        tuple(order) != (2, 0, 3, 1, 4)
        or shape[:2] != whole[:2]
        or parts.args[1:] not in ((), (0,))
    ):
        return
    if node.kwargs:
        return
    x, weight, bias = (*node.args, None)[:3]
    with graph.inserting_before(node):
        given = (x, weight, bias, shape[3], node.target is fp8.linear)
        made = graph.call_function(_calls().heads_of, given)
    parts.replace_all_uses_with(made)
    for gone in reversed(chain):
        graph.erase_node(gone)


def _patches_at(node: fx.Node) -> None:
    """A convolution whose windows lie side by side, without margins."""
    given = _given(CONVOLUTION, node)
    image, kernel = shape_of(given["input"]), shape_of(given["weight"])
    if image is None or kernel is None or len(image) != 4:
        return
    sides = tuple(kernel[2:])
    alike = {"stride": sides, "padding": (0, 0), "dilation": (1, 1)}
    plain = given["groups"] == 1 and all(pair(given[name]) == v for name, v in alike.items())
    fits = all(side % p == 0 for side, p in zip(image[2:], sides, strict=True))
    if plain and fits and max(sides) > 1 and kernel[1] * sides[0] * sides[1] >= LEAST_PATCH:
        node.target = _calls().patches_convolved
        node.args, node.kwargs = (given["input"], given["weight"], given["bias"]), {}


def pair(given: Any) -> tuple[Any, ...]:
    return (given, given) if isinstance(given, int | str) else tuple(given)


# --- norms and activations ------------------------------------------------------------------------


def _biased(node: Any, reader: fx.Node) -> tuple[Any, ...] | None:
    """A linear layer's operands, if it has a bias, and nobody else reads its result."""
    if not isinstance(node, fx.Node) or node.target not in _LINEARS or node.kwargs:
        return None
    alone = list(node.users) == [reader]
    return node.args if alone and len(node.args) == 3 and node.args[2] is not None else None


def _gelu_at(graph: fx.Graph, node: fx.Node) -> None:
    """A GELU of a linear layer's result takes the layer's bias."""
    x: Any = node.args[0] if node.args else node.kwargs.get("input")
    layer = _biased(x, node)
    if layer is None:
        return
    x.args = layer[:2]
    node.target = _calls().gelu
    node.args = (x, layer[2], node.kwargs.get("approximate", "none"))
    node.kwargs = {}


def _dense_at(graph: fx.Graph, node: fx.Node) -> None:
    """A linear layer of a GELU's result, which is that of another: all in 8 bits."""
    x: Any = node.args[0]
    if node.kwargs or x.target is not _calls().gelu or list(x.users) != [node]:
        return
    first, bias, approximate = x.args
    if first.target is not fp8.linear or len(first.args) != 2 or list(first.users) != [x]:
        return
    node.target, node.args = _calls().dense, (*first.args, bias, approximate, *node.args[1:])
    graph.erase_node(x)
    graph.erase_node(first)


def _norm_at(graph: fx.Graph, node: fx.Node, places: dict[fx.Node, int]) -> None:
    """A layer norm takes the sum before it, and the bias of the layer whose result is added."""
    given = _given(_LAYER_NORM, node)
    x, width = given["input"], given["normalized_shape"]
    affine = [given[name] for name in ("weight", "bias")]
    known = all(isinstance(a, fx.Node) and a.op in ("placeholder", "get_attr") for a in affine)
    if (
        not known
        or len(width) != 1
        or any(changes(user, read) for read in (node, x) for user in read.users)
    ) or {_storage(x), _storage(node)} & _written(graph):
        return
    at, parts = node, (x, None, None)
    if x in places and (found := _sum_of(x)) is not None:
        at, parts = x, found
    keeps = [user for user in x.users if user is not node and places.get(user, 0) > places[at]]
    lowering = {*_LINEARS, _calls().heads_of, _calls().heads_attended}
    lower = [user for user in node.users if user.target in lowering and user.args[:1] == (node,)]
    full = [user for user in node.users if user not in lower]
    with graph.inserting_before(at):
        made = graph.call_function(
            _calls().layer_normed,
            (*parts, *affine, given["eps"], bool(keeps), bool(lower), bool(full)),
        )
        outs = [graph.call_function(operator.getitem, (made, place)) for place in range(3)]
    for readers, of, out in ((keeps, x, outs[0]), (lower, node, outs[1]), (full, node, outs[2])):
        out.meta.update(of.meta)
        for reader in readers:
            reader.replace_input_with(of, out)
        if not readers:
            graph.erase_node(out)
        else:
            places[out] = places[at]
    graph.erase_node(node)
    if at is x:
        graph.erase_node(x)


def _sum_of(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """Two terms of equal shapes, the second perhaps with the bias that it is to get."""
    if node.target not in _ADDS or node.kwargs or len(node.args) != 2:
        return None
    one: Any
    other: Any
    one, other = node.args
    if shape_of(one) is None or shape_of(one) != shape_of(other) or one is other:
        return None
    for x, added in ((one, other), (other, one)):
        if (layer := _biased(added, node)) is not None:
            added.args = layer[:2]
            return x, added, layer[2]
    return one, other, None


def _storage(node: fx.Node) -> int | None:
    """The storage of a node's value, None where it was not recorded."""
    seen = node.meta.get("example_value")
    return seen.untyped_storage()._cdata if isinstance(seen, Tensor) else None


def _written(graph: fx.Graph) -> set[int | None]:
    """The storages that a graph writes into, also through views."""
    first = [(n, n.args[0]) for n in graph.nodes if n.args and isinstance(n.args[0], fx.Node)]
    return {_storage(given) for n, given in first if changes(n, given)} - {None}


def changes(node: fx.Node, given: fx.Node) -> bool:
    """Whether a node may write into what it is given."""
    if given not in node.args[:1]:
        return False
    if node.target in _IN_PLACE or node.kwargs.get("inplace"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.endswith("_")
