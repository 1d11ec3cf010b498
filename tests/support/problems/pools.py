"""Pools and means, alone and in chains of steps, and their comparison with float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta

CPU = torch.device("cpu")
# the interpreter cuts float32 to bfloat16 where a GPU rounds
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2, "int8": 0.0}
FORMATS: tuple[Format, ...] = ("contiguous", "channels_last")


def problem(
    op: str,
    shape: tuple[int, ...],
    attrs: dict[str, Any],
    dtype: str = "float32",
    format: Format = "channels_last",
) -> Problem:
    x = TensorMeta(shape=shape, dtype=dtype, format=format if len(shape) == 4 else "contiguous")
    (made,) = operation(op).call([x.empty(torch.device("meta"))], attrs)
    kept: Format = format if made.dim() == 4 else "contiguous"
    out = TensorMeta(shape=tuple(made.shape), dtype=dtype, format=kept)
    return Problem(op=op, inputs=(x,), outputs=(out,), attrs=attrs)


def maximum(
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    ceil_mode: bool = False,
) -> dict[str, Any]:
    return {
        "kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation,
        "ceil_mode": ceil_mode,
    }  # fmt: skip


def mean(
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (2, 2),
    padding: tuple[int, int] = (1, 1),
    ceil_mode: bool = False,
    padded: bool = True,
    divisor: int | None = None,
) -> dict[str, Any]:
    return {
        "kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil_mode,
        "count_include_pad": padded, "divisor_override": divisor,
    }  # fmt: skip


IMAGE = (2, 20, 9, 14)
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "max": ("max_pool2d", maximum()),
    "max, over the edge": ("max_pool2d", maximum(ceil_mode=True)),
    "max, dilated": ("max_pool2d", maximum((2, 3), (1, 2), (1, 0), (3, 2))),
    "max of all": ("max_pool2d", maximum((9, 14), (1, 1), (0, 0))),
    "mean": ("avg_pool2d", mean()),
    "mean, over the edge": ("avg_pool2d", mean(ceil_mode=True)),
    "mean of the image only": ("avg_pool2d", mean(ceil_mode=True, padded=False)),
    "mean by 5": ("avg_pool2d", mean((2, 2), (2, 2), (0, 0), divisor=5)),
    "mean, cut off": ("avg_pool2d", mean((2, 3), (2, 3), (0, 0))),
    "adaptive": ("adaptive_avg_pool2d", {"output_size": (3, 7)}),
}


def agrees(algorithm: str, asked: Problem, device: torch.device = CPU) -> None:
    """Every configuration gives float64's answer; where it stays exact, to the last bit."""
    row = catalog.kernel(f"{asked.op}.{algorithm}")
    assert row.refusal(asked) is None
    (meta,), out = asked.inputs, asked.output
    values = 40 * torch.randn(meta.shape, generator=torch.Generator().manual_seed(0))
    x = meta.empty(device).copy_(
        values.clamp(-127, 127).round() if meta.dtype == "int8" else values
    )
    (right,) = operation(asked.op).call([x.double()], asked.attrs)
    for config in row.configs(asked):
        made = out.empty(device).fill_(77)
        row.load().bind(asked, {}, **config)(x, out=made)
        assert out.matches(made)
        error = (made.double() - right).abs().max() / right.abs().max()
        assert error <= (0.0 if "max" in asked.op else TOLERANCES[out.dtype]), config


Step = tuple[str, tuple[int | None, ...], dict[str, Any]]


def chained(
    inputs: list[TensorMeta], *program: Step, constant: tuple[int, ...] = (), format: Format
) -> Problem:
    """A program; its last instruction's value is the result."""
    attrs = {"program": program, "results": (len(inputs) + len(program) - 1,)}
    meta = torch.device("meta")
    (made,) = operation("pointwise").call([m.empty(meta) for m in inputs], attrs)
    dtype = str(made.dtype).removeprefix("torch.")
    out = TensorMeta(shape=tuple(made.shape), dtype=dtype, format=format)
    return Problem(
        op="pointwise", inputs=tuple(inputs), outputs=(out,), attrs=attrs, constant=constant
    )


def vector(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype)


def image(
    h: int = 9, w: int = 14, c: int = 20, dtype: str = "float32", format: Format = "channels_last"
) -> TensorMeta:
    return TensorMeta(shape=(2, c, h, w), dtype=dtype, format=format)


