"""torch's graph of a module without in-place operators, where that is plain to see.

``run_decompositions`` finds it for every graph by tracing a second time, which takes as long as the
first: of DenseNet-121 10 s of processor time, a seventh of all that its plan took. Here a graph is
only looked through. It is left as it is where an operator is not known to keep its result apart
from what it reads.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind

Node = torch.fx.Node
Overload = torch._ops.OpOverload


def _overloads(*lines: str) -> frozenset[str]:
    return frozenset(overload for line in lines for overload in line.split())


# Operators made of others, which ``run_decompositions({})`` keeps; their results are new memory.
_LAYERS = _overloads(
    "conv1d.default conv2d.default conv3d.default linear.default matmul.default max_pool2d.default",
    "adaptive_avg_pool2d.default layer_norm.default group_norm.default softmax.int pad.default",
    "scaled_dot_product_attention.default sym_size.int",
)
# Those that it takes apart, and that ``aten`` translates whole. Their results may be views, of
# dropout that has nothing to drop, too.
_SHAPERS = _overloads(
    "flatten.using_ints reshape.default unflatten.int contiguous.default dropout.default",
    "dropout_.default to.dtype to.dtype_layout to.device __and__.Tensor chunk.default",
    # whose schemas do not say so
    "_unsafe_view.default lift.default pixel_shuffle.default pixel_unshuffle.default",
)
_NORM = "batch_norm.default"  # with running statistics alone
_IN_PLACE = _overloads(
    "relu_.default relu6_.default hardtanh_.default silu_.default hardswish_.default",
    "hardsigmoid_.default leaky_relu_.default elu_.default sigmoid_.default tanh_.default",
    "add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor",
)
_READ_BY_CHECKS = _overloads("item.default _is_all_true.default")
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # what symbolic sizes are computed with


def made_functional(exported: torch.export.ExportedProgram) -> bool:
    """Give each in-place operator's result a name of its own, if nothing else shares its memory.

    Returns:
        Whether the graph is functional now. Else it is as it was.
    """
    signature, nodes = exported.graph_signature, list(exported.graph.nodes)
    outputs = {spec.kind for spec in signature.output_specs}
    inputs = {spec.kind for spec in signature.input_specs}
    if outputs - {OutputKind.USER_OUTPUT} or inputs & {InputKind.CUSTOM_OBJ, InputKind.TOKEN}:
        return False
    if not all(_is_known(node) for node in nodes):
        return False
    changing = [node for node in nodes if _overload(node) in _IN_PLACE]
    if not all(_changes_its_own(node) for node in changing):
        return False
    place = {node: index for index, node in enumerate(nodes)}
    for node in changing:
        changed = _argument(node, "self")
        for user in [user for user in changed.users if place[user] > place[node]]:
            user.replace_input_with(changed, node)
    for node in nodes:
        if isinstance(node.target, Overload) and node.target._schema.is_mutable:
            packet, _, overload = _overload(node).partition("_.")
            node.target = getattr(getattr(torch.ops.aten, packet), overload)
    exported.graph.eliminate_dead_code()
    return True


def drop_checks(exported: torch.export.ExportedProgram) -> None:
    """Take out what is asserted about numbers, and all that is computed for that alone.

    A plan asserts nothing; some of what assertions read, no plan can hold.
    """
    graph = exported.graph
    for node in reversed(list(graph.nodes)):
        asserts = isinstance(node.target, Overload) and node.target.__name__.startswith("_assert")
        if asserts or (not node.users and _overload(node) in _READ_BY_CHECKS):
            graph.erase_node(node)


def _overload(node: Node) -> str:
    """``relu_.default``; nothing of what is none of torch's own operators."""
    target = node.target
    is_atens = isinstance(target, Overload) and target.namespace == "aten"
    return str(target).removeprefix("aten.") if is_atens else ""


def _argument(node: Node, name: str) -> Any:
    """An argument of an operator; None where it is left out."""
    assert isinstance(node.target, Overload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}.get(name)


def _is_known(node: Node) -> bool:
    """Whether ``run_decompositions`` would leave the operator, or ``aten`` has the same for it."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    target, overload = node.target, _overload(node)
    if not isinstance(target, Overload):
        return target is operator.getitem or isinstance(node.meta.get("val"), _NUMBERS)
    if overload == _NORM:
        return not _argument(node, "training") and _argument(node, "running_mean") is not None
    if overload in ("dropout.default", "dropout_.default"):
        return not _argument(node, "train")
    if overload in _LAYERS | _SHAPERS | _IN_PLACE:
        return True
    return not (target._schema.is_mutable or _is_composite(target))


def _is_composite(target: Overload) -> bool:
    """Whether the operator is made of others, so that its schema need not tell all views."""
    key, schema = "CompositeImplicitAutograd", target._schema
    name = ".".join(part for part in (schema.name, schema.overload_name) if part)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _changes_its_own(node: Node) -> bool:
    """Whether what an operator changes is a step's new result that nothing else is a view of, and
    whose element type the operator without "in place" would make, too.
    """
    changed = _argument(node, "self")
    if not isinstance(changed, Node) or not _is_new(changed):
        return False
    dtypes = {n.meta["val"].dtype for n in node.all_input_nodes if _is_tensor(n)}
    return (
        len(dtypes) == 1
        and dtypes.pop().is_floating_point
        and all(user.op == "output" or _is_new(user) for user in changed.users)
    )


def _is_new(node: Node) -> bool:
    """Whether an operator's result is memory of its own, or what it has changed in place."""
    overload = _overload(node)
    if overload in _LAYERS | _IN_PLACE or overload == _NORM:
        return True
    target = node.target
    if not overload or not isinstance(target, Overload) or overload in _SHAPERS:
        return False
    returned = (result.alias_info for result in target._schema.returns)
    return not _is_composite(target) and all(alias is None for alias in returned)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
