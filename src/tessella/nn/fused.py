"""Batch norms of any module in one pass with the sum and the activation behind them, and its
depthwise convolutions and poolings by our kernels.

Dynamo captures the module's forward pass as a graph of torch's functions. A batch norm in it that
takes a batch's statistics becomes one call with what follows it alone: a sum with a residual or
with another norm, an activation; and with a 1×1 convolution before it that widens. Max pooling and
depthwise convolutions become ours, and instance norms keep the order in memory of what they norm.
Whatever else the graph holds runs in torch or goes to torch's compiler, as does what Dynamo does
not capture.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tessella.core.errors import UsageError
from tessella.device.listing import listing
from tessella.device.machine import gpu_target
from tessella.nn import fp8
from tessella.nn.fused_dense import CONVOLUTION, Found, changes, fuse_dense, pair, shape_of
from tessella.search.compile_ahead import compile_listed, start_compilers

log = logging.getLogger(__name__)

_ACTIVATIONS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", F.relu_: "relu", torch.relu_: "relu", "relu": "relu",
    "relu_": "relu", F.relu6: "relu6", F.silu: "silu",
}  # fmt: skip
_MODULES = 256  # of a class that a process captures: a search's trials, say
_BATCH_NORM = inspect.signature(F.batch_norm)
_MAX_POOL = inspect.signature(F.max_pool2d_with_indices)


def fused(module: nn.Module) -> nn.Module:
    """A call of ``module`` in training with its batch norms fused; the module stays as it is.

    Numbers differ from torch's by rounding: 16-bit values are not rounded between a norm, a sum and
    an activation, nor is what a 1×1 convolution makes for a norm. Tensors that are not of
    channels_last, or lie where Triton does not run, are normalized by torch, and what Dynamo fails
    at runs as it is.

    Raises:
        UsageError: there is no Triton.
    """
    if not can_fuse():
        raise UsageError("norms are fused by Triton, which is not installed", fix="leave fuse out")
    _settings().suppress_errors = True
    _expect_kernels(module)
    return cast(nn.Module, torch.compile(module, backend=_backend, dynamic=False))


def compiled(module: nn.Module, compiler: str = "inductor") -> nn.Module:
    """A call of ``module`` in training as code of torch.compile, with our kernels in it.

    Args:
        compiler: a backend of torch.compile, which gets the graph with our calls.
    """

    def backend(graph: fx.GraphModule, examples: list[Tensor]) -> Any:
        if can_fuse():
            fuse_dense(graph.graph)
            fuse(graph)
            compile_kernels(graph, examples)
        return torch._dynamo.lookup_backend(compiler)(graph, examples)

    _settings()
    _expect_kernels(module)
    return cast(nn.Module, torch.compile(module, backend=backend, dynamic=False))


def _settings() -> Any:
    """Dynamo's, with room for what a process captures: beyond its limit it lets modules run."""
    settings: Any = torch._dynamo.config  # torch imports it when it is asked for
    settings.recompile_limit = max(settings.recompile_limit, _MODULES)
    allow: Any = torch._dynamo.allow_in_graph
    allow(fp8.linear)  # one node, which fuse_dense knows
    return settings


def can_fuse() -> bool:
    """Whether Triton is here, which a torch without CUDA comes without."""
    return importlib.util.find_spec("triton") is not None


def interruptions() -> int:
    """How often Dynamo could not go on capturing in this process, and let Python run instead."""
    counts = torch._dynamo.utils.counters
    failed = counts["frames"]["total"] - counts["frames"]["ok"]
    return failed + sum(counts["graph_break"].values())


def _calls() -> ModuleType:
    """The functions that rewritten graphs call, imported late: they need Triton."""
    return importlib.import_module("tessella.nn.fused_calls")


