"""The largest of each row by counting, beside torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from tessella.kernels.detect import ranked
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.kernels.compile_only import compile_all


def asked(x: torch.Tensor, *args: object, **kwargs: object) -> Problem:
    dtype = str(x.dtype).removeprefix("torch.")
    shape = (*x.shape[:-1], args[0])
    return Problem(
        op="fallback",
        inputs=(TensorMeta(shape=tuple(x.shape), dtype=dtype),),
        outputs=tuple(TensorMeta(shape=shape, dtype=d) for d in (dtype, "int64")),  # type: ignore[arg-type]
        attrs={"target": "aten::topk", "args": ({"input": 0}, *args), "kwargs": kwargs},
    )


@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 5), (300, 300)])
def test_the_largest_come_first_and_equal_ones_keep_their_order(n: int, k: int) -> None:
    x = torch.randint(-6, 6, (3, n), generator=torch.Generator().manual_seed(n)).half() / 2
    x[0, 0], x[1, -1], x[2, n // 2] = float("nan"), float("inf"), float("-inf")
    x[2, 0] = -0.0
    problem = asked(x, k)
    assert problem.misfit is None
    assert ranked.fits(problem) is None
    whole, order = x.float().sort(dim=1, descending=True, stable=True)
    for config in ranked.configs(problem):
        values, places = ranked.bind(problem, {}, **config)(x)
        torch.testing.assert_close(values.float(), whole[:, :k], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, order[:, :k])
    theirs, _ = torch.topk(x, k)
    torch.testing.assert_close(values, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("args", "why"), [
    ((2, 0), "last axis"), ((2, -1, False), "largest"), ((9,), "largest"), ((True,), "largest"),
])  # fmt: skip
def test_other_questions_are_left_to_torch(args: tuple[object, ...], why: str) -> None:
    assert why in str(ranked.fits(asked(torch.zeros(3, 8), *args)))


def test_too_many_pairs_are_left_to_torch() -> None:
    assert "all pairs" in str(ranked.fits(asked(torch.zeros(32, 8400), 300)))


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    """D-FINE's 8,400 places, of which 300 become queries."""
    x = torch.zeros(1, 8400, dtype=torch.float16)
    problem = asked(x, 300)
    for config in ranked.configs(problem):
        yield str(config), functools.partial(ranked.bind(problem, {}, **config), x)


def test_compiled_for_hopper_nothing_spills() -> None:
    for launches in compile_all(f"{__name__}:on_hopper").values():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0
