"""Every kernel of the catalog that runs on a CPU does what the reference does, as it promised."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import CompileError
from tessella.kernels import catalog
from tessella.operations.epilogue import ACTIVATIONS as ACTIVATION_FUNCTIONS
from tessella.operations.problem import Problem
from tessella.operations.table import OPERATIONS, operation
from tessella.operations.tensor_meta import Format, TensorMeta
from tessella.search.find import bind
from tessella.search.inputs import sample_inputs

CPU = torch.device("cpu")
CONV = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "activation": None}
POOL = {"kernel_size": (3, 3), "stride": (2, 2), "padding": (1, 1), "ceil_mode": True}
# dtype → (largest error over largest value)
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


def problem(
    op: str,
    inputs: list[tuple[int, ...] | None],
    output: tuple[int, ...],
    attrs: dict[str, Any],
    constant: tuple[int, ...] = (),
    format: Format = "contiguous",
    made: Format | None = None,
    dtype: str = "float32",
) -> Problem:
    def meta(shape: tuple[int, ...], position: int) -> TensorMeta:
        dense = "contiguous" if position in constant or len(shape) != 4 else format
        return TensorMeta(shape=shape, dtype=dtype, format=dense)

    return Problem(
        op=op,
        inputs=tuple(None if s is None else meta(s, i) for i, s in enumerate(inputs)),
        outputs=(TensorMeta(shape=output, dtype=dtype, format=made or format),),
        attrs=attrs,
        constant=constant,
    )


def conv(activation: str | None, residual: bool, **changes: Any) -> Problem:
    attrs = {**CONV, "activation": activation, **changes.pop("attrs", {})}
    groups = attrs["groups"]
    out = (2, 8, 6, 6)
    inputs = [(2, 4, 6, 6), (8, 4 // groups, 3, 3), (8,), out if residual else None]
    return problem("conv2d", inputs, out, attrs, constant=(1, 2), **changes)


def conv_gradients(axes: int) -> list[Problem]:
    """Of a convolution of 6 pixels along each axis, padded, every second pixel, in two groups."""
    x, dy, weight = ((*t, *(n,) * axes) for t, n in (((2, 4), 6), ((2, 8), 3), ((8, 2), 3)))
    ones = (1,) * axes
    attrs = {"stride": (2,) * axes, "padding": ones, "dilation": ones, "groups": 2}
    return [
        problem(f"conv{axes}d_dgrad", [dy, weight], x, {**attrs, "input_size": x}),
        problem(f"conv{axes}d_wgrad", [dy, x], weight, {**attrs, "kernel_size": weight[2:]}),
    ]


def linear(
    activation: str | None, residual: bool, rows: tuple[int, ...], **changes: Any
) -> Problem:
    out = (*rows, 5)
    inputs = [(*rows, 7), (5, 7), (5,), out if residual else None]
    return problem("linear", inputs, out, {"activation": activation}, constant=(1, 2), **changes)


ACTIVATIONS = (None, *ACTIVATION_FUNCTIONS)
# fmt: off
UNARY = (
    "relu", "relu6", "sigmoid", "tanh", "silu", "hardswish", "hardsigmoid", "mish", "exp", "neg",
    "abs", "erf", "sin", "cos",
)
# fmt: on
X = (2, 4, 6, 6)
LAST: Format = "channels_last"

PROBLEMS = [
    *(conv(a, r, format=LAST) for a in ACTIVATIONS for r in (False, True)),
    *(conv("relu", r, format="contiguous") for r in (False, True)),
    *(conv(a, True, format=LAST, dtype="bfloat16") for a in (None, "relu", "silu")),
    conv("relu", False, format=LAST, attrs={"groups": 2}),
    *(linear(a, r, rows) for a in ACTIVATIONS for r in (False, True) for rows in ((3,), (2, 3))),
    *(linear("relu", r, (3,), dtype="bfloat16") for r in (False, True)),
    problem("linear", [(3, 7), (5, 7), None, None], (3, 5), {"activation": None}, (1,)),
    *(made for axes in (1, 2, 3) for made in conv_gradients(axes)),
    *(problem(f"conv{axes}d", [(2, 4, *(6,) * axes), (8, 4, *(3,) * axes), (8,)],
              (2, 8, *(6,) * axes),
              dict.fromkeys(("stride", "padding", "dilation"), (1,) * axes)
              | {"groups": 1, "activation": "relu"}, (1, 2))
      for axes in (1, 3)),
    *(problem("conv3d", [(2, 4, 6, 7, 8), (8, 2, 3, 1, 3), (8,), (2, 8, 2, 7, 4)],
              (2, 8, 2, 7, 4),
              {"stride": (2, 1, 2), "padding": (0, 0, 2), "dilation": (1, 1, 2), "groups": 2,
               "activation": "silu"}, (1, 2), dtype=dtype)
      for dtype in ("float32", "bfloat16")),
    *(problem("conv3d", [(2, 8, 6, 6, 4), (8, 8, 3, 3, 3), (8,)], (2, 8, 4, 4, 1),
              {"stride": (1, 1, 2), "padding": (0,) * 3, "dilation": (1,) * 3, "groups": 1,
               "activation": None}, (1, 2), dtype=dtype)
      for dtype in ("float32", "bfloat16")),
    *(problem(f"conv_transpose{axes}d", [(2, 4, *(3,) * axes), (4, 8, *(3,) * axes), (8,)],
              (2, 8, *(6,) * axes),
              dict.fromkeys(("padding", "output_padding", "dilation"), (1,) * axes)
              | {"stride": (2,) * axes, "groups": 1}, (1, 2), format=LAST)
      for axes in (2, 3)),
    problem("matmul", [(2, 3, 4), (2, 4, 5)], (2, 3, 5), {}),
    problem("matmul", [(3, 4), (4, 5)], (3, 5), {}, constant=(1,)),
    problem("matmul", [(3, 4), (4, 5)], (3, 5), {}, constant=(0,)),
    *(problem("max_pool2d", [X], (2, 4, 4, 4), {**POOL, "dilation": (1, 1)}, format=f)
      for f in ("contiguous", LAST)),
    *(problem("avg_pool2d", [X], (2, 4, 4, 4), {**POOL, "count_include_pad": c,
                                               "divisor_override": None}, format=LAST)
      for c in (False, True)),
    problem("adaptive_avg_pool2d", [X], (2, 4, 2, 3), {"output_size": (2, 3)}, format=LAST),
    problem("batch_norm", [X, (4,), (4,), (4,), None], X, {"eps": 0.1}, (1, 2, 3), format=LAST),
    problem("layer_norm", [(2, 3, 8), (8,), (8,)], (2, 3, 8),
            {"normalized_shape": (8,), "eps": 1e-5}, (1, 2)),
    *(problem(op, [(3, 8)], (3, 8), {"dim": -1, "dtype": None})
      for op in ("softmax", "log_softmax")),
    *(problem(op, [X], (2, 4, 1, 1), {"dim": (2, 3), "keepdim": True, "dtype": None}, format=LAST)
      for op in ("mean", "sum")),
    problem("mean", [(3, 4)], (), {"dim": None, "keepdim": False, "dtype": None}),
    problem("scaled_dot_product_attention", [(2, 2, 3, 8), (2, 2, 5, 8), (2, 2, 5, 8), None],
            (2, 2, 3, 8), {"is_causal": False, "scale": None, "enable_gqa": False}, made="strided"),
    *(problem(op, [X], X, {}, format=LAST) for op in
      UNARY),
    *(problem("gelu", [(3, 9)], (3, 9), {"approximate": a}) for a in ("none", "tanh")),
    problem("leaky_relu", [(3, 9)], (3, 9), {"negative_slope": 0.3}),
    problem("elu", [(3, 9)], (3, 9), {"alpha": 0.5, "scale": 1.5, "input_scale": 0.7}),
    problem("clamp", [(3, 9)], (3, 9), {"min": -0.5, "max": None}),
    problem("add", [X, X], X, {"scalar": None, "alpha": 2}, format=LAST),
    problem("add", [X, (4, 1, 1)], X, {"scalar": None, "alpha": 1}, constant=(1,), format=LAST),
    problem("sub", [(3, 4), (3, 4)], (3, 4), {"scalar": None, "alpha": 1}, constant=(0,)),
    problem("mul", [X, (2, 4, 1, 1)], X, {"scalar": None}, format=LAST),
    problem("div", [(3, 4), None], (3, 4), {"scalar": 3}),
    problem("pow", [(3, 4), None], (3, 4), {"scalar": 2}),
    *(problem("pointwise", [X, X], X, {"program": (
        ("add", (0, 1), {"scalar": None, "alpha": 1}), ("layer_norm", (2, None, None),
         {"normalized_shape": (6,), "eps": 1e-5}), ("relu", (3,), {})), "results": (4,)}, format=f)
      for f in ("contiguous", LAST)),
    problem("to", [X], X, {"dtype": "float32"}, format="contiguous", made=LAST),
    *(problem("interpolate", [X], (2, 4, *size), {"size": size, "scale_factor": None, "mode": mode,
                                                  "align_corners": corners, "antialias": False},
              format=f)
      for f in ("contiguous", LAST) for size in ((12, 18), (4, 9))
      for mode, corners in (("nearest", None), ("bilinear", False), ("bilinear", True))),
    *(problem("peak_boxes", [(2, 8, h, 9)], (2, 12, 7), {"down": 0.2, "along": 0.1, "most": 12},
              format=f, made="contiguous")
      for f in ("contiguous", LAST) for h in (1, 20)),
    problem("deformable_attention", [(2, 10, 8), (2, 5, 4), (2, 5, 16), (2, 5, 8)], (2, 5, 8),
            {"heads": 2, "sizes": (2, 3, 1, 4), "points": (3, 1), "spread": 0.5}),
    problem("cat", [X, (2, 2, 6, 6)], (2, 6, 6, 6), {"dim": 1}, format=LAST),
    problem("reshape", [X], (2, 144), {"shape": (2, 144)}, format=LAST, made="contiguous"),
    problem("reshape", [X], (2, 144), {"shape": (2, 144)}),
    problem("permute", [X], (2, 6, 6, 4), {"dims": (0, 2, 3, 1)}, made="strided"),
    *(problem("rearrange", [X], X, {"sizes": (2, 2, 2, 6, 6), "rolls": r, "dims": (0, 2, 1, 3, 4),
                                    "shape": X}, format=f)
      for f in ("contiguous", LAST) for r in ((), (((3,), 2), ((4,), 5)), (((1, 2), 1),))),
    *(problem("slice", [X], (2, 2, 6, 6), {"dim": 1, "start": 1, "end": e, "step": s},
              format=f, made="strided")
      for f, e, s in (("contiguous", 3, 1), (LAST, None, 2))),
    problem("select", [X], (2, 6, 6), {"dim": 1, "index": 2}, made="strided"),
    problem("expand", [(2, 1, 6, 6)], X, {"shape": X}, made="strided"),
    problem("split", [X], X, {"sizes": (4,), "dim": 1}, made="strided"),  # parts: fuse_siblings
]  # fmt: skip


def run(row: catalog.Kernel, asked: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes, and what the reference makes in float64."""
    generator = torch.Generator().manual_seed(1)
    constants = {}
    for i in asked.constant:
        drawn = torch.randn(asked.inputs[i].shape, generator=generator)
        drawn = drawn.abs() if asked.op == "batch_norm" else drawn
        constants[i] = drawn.to(getattr(torch, asked.inputs[i].dtype))
    inputs = sample_inputs(asked, CPU)
    copies = [t.clone() for t in inputs]
    with torch.inference_mode():
        call, out = bind(row, asked, constants, CPU)
        made = call(*inputs, **out)
    if "out" in out:  # a kernel may have a workspace alone
        assert made.data_ptr() == out["out"].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True)), "changed an input"
    rest = iter(inputs)
    full = [
        None if m is None else constants[i] if i in constants else next(rest)
        for i, m in enumerate(asked.inputs)
    ]
    wide = [None if t is None else t.double() for t in full]
    (right,) = operation(asked.op).call(wide, {**asked.attrs, **_wide(asked)})
    return made, right


