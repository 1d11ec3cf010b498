"""torch's recurrent layers, caught whole while a module is captured.

torch.export takes an LSTM apart while it finds out shapes: one step of time after another, so that
the number of steps would be fixed and a long sequence would take minutes. Inside ``CaughtWhole``
the call becomes one operator of ours for each layer. Packed sequences stay as they were before
packing, with their lengths beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.utils.rnn as packing
from torch import nn

from tessella.core.errors import CompileError
from tessella.graph.build import Builder
from tessella.graph.graph import Graph, Value
from tessella.graph.operator_call import OperatorCall
from tessella.operations.table import operation

Tensor = torch.Tensor


def _layers_shapes(
    input: Tensor,
    weights: list[Tensor],
    h_0: Tensor,
    c_0: Tensor | None,
    lengths: Tensor | None,
    kind: str,
    bidirectional: bool,
    has_biases: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, samples, _ = input.shape
    output = input.new_empty(steps, samples, h_0.shape[2] * (1 + bidirectional))
    c = h_0 if c_0 is None else c_0
    return output, h_0.new_empty(h_0.shape), c.new_empty(c.shape)


def _packed_shape(input: Tensor) -> Tensor:
    return input.new_empty(input.shape[0] * input.shape[1], *input.shape[2:])


def _unpacked_shape(data: Tensor, lengths: Tensor, padding: float) -> Tensor:
    samples = lengths.shape[0]
    return data.new_empty(data.shape[0] // samples, samples, *data.shape[1:])


_LIBRARY = torch.library.Library("tessella", "DEF")  # type: ignore[no-untyped-call]


def _operator(schema: str, shapes: Callable[..., Any]) -> torch._ops.OpOverload:
    """An operator that is only traced: it has shapes, and no numbers."""
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    name = schema.partition("(")[0]
    torch.library.register_fake(f"tessella::{name}", shapes, lib=_LIBRARY)
    made: torch._ops.OpOverload = getattr(torch.ops.tessella, name).default
    return made


RECURRENT = _operator(
    "recurrent(Tensor input, Tensor[] weights, Tensor h_0, Tensor? c_0, Tensor? lengths, str kind,"
    " bool bidirectional, bool has_biases) -> (Tensor, Tensor, Tensor)",
    _layers_shapes,
)
# a padded sequence [T, N, I] as rows [T · N, I], as packed sequences have them; and back
PACKED = _operator("packed(Tensor input) -> Tensor", _packed_shape)
UNPACKED = _operator(
    "unpacked(Tensor data, Tensor lengths, float padding) -> Tensor", _unpacked_shape
)

KINDS = {
    torch.lstm: "lstm",
    torch.gru: "gru",
    torch.rnn_tanh: "rnn_tanh",
    torch.rnn_relu: "rnn_relu",
}
CAUGHT = (torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence, *KINDS)


class _Lengths:
    """Stands for the batch sizes of a packed sequence: what is padded, and how long each sample is.

    A packed sequence asks for its device, its length and its first number; torch's functions take
    it for a tensor.
    """

    device = torch.device("cpu")

    def __init__(self, lengths: Tensor, steps: int, samples: int) -> None:
        self.lengths, self.steps, self.samples = lengths, steps, samples

    def __getitem__(self, step: int) -> int:
        if step:
            raise CompileError(
                "the network reads how many samples of a packed sequence are left at a step",
                seen=f"batch_sizes[{step}]",
                fix="pad the sequence again before it is read",
            )
        return self.samples

    def size(self, axis: int) -> int:
        return self.steps

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise CompileError(
            "the network reads a packed sequence by other means than a recurrent layer",
            seen=getattr(func, "__name__", func),
            fix="pad the sequence again before it is read",
        )


class _InOrder:
    """Stands for samples sorted by length, or back: no layer here needs it, so they stay."""

    device = torch.device("cpu")

    def to(self, *_: Any, **__: Any) -> _InOrder:
        return self

    cpu = to

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.index_select, Tensor.__getitem__):
            return args[0]
        raise CompileError(
            "the network reads how a packed sequence was sorted",
            seen=getattr(func, "__name__", func),
            fix="give pack_padded_sequence enforce_sorted=True: a plan takes any lengths",
        )


class _TorchUnsorted:
    """torch as ``torch.nn.utils.rnn`` sees it, which sorts nothing but lengths."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def sort(self, lengths: Tensor, *, descending: bool) -> tuple[Tensor, _InOrder]:
        assert descending
        return lengths, _InOrder()