def chains(format: Format = "channels_last", dtype: str = "float32") -> dict[str, Problem]:
    """By name: what networks have around their pools."""
    x, c, one, pair = image(dtype=dtype, format=format), vector(20), vector(), {"scalar": None}
    norm: Step = ("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5})
    small: dict[str, Any] = {"axis": 1, "dtype": "int8"}
    back: dict[str, Any] = {"axis": 1, "dtype": dtype}
    halves = mean((3, 2), (3, 2), (0, 0))
    make = functools.partial(chained, format=format)
    return {
        "a transition of DenseNet": make(
            [x, c, c, c, c], norm, ("relu", (5,), {}), ("avg_pool2d", (6,), halves),
            constant=(1, 2, 3, 4),
        ),
        "norm after max": make(
            [x, c, c, c, c], ("max_pool2d", (0,), maximum()),
            ("batch_norm", (5, 1, 2, 3, 4), {"eps": 1e-5}), ("relu", (6,), {}),
            constant=(1, 2, 3, 4),
        ),
        "bias after mean": make(
            [x, vector(20, 1, 1)], ("avg_pool2d", (0,), mean((3, 3), (1, 1))),
            ("add", (2, 1), {"scalar": None, "alpha": 1}), ("relu", (3,), {}), constant=(1,),
        ),
        "quantized after max": make(
            [x, one], ("max_pool2d", (0,), maximum()), ("quantize", (2, 1), small), constant=(1,)
        ),
        "mean of quantized values": make(
            [image(dtype="int8", format=format), one, vector(20, dtype="int8")],
            ("dequantize", (0, 1, 2), back), ("avg_pool2d", (3,), mean((3, 3), (1, 1))),
            ("quantize", (4, 1), small), constant=(1, 2),
        ),
        "max of quantized values": make(
            [image(dtype="int8", format=format), one], ("max_pool2d", (0,), maximum()),
            ("dequantize", (2, 1), back), constant=(1,),
        ),
        "a gate, pooled, and a sum": make(
            [x, image(1, 1, dtype=dtype, format=format), image(3, 7, dtype=dtype, format=format)],
            ("sigmoid", (1,), {}), ("mul", (0, 3), pair), ("max_pool2d", (4,), {
                **maximum((3, 2), (3, 2), (0, 0))}), ("add", (5, 2), {"scalar": None, "alpha": 1}),
        ),
        "a global mean": make(
            [x, one], ("relu", (0,), {}), ("adaptive_avg_pool2d", (2,), ONE),
            ("mul", (3, None), {"scalar": 3.0}), ("quantize", (4, 1), small), constant=(1,),
        ),
        "a mean less its middle": make(
            [x], ("avg_pool2d", (0,), mean((3, 3), (1, 1))),
            ("sub", (1, 0), {"scalar": None, "alpha": 1}),
        ),
        "a cast": make(
            [x], ("adaptive_avg_pool2d", (0,), {"output_size": (3, 7)}),
            ("to", (1,), {"dtype": "float16"}),
        ),
    }  # fmt: skip


def numbers(asked: Problem, device: torch.device = CPU) -> list[torch.Tensor]:
    """For every input; scales and variances are positive."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for position, meta in enumerate(asked.inputs):
        values = torch.randn(meta.shape, generator=generator)
        if meta.dtype == "int8":
            values = torch.randint(-128, 128, meta.shape, generator=generator)
        elif position in asked.constant:
            values = values.abs() / 30 + 0.02 if not meta.shape else values.abs() + 0.5
        made.append(meta.empty(device).copy_(values))
    return made


def chain_agrees(asked: Problem, device: torch.device = CPU, algorithm: str = "windows") -> None:
    """The first configuration gives float64's answer; int8 may be one off where a tie is near."""
    row = catalog.kernel(f"pointwise.{algorithm}")
    assert row.refusal(asked) is None
    inputs = numbers(asked, device)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    (right,) = operation(asked.op).call(wide, asked.attrs)
    constants = {i: inputs[i] for i in asked.constant}
    free = [t for i, t in enumerate(inputs) if i not in constants]
    made = asked.output.empty(device).fill_(77)
    row.load().bind(asked, constants, **row.configs(asked)[0])(*free, out=made)
    assert asked.output.matches(made)
    deviates = (made.double() - right).abs()
    if asked.output.dtype == "int8":
        assert deviates.max() <= 1
        assert deviates.mean() < 0.1
        assert right.double().std() > 2
    else:
        assert deviates.max() <= TOLERANCES[asked.output.dtype] * right.abs().max()


ONE = {"output_size": (1, 1)}
CHAINS = {
    f"{name}, {dtype} {format}": asked
    for format in FORMATS
    for dtype in ("float32", "float16")
    for name, asked in chains(format, dtype).items()
    if dtype == "float32" or format == "channels_last"
}


def global_means(dtype: str = "float32") -> dict[str, Problem]:
    """By name: what networks have around their last pool, and around gates."""
    x, gate = image(dtype=dtype), image(1, 1, dtype=dtype)
    make = functools.partial(chained, format="channels_last")
    small: dict[str, Any] = {"axis": 1, "dtype": "int8"}
    return {
        "quantized": chains(dtype=dtype)["a global mean"],
        "the end of DenseNet": make(
            [x, *[vector(20)] * 4], ("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5}),
            ("relu", (5,), {}), ("adaptive_avg_pool2d", (6,), ONE), constant=(1, 2, 3, 4),
        ),
        "between gates": make(
            [x, gate, vector()], ("mul", (0, 1), {"scalar": None}),
            ("adaptive_avg_pool2d", (3,), ONE), ("add", (4, 1), {"scalar": None, "alpha": 1}),
            ("quantize", (5, 2), small), constant=(2,),
        ),
        "a cast": make(
            [x], ("adaptive_avg_pool2d", (0,), ONE), ("to", (1,), {"dtype": "float16"})
        ),
        "of quantized values": make(
            [image(dtype="int8"), vector()], ("dequantize", (0, 1), {"axis": 1, "dtype": dtype}),
            ("adaptive_avg_pool2d", (2,), ONE), constant=(1,),
        ),
    }  # fmt: skip


GLOBAL = {
    f"{name}, {dtype}": asked
    for dtype in ("float32", "float16", "bfloat16")
    for name, asked in global_means(dtype).items()
}


def over(*dim: int, keep: bool = False) -> dict[str, Any]:
    return {"dim": dim, "keepdim": keep, "dtype": None}


COLUMNS: dict[str, Problem] = {
    "a global pool": problem("adaptive_avg_pool2d", (3, 40, 5, 7), ONE),
    "of many pixels": problem("adaptive_avg_pool2d", (2, 70, 33, 21), ONE),
    "in float16": problem("adaptive_avg_pool2d", (3, 40, 5, 7), ONE, "float16"),
    "mean of pixels": problem("mean", (3, 40, 5, 7), over(-1, -2)),
    "mean of pixels, kept": problem("mean", (3, 40, 5, 7), over(2, 3, keep=True)),
    "sum of tokens": problem("sum", (3, 11, 40), over(1)),
    "sum of the batch": problem("sum", (9, 40), over(0)),
    "sum of channels": problem("sum", (3, 40, 5, 7), over(1), format="contiguous"),
}


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """ResNet's pools, which ``test_pointwise`` compiles for a GPU that is not there."""
    for name in ("a transition of DenseNet", "quantized after max", "bias after mean"):
        asked = chains(dtype="float16")[name]
        yield name, functools.partial(_launch_chain, "windows", asked)
    quantized = image(dtype="float8_e4m3fn")
    back = ("dequantize", (0, 1), {"axis": 0, "dtype": "float16"})
    small = {"axis": 0, "dtype": "float8_e4m3fn"}
    make = functools.partial(chained, constant=(1,), format="channels_last")
    fp8 = make(
        [quantized, vector()], back, ("max_pool2d", (2,), maximum()), ("quantize", (3, 1), small)
    )
    yield "max fp8", functools.partial(_launch_chain, "windows", fp8)
    fp8 = make([quantized, vector()], back, ("adaptive_avg_pool2d", (2,), ONE))
    yield "global mean fp8", functools.partial(_launch_chain, "columns", fp8)
    for name, asked in global_means("float16").items():
        yield f"global mean: {name}", functools.partial(_launch_chain, "columns", asked)
    last = problem("adaptive_avg_pool2d", (2, 2048, 7, 7), ONE, "float16")
    pool = problem("max_pool2d", (2, 64, 112, 112), maximum(), "float16")
    yield "max", functools.partial(_launch, "windows", pool)
    yield (
        "max int8",
        functools.partial(
            _launch, "windows", problem("max_pool2d", (2, 64, 56, 56), maximum(), "int8")
        ),
    )
    nchw = problem("avg_pool2d", (2, 64, 56, 56), mean(), "float16", "contiguous")
    yield "mean NCHW", functools.partial(_launch, "windows", nchw)
    yield "global mean", functools.partial(_launch, "columns", last)


def _launch(algorithm: str, asked: Problem) -> None:
    row = catalog.kernel(f"{asked.op}.{algorithm}")
    call = row.load().bind(asked, {}, **row.configs(asked)[0])
    call(asked.inputs[0].empty(CPU), out=asked.output.empty(CPU))


def _launch_chain(algorithm: str, asked: Problem) -> None:
    row = catalog.kernel(f"pointwise.{algorithm}")
    inputs = numbers(asked)
    constants = {i: inputs[i] for i in asked.constant}
    free = [t for i, t in enumerate(inputs) if i not in constants]
    row.load().bind(asked, constants, **row.configs(asked)[0])(*free, out=asked.output.empty(CPU))
