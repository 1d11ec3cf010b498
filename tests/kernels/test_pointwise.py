"""Programs of element-wise operations: by our generated kernel and by torch, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tessella.core.errors import CompileError
from tessella.kernels import catalog
from tessella.kernels.pointwise import generated, generated_several, sequence
from tessella.kernels.pointwise.walk import refusal
from tessella.kernels.shared.axes import common_axes
from tessella.operations.pointwise_program import ELEMENTWISE, QUANTIZATION, ROWS, parse, text
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.inspection import exact_answers
from tests.support.kernels.compile_only import compile_all
from tests.support.problems import pools as test_pool
from tests.support.problems.programs import (
    ALONG,
    CASES,
    LAST,
    PAIR,
    SUM,
    X,
    agrees,
    alone,
    gate,
    image,
    meta,
    norm_relu,
    problem,
    quantized,
    run,
    tensors,
)

# lanes beyond the edge compute with zeros, which NumPy, but no GPU, remarks on
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_agrees_with_float64(asked: Problem) -> None:
    agrees(asked)


def test_slices_are_read_and_written() -> None:
    whole = image(c=48, format=LAST)
    asked = gate("float32", LAST)
    part = whole.part(1, 24)
    assert part.strides is not None
    agrees(replace(asked, inputs=(part, asked.inputs[1]), outputs=(part,)))


@pytest.mark.parametrize("op", ["layer_norm", "amax"])
def test_rows_of_a_slice_are_read_where_they_lie(op: str) -> None:
    """Of a product that several layers share, whose columns are apart."""
    part = TensorMeta(shape=(2, 5, 48), dtype="float32").part(2, 24)
    vector = TensorMeta(shape=(24,), dtype="float32")
    attrs: dict[str, Any] = {"dim": (2,), "keepdim": False}
    inputs, shape = (part,), (2, 5)
    if op == "layer_norm":
        attrs, inputs, shape = (
            {"normalized_shape": (24,), "eps": 1e-5},
            (part, vector, vector),
            part.shape,
        )
    made = TensorMeta(shape=shape, dtype="float32")
    asked = Problem(op=op, inputs=inputs, outputs=(made,), attrs=attrs)
    assert generated.fits(asked) is None
    x, *vectors = (torch.randn(m.shape, generator=torch.Generator().manual_seed(3)) for m in inputs)
    apart = part.empty(CPU).copy_(x)
    right = (
        x.double().amax(2)
        if op == "amax"
        else F.layer_norm(x.double(), (24,), *(v.double() for v in vectors))
    )
    for config in generated.configs(asked):
        out = made.empty(CPU)
        generated.bind(asked, {}, **config)(apart, *vectors, out=out)
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    uneven = TensorMeta(shape=(2, 5, 3, 8), dtype="float32").part(2, 2)
    refused = replace(
        asked,
        op="amax",
        inputs=(uneven,),
        attrs={"dim": (1, 2, 3), "keepdim": False},
        outputs=(TensorMeta(shape=(2,), dtype="float32"),),
    )
    assert "rows must be contiguous" in str(generated.fits(refused))


# what a function of one number is asked with, beside NaN
NUMBERS = [0.0, 1e-9, -1e-9, 0.02, -0.02, 0.3, -0.3, 1.0, -1.0, 2.9, -2.9, 7.0, -7.0, 30.0, -30.0]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "leaky_relu": [{"negative_slope": 0.1}],
    "elu": [{"alpha": 1.5, "scale": 1.1, "input_scale": 0.7}],
    "softplus": [{"beta": 2.0, "threshold": 20.0}],
    "clamp": [{"min": -1, "max": None}, {"min": None, "max": 0.5}, {"min": -0.5, "max": 0.5}],
    "to": [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32"}],
    "pow": [{"scalar": n} for n in (-1, -0.5, 0.5, 1, 2, 3, 4)],
    "add": [{"scalar": 0.3, "alpha": 2}],
    "sub": [{"scalar": 0.3, "alpha": 2}],
    **{op: [{"scalar": 0.3}] for op in ("mul", "div", "maximum", "minimum")},
}
POSITIVE = ("log", "sqrt", "rsqrt", "pow")


@pytest.mark.parametrize("op", sorted(ELEMENTWISE - {"batch_norm"}))
def test_functions(op: str) -> None:
    """Alone, as the catalog's rows run them."""
    x = torch.tensor(NUMBERS)
    x = x.abs() + 0.1 if op in POSITIVE else x[1:] if op == "reciprocal" else x
    for attrs in SETTINGS.get(op, [{}]):
        dtype = attrs.get("dtype", "float32")
        one = TensorMeta(shape=tuple(x.shape), dtype="float32")
        inputs = (one, None) if "scalar" in attrs else (one,)
        asked = Problem(op=op, inputs=inputs, outputs=(replace(one, dtype=dtype),), attrs=attrs)
        assert generated.fits(asked) is None, attrs
        (config, *_) = generated.configs(asked)
        (made,) = run(generated, asked, [x], **config)
        (right,) = operation(op).call([x.double(), None][: len(inputs)], attrs)
        close = {"rtol": 1e-2 if dtype == "bfloat16" else 2e-6, "atol": 3e-7}
        torch.testing.assert_close(made.double(), right.double(), **close)
        (made,) = run(generated, asked, [x * torch.nan], **config)
        assert made.isnan().all(), attrs