@contextmanager
def packed_as_given() -> Iterator[None]:
    """Packed sequences keep the order of their samples; and torch's check of a first state, which
    makes a fixed number of the batch, is left to our operators' shapes.
    """
    known_inverse = packing.invert_permutation
    checks = {kind: kind.check_forward_args for kind in (nn.RNNBase, nn.LSTM)}

    def inverse(order: Any) -> Any:
        return order if isinstance(order, _InOrder) else known_inverse(order)

    def checked(kind: type[nn.RNNBase]) -> Callable[..., None]:
        def check(module: Any, input: Any, hidden: Any, batch_sizes: Any) -> None:
            if not isinstance(batch_sizes, _Lengths):
                checks[kind](module, input, hidden, batch_sizes)

        return check

    changed = cast(Any, packing)
    changed.torch, changed.invert_permutation = _TorchUnsorted(), inverse
    for kind in checks:
        cast(Any, kind).check_forward_args = checked(kind)
    try:
        yield
    finally:
        changed.torch, changed.invert_permutation = torch, known_inverse
        for kind, check in checks.items():
            cast(Any, kind).check_forward_args = check


def caught(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call of torch's is as calls of the operators above; NotImplemented for any other."""
    if kwargs:
        return NotImplemented
    if func is torch._VF._pack_padded_sequence:
        return _pack(*args)
    if func is torch._VF._pad_packed_sequence and isinstance(args[1], _Lengths):
        return _pad(*args)
    kind = KINDS.get(func)
    packed = kind is not None and isinstance(args[1], _Lengths)
    is_tensor = kind is not None and isinstance(args[2], Tensor)  # batch sizes of torch's own
    if kind is None or (is_tensor and not packed):
        return NotImplemented
    return _packed_layers(kind, *args) if packed else _padded_layers(kind, *args)


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, _Lengths]:
    x = input.transpose(0, 1) if batch_first else input
    return PACKED(x), _Lengths(lengths, x.shape[0], x.shape[1])


