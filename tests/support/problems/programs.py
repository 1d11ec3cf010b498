"""Programs of element-wise operations, and their comparison with float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tessella.kernels import catalog
from tessella.kernels.pointwise import generated, generated_several, sequence
from tessella.kernels.pointwise.walk import refusal
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta

CPU = torch.device("cpu")
# the interpreter cuts float32 to bfloat16 where a GPU rounds
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}
SUM = {"scalar": None, "alpha": 1}
PAIR = {"scalar": None}

Step = tuple[str, tuple[int | None, ...], dict[str, Any]]
Shape = tuple[int, ...]


def problem(
    inputs: Sequence[TensorMeta],
    *program: Step,
    results: tuple[int, ...] = (),
    format: Format = "contiguous",
    constant: tuple[int, ...] = (),
) -> Problem:
    """The last instruction's value is the result; element types follow from torch."""
    results = results or (len(inputs) + len(program) - 1,)
    attrs = {"program": program, "results": results}
    made = operation("pointwise").call([m.empty(torch.device("meta")) for m in inputs], attrs)
    outputs = tuple(
        TensorMeta(
            shape=tuple(t.shape),
            dtype=str(t.dtype).removeprefix("torch."),
            format=format if t.dim() == 4 else "contiguous",
        )
        for t in made
    )
    return Problem(
        op="pointwise", inputs=tuple(inputs), outputs=outputs, attrs=attrs, constant=constant
    )


def meta(*shape: int, dtype: str = "float32", format: Format = "contiguous") -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype, format=format)