def _wide(asked: Problem) -> dict[str, str]:
    return {"dtype": "float64"} if asked.attrs.get("dtype") else {}


@pytest.mark.parametrize("asked", PROBLEMS, ids=lambda p: f"{p.op}-{p.key[:6]}")
def test_agrees_with_the_reference(asked: Problem) -> None:
    rows = catalog.candidates(asked.op, "cpu")
    fitting = [row for row in rows if row.refusal(asked) is None]
    assert len(fitting) > 1, "only the last resort fits"
    for row in fitting:
        made, right = run(row, asked)
        assert asked.output.matches(made), row.id
        error = (made.double() - right).abs().max() / right.abs().max()
        assert error <= TOLERANCES[asked.output.dtype], row.id


def sliced(meta: TensorMeta, axis: int = 1) -> TensorMeta:
    """The same tensor as a slice of one with twice as many places on an axis."""
    shape = (*meta.shape[:axis], 2 * meta.shape[axis], *meta.shape[axis + 1 :])
    return replace(meta, shape=shape).part(axis, meta.shape[axis])


IN_SLICES = [
    replace(asked, inputs=tuple(map(sliced, asked.inputs)), outputs=(sliced(asked.output),))
    for asked in (
        problem("relu", [X], X, {}, format=LAST),
        problem("add", [X, X], X, {"scalar": None, "alpha": 2}),
        problem("to", [X], X, {"dtype": "float32"}, format=LAST),
        problem("cat", [X, (2, 2, 6, 6)], (2, 6, 6, 6), {"dim": 1}, format=LAST),
    )
]