@pytest.mark.parametrize("op", ["maximum", "minimum", "add"])
def test_not_a_number_on_either_side_stays_so(op: str) -> None:
    x, nan = torch.ones(8), torch.full((8,), torch.nan)
    asked = problem([meta(8), meta(8)], (op, (0, 1), SUM if op == "add" else PAIR))
    for inputs in ([x, nan], [nan, x]):
        (made,) = run(generated, asked, inputs, **generated.configs(asked)[0])
        assert made.isnan().all()


@pytest.mark.parametrize("case", ALONG)
def test_along_rows(case: str) -> None:
    agrees(alone(case))


def test_infinite_masks_and_rows_of_not_a_number() -> None:
    x = torch.randn(4, 9)
    x[0, 3:], x[1], x[2, 5] = -torch.inf, -torch.inf, torch.nan
    asked = problem([meta(4, 9)], ("softmax", (0,), {"dim": -1, "dtype": None}))
    (made,) = run(generated, asked, [x], **generated.configs(asked)[0])
    torch.testing.assert_close(made, torch.softmax(x, -1), equal_nan=True)
    asked = problem([meta(4, 9)], ("amax", (0,), {"dim": [-1], "keepdim": True}))
    (made,) = run(generated, asked, [x], **generated.configs(asked)[0])
    torch.testing.assert_close(made, x.amax(-1, keepdim=True), equal_nan=True)


