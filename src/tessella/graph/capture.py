"""A torch module becomes a graph, through torch.export: functional, but not decomposed.

The batch is symbolic: one capture serves every batch size in the inputs' range.
"""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch.export import Dim as ExportDim
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError, TessellaError, UsageError
from tessella.core.memory import is_out_of_memory
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.aten import TRANSLATORS, translate
from tessella.graph.build import Builder
from tessella.graph.check import check
from tessella.graph.functional import drop_checks, made_functional
from tessella.graph.graph import Dim, Graph, Shape, Value
from tessella.graph.operator_call import OperatorCall
from tessella.graph.recognize import recognize
from tessella.graph.recurrent import require_known_readers
from tessella.graph.traced import traced

if TYPE_CHECKING:
    import sympy

# torch treats 0 and 1 as known, and a size that equals another by chance as the same: tried in this
# order, the first is taken that no other axis of the inputs has.
_EXAMPLE_BATCHES = (5, 7, 11, 13, 17, 3, 2, 4, 6, 8)

_LEAST_RANGE = 3  # batches that torch.export is told of at least

# Checks and hints that torch.export leaves in a graph, which compute nothing.
_NO_COMPUTATION = ("_assert", "sym_", "_check", "_functional_sym", "_functional_assert")


def capture(
    module: torch.nn.Module,
    inputs: Sequence[TensorSpec],
    *,
    name: str = "",
    outputs: Sequence[str] | None = None,
) -> Graph:
    """The graph of ``module`` in evaluation mode.

    Args:
        inputs: what ``forward`` takes, by position. Dimension 0 is symbolic where it is a range
            of more than one size. Every other dimension is fixed.
        name: the graph's name; by default the class of the module.
        outputs: names of the results, in order (dicts and tuples flattened); by default
            ``output``, ``output_1``, …

    The constants share memory with the module's parameters and have their names in the state dict.

    Raises:
        CompileError: the module cannot be exported, or its shapes do not follow the batch linearly:
            then inputs of one batch size can be captured.
    """
    for spec in inputs:
        if any(isinstance(d, DimRange) and d.min != d.max for d in spec.shape[1:]):
            raise UsageError(
                "only dimension 0, the batch, may have a range",
                seen=spec,
                fix="fix the other sizes",
            )
    if type(module).__module__.startswith("torchvision.models.detection."):
        raise CompileError(
            "torchvision's detection networks take a list of pictures, and answer with as many "
            "boxes as each has",
            seen=type(module).__name__,
            fix="RetinaNet and Mask R-CNN answer with a fixed number of boxes as tessella.nn.zoo "
            "has them (retinanet_r50, mask_rcnn, also with torchvision's weights); of others "
            "compile backbone and head as a module of your own",
        )
    dynamic = [s.batch.min != s.batch.max for s in inputs]
    exported = _export(module, inputs, dynamic)
    graph = _Reader(exported, inputs, dynamic, name or type(module).__name__).read(outputs)
    recognize(graph)
    check(graph)
    return graph


