"""torch's operators become ours: one function for each group of overloads that says the same.

An overload without a translation here, and without a row that shares its arguments
(``operation.BY_ATEN``), becomes a ``fallback`` node, if ``operations.torch_operators`` lets it run;
one of a user's own (``kernels.user``) becomes a ``user`` node.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tessella.core.dtype import dtype_name
from tessella.core.errors import CompileError
from tessella.graph import recurrent
from tessella.graph.aten_layers import LAYERS
from tessella.graph.attributes import is_attribute
from tessella.graph.build import Builder
from tessella.graph.graph import Dim, Value
from tessella.graph.operator_call import OperatorCall
from tessella.graph.quantized import QUANTIZED
from tessella.operations.operation import Operation
from tessella.operations.table import BY_ATEN
from tessella.operations.user_operators import OPERATORS

Result = Value | tuple[Value, ...] | None


def translate(call: OperatorCall, build: Builder) -> Result:
    """Append what ``call`` does to the graph.

    Raises:
        CompileError: the operator has no operation of ours and may not run as a fallback.
    """
    if call.operator.namespace == "tessella" and call.overload in recurrent.TRANSLATORS:
        return recurrent.TRANSLATORS[call.overload](call, build)
    if call.operator.namespace in ("aten", "quantized_decomposed", "tessella"):
        translator = TRANSLATORS.get(call.overload)
        if translator is not None and (made := translator(call, build)) is not None:
            return made
        row = BY_ATEN.get(call.overload)
        if row is not None and (made := _same_arguments(call, build, row)) is not None:
            return made
    return _user(call, build) if call.target in OPERATORS else _fallback(call, build)


# Arguments that cannot change what an inference computes.
_IGNORED = frozenset({"cudnn_enable", "cudnn_enabled", "memory_format", "non_blocking", "copy"})

# Rank of the input of operations whose kernels want a batch axis; torch takes samples without one
# too.
_RANKS = {"conv1d": 3, "conv2d": 4, "conv3d": 5, "conv_transpose2d": 4,
          "conv_transpose3d": 5}  # fmt: skip
_RANKS |= {"max_pool2d": 4, "avg_pool2d": 4, "adaptive_avg_pool2d": 4}

# Attributes that torch lets be one number, or empty for "like the kernel", for every axis.
_PER_AXIS = frozenset(
    {"stride", "padding", "dilation", "output_padding", "kernel_size", "output_size"}
)


def _same_arguments(call: OperatorCall, build: Builder, row: Operation) -> Result:
    """A row whose inputs and attributes are the overload's arguments of the same names."""
    arguments = dict(call.arguments)
    if "self" in arguments:
        arguments["input"] = arguments.pop("self")
    inputs = [arguments.pop(i, None) for i in row.inputs]
    attrs = {a: arguments.pop(a) for a in row.attributes if a in arguments}
    defaults = {a.name: a.default_value for a in call.operator._schema.arguments}
    changed = {
        a for a, v in arguments.items() if a not in _IGNORED and v not in (None, defaults.get(a))
    }
    first = inputs[0]
    if changed or not isinstance(first, Value):
        return None
    if row.name in _RANKS and len(first.shape) != _RANKS[row.name]:
        return None
    attrs = _canonical(attrs, first)
    if not is_attribute(attrs):
        return None
    return build.one(row.name, inputs, **attrs)


def _canonical(attrs: dict[str, Any], first: Value) -> dict[str, Any]:
    """Attributes in the one form that kernels see: axes counted from 0, a size for every axis."""
    rank = len(first.shape)
    canonical: dict[str, Any] = {}
    for name, attr in attrs.items():
        if name == "dim":
            attr = _axes(attr, rank)
        elif name == "dtype" and attr is not None:
            attr = dtype_name(attr)
        elif name in _PER_AXIS:
            values = tuple(attr) if isinstance(attr, list | tuple) else (attr,)
            attr = values * (rank - 2) if len(values) == 1 else values
        canonical[name] = attr
    if canonical.get("stride") == ():
        canonical["stride"] = canonical["kernel_size"]
    return canonical