@pytest.mark.parametrize("asked", IN_SLICES, ids=lambda p: p.op)
def test_slices_are_read_and_written(asked: Problem) -> None:
    rows = [
        row
        for row in catalog.candidates(asked.op, "cpu")
        if row.refusal(asked) is None and not row.last_resort
    ]
    assert rows
    for row in rows:
        made, right = run(row, asked)
        assert asked.output.matches(made), row.id
        torch.testing.assert_close(made.double(), right, rtol=1e-6, atol=1e-6, msg=row.id)


@pytest.mark.parametrize("ready", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_a_concatenation_copies_only_what_is_not_there(ready: tuple[int, ...]) -> None:
    asked = problem("cat", [X, (2, 2, 6, 6), X], (2, 10, 6, 6), {"dim": 1}, format=LAST)
    places = [sliced(meta) if i in ready else meta for i, meta in enumerate(asked.inputs)]
    asked = replace(asked, inputs=tuple(places), in_place=ready)
    row = catalog.kernel("cat.in_place")
    assert row.refusal(asked) is None
    assert catalog.kernel("cat.aten").refusal(asked) is not None
    assert row.refusal(replace(asked, in_place=())) is not None
    whole = torch.randn(2, 10, 6, 6).contiguous(memory_format=torch.channels_last)
    right = whole.clone()
    parts = list(whole.split([4, 2, 4], 1))
    for i in {0, 1, 2} - set(ready):
        parts[i] = torch.randn_like(parts[i])
        right.split([4, 2, 4], 1)[i].copy_(parts[i])
    call, _ = bind(row, asked, {}, CPU)
    assert call(*parts, out=whole) is whole
    assert torch.equal(whole, right)


def test_every_row_is_a_kernel_of_a_known_operation() -> None:
    assert len(catalog.BY_ID) == len(catalog.KERNELS)
    for row in catalog.KERNELS:
        module = row.load()
        assert callable(module.fits)
        assert callable(module.bind)
        assert row.op == "*" or row.op in OPERATIONS
        assert set(row.targets) <= {"cpu", "gpu", "reference"}
        assert not (row.views and row.writes_out)


OPTIONAL = ("configs", "workspace_bytes", "outclassed")


def test_no_function_of_a_kernel_is_misspelt() -> None:
    """The catalog looks for some functions by name: one that is nearly called so is never found."""
    for row in catalog.KERNELS:
        for name, value in vars(row.load()).items():
            if callable(value) and not name.startswith("_") and name not in OPTIONAL:
                near = difflib.get_close_matches(name, OPTIONAL, 1, cutoff=0.85)
                assert not near, f"{row.module}.{name} is not {near[0]}"
            assert not name.isupper() or name.lower() not in CAPABILITIES, f"{row.module}.{name}"


CAPABILITIES = {"writes_out", "sliced_out", "in_place", "gamma", "views", "overwrites"}


def test_a_misspelt_capability_is_an_error() -> None:
    assert {field.name for field in dataclasses.fields(catalog.Kernel)} >= CAPABILITIES
    with pytest.raises(TypeError, match="slices_out"):
        catalog._cpu("relu", "new", "pointwise.unary", source="aten", slices_out=True)


def test_every_kernel_of_the_cpu_is_exercised() -> None:
    fitted = {
        row.id
        for asked in PROBLEMS
        for row in catalog.candidates(asked.op, "cpu")
        if row.refusal(asked) is None
    }
    untested = {r.id for r in catalog.KERNELS if "cpu" in r.targets} - fitted
    # the logarithm and the roots need positive inputs, the fallback is the graph's own test, and a
    # user's operators have test_user.py; parts and sums in place, images, rounding and machine code
    # have tests of their own
    untested -= {row.id for row in catalog.KERNELS if row.isa}
    untested -= {"lstm.onednn", "lstm.steps", "gru.steps", "rnn.steps"}  # recurrent/test_layers.py
    untested -= {"nms.numpy"}  # detect/test_nms.py
    assert untested == {
        "log.aten", "sqrt.aten", "rsqrt.aten", "reciprocal.aten", "fallback.aten", "user.operator",
        "cat.in_place", "conv2d.onednn_sum", "conv2d.onednn_linear",
        "image_to_tensor.aten", "quantize.aten", "dequantize.aten", "conv2d.onednn_int8",
        "linear.onednn_int8",
    }  # fmt: skip


@pytest.mark.parametrize("op", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_operations_of_positive_numbers(op: str) -> None:
    asked = problem(op, [(3, 9)], (3, 9), {})
    call, out = bind(catalog.kernel(f"{op}.aten"), asked, {}, CPU)
    x = torch.rand(3, 9) + 0.1
    torch.testing.assert_close(call(x, **out), getattr(torch, op)(x.double()).float())


def test_an_unknown_id_is_told() -> None:
    with pytest.raises(CompileError, match="unknown kernel"):
        catalog.kernel("conv2d.magic")