def _pad(
    data: Tensor, lengths: _Lengths, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    if total != lengths.steps:
        raise CompileError(
            "a packed sequence is padded to another length than it had",
            seen=f"{total}, packed from {lengths.steps} steps",
            fix="give pad_packed_sequence the total_length that was packed",
        )
    x = UNPACKED(data, lengths.lengths, float(padding))
    return (x.transpose(0, 1) if batch_first else x), lengths.lengths


def _packed_layers(kind: str, data: Tensor, lengths: _Lengths, *rest: Any) -> tuple[Tensor, ...]:
    """The layers of packed rows; ``rest`` as that of ``_layers``."""
    x = data.reshape(lengths.steps, lengths.samples, data.shape[1])
    output, *states = _layers(kind, x, lengths.lengths, *rest)
    return PACKED(output), *states


def _padded_layers(kind: str, input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The layers of a padded sequence; ``rest`` as that of ``_layers``, then ``batch_first``."""
    *settings, batch_first = rest
    x = input.transpose(0, 1) if batch_first else input
    output, *states = _layers(kind, x, None, *settings)
    return (output.transpose(0, 1) if batch_first else output), *states


def _layers(
    kind: str,
    x: Tensor,
    lengths: Tensor | None,
    hx: Any,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """The output, and the last states [layers · directions, N, …], of x [T, N, I]."""
    if train and dropout:
        raise CompileError(
            "a recurrent layer drops values at random even in evaluation mode",
            seen=f"dropout={dropout}",
            fix="use nn.LSTM, nn.GRU or nn.RNN, or pass training=self.training",
        )
    h, c = hx if kind == "lstm" else (hx, None)
    ways = 1 + bidirectional
    each = len(params) // num_layers
    lasts = []
    for layer in range(num_layers):
        of_layer = slice(layer * ways, (layer + 1) * ways)
        c_0 = None if c is None else c[of_layer]
        weights = params[layer * each : (layer + 1) * each]
        x, *states = RECURRENT(
            x, weights, h[of_layer], c_0, lengths, kind, bidirectional, has_biases
        )
        lasts.append(states)
    joined = [s[0] if len(s) == 1 else torch.cat(s) for s in zip(*lasts, strict=True)]
    return x, *joined[: 2 if kind == "lstm" else 1]


def require_known_readers(exported: torch.fx.Graph) -> None:
    """Refuse to read a packed sequence by rows: here they are padded, and in another order.

    Raises:
        CompileError: something else than a recurrent layer, or what knows no rows, reads them.
    """
    for node in exported.nodes:
        if node.target == PACKED:
            _require_known_readers(node)


# what may happen to packed rows: each row is changed by itself
_BY_ROW = ("dropout", "relu", "tanh", "sigmoid", "gelu", "linear", "layer_norm", "clone", "detach")
_INSIDE = ("view", "reshape", "_unsafe_view")


def _require_known_readers(packed: torch.fx.Node) -> None:
    for user in packed.users:
        name = ""
        if isinstance(user.target, torch._ops.OpOverload):
            name = user.target._schema.name.split("::")[1]
        if user.target in (PACKED, UNPACKED):
            continue
        if name in _INSIDE and all(u.target == RECURRENT for u in user.users):
            continue
        if name not in _BY_ROW:
            raise CompileError(
                "the network reads the rows of a packed sequence",
                seen=f"{user.target}",
                fix="pad the sequence again (pad_packed_sequence) before it is read",
            )
        _require_known_readers(user)


# --- translations --------------------------------------------------------------------------------


def _recurrent(call: OperatorCall, build: Builder) -> tuple[Value, ...]:
    """One layer; states that are zero are left out."""
    a = call.arguments
    kind, _, nonlinearity = str(a["kind"]).partition("_")
    ways = 1 + a["bidirectional"]
    each = len(a["weights"]) // ways
    ends = [a["weights"][d * each : (d + 1) * each] for d in range(ways)]
    stacked = [_stacked(build, parts) for parts in zip(*ends, strict=True)]
    names = ["weight_ih", "weight_hh", *["bias_ih", "bias_hh"] * a["has_biases"], "weight_hr"]
    operands = dict(zip(names, stacked, strict=False))
    for name in ("h_0", "c_0", "lengths"):
        if a[name] is not None and not (name != "lengths" and is_zero(build.graph, a[name])):
            operands[name] = a[name]
    attrs: dict[str, Any] = {"direction": "bidirectional" if a["bidirectional"] else "forward"}
    if kind == "gru":
        attrs["reset_after"] = True
    elif kind == "rnn":
        attrs["nonlinearity"] = nonlinearity
    made = layer(build, kind, call.input, operands, attrs)
    return made if len(made) == 3 else (*made, made[-1])


def layer(
    build: Builder,
    kind: str,
    input: Value,
    given: dict[str, Value],
    attrs: dict[str, Any],
    name: str | None = None,
) -> tuple[Value, ...]:
    """Append ``lstm``, ``gru`` or ``rnn`` with its operands by name."""
    operands = operation(kind).ordered(input=input, **given)
    return build.node(kind, operands, name=name, **attrs)


def _stacked(build: Builder, parts: tuple[Value, ...]) -> Value:
    wide = [build.one("reshape", [part], shape=(1, *part.shape)) for part in parts]
    return wide[0] if len(wide) == 1 else build.one("cat", wide, dim=0)


_SPREADS = ("slice", "select", "reshape", "expand", "permute", "cat")


def is_zero(graph: Graph, value: Value) -> bool:
    """Whether a value is a constant 0, however it was cut and spread."""
    tensor = graph.constant(value)
    if tensor is not None:
        return not tensor.count_nonzero()
    maker = graph.producer(value)
    if maker is None or maker.op not in _SPREADS:
        return False
    return all(is_zero(graph, v) for v in maker.inputs if v is not None)


def _packed(call: OperatorCall, build: Builder) -> Value:
    return build.one("reshape", [call.input], shape=call.shapes[0])


def _unpacked(call: OperatorCall, build: Builder) -> Value:
    """[T, N, …], with the padding behind each sample's end."""
    x = build.one("reshape", [call.arguments["data"]], shape=call.shapes[0])
    steps, samples = x.shape[:2]
    if not isinstance(steps, int):
        raise CompileError(
            "a packed sequence is padded again to a number of steps that is not fixed",
            seen=f"{x.shape} in {build.layer or 'the network itself'}",
            fix="let the first axis of the input be the batch",
        )
    counted = build.constant("steps", torch.arange(steps).view(-1, 1))
    lengths = build.one("reshape", [call.arguments["lengths"]], shape=(1, samples))
    (going,) = build.fallback("aten::lt.Tensor", (counted, lengths), {})
    going = build.one("reshape", [going], shape=(steps, samples, *[1] * (len(x.shape) - 2)))
    padding = torch.tensor(call.arguments["padding"], dtype=getattr(torch, x.dtype))
    return build.fallback("aten::where.self", (going, x, build.constant("padding", padding)), {})[0]


TRANSLATORS: dict[str, Callable[[OperatorCall, Builder], Value | tuple[Value, ...]]] = {
    "recurrent.default": _recurrent,
    "packed.default": _packed,
    "unpacked.default": _unpacked,
}