def _export(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], dynamic: Sequence[bool]
) -> torch.export.ExportedProgram:
    """torch's own graph of the module, on example inputs."""
    device = next((p.device for p in (*module.parameters(), *module.buffers())), None)
    ranges = [s.batch for s, d in zip(inputs, dynamic, strict=True) if d]
    least, most = max((r.min for r in ranges), default=1), min((r.max for r in ranges), default=1)
    # up to 2 torch sees one size, for 1 is special, and calls that of each input by another name
    most = max(most, _LEAST_RANGE)
    some = _example_batch(inputs, least, most)
    shapes_of = [s.at(some if d else s.batch.opt) for s, d in zip(inputs, dynamic, strict=True)]
    try:
        example = tuple(
            torch.zeros(shape, dtype=getattr(torch, s.dtype), device=device)
            for s, shape in zip(inputs, shapes_of, strict=True)
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UsageError(
            "there is not enough memory for one batch of inputs",
            seen=f"inputs {', '.join(map(str, shapes_of))}",
            fix="ask for a smaller batch",
        ) from error
    batch = ExportDim("batch", min=least, max=most) if ranges else None
    shapes = tuple({0: batch} if d else {} for d in dynamic)
    with _evaluation_mode(module), torch.no_grad(), traced(module), warnings.catch_warnings():
        # torch 2.11 uses in torch.export what it deprecates itself.
        warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
        # A recurrent module's list of its own weights, which torch.export swaps and gives back.
        warnings.filterwarnings("ignore", r"The tensor attributes? .*_flat_weights", UserWarning)
        try:
            exported: torch.export.ExportedProgram = torch.export.export(
                module, example, dynamic_shapes=_star(module, shapes), strict=False
            )
            drop_checks(exported)
            return exported if made_functional(exported) else exported.run_decompositions({})
        except TessellaError:
            raise
        except Exception as error:  # torch.export runs the user's code: anything may come out of it
            raise CompileError(
                f"{type(module).__name__} cannot be captured",
                seen=_relevant(error),
                fix=next((fix for text, fix in _FIXES.items() if text in str(error)), _TRY),
            ) from error


def _example_batch(inputs: Sequence[TensorSpec], least: int, most: int) -> int:
    """A batch within the range that is none of the other sizes, if there is one."""
    others = {size for spec in inputs for size in spec.at(1)[1:]}
    usual = [size for size in _EXAMPLE_BATCHES if least <= size <= most]
    every = [*usual, *range(max(2, least), min(most, least + len(others) + 1) + 1)]
    return next((size for size in every if size not in others), (usual or [most])[0])


def _star(module: torch.nn.Module, shapes: tuple[dict[int, Any], ...]) -> tuple[Any, ...]:
    """``shapes`` as torch.export wants them: nested once more where forward takes ``*args``."""
    code = module.forward.__code__ if hasattr(module.forward, "__code__") else None
    variadic = code is not None and code.co_flags & 0x04 and code.co_argcount <= 1
    return (shapes,) if variadic else shapes


@contextmanager
def _evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    """``module.eval()``, undone afterwards."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


_TRY = (
    "see whether torch.export takes the module; where only its batch is the matter, compile it for "
    "one batch size"
)
_BY_DATA = (
    "a plan's shapes are fixed: let no size and no branch depend on values. A detection network "
    "may suppress boxes by torch.ops.tessella.nms(boxes[None], scores[None, None], "
    "iou_threshold=0.5, score_threshold=None, most=100)[0, 0], which tells 100 places, −1 behind "
    "the last; or compile what comes before (backbone and heads), and run torchvision.ops.nms on "
    "what the plan answers"
)
# what torch's messages hold, and what to do then
_FIXES = {
    "data-dependent": _BY_DATA,
    "DataDependent": _BY_DATA,
    "PackedParams": "a plan quantizes by itself: take the float32 network (quantize=False) and "
    "compile it with precision='int8' and calibration=…",
}


# Sentences of torch's messages that are about torch: how to see more of it, where else to ask.
_ADVICE = re.compile(
    r"For more information|For more debugging|For extended logs|For C\+\+|If you're using"
    r"|If you suspect|Suggested fixes|The error above|The following call|consider using"
    r"|Caused by|File \"|Traceback"
)


def _relevant(error: Exception) -> str:
    """The part of torch's message that says what is wrong, without traces and advice about
    torch.
    """
    message = re.sub(r"L\['\w+'\]\.size\(\)\[0\]", "the batch", str(error))
    lines = [_ADVICE.split(line)[0].strip(" -") for line in message.splitlines()]
    return f"{type(error).__name__}: " + " · ".join([line for line in lines if line][:3])[:500]


_SHAPERS = (torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default)


class _Reader:
    """Walks torch's graph once and writes ours."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        inputs: Sequence[TensorSpec],
        dynamic: Sequence[bool],
        name: str,
    ) -> None:
        self.exported = exported
        self.inputs = inputs
        self.dynamic = dynamic
        self.build = Builder(name, reserved=[s.name for s in inputs])
        self.symbol: sympy.Symbol | None = None
        self.known: dict[torch.fx.Node, Any] = {}  # Value, tuple of Value, Dim or number

    def read(self, outputs: Sequence[str] | None) -> Graph:
        self._refuse_changed_buffers()
        require_known_readers(self.exported.graph)
        self._placeholders()
        for node in self.exported.graph.nodes:
            if node.op == "call_function":
                self.build.layer = _layer(node)
                self.known[node] = self._call(node)
        return self._outputs(outputs)

    def _refuse_changed_buffers(self) -> None:
        kept = {OutputKind.USER_OUTPUT, OutputKind.USER_INPUT_MUTATION}
        changed = [s for s in self.exported.graph_signature.output_specs if s.kind not in kept]
        if changed:
            raise CompileError(
                "the network changes its own buffers while it runs",
                seen=", ".join(str(s.target) for s in changed),
                fix="keep state out of forward in evaluation mode",
            )

    def _placeholders(self) -> None:
        """Inputs and constants."""
        nodes = [n for n in self.exported.graph.nodes if n.op == "placeholder"]
        specs = self.exported.graph_signature.input_specs
        user = iter(zip(self.inputs, self.dynamic, strict=True))
        tensors = {**self.exported.state_dict, **self.exported.constants}
        for node, spec in zip(nodes, specs, strict=True):
            if spec.kind is InputKind.USER_INPUT:
                tensor_spec, dynamic = next(user)
                if dynamic:
                    self.symbol = node.meta["val"].shape[0].node.expr
                self.known[node] = self.build.input(tensor_spec, dynamic=dynamic)
            elif isinstance(tensor := tensors.get(spec.target), torch.Tensor):
                self.known[node] = self.build.constant(spec.target, tensor)
            else:
                raise CompileError(
                    "the network holds something that is not a tensor",
                    seen=f"{spec.target} ({spec.kind.name})",
                )

    def _call(self, node: torch.fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
            return self._dim(value)
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            return self.known[source][index]
        target = node.target
        if not isinstance(target, torch._ops.OpOverload):
            raise CompileError(
                "the network calls something that is not an operator on tensors",
                seen=f"{target} in {self.build.layer or 'the network itself'}",
                fix="let control flow depend on sizes, not on values",
            )
        if target._schema.name.split("::")[1].startswith(_NO_COMPUTATION):
            return None
        made = list(value) if isinstance(value, list | tuple) else [value]
        if not any(isinstance(t, torch.Tensor) for t in made):
            return None
        args, kwargs = pytree.tree_map(self._argument, (tuple(node.args), dict(node.kwargs)))
        call = OperatorCall(
            operator=target,
            args=args,
            kwargs=kwargs,
            arguments=_by_name(target, args, kwargs),
            shapes=tuple(self._shape(t) for t in made),
            dtypes=tuple(dtype_name(t.dtype) if _is_tensor(t) else None for t in made),
            read=frozenset(
                index
                for user in node.users
                if user.target is operator.getitem and isinstance(index := user.args[1], int)
            ),
        )
        if any(isinstance(a, Value) for a in pytree.tree_leaves((args, kwargs))):
            return _as_torch_says(call, translate(call, self.build), self.build.layer)
        batched = any(v.shape and v.shape[0] == Dim() for v in self.build.graph.inputs)
        counts = batched and call.overload == "arange.default" and args == (Dim(),)
        if counts and _picks_samples(node):
            return self._counted()
        return self._create(call)

    def _create(self, call: OperatorCall) -> Any:
        """An operator without tensor arguments makes a constant: it runs now."""
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        if call.overload in TRANSLATORS:
            return translate(call, self.build)
        if any(isinstance(a, Dim) for a in leaves):
            raise CompileError(
                "a tensor is made from the batch size alone",
                seen=f"{call.target} in {self.build.layer or 'the network itself'}",
                fix="make it from a tensor's shape otherwise, or compile for one batch size",
            )
        if torch.Tag.nondeterministic_seeded in call.operator.tags:
            raise CompileError(
                "the network draws random numbers",
                seen=f"{call.target} in {self.build.layer or 'the network itself'}",
                fix="draw them outside, and pass them as an input",
            )
        kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory")}
        return self.build.constant(call.name, call.operator(*call.args, **kwargs))

    def _counted(self) -> Value:
        """0, 1, … for each sample, made from an input, as nothing else says how many there are."""
        x = next(v for v in self.build.graph.inputs if v.shape and v.shape[0] == Dim())
        while len(x.shape) > 1:
            x = self.build.one("select", [x], dim=1, index=0)
        (ones,) = self.build.fallback("aten::ones_like", (x,), {})
        ones = self.build.one("to", [ones], dtype="int64")
        (count,) = self.build.fallback("aten::cumsum", (ones, 0), {})
        return self.build.one("sub", [count], scalar=1, alpha=1)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, torch.fx.Node):
            return self.known[arg]
        return self._dim(arg) if isinstance(arg, torch.SymInt) else arg

    def _shape(self, tensor: Any) -> Shape | None:
        return tuple(self._dim(d) for d in tensor.shape) if _is_tensor(tensor) else None

    def _dim(self, size: int | torch.SymInt) -> int | Dim:
        """A symbolic size as a multiple of the batch plus a constant."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        if self.symbol is not None and expression.free_symbols == {self.symbol}:
            offset = expression.subs(self.symbol, 0)
            factor = expression.subs(self.symbol, 1) - offset
            if (expression - factor * self.symbol - offset).expand() == 0:
                return Dim(int(factor), int(offset))
        by_data = any(str(symbol).startswith("u") for symbol in expression.free_symbols)
        raise CompileError(
            "a size in the network depends on data"
            if by_data
            else "a size in the network is not a multiple of the batch plus a constant",
            seen=f"{expression} in {self.build.layer or 'the network itself'}",
            fix=_BY_DATA if by_data else "compile for one fixed batch size",
        )

    def _outputs(self, names: Sequence[str] | None) -> Graph:
        """The results that are tensors, flattened in order."""
        (node,) = (n for n in self.exported.graph.nodes if n.op == "output")
        specs = self.exported.graph_signature.output_specs
        user = [
            result
            for result, spec in zip(node.args[0], specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        keys = self._keys(user)
        user = [result for result in user if result is not None]
        results = [self.known.get(r) if isinstance(r, torch.fx.Node) else r for r in user]
        values = [r for r in results if isinstance(r, Value)]
        if not values or len(values) < len(results):
            raise CompileError(
                "a network must return tensors",
                seen=", ".join("a tensor" if isinstance(r, Value) else repr(r) for r in results)
                or "nothing",
                fix="return a tensor, or a tuple or dict of tensors",
            )
        if names is None:
            names = keys or ["output", *(f"output_{i}" for i in range(1, len(results)))]
        if len(names) != len(results):
            raise UsageError(
                "the number of output names is not the number of outputs",
                seen=f"{len(names)} names, {len(results)} outputs",
            )
        return self.build.finish(values, names)

    def _keys(self, user: Sequence[object]) -> list[str]:
        """The names of results by their keys, of a network that returns a dict; none of others.

        A tuple in a dict has its key and its places: ``boxes.0``, ``boxes.1``.
        """
        spec = self.exported.call_spec.out_spec
        if spec is None or spec.num_leaves != len(user):
            return []
        made = pytree.tree_unflatten(list(user), spec)
        if not isinstance(made, Mapping):
            return []
        leaves, _ = pytree.tree_flatten_with_path(made, is_leaf=lambda leaf: leaf is None)
        names = [
            ".".join(str(getattr(entry, "key", getattr(entry, "idx", "?"))) for entry in path)
            for path, result in leaves
            if result is not None
        ]
        taken = {spec.name for spec in self.inputs}
        usable = len({*names, *taken}) == len(names) + len(taken) and all(names)
        return names if usable else []


def _as_torch_says(call: OperatorCall, made: Any, layer: str) -> Any:
    """What an operator became, if it has torch's element types.

    Raises:
        CompileError: it has not: a layer of ours takes other types than torch's.
    """
    values = made if isinstance(made, tuple) else (made,)
    kinds = [v.dtype if isinstance(v, Value) else None for v in values]
    wrong = [
        (a, b) for a, b in zip(kinds, call.dtypes, strict=False) if None not in (a, b) and a != b
    ]
    if wrong:
        raise CompileError(
            f"{call.name} of this element type would be computed in another",
            seen=f"{wrong[0][1]}, not {wrong[0][0]}, in {layer or 'the network itself'}",
            fix="change the type of its inputs with .to(…), to float32 as a rule",
        )
    return made


def _picks_samples(count: torch.fx.Node) -> bool:
    """Whether 0, 1, … is nothing but the first of several indices: each sample picks from itself.

    transformers' masks and CLIP's texts are indexed so.
    """
    return all(
        (user.target == torch.ops.aten.index.Tensor and _first(user.args[1]) is count)
        or (user.target in _SHAPERS and _picks_samples(user))
        for user in count.users
    )


def _first(indices: object) -> object:
    return indices[0] if isinstance(indices, list | tuple) else None


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _by_name(
    target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """All arguments by their names in the schema."""
    schema = target._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), args))
    return named | kwargs


def _layer(node: torch.fx.Node) -> str:
    """The path of the innermost module that the node came from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return "" if path.startswith("_empty") else path
