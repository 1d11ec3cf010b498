"""``cat`` in machine code beside torch's own, equal to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.kernels.transform import x86_join
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta, meta_of

LAST: Format = "channels_last"
CASES: dict[str, tuple[int, Format, str, list[tuple[int, ...]]]] = {
    "channels": (1, LAST, "float32", [(2, 16, 3, 4), (2, 23, 3, 4), (2, 70, 3, 4)]),
    "half of the bytes": (1, LAST, "bfloat16", [(2, 32, 3, 4), (2, 71, 3, 4)]),
    "bytes": (1, LAST, "int8", [(1, 64, 5, 4), (1, 101, 5, 4)]),
    "rows": (1, "contiguous", "float32", [(3, 1, 16), (3, 4, 16)]),
    "columns": (2, "contiguous", "float32", [(2, 3, 16), (2, 3, 27)]),
    "many": (1, LAST, "float32", [(1, 33, 40, 40), (1, 48, 40, 40)]),
}


def asked(dim: int, metas: list[TensorMeta], format: Format) -> Problem:
    shape = list(metas[0].shape)
    shape[dim] = sum(meta.shape[dim] for meta in metas)
    made = replace(metas[0], shape=tuple(shape), format=format)
    return Problem(op="cat", inputs=tuple(metas), outputs=(made,), attrs={"dim": dim})


def drawn(name: str) -> tuple[Problem, list[torch.Tensor]]:
    dim, format, dtype, shapes = CASES[name]
    memory = torch.channels_last if format == LAST else torch.contiguous_format
    parts = [
        (torch.randn(s) * 50).to(getattr(torch, dtype)).contiguous(memory_format=memory)
        for s in shapes
    ]
    metas = [TensorMeta(shape=s, dtype=dtype, format=format) for s in shapes]
    return asked(dim, metas, format), parts


@pytest.mark.parametrize("name", CASES)
def test_what_torch_makes(name: str) -> None:
    problem, parts = drawn(name)
    assert x86_join.fits(problem) is None
    out = problem.output.empty(torch.device("cpu")).fill_(7)
    assert x86_join.bind(problem, {})(*parts, out=out) is out
    assert torch.equal(out, torch.cat(parts, problem.attrs["dim"]))


def test_slices_are_read_and_written_where_they_lie() -> None:
    problem, parts = drawn("channels")
    wide = torch.randn(2, 90, 3, 4).contiguous(memory_format=torch.channels_last)
    parts[2] = wide[:, 10:80]
    whole = torch.randn(2, 130, 3, 4).contiguous(memory_format=torch.channels_last)
    before = whole.clone()
    last, made = (meta_of(t).part(1, size) for t, size in ((wide, 70), (whole, 109)))
    there = replace(problem, inputs=(*problem.inputs[:2], last), outputs=(made,))
    assert x86_join.fits(there) is None
    x86_join.bind(there, {})(*parts, out=whole[:, 8:117])
    before[:, 8:117] = torch.cat(parts, 1)
    assert torch.equal(whole, before)


def test_parts_that_lie_in_the_result_stay() -> None:
    problem, parts = drawn("channels")
    whole = torch.randn(2, 109, 3, 4).contiguous(memory_format=torch.channels_last)
    right = whole.clone()
    right[:, 16:39] = parts[1]
    there = [whole[:, :16], parts[1], whole[:, 39:]]
    metas = [meta_of(whole).part(1, size) for size in (16, 70)]
    asked = replace(problem, inputs=(metas[0], problem.inputs[1], metas[1]), in_place=(0, 2))
    assert x86_join.fits(asked) is None
    x86_join.bind(asked, {})(*there, out=whole)
    assert torch.equal(whole, right)


def test_what_has_no_rows_of_vectors_is_left_to_others() -> None:
    problem, _ = drawn("channels")
    assert "lie in the result" in str(x86_join.fits(replace(problem, in_place=(0, 1, 2))))
    few = TensorMeta(shape=(2, 7, 3, 4), dtype="float32", format=LAST)
    assert "bytes at least" in str(x86_join.fits(asked(1, [few, few], LAST)))
    wide = TensorMeta(shape=(2, 32, 3, 4), dtype="float32", format=LAST)
    mixed = [wide, replace(wide, format="contiguous")]
    for other in (
        asked(2, [wide, wide], LAST),
        asked(1, mixed, LAST),
        asked(1, mixed, "contiguous"),
    ):
        assert "rows of channels" in str(x86_join.fits(other))
