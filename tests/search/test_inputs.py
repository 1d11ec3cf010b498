"""The tensors that kernels are tried on: as the problem says, with numbers of their own."""

from __future__ import annotations

import pytest
import torch

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta
from tessella.search.inputs import DRAWN, POOL, Numbers, expose_errors, sample_inputs
from tessella.search.inspection import deviates, exact_answers

CPU = torch.device("cpu")


@pytest.mark.parametrize("pixels", [2, 40, 140])
@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
def test_inputs_are_as_the_problem_says(format: Format, pixels: int) -> None:
    """Drawn, of a pool, and of a pool again and again; dense, and a slice of a larger tensor."""
    whole = TensorMeta(shape=(4, 32, pixels, pixels), dtype="float32", format=format)
    half = whole.part(1, 16)
    plain = TensorMeta(shape=half.shape, dtype="float32", format=format)
    assert (whole.nbytes // 4 > DRAWN, whole.nbytes // 4 > POOL) == (pixels > 2, pixels > 40)
    problem = Problem(op="cat", inputs=(plain, half, whole), outputs=(whole,), attrs={"dim": 1})
    made = sample_inputs(problem, CPU)
    for meta, tensor in zip(problem.given, made, strict=True):
        assert meta.matches(tensor)
        assert abs(float(tensor.mean())) < 0.2
        assert 0.8 < float(tensor.std()) < 1.2
    assert expose_errors(made)
    assert not torch.equal(made[0], made[1])  # operands are not alike, nor images of one
    assert not torch.equal(made[2][0], made[2][1])
    again = [tensor.clone() for tensor in made]
    for tensor in made:
        tensor.zero_()  # a kernel may write into its inputs: nobody else sees it
    for first, second in zip(again, sample_inputs(problem, CPU), strict=True):
        assert torch.equal(first, second)


def test_searches_of_a_build_read_the_same_memory_and_operands_do_not() -> None:
    """Slices of one tensor lie in one, side by side; a larger problem does not change a smaller."""
    whole = TensorMeta(shape=(4, 48, 20, 20), dtype="float32", format="channels_last")
    thirds = (whole.part(1, 16),) * 3
    dense = TensorMeta(shape=(4, 16, 20, 20), dtype="float32", format="channels_last")
    problem = Problem(op="cat", inputs=(*thirds, dense), outputs=(whole,), attrs={"dim": 1})
    numbers = Numbers()
    first = sample_inputs(problem, CPU, numbers=numbers)
    starts = [(t.data_ptr() - first[0].data_ptr()) // 4 for t in first]
    assert starts == [0, 16, 32, 4 * 48 * 20 * 20]
    before = [t.clone() for t in first]
    large = TensorMeta(shape=(8, 64, 90, 90), dtype="float32")
    sample_inputs(Problem(op="cat", inputs=(large,), outputs=(large,)), CPU, numbers=numbers)
    for one, then, now in zip(
        before, first, sample_inputs(problem, CPU, numbers=numbers), strict=True
    ):
        assert torch.equal(one, then)
        assert torch.equal(one, now)


@pytest.mark.parametrize("gamma", [50.0, 30_000.0, 140_000.0])
def test_attention_into_int8_is_tried_on_values_that_its_result_holds(gamma: float) -> None:
    """The probabilities of a right kernel have 16 bits; beyond the range these are whole steps."""
    heads = TensorMeta(shape=(2, 4, 300, 32), dtype="float16")
    codes = TensorMeta(shape=heads.shape, dtype="int8")
    problem = Problem(
        op="scaled_dot_product_attention", inputs=(heads, heads, heads, None), outputs=(codes,),
        attrs={"is_causal": False, "scale": 32**-0.5, "enable_gqa": False, "dtype": "int8",
               "gamma": gamma},
    )  # fmt: skip
    q, k, v = sample_inputs(problem, CPU)
    exact = exact_answers(problem, {}, [q, k, v])
    largest = exact[0].abs()
    assert float(largest.max()) > 20
    assert float((largest >= 127).double().mean()) < 0.1
    shares = (q.float() @ k.float().mT * 32**-0.5).softmax(3).half()
    made = shares.float() @ v.float() * gamma
    right, wrong = ((made * by).round().clamp(-128, 127).to(torch.int8) for by in (1, 1.1))
    assert deviates(problem, [right], exact) is None
    assert deviates(problem, [wrong], exact)