def tensors(asked: Problem, device: torch.device = CPU) -> list[torch.Tensor]:
    """Numbers for every input, positive where they are constant (a variance)."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for position, one in enumerate(asked.inputs):
        tensor = one.empty(device)
        values = torch.randn(one.shape, generator=generator)
        if not tensor.is_floating_point():
            values = torch.randint(-100, 100, one.shape, generator=generator)
        made.append(tensor.copy_(values.abs() + 0.5 if position in asked.constant else values))
    return made


def run(module: Any, asked: Problem, inputs: Sequence[torch.Tensor], **config: Any) -> list[Any]:
    constants = {i: inputs[i] for i in asked.constant}
    call = module.bind(asked, constants, **config)
    free = [t for i, t in enumerate(inputs) if i not in constants]
    (writes_out,) = {row.writes_out for row in catalog.KERNELS if row.module == module.__name__}
    if not writes_out:
        return list(call(*free))
    return [call(*free, out=asked.output.empty(inputs[0].device).fill_(77))]


def agrees(asked: Problem, inputs: Sequence[torch.Tensor] | None = None) -> None:
    """Every configuration of the generated kernel, and torch's sequence, give float64's answer."""
    inputs = inputs or tensors(asked)
    assert refusal(asked) is None
    assert (generated.fits(asked) is None) == (len(asked.outputs) == 1)
    assert (generated_several.fits(asked) is None) == (len(asked.outputs) > 1)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    right = operation(asked.op).call(wide, asked.attrs)
    module = generated if len(asked.outputs) == 1 else generated_several
    runs = [run(module, asked, inputs, **config) for config in module.configs(asked)]
    if asked.op == "pointwise" and len(asked.outputs) == 1:
        runs.append(run(sequence, asked, inputs))
    for made in runs:
        for one, exact, told in zip(made, right, asked.outputs, strict=True):
            assert told.matches(one)
            if exact.numel():
                deviates = (one.double() - exact).abs().max()
                if told.dtype == "int8":  # quantized values: a tie may fall either way
                    assert deviates <= 1
                    assert (one == exact).double().mean() > 0.9
                else:
                    assert deviates <= TOLERANCES[told.dtype] * exact.abs().max()


V = meta(24)
BATCH_NORM: Step = ("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5})


def image(n: int = 2, c: int = 24, h: int = 5, w: int = 7, **more: Any) -> TensorMeta:
    return meta(n, c, h, w, **more)


def norm_relu(dtype: str = "float32", format: Format = "contiguous", n: int = 2) -> Problem:
    x = image(n, dtype=dtype, format=format)
    steps = BATCH_NORM, ("relu", (5,), {})
    return problem([x, V, V, V, V], *steps, format=format, constant=(1, 2, 3, 4))


def gate(dtype: str, format: Format) -> Problem:
    """hardsigmoid(g) · x + x, a squeeze-and-excitation with what follows."""
    x, g = image(dtype=dtype, format=format), image(h=1, w=1, dtype=dtype)
    steps = ("hardsigmoid", (1,), {}), ("mul", (0, 2), PAIR), ("add", (3, 0), SUM)
    return problem([x, g], *steps, format=format)


def add_norm(dtype: str, columns: int = 33) -> Problem:
    """The sum too: what the next residual adds to."""
    x, w = meta(3, 5, columns, dtype=dtype), meta(columns, dtype=dtype)
    steps = (
        ("add", (0, 1), SUM),
        ("layer_norm", (4, 2, 3), {"normalized_shape": (columns,), "eps": 1e-5}),
    )
    return problem([x, x, w, w], *steps, results=(5, 4), constant=(2, 3))


def quantized(
    dtype: str, scale: Shape = (), zero: Shape | None = None, format: Format = "contiguous"
) -> Problem:
    """relu(dequantize(int8) + x) as int8: what lies between two layers on quantized values."""
    x, y = image(dtype="int8", format=format), image(dtype=dtype, format=format)
    zeros = [] if zero is None else [meta(*zero, dtype="int8")]
    reads = (2, 3) if zeros else (2,)
    n = 3 + len(zeros)
    return problem(
        [x, y, meta(*scale), *zeros],
        ("dequantize", (0, *reads), {"axis": 1, "dtype": dtype}),
        ("add", (n, 1), SUM),
        ("relu", (n + 1,), {}),
        ("quantize", (n + 2, *reads), {"axis": 1, "dtype": "int8"}),
        format=format,
        constant=(2, *reads[1:]),
    )


X = meta(4, 6, 10)
LAST = "channels_last"
CASES: dict[str, Problem] = {
    **{f"norm+relu {d} {f}": norm_relu(d, f) for d in TOLERANCES for f in ("contiguous", LAST)},
    **{f"gate {d} {f}": gate(d, f) for d in ("float32", "float16") for f in ("contiguous", LAST)},
    **{f"add+norm {d}": add_norm(d) for d in TOLERANCES},
    "rows of 1": add_norm("float32", 1),
    "an empty batch": norm_relu(n=0),
    "one number": problem([meta()], ("exp", (0,), {}), ("neg", (1,), {})),
    "flat, of odd size": problem([meta(1031)], ("silu", (0,), {}), ("mul", (1, 0), PAIR)),
    **{
        f"quantized {d} {f}": quantized(d, format=f)
        for d in TOLERANCES
        for f in ("contiguous", LAST)
    },
    "quantized, a scale a channel": quantized("float32", (24,), format=LAST),
    "quantized, a zero point": quantized("float32", (1,), (1,)),
    "quantized, a zero a channel": quantized("float16", (), (24,), format=LAST),
    "quantized of a row": problem(
        [meta(3, 40), meta(40), meta()],
        ("layer_norm", (0, 1, None), {"normalized_shape": (40,), "eps": 1e-5}),
        ("quantize", (3, 2), {"axis": 0, "dtype": "int8"}), constant=(1, 2),
    ),
    "a number, and it quantized": problem(
        [X, meta()], ("tanh", (0,), {}), ("quantize", (2, 1), {"axis": 0, "dtype": "int8"}),
        results=(3, 2), constant=(1,),
    ),
    "a norm, and it quantized": problem(
        [meta(3, 40, dtype="float16"), *[meta(40, dtype="float16")] * 2, meta()],
        ("layer_norm", (0, 1, 2), {"normalized_shape": (40,), "eps": 1e-5}),
        ("quantize", (4, 3), {"axis": 0, "dtype": "int8"}), results=(5, 4), constant=(1, 2, 3),
    ),
    "a number for all": problem([X, meta()], ("mul", (0, 1), PAIR), ("tanh", (2,), {})),
    "rows and columns": problem(
        [meta(7, 1), meta(1, 9)], ("add", (0, 1), SUM), ("exp", (0,), {}), ("div", (2, 3), PAIR)
    ),
    "positions": problem([X, meta(1, 6, 10)], ("add", (0, 1), SUM), ("gelu", (2,), {})),
    "axes that do not join": problem(
        [meta(2, 3, 4, 5), meta(2, 1, 4, 1), meta(3, 1, 5)],
        *(("mul", (0, 1), PAIR), ("sub", (3, 2), {"scalar": None, "alpha": 2})),
    ),
    "another format out": problem(
        [image(c=3), meta(3, 1, 1)], ("mul", (0, 1), PAIR), ("to", (2,), {"dtype": "float16"}),
        format=LAST,
    ),
    "two formats in": problem(
        [image(), image(format=LAST)], ("add", (0, 1), SUM), ("relu", (2,), {}), format=LAST
    ),
    "integers in": problem(
        [meta(3, 50, dtype="uint8")], ("to", (0,), {"dtype": "float32"}),
        ("div", (1, None), {"scalar": 255.0}),
    ),
    "rounded on the way": problem(
        [X], ("exp", (0,), {}), ("to", (1,), {"dtype": "float16"}),
        ("to", (2,), {"dtype": "float32"}), ("log", (3,), {}),
    ),
    "a cast alone": problem([X], ("to", (0,), {"dtype": "float32"})),
    "masked softmax": problem(
        [meta(2, 3, 9, 9), meta(2, 1, 1, 9)], ("mul", (0, None), {"scalar": 0.125}),
        ("add", (2, 1), SUM), ("softmax", (3,), {"dim": -1, "dtype": None}),
    ),
    "a norm by hand": problem(
        [X, meta(10)], ("mean", (0,), {"dim": [-1], "keepdim": True, "dtype": None}),
        ("sub", (0, 2), SUM), ("pow", (3, None), {"scalar": 2}),
        ("mean", (4,), {"dim": [2], "keepdim": True, "dtype": None}),
        ("add", (5, None), {"scalar": 1e-6, "alpha": 1}), ("rsqrt", (6,), {}),
        ("mul", (3, 7), PAIR), ("mul", (8, 1), PAIR), results=(9, 6),
    ),
    "rms norm": problem(
        [X, meta(10)], ("rms_norm", (0, 1), {"normalized_shape": (10,), "eps": 1e-6}),
        ("sigmoid", (2,), {}),
    ),
    "extremes": problem(
        [X], ("amax", (0,), {"dim": [-1], "keepdim": True}),
        ("amin", (0,), {"dim": [-1], "keepdim": True}), ("sub", (1, 2), SUM),
        ("sum", (0,), {"dim": [-1], "keepdim": True, "dtype": None}),
        ("div", (4, 3), PAIR),
    ),
}  # fmt: skip

# operation → input, attributes; along the last axes of it
ALONG: dict[str, tuple[str, list[Shape], dict[str, Any]]] = {
    "softmax": ("softmax", [(4, 33)], {"dim": 1, "dtype": None}),
    "log_softmax": ("log_softmax", [(2, 4, 7)], {"dim": -1, "dtype": None}),
    "norm of two axes": (
        "layer_norm", [(5, 4, 6), (4, 6), (4, 6)], {"normalized_shape": (4, 6), "eps": 1e-5},
    ),
    "mean of all": ("mean", [(3, 4, 5)], {"dim": None, "keepdim": False, "dtype": None}),
    "mean of the last": ("mean", [(3, 4, 5)], {"dim": (1, 2), "keepdim": True, "dtype": None}),
    "sum": ("sum", [(3, 4, 5)], {"dim": (-1,), "keepdim": False, "dtype": None}),
    "amax": ("amax", [(3, 4, 5)], {"dim": (2, 1), "keepdim": False}),
    "pool": ("adaptive_avg_pool2d", [(3, 4, 5, 6)], {"output_size": (1, 1)}),
    "norm of channels": ("batch_norm", [(3, 24, 5), *[(24,)] * 4], {"eps": 1e-5}),
}  # fmt: skip


def alone(case: str) -> Problem:
    op, shapes, attrs = ALONG[case]
    (made,) = operation(op).call([torch.empty(s, device="meta") for s in shapes], attrs)
    return Problem(
        op=op,
        inputs=tuple(meta(*s) for s in shapes),
        outputs=(meta(*made.shape),),
        attrs=attrs,
        constant=tuple(range(1, len(shapes))),
    )
