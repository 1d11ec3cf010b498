"""A linear and the norm of its rows as one problem: which pairs, what they mean, what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessella.compiler.choices.choose_kernels import as_measured
from tessella.core.errors import UsageError
from tessella.operations import problems, shapes
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.inputs import sample_inputs
from tessella.search.inspection import exact_answers

CPU = torch.device("cpu")
K, N, EPS = 24, 16, 1e-3
FP8 = "float8_e4m3fn"


def meta(dtype: str, *shape: int) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype)


def first_of(dtype: str = "float16", out: str = "float16", **more: Any) -> Problem:
    """A layer with all that it may have; of fp8 that is one factor a channel, too."""
    made = problems.linear(
        meta(dtype, 3, 5, K), meta(dtype, N, K), meta(out, N), meta(out, 3, 5, N),
        *[meta("float32", N)] * (dtype != out), out_dtype=out,
        constant=(1, 2, 4) if dtype != out else (1, 2), **more,
    )  # fmt: skip
    return made if dtype == out else replace(made, attrs={**made.attrs, "dtype": out})


NORM = ("layer_norm", (0, 1, 2), {"normalized_shape": (N,), "eps": EPS})
ROUNDS = ("quantize", (4, 3), {"axis": 0, "dtype": FP8})


def norm_of(
    results: tuple[str, ...] = ("norm",), dtype: str = "float16", quantized: str = FP8
) -> Problem:
    """What reads the sum: a layer_norm, or a program with the rounding to quantized values."""
    value, vector = meta(dtype, 3, 5, N), meta(dtype, N)
    if results == ("norm",):
        return Problem(
            op="layer_norm", inputs=(value, vector, vector), outputs=(value,),
            attrs={"normalized_shape": (N,), "eps": EPS}, constant=(1, 2),
        )  # fmt: skip
    rounds = (*ROUNDS[:2], {**ROUNDS[2], "dtype": quantized})
    numbers = {"norm": 4, "codes": 5}
    return Problem(
        op="pointwise",
        inputs=(value, vector, vector, meta("float32")),
        outputs=tuple(replace(value, dtype=quantized) if r == "codes" else value for r in results),
        attrs={"program": (NORM, rounds), "results": tuple(numbers[r] for r in results)},
        constant=(1, 2, 3),
    )


RESULTS = (("norm",), ("codes",), ("codes", "norm"), ("norm", "codes"))

# ------------------------------------------------------------------ the problem


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("results", RESULTS)
def test_one_problem_of_two(results: tuple[str, ...], keep: bool) -> None:
    first, second = first_of(FP8, fast_accumulation=True), norm_of(results)
    made = problems.linear_norm(first, second, keep=keep)
    coded = "codes" in results
    vectors = (meta("float16", N), meta("float16", N), meta("float32") if coded else None)
    assert made.op == "linear_norm"
    assert len(made.inputs) == 8
    assert made.inputs == (*first.inputs, *vectors)
    assert made.outputs == (*second.outputs, *[first.output] * keep)
    assert made.constant == (1, 2, 4, 5, 6, *[7] * coded)
    quantized = {"code_dtype": FP8} if coded else {}
    kept = {"eps": EPS, "results": (*results, *["sum"] * keep)}
    assert made.attrs == {**first.attrs, **kept, **quantized}


def test_what_is_left_out_stays_so() -> None:
    first = problems.linear(meta("bfloat16", 5, K), meta("bfloat16", N, K), constant=(1,))
    second = replace(norm_of(dtype="bfloat16"), inputs=(first.output, *[meta("bfloat16", N)] * 2))
    made = problems.linear_norm(first, replace(second, outputs=(first.output,)), keep=False)
    assert made.inputs[2:5] == (None, None, None)
    assert made.constant == (1, 5, 6)


def test_a_program_may_read_in_any_order() -> None:
    """Inputs of a program are numbered as they come; a vector may be both weight and bias."""
    second = norm_of(("codes",))
    scale, value, weight = meta("float32"), *second.inputs[:2]
    program = (
        ("layer_norm", (1, 2, 2), NORM[2]),
        ("quantize", (3, 0, None), ROUNDS[2]),
    )
    second = replace(
        second, inputs=(scale, value, weight), constant=(0, 2),
        attrs={"program": program, "results": (4,)},
    )  # fmt: skip
    made = problems.linear_norm(first_of(), second, keep=False)
    assert made.inputs[5:] == (weight, weight, scale)
    assert made.constant == (1, 2, 5, 6, 7)


def with_program(*program: Any, results: tuple[int, ...] = (5,)) -> Problem:
    return replace(norm_of(("codes",)), attrs={"program": program, "results": results})


OVER_TWO = {"normalized_shape": (5, N), "eps": EPS}
HALF, INT8 = meta("float16", N), {"axis": 0, "dtype": "int8"}
QUANTIZED = norm_of(("codes",))


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (first_of(out="float32"), norm_of(dtype="float32"), "makes float16 or bfloat16"),
        (norm_of(), norm_of(), "a linear that"),
        (first_of(), first_of(), "a layer_norm, or"),
        (first_of(), norm_of(dtype="bfloat16"), "the norm reads"),
        (first_of(), replace(norm_of(), inputs=(meta("float16", 15, N), HALF, HALF)), "reads"),
        (first_of(), replace(norm_of(), inputs=norm_of().inputs[:2]), "a weight and a bias"),
        (first_of(), replace(norm_of(), inputs=(norm_of().inputs[0], None, HALF)), "a weight and"),
        (first_of(), replace(norm_of(), attrs=OVER_TWO), "the last axis only"),
        (first_of(), with_program(("relu", (0,), {}), ROUNDS), "only layer_norm"),
        (first_of(), with_program(NORM, ("relu", (4,), {})), "only layer_norm"),
        (first_of(), with_program(NORM, ROUNDS, ("relu", (4,), {}), results=(6,)), "only layer_n"),
        (first_of(), with_program(NORM, ("quantize", (0, 3), ROUNDS[2])), "only layer_norm"),
        (first_of(), with_program(NORM, ("quantize", (4, 3, 3), INT8)), "zero point"),
        (first_of(), with_program(NORM, ("quantize", (4, 1), ROUNDS[2])), "one constant scale"),
        (first_of(), replace(QUANTIZED, constant=(1, 2)), "one constant scale"),
        (
            first_of(),
            with_program(NORM, ("quantize", (4, 3), {"axis": 0, "dtype": "float8_e5m2"})),
            "quantized values of float8_e4m3fn or int8",
        ),
        (first_of(), with_program(("layer_norm", (0, 1), NORM[2]), ROUNDS), "a weight and a bias"),
    ],
)
def test_what_is_no_pair(first: Problem, second: Problem, why: str) -> None:
    assert why in str(problems.unnormable(first, second))
    with pytest.raises(UsageError, match="no linear and its norm"):
        problems.linear_norm(first, second, keep=True)


# ------------------------------------------------------------------ what it means


def constants_of(problem: Problem) -> dict[int, torch.Tensor]:
    torch.manual_seed(2)
    made = {i: torch.randn(problem.inputs[i].shape) for i in problem.constant}
    for i in {4, 7} & set(made):
        made[i] = made[i].abs() / 40 + 0.01
    return {i: t.to(getattr(torch, problem.inputs[i].dtype)) for i, t in made.items()}


@pytest.mark.parametrize("quantized", [FP8, "int8"])
@pytest.mark.parametrize(
    ("dtype", "out", "more"),
    [
        ("float16", "float16", {"activation": "gelu", "beta": 0.5}),
        ("bfloat16", "bfloat16", {"alpha": 2.0, "gamma": 3.0}),
        (FP8, "float16", {"fast_accumulation": True}),
        (FP8, "bfloat16", {"activation": "relu"}),
    ],
)
def test_means_what_torch_computes_in_float64(
    dtype: str, out: str, more: dict[str, Any], quantized: str
) -> None:
    first, second = first_of(dtype, out, **more), norm_of(("codes", "norm"), out, quantized)
    problem = problems.linear_norm(first, second, keep=True)
    constants, inputs = constants_of(problem), sample_inputs(problem, CPU)
    found = exact_answers(problem, constants, inputs)
    x, residual = (t.double() for t in inputs)
    weight, bias, by, plus, step = (constants[i].double() for i in (1, 2, 5, 6, 7))
    scale = more.get("alpha", 1.0) * constants.get(4, torch.ones(N)).double()
    total = scale * F.linear(x, weight) + bias
    total = total + more.get("beta", 1.0) * residual
    total = ACTIVATIONS[more["activation"]](total) if "activation" in more else total
    total = total * more.get("gamma", 1.0)
    norm = F.layer_norm(total, (N,), by, plus, EPS)
    if quantized == "int8":
        stored = (norm / step).round().clamp(-128, 127)
    else:
        stored = (norm / step).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    kind = getattr(torch, out)
    torch.testing.assert_close(found[0], stored, rtol=0, atol=0)
    if dtype == out:
        torch.testing.assert_close(found[1], norm, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found[2], total, rtol=1e-12, atol=1e-12)
    else:  # ``dtype`` says how they are stored
        torch.testing.assert_close(found[1], norm.to(kind).double(), rtol=0, atol=0)
        torch.testing.assert_close(found[2], total.to(kind).double(), rtol=0, atol=0)
    assert stored.unique().numel() > 20


def test_the_sum_is_not_rounded_before_it_is_normalized() -> None:
    """4096 + 1, 2, 3 …: float16 has every fourth."""
    problem = problems.linear_norm(first_of(FP8), norm_of(), keep=True)
    rows = torch.arange(N, dtype=torch.float64)
    x, residual = torch.zeros(3, 5, K).to(torch.float8_e4m3fn), torch.full((3, 5, N), 4096.0).half()
    weight, bias = torch.zeros(N, K).to(torch.float8_e4m3fn), rows.half()
    one, nothing = torch.ones(N), torch.zeros(N).half()
    operands = [x, weight, bias, residual, one, one.half(), nothing, None]
    norm, total = operation(problem.op).call(operands, problem.attrs)
    assert norm.dtype == total.dtype == torch.float16
    assert total.unique().numel() < N
    right = F.layer_norm(rows, (N,), eps=EPS).expand(3, 5, N)
    torch.testing.assert_close(norm.double(), right, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("dtype", ["float16", FP8])
@pytest.mark.parametrize("results", RESULTS)
def test_shapes_without_numbers_are_those_with(
    results: tuple[str, ...], dtype: str, keep: bool
) -> None:
    problem = problems.linear_norm(first_of(dtype), norm_of(results), keep=keep)
    made = shapes.made(problem.op, problem.inputs, problem.attrs)
    operands = problem.operands(constants_of(problem), sample_inputs(problem, CPU))
    called = operation(problem.op).call(operands, problem.attrs)
    assert made == [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in called]
    assert made == [(m.dtype, m.shape) for m in problem.outputs]


@pytest.mark.parametrize(
    "changes",
    [
        {"results": ()},
        {"results": ("norm", "norm", "sum")},
        {"results": ("norm", "mean", "sum")},
        {"results": "norm"},
        {"results": None},
        {"eps": "small"},
        {"eps": None},
        {"eps": float("nan")},
        {"code_dtype": None},
        {"code_dtype": "Tensor"},
        {"code_dtype": ["int8"]},
        {"dtype": "no such type"},
        {"gamma": 0.0},
        {"normalized_shape": (N,)},
    ],
    ids=str,
)
def test_refuses_attributes_that_mean_nothing(changes: dict[str, Any]) -> None:
    problem = problems.linear_norm(first_of(FP8), norm_of(("codes", "norm")), keep=True)
    with pytest.raises((ValueError, TypeError, AttributeError, RuntimeError)):
        shapes.made(problem.op, problem.inputs, {**problem.attrs, **changes})


@pytest.mark.parametrize(
    ("position", "shape"),
    [(5, (N - 1,)), (6, (1,)), (7, (3,)), (2, (1,)), (3, (3, 1, N)), (4, ()), (1, (N, K - 1))],
)
def test_refuses_operands_of_other_shapes(position: int, shape: tuple[int, ...]) -> None:
    problem = problems.linear_norm(first_of(FP8), norm_of(("codes", "norm")), keep=True)
    inputs = list(problem.inputs)
    inputs[position] = replace(inputs[position], shape=shape)
    with pytest.raises((ValueError, RuntimeError)):
        shapes.made(problem.op, inputs, problem.attrs)


def test_codes_need_their_scale() -> None:
    problem = problems.linear_norm(first_of(FP8), norm_of(("codes",)), keep=False)
    with pytest.raises(ValueError, match="a scale of one number"):
        shapes.made(problem.op, problem.inputs[:7], problem.attrs)


# ------------------------------------------------------------------ what it costs


def test_work_is_the_product_s_and_the_sum_is_not_moved() -> None:
    first, second = first_of(FP8), norm_of(("codes", "norm"))
    dropped, kept = (problems.linear_norm(first, second, keep=keep) for keep in (False, True))
    assert dropped.flops == kept.flops == first.flops == 2 * 15 * N * K
    assert kept.nbytes == first.nbytes + second.nbytes - first.output.nbytes
    assert dropped.nbytes == kept.nbytes - first.output.nbytes


def test_problems_with_other_factors_share_a_search() -> None:
    one, two, plain = (
        problems.linear_norm(first_of(FP8, **more), norm_of(), keep=True)
        for more in ({"beta": 0.3, "gamma": 2.0}, {"beta": 0.7, "gamma": 5.0}, {})
    )
    assert one.key != two.key
    assert as_measured(one).key == as_measured(two).key
    assert as_measured(one).attrs["results"] == ("norm", "sum")
    assert as_measured(plain) == plain