def _axes(dim: Any, rank: int) -> Any:
    if isinstance(dim, list | tuple):
        return tuple(sorted(_axis(d, rank) for d in dim)) or None
    return None if dim is None else _axis(dim, rank)


def _axis(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _user(call: OperatorCall, build: Builder) -> Result:
    """An operator of a user's own, with all its arguments in order."""
    arguments = [call.arguments[a.name] for a in call.operator._schema.arguments]
    outputs = build.user(call.target, arguments)
    return outputs if len(outputs) > 1 else outputs[0]


def _fallback(call: OperatorCall, build: Builder) -> Result:
    """The operator itself."""
    kwargs = {k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory")}
    outputs = build.fallback(call.target, call.args, kwargs)
    several = len(call.shapes) > 1 or str(call.operator._schema.returns[0].type) != "Tensor"
    return outputs if several else outputs[0]


# ── what is not there at inference ────────────────────────────────────────────────────────────────


def _identity(call: OperatorCall, build: Builder) -> Result:
    return call.input


def _dropout(call: OperatorCall, build: Builder) -> Result:
    if call.arguments["train"] and call.arguments["p"] > 0:
        raise CompileError(
            "the network drops values at random even in evaluation mode",
            seen=f"p={call.arguments['p']} in {build.layer or 'the network itself'}",
            fix="use nn.Dropout, or pass training=self.training to F.dropout",
        )
    return (call.input,) if len(call.shapes) > 1 else call.input


def _to(call: OperatorCall, build: Builder) -> Result:
    """A change of element type; to another device or layout is nothing at inference."""
    dtype = call.dtypes[0]
    if dtype is None or dtype == call.input.dtype:
        return call.input
    return build.one("to", [call.input], dtype=dtype)


# ── views ─────────────────────────────────────────────────────────────────────────────────────────


def _reshape(call: OperatorCall, build: Builder) -> Result:
    """Everything whose result is the input's elements, in order, in another shape."""
    if call.shapes[0] == call.input.shape:
        return call.input
    return build.one("reshape", [call.input], shape=call.shapes[0])


def _expand(call: OperatorCall, build: Builder) -> Result:
    if call.shapes[0] == call.input.shape:
        return call.input
    return build.one("expand", [call.input], shape=call.shapes[0])


def _permute(call: OperatorCall, build: Builder) -> Result:
    rank = len(call.input.shape)
    order = list(range(rank))
    arguments = call.arguments
    if "dims" in arguments:
        order = [_axis(d, rank) for d in arguments["dims"]]
    elif "dim0" in arguments:
        a, b = _axis(arguments["dim0"], rank), _axis(arguments["dim1"], rank)
        order[a], order[b] = order[b], order[a]
    elif "source" in arguments:
        source, destination = (
            [_axis(d, rank) for d in (v if isinstance(v, list | tuple) else [v])]
            for v in (arguments["source"], arguments["destination"])
        )
        rest = iter(d for d in range(rank) if d not in source)
        place = dict(zip(destination, source, strict=True))
        order = [place[d] if d in place else next(rest) for d in range(rank)]
    else:  # t, mT: the last two axes
        order[-2:] = order[:-3:-1] if rank >= 2 else order
    if order == list(range(rank)):
        return call.input
    return build.one("permute", [call.input], dims=order)


def _slice(call: OperatorCall, build: Builder) -> Result:
    arguments, shape = call.arguments, call.input.shape
    dim = _axis(arguments["dim"], len(shape))
    size, step = shape[dim], arguments["step"]
    start = _from_front(arguments["start"] or 0, size)
    end = _from_front(arguments["end"], size)
    if end == size or (isinstance(end, int) and end >= 2**31):
        end = None
    if start == 0 and end is None and step == 1:
        return call.input
    attrs = {"dim": dim, "start": start, "end": end, "step": step}
    return build.one("slice", [call.input], **attrs)


def _from_front(index: Any, size: int | Dim) -> Any:
    """An index into an axis of known size as one from 0 to ``size``."""
    if not isinstance(index, int) or not isinstance(size, int):
        return index
    return min(max(index + size if index < 0 else index, 0), size)


def _split(call: OperatorCall, build: Builder) -> Result:
    """split, chunk: the sizes are in torch's shapes of the results."""
    dim = _axis(call.arguments["dim"], len(call.input.shape))
    sizes = [s[dim] for s in call.shapes if s is not None]
    return build.node("split", [call.input], sizes=sizes, dim=dim)


def _unbind(call: OperatorCall, build: Builder) -> Result:
    dim = _axis(call.arguments["dim"], len(call.input.shape))
    return tuple(
        build.one("select", [call.input], dim=dim, index=i) for i in range(len(call.shapes))
    )


def _cat(call: OperatorCall, build: Builder) -> Result:
    tensors = call.arguments["tensors"]
    dim = _axis(call.arguments["dim"], len(tensors[0].shape))
    if len(tensors) == 1:
        only: Value = tensors[0]
        return only
    return build.one("cat", tensors, dim=dim)


def _stack(call: OperatorCall, build: Builder) -> Result:
    tensors = call.arguments["tensors"]
    shape = tensors[0].shape
    dim = _axis(call.arguments["dim"], len(shape) + 1)
    wide = (*shape[:dim], 1, *shape[dim:])
    columns = [build.one("reshape", [t], shape=wide) for t in tensors]
    return build.one("cat", columns, dim=dim)


def _roll(call: OperatorCall, build: Builder) -> Result:
    """Each axis cut in two, and the parts exchanged."""
    shifts, dims, x = call.arguments["shifts"], call.arguments["dims"], call.input
    axes = [_axis(d, len(x.shape)) for d in dims]
    if not axes or any(isinstance(n, Dim) for n in (*shifts, *(x.shape[a] for a in axes))):
        return None
    for shift, axis in zip(shifts, axes, strict=True):
        place = -shift % x.shape[axis]
        if place == 0:
            continue
        ends = ((place, None), (0, place))
        parts = [build.one("slice", [x], dim=axis, start=a, end=b, step=1) for a, b in ends]
        x = build.one("cat", parts, dim=axis)
    return x


def _repeat_interleave(call: OperatorCall, build: Builder) -> Result:
    """Every element along an axis ``repeats`` times: an axis beside it, spread."""
    repeats, dim, shape = call.arguments["repeats"], call.arguments["dim"], call.input.shape
    if dim is None or not isinstance(repeats, int):
        return None
    after = _axis(dim, len(shape)) + 1
    wide = build.one("reshape", [call.input], shape=(*shape[:after], 1, *shape[after:]))
    spread = build.one("expand", [wide], shape=(*shape[:after], repeats, *shape[after:]))
    return build.one("reshape", [spread], shape=call.shapes[0])


def _copy(call: OperatorCall, build: Builder) -> Result:
    """What is assigned to all of a tensor, in its type and shape."""
    source = call.arguments["src"]
    if source.dtype != call.dtypes[0]:
        source = build.one("to", [source], dtype=call.dtypes[0])
    shape = call.shapes[0]
    return source if source.shape == shape else build.one("expand", [source], shape=shape)


# ── element by element ────────────────────────────────────────────────────────────────────────────


def _binary(op: str) -> Callable[[OperatorCall, Builder], Result]:
    def translator(call: OperatorCall, build: Builder) -> Result:
        left = call.arguments["self"]
        right = call.arguments["exponent" if op == "pow" else "other"]
        attrs = {"alpha": call.arguments.get("alpha", 1)} if op in ("add", "sub") else {}
        if not isinstance(left, Value):
            return None
        if isinstance(right, Value):
            return build.one(op, [left, right], **attrs)
        if not is_attribute(right):
            return None
        return build.one(op, [left], scalar=right, **attrs)

    return translator


def _rsub(call: OperatorCall, build: Builder) -> Result:
    """``other − alpha · input`` for a number ``other``."""
    other, alpha = call.arguments["other"], call.arguments["alpha"]
    if isinstance(other, Value):
        return build.one("sub", [other, call.input], alpha=alpha)
    negative = (
        build.one("neg", [call.input])
        if alpha == 1
        else build.one("mul", [call.input], scalar=-alpha)
    )
    return build.one("add", [negative], scalar=other, alpha=1)


def _clamp(call: OperatorCall, build: Builder) -> Result:
    arguments = call.arguments
    low = arguments.get("min", arguments.get("min_val"))
    high = arguments.get("max", arguments.get("max_val"))
    low = None if isinstance(low, float) and low == -math.inf else low
    high = None if isinstance(high, float) and high == math.inf else high
    if low is None and high is None:
        return call.input
    if not all(v is None or isinstance(v, int | float) for v in (low, high)):
        return None
    if (low, high) == (0, 6) and call.input.dtype in ("float32", "float64", "float16", "bfloat16"):
        return build.one("relu6", [call.input])
    return build.one("clamp", [call.input], min=low, max=high)


def _bitwise(call: OperatorCall, build: Builder) -> Result:
    """Python's operators on masks, whose own overloads torch counts among its internals."""
    name = call.name.strip("_")
    return build.fallback(f"aten::bitwise_{name}.Tensor", call.args, {})[0]


def _scaled_elu(call: OperatorCall, build: Builder) -> Result:
    """selu and celu: an elu with other factors (https://arxiv.org/abs/1706.02515, 1704.07483)."""
    alpha, scale, input_scale = 1.6732632423543772, 1.0507009873554805, 1.0
    if call.name == "celu":
        alpha, scale = float(call.arguments["alpha"]), 1.0
        input_scale = 1 / alpha
    return build.one("elu", [call.input], alpha=alpha, scale=scale, input_scale=input_scale)


def _square(call: OperatorCall, build: Builder) -> Result:
    return build.one("mul", [call.input, call.input])


def _add_of(op: str) -> Callable[[OperatorCall, Builder], Result]:
    """addcmul and addcdiv: a product or quotient is added, times a number."""

    def translated(call: OperatorCall, build: Builder) -> Result:
        one, other, value = (call.arguments[name] for name in ("tensor1", "tensor2", "value"))
        if not is_attribute(value) or len({v.dtype for v in (call.input, one, other)}) > 1:
            return None
        return build.one("add", [call.input, build.one(op, [one, other])], alpha=value)

    return translated


def _max_pool_with_indices(call: OperatorCall, build: Builder) -> Result:
    if call.read - {0}:
        return None
    made = _same_arguments(call, build, BY_ATEN["max_pool2d.default"])
    return (made,) if isinstance(made, Value) else None


def _extreme(op: str) -> Translator:
    """A maximum or minimum along an axis whose place nobody asks for; with it: None."""

    def translated(call: OperatorCall, build: Builder) -> Result:
        if call.read - {0} or not call.input.shape:
            return None
        dim = _axis(call.arguments["dim"], len(call.input.shape))
        return (build.one(op, [call.input], dim=(dim,), keepdim=call.arguments["keepdim"]),)

    return translated


def _vector_norm(call: OperatorCall, build: Builder) -> Result:
    """The 2-norm along axes."""
    a = call.arguments
    if a["ord"] != 2 or not a["dim"] or a["dtype"] is not None or _complex(call.input):
        return None
    square = build.one("mul", [call.input, call.input])
    dim = _axes(a["dim"], len(call.input.shape))
    return build.one("sqrt", [build.one("sum", [square], dim=dim, keepdim=a["keepdim"])])


def _complex(value: Value) -> bool:
    return value.dtype.startswith("complex")


def _mean_of_all(op: str) -> Callable[[OperatorCall, Builder], Result]:
    def translator(call: OperatorCall, build: Builder) -> Result:
        dtype = call.arguments.get("dtype")
        name = None if dtype is None else dtype_name(dtype)
        return build.one(op, [call.input], dim=None, keepdim=False, dtype=name)

    return translator


def _filled(call: OperatorCall, build: Builder) -> Result:
    """zeros, ones, full and their like: one number, spread over the shape."""
    shape, name = call.shapes[0], call.name
    number = 0 if "zero" in name or "empty" in name else 1 if "ones" in name else None
    if number is None:
        number = call.arguments["fill_value"]
    if shape is None or isinstance(number, Value | Dim):
        return None
    static = [1 if isinstance(d, Dim) else d for d in shape]
    filled = torch.full(static, number, dtype=getattr(torch, str(call.dtypes[0])))
    constant = build.constant(name, filled)
    return constant if constant.shape == shape else build.one("expand", [constant], shape=shape)


Translator = Callable[[OperatorCall, Builder], Result]


def _table(*groups: tuple[str, Translator]) -> dict[str, Translator]:
    return {overload: function for overloads, function in groups for overload in overloads.split()}


TRANSLATORS: dict[str, Translator] = _table(
    ("alias.default contiguous.default clone.default detach.default detach_.default", _identity),
    ("lift_fresh_copy.default lift_fresh.default positive.default", _identity),
    ("dropout.default feature_dropout.default alpha_dropout.default", _dropout),
    ("feature_alpha_dropout.default native_dropout.default", _dropout),
    ("_to_copy.default to.dtype to.device to.dtype_layout to.other type_as.default", _to),
    ("view.default reshape.default _unsafe_view.default view_as.default", _reshape),
    ("reshape_as.default flatten.using_ints unflatten.int ravel.default", _reshape),
    ("squeeze.default squeeze.dim squeeze.dims unsqueeze.default", _reshape),
    ("expand.default expand_as.default broadcast_to.default", _expand),
    ("permute.default transpose.int swapaxes.default movedim.int movedim.intlist", _permute),
    ("moveaxis.int moveaxis.intlist t.default mT.default", _permute),
    ("slice.Tensor", _slice),
    ("roll.default", _roll),
    ("repeat_interleave.self_int", _repeat_interleave),
    ("copy.default", _copy),
    ("linalg_vector_norm.default", _vector_norm),
    ("split.Tensor split.sizes split_with_sizes.default chunk.default", _split),
    ("unbind.int", _unbind),
    ("cat.default concat.default concatenate.default", _cat),
    ("stack.default", _stack),
    ("add.Tensor add.Scalar", _binary("add")),
    ("sub.Tensor sub.Scalar", _binary("sub")),
    ("mul.Tensor mul.Scalar", _binary("mul")),
    ("div.Tensor div.Scalar", _binary("div")),
    ("pow.Tensor_Scalar pow.Tensor_Tensor", _binary("pow")),
    ("maximum.default max.other", _binary("maximum")),
    ("minimum.default min.other", _binary("minimum")),
    ("rsub.Scalar rsub.Tensor", _rsub),
    ("clamp.default clamp_min.default clamp_max.default hardtanh.default", _clamp),
    ("square.default", _square),
    ("addcmul.default", _add_of("mul")),
    ("addcdiv.default", _add_of("div")),
    ("selu.default celu.default", _scaled_elu),
    ("__and__.Tensor __or__.Tensor __xor__.Tensor", _bitwise),
    ("max_pool2d_with_indices.default", _max_pool_with_indices),
    ("max.dim", _extreme("amax")),
    ("min.dim", _extreme("amin")),
    ("mean.default", _mean_of_all("mean")),
    ("sum.default", _mean_of_all("sum")),
    ("zeros.default ones.default full.default zeros_like.default ones_like.default", _filled),
    ("full_like.default new_zeros.default new_ones.default new_full.default", _filled),
    ("empty.memory_format empty_like.default new_empty.default zero.default", _filled),
    *LAYERS.items(),
    *QUANTIZED.items(),
)