def _backend(graph: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    fuse(graph)
    compile_kernels(graph, examples)
    return graph.forward


def _expect_kernels(module: nn.Module) -> None:
    if can_fuse() and any(one.is_cuda for one in module.parameters()):
        start_compilers()


def compile_kernels(graph: fx.GraphModule, examples: Sequence[Any]) -> None:
    """Compile what a graph and its backward pass launch of ours, by all cores at once.

    Of a ResNet-50 in FP16 that is 58 kernels and 20 s of a core (Triton 3.6), 1.2 of them for the
    longest. With empty caches its first step took an H200 with 16 cores 50.2 s, and so 23.7. Where
    a graph does not run on tensors without numbers, or recomputes parts of itself, what is not
    listed is compiled when it is first launched.
    """
    if not any(isinstance(one, Tensor) and one.is_cuda for one in examples):
        return
    target = gpu_target()
    compile_listed(launches_of(graph, examples, target), target).wait()


def launches_of(
    graph: fx.GraphModule, examples: Sequence[Any], target: str, device: str = "cuda"
) -> Mapping[str, bytes]:
    """What a graph and its backward pass launch of our kernels (``device.listing``); nothing runs.

    Args:
        examples: arguments of the graph, of which shapes and types are read.
        device: on which they are taken to lie.
    """
    bare = FakeTensorMode(allow_non_fake_inputs=True)
    with listing(target) as listed, bare:
        try:
            outputs = graph(*(_bare(one, device) for one in examples))
            learned = [one for one in outputs if isinstance(one, Tensor) and one.requires_grad]
            with torch.autograd.set_multithreading_enabled(False):  # the list is this thread's
                torch.autograd.backward(learned, [torch.empty_like(one) for one in learned])
        except Exception as error:  # of a user's code, on which no training may depend
            log.info("not all kernels of a step are compiled before it: %s", error)
    return listed.launches


def _bare(value: Any, device: str) -> Any:
    """An example without its numbers."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return made.requires_grad_(value.requires_grad)


def fuse(graph: fx.GraphModule) -> int:
    """Fuse the batch norms of a captured forward pass, in place; into how many calls."""
    nodes = graph.graph
    made, gone = [], set()
    for node in list(nodes.nodes):
        if node in gone:
            continue  # it went with another norm
        if (found := _norm_of(node)) is not None:
            call, chain = _fuse_at(nodes, node, found)
            made.append(call)
            gone.update(chain)
        elif node.target is F.max_pool2d:
            _pool_at(nodes, node)
        elif node.target is torch.conv2d:
            _convolution_at(nodes, node)
        elif node.target is torch.conv3d:
            node.target = _calls().volumes_convolved
        elif node.target is F.instance_norm:
            node.target = _calls().instances_normed
        elif node.target is F.cross_entropy:
            node.target = _calls().entropy
    for node in made:
        _split_branches(nodes, node)
    _count_batches_at_once(nodes)
    graph.recompile()
    return len(made)


def _norm_of(node: fx.Node) -> Found | None:
    """A batch norm with a batch's statistics whose input nobody else reads or changes."""
    if node.op != "call_function" or node.target is not F.batch_norm:
        return None
    given = _BATCH_NORM.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    named = given.arguments
    takes_statistics = named.pop("training") is True and isinstance(named["momentum"], float)
    if not takes_statistics or None in (named["weight"], named["bias"]):
        return None
    return Found(**named) if len(named["input"].users) == 1 else None


def _fuse_at(graph: fx.Graph, norm: fx.Node, found: Found) -> tuple[fx.Node, list[fx.Node]]:
    """Insert one call for a batch norm and its followers; returns it and the nodes it replaces."""
    chain, second, residual, activation = [norm], None, None, None
    follower = _only_user(norm)
    other = None if follower is None else _added(follower, norm)
    if follower is not None and other is not None:
        behind = _only_user(follower)
        name = None if behind is None else _activation(behind, follower)
        if behind is None or name in (None, "relu"):
            chain.append(follower)
            residual, second = other, _norm_of(other) if len(other.users) == 1 else None
            if second is not None:
                chain.insert(0, other)
                residual = None
    if (follower := _only_user(chain[-1])) is not None:
        activation = _activation(follower, chain[-1])
        chain += [follower] if activation is not None else []
    norms = [found, second] if second is not None else [found]
    before = [_projection_of(norm.input) for norm in norms]
    with graph.inserting_before(chain[-1]):
        if activation in (None, "relu") and None not in before:
            how = [tuple(norm._replace(input=None)) for norm in norms]
            made = graph.call_function(
                _calls().projected, (before, how, residual, activation, False)
            )
            chain = [norm.input for norm in norms] + chain
        else:
            made = graph.call_function(
                _calls().normed, ([tuple(n) for n in norms], residual, activation, False)
            )
    chain[-1].replace_all_uses_with(made)
    for node in reversed(chain):
        graph.erase_node(node)
    return made, chain


def _projection_of(node: fx.Node) -> tuple[Any, Any, int] | None:
    """The input, the weight and the step of a 1×1 convolution, if its result need not be made."""
    if node.target is not torch.conv2d:
        return None
    given = CONVOLUTION.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    named = given.arguments
    x, weight = named["input"], named["weight"]
    shape = shape_of(weight)
    if shape is None or not _calls().widens(shape):
        return None
    steps = pair(named["stride"])
    plain = named["groups"] == 1 and named["bias"] is None and pair(named["padding"]) == (0, 0)
    if not plain or steps[0] != steps[1] or any(changes(user, x) for user in x.users):
        return None
    return x, weight, steps[0]


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _activation(node: fx.Node, of: fx.Node) -> str | None:
    return _ACTIVATIONS.get(node.target) if node.args[:1] == (of,) else None


def _added(node: fx.Node, norm: fx.Node) -> fx.Node | None:
    """What a node adds to a norm's result, if that is all that it does."""
    in_place = node.target in (operator.iadd, "add_")
    if node.kwargs or not (in_place or node.target in (operator.add, torch.add, "add")):
        return None
    first, second = (*node.args, None)[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node) or first is second:
        return None
    if in_place and first is not norm:
        return None
    other = second if first is norm else first
    return None if any(changes(user, other) for user in other.users) else other


def _pool_at(graph: fx.Graph, node: fx.Node) -> None:
    """Our max pooling in the place of torch's."""
    given = _MAX_POOL.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    named = given.arguments
    if named.pop("return_indices") or named.pop("ceil_mode"):
        return
    with graph.inserting_before(node):
        made = graph.call_function(_calls().pooled, kwargs=dict(named))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _convolution_at(graph: fx.Graph, node: fx.Node) -> None:
    """Our depthwise convolution in the place of torch's, if it is one."""
    given = CONVOLUTION.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    if given.arguments["groups"] == 1:
        return
    with graph.inserting_before(node):
        made = graph.call_function(_calls().convolved, kwargs=dict(given.arguments))
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _split_branches(graph: fx.Graph, made: fx.Node) -> None:
    """Where a result goes two ways, its gradients arrive apart and are added on the way back."""
    users = list(made.users)
    ours = {_calls().normed, _calls().projected, _calls().pooled, _calls().convolved}
    readers = ours | {torch.conv2d, F.adaptive_avg_pool2d, torch._C._nn.linear}
    if len(users) < 2 or not all(user.target in readers for user in users):
        return
    made.args = (*made.args[:-1], True)
    with graph.inserting_after(made):
        one, other = (graph.call_function(operator.getitem, (made, place)) for place in (0, 1))
    users[0].replace_input_with(made, one)
    for user in users[1:]:
        user.replace_input_with(made, other)


def _count_batches_at_once(graph: fx.Graph) -> None:
    """One call for all norms' counts of batches, each of which is a launch."""
    counts = [
        node for node in graph.nodes
        if node.target == "add_" and node.args[1:] == (1,) and not node.users
        and node.args[0].op == "placeholder"
    ]  # fmt: skip
    if len(counts) < 2:
        return
    with graph.inserting_before(counts[0]):
        graph.call_function(torch._foreach_add_, ([node.args[0] for node in counts], 1))
    for node in counts:
        graph.erase_node(node)