REFUSED: dict[str, tuple[Problem, str]] = {
    "strides nobody knows": (
        problem([meta(4, 4, format="strided")], ("relu", (0,), {})), "strides must be known",
    ),
    "a long row": (
        problem([meta(2, 20000)], ("softmax", (0,), {"dim": -1, "dtype": None})), "20000",
    ),
    "another axis": (problem([X], ("softmax", (0,), {"dim": 1, "dtype": None})), "last axis"),
    "a reduction that drops its axis": (
        problem([X], ("sum", (0,), {"dim": [-1], "keepdim": False, "dtype": None})), "together",
    ),
    "float64": (problem([meta(4, dtype="float64")], ("relu", (0,), {})), "16 or 32 bits"),
    "an odd power": (problem([X], ("pow", (0, None), {"scalar": 2.5})), "power"),
    "scales that are computed": (
        problem([X, meta()], ("quantize", (0, 1), {"axis": 0, "dtype": "int8"})), "constants",
    ),
    "fp8 that is read again": (
        problem(
            [X, meta()], ("quantize", (0, 1), {"axis": 0, "dtype": "float8_e4m3fn"}),
            ("dequantize", (2, 1), {"axis": 0, "dtype": "float32"}), constant=(1,),
        ), "fp8 values that are read",
    ),
    "integers out": (problem([X], ("to", (0,), {"dtype": "int32"})), "makes floating"),
    "statistics that are computed": (norm_relu(), "constants"),
    "many tensors": (
        problem(
            [X] * 11,
            ("add", (0, 1), SUM),
            *(("add", (9 + i, i), SUM) for i in range(2, 11)),
        ),
        "10 tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "why"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_told(asked: Problem, why: str) -> None:
    if why == "constants":
        asked = replace(asked, constant=())
    assert why in str(refusal(asked))


# a plan is data from a stranger
HOSTILE: dict[str, tuple[Any, int, Any]] = {
    "no instruction": ([], 1, [1]),
    "not a list": ("relu", 1, [1]),
    "an operation with code": ([["user", [0], {"target": "x"}]], 1, [1]),
    "a fallback": ([["fallback", [0], {"target": "aten::from_file"}]], 1, [1]),
    "itself": ([["pointwise", [0], {}]], 1, [1]),
    "a read from later": ([["relu", [1], {}]], 1, [1]),
    "a read from before": ([["relu", [-1], {}]], 1, [1]),
    "a bool": ([["relu", [True], {}]], 1, [1]),
    "nothing read": ([["relu", [None], {}]], 1, [1]),
    "a result that is an input": ([["relu", [0], {}]], 1, [0]),
    "a result from later": ([["relu", [0], {}]], 1, [2]),
    "a result twice": ([["relu", [0], {}]], 1, [1, 1]),
    "no result": ([["relu", [0], {}]], 1, []),
    "attributes without names": ([["relu", [0], [1]]], 1, [1]),
    "four parts": ([["relu", [0], {}, 0]], 1, [1]),
    "no input": ([["relu", [0], {}]], 0, [0]),
    "a million instructions": ([["relu", [0], {}]] * 10**6, 1, [1]),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_are_refused(case: tuple[Any, int, Any]) -> None:
    program, inputs, results = case
    with pytest.raises(CompileError) as caught:
        parse(program, inputs, results)
    assert len(str(caught.value)) < 500


def test_a_program_for_people() -> None:
    steps = CASES["a norm by hand"].attrs
    assert text(steps["program"], steps["results"], ["%x", "w"]) == (
        "$1 = sub(%x, mean(%x, dim=[-1], keepdim=True)); "
        "$4 = add(mean(pow($1, 2), dim=[2], keepdim=True), 1e-06); "
        "$7 = mul(mul($1, rsqrt($4)), w)"
    )
    (one,) = (gate("float32", "contiguous").attrs,)
    assert text(one["program"], one["results"], ["%x", "%g"]) == (
        "add(mul(%x, hardsigmoid(%g)), %x)"
    )


def test_axes_are_joined_where_memory_lets_them() -> None:
    x = image(2, 24, 5, 7, format=LAST)
    assert common_axes(x.shape, [x, x]).sizes == (2 * 24 * 5 * 7,)
    assert common_axes(x.shape, [meta(24, 1, 1), x], lead=1).sizes == (70, 24)
    one = common_axes(x.shape, [image(h=1, w=1), x], lead=1)
    assert (one.sizes, one.strides[0]) == ((2, 35, 24), (24, 0, 1))
    rows = common_axes((4, 6, 10), [X, X], keep_last=True)
    assert (rows.rows, rows.columns) == (24, 10)


def test_torch_reuses_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of five operations of one shape needs no memory but its result's."""
    steps = [("exp", (0,), {}), *((op, (i,), {}) for i, op in enumerate(("neg", "tanh", "abs"), 1))]
    asked = problem([X], *steps)
    inputs = tensors(asked)
    out = X.empty(CPU)
    call = sequence.bind(asked, {})
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("a buffer too many"))
    call(*inputs, out=out)
    torch.testing.assert_close(out, inputs[0].exp().neg().tanh().abs())


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """For ``compile_all``: shapes as networks have them."""
    tokens, w = meta(64, 768, dtype="float16"), meta(768, dtype="float16")
    asked = {
        "norm+relu": norm_relu("float16", LAST, 64),
        "gate": gate("float16", LAST),
        "add+norm": problem(
            [tokens, tokens, w, w],
            ("add", (0, 1), SUM),
            ("layer_norm", (4, 2, 3), {"normalized_shape": (768,), "eps": 1e-5}),
            constant=(2, 3),
        ),
        "softmax": problem(
            [meta(64, 4096, dtype="float16")], ("softmax", (0,), {"dim": -1, "dtype": None})
        ),
        "a norm by hand": CASES["a norm by hand"],
        "quantized": quantized("float16", format=LAST),
        "a norm, and it quantized": problem(
            [tokens, w, w, meta()],
            ("layer_norm", (0, 1, 2), {"normalized_shape": (768,), "eps": 1e-5}),
            ("quantize", (4, 3), {"axis": 0, "dtype": "float8_e4m3fn"}),
            results=(5, 4),
            constant=(1, 2, 3),
        ),
        "quantized alone": Problem(
            op="quantize",
            inputs=(tokens, meta()),
            outputs=(meta(64, 768, dtype="float8_e4m3fn"),),
            attrs={"axis": 0, "dtype": "float8_e4m3fn"},
            constant=(1,),
        ),
        "numbers of quantized values": Problem(
            op="dequantize",
            inputs=(meta(64, 768, dtype="float8_e4m3fn"), meta()),
            outputs=(tokens,),
            attrs={"axis": 0, "dtype": "float16"},
            constant=(1,),
        ),
        "shifted windows": problem(
            [meta(8, 64, 3, 49, 49, dtype="float16"), meta(3, 49, 49), meta(1, 64, 1, 49, 49)],
            *(("add", (0, 1), SUM), ("add", (3, 2), SUM)),
            ("softmax", (4,), {"dim": -1, "dtype": None}),
        ),
    }
    for name, one in asked.items():
        yield name, functools.partial(_launch, one, generated.configs(one)[0])
    yield from test_pool.cases()


def _launch(asked: Problem, config: Mapping[str, Any]) -> None:
    module = generated if len(asked.outputs) == 1 else generated_several
    run(module, asked, tensors(asked), **config)


def test_compiles_for_hopper_without_spills() -> None:
    found = compile_all("tests.kernels.test_pointwise:cases")
    for name, launches in found.items():
        (one,) = launches
        assert one["spilled_bytes"] == 0, name
        assert not {"LDL", "STL"} & {op for op, count in one["opcodes"].items() if count}, name


def test_every_operation_of_programs_has_rows() -> None:
    """Alone it is asked of the same kernel; only torch's sequence runs on a CPU."""
    for op in ELEMENTWISE | ROWS | QUANTIZATION:
        assert catalog.kernel(f"{op}.generated").module.endswith("pointwise.generated")


def test_exact_answers_of_a_program_that_casts_stay_float64() -> None:
    """A quantized plan casts to its 16-bit type, and a norm follows with 16-bit weights."""
    meta = functools.partial(TensorMeta, dtype="float16")
    problem = Problem(
        op="pointwise",
        inputs=(TensorMeta(shape=(3, 8), dtype="float32"), meta(shape=(8,)), meta(shape=(8,))),
        outputs=(meta(shape=(3, 8)),),
        attrs={
            "program": (
                ("to", (0,), {"dtype": "float16"}),
                ("layer_norm", (3, 1, 2), {"normalized_shape": (8,), "eps": 1e-5}),
            ),
            "results": (4,),
        },
    )
    x = torch.randn(3, 8)
    weight, bias = torch.randn(2, 8).half()
    (made,) = exact_answers(problem, {1: weight, 2: bias}, (x,))
    right = torch.layer_norm(x.half().double(), (8,), weight.double(), bias.double(), eps=1e-5)
    torch.testing.assert_close(made, right)


def test_exact_answers_of_codes_are_numbers() -> None:
    meta = functools.partial(TensorMeta, shape=(9,))
    problem = Problem(
        op="quantize",
        inputs=(meta(dtype="float32"), TensorMeta(shape=(), dtype="float32")),
        outputs=(meta(dtype="float8_e4m3fn"),),
        attrs={"dtype": "float8_e4m3fn", "axis": None},
    )
    x, scale = torch.linspace(-600.0, 600.0, 9), torch.tensor(1.0)
    (made,) = exact_answers(problem, {}, (x, scale))
    assert made.dtype == torch.float64
    assert made[-1] == 448.0
