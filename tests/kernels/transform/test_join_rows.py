"""``cat`` in one launch beside torch's own, in every configuration.

Without a GPU Triton's interpreter runs it.
"""

from __future__ import annotations

import os

import pytest
import torch

from tessella.kernels.transform import join_rows
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
LAST: Format = "channels_last"
CASES: dict[str, tuple[int, Format, list[tuple[int, ...]]]] = {
    "channels": (1, LAST, [(2, 5, 3, 4), (2, 16, 3, 4), (2, 1, 3, 4)]),
    "columns": (2, "contiguous", [(2, 3, 2), (2, 3, 7)]),
    "rows": (1, "contiguous", [(3, 1, 6), (3, 4, 6)]),
    "wide": (1, "contiguous", [(2, 700), (2, 3)]),
}


def asked(dim: int, metas: list[TensorMeta], format: Format, constant: bool = False) -> Problem:
    shape = list(metas[0].shape)
    shape[dim] = sum(m.shape[dim] for m in metas)
    made = TensorMeta(shape=tuple(shape), dtype=metas[0].dtype, format=format)
    return Problem(
        op="cat", inputs=tuple(metas), outputs=(made,), attrs={"dim": dim},
        constant=(0,) if constant else (),
    )  # fmt: skip


@runs
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_makes_what_torch_makes(name: str) -> None:
    dim, format, shapes = CASES[name]
    memory = torch.channels_last if format == LAST else torch.contiguous_format
    parts = [torch.randn(s, device=DEVICE).half().contiguous(memory_format=memory) for s in shapes]
    metas = [TensorMeta(shape=s, dtype="float16", format=format) for s in shapes]
    problem = asked(dim, metas, format)
    assert problem.misfit is None
    assert join_rows.fits(problem) is None
    right = torch.cat(parts, dim)
    for config in join_rows.configs(problem):
        out = problem.output.empty(parts[0].device).fill_(7)
        assert join_rows.bind(problem, {}, **config)(*parts, out=out) is out
        assert torch.equal(out, right)


@runs
@pytest.mark.parametrize("format", [LAST, "contiguous"])
def test_parts_that_are_slices_are_read_where_they_lie_and_constants_are_parts(
    format: Format,
) -> None:
    dim = 1 if format == LAST else 3
    memory = torch.channels_last if format == LAST else torch.contiguous_format
    shape = (2, 6, 3, 4) if format == LAST else (2, 3, 4, 6)
    whole = torch.randn(shape, device=DEVICE).contiguous(memory_format=memory)
    meta = TensorMeta(shape=shape, dtype="float32", format=format)
    parts = [part.contiguous(memory_format=memory) if i == 0 else part
             for i, part in enumerate(whole.split([2, 4], dim))]  # fmt: skip
    metas = [meta.part(dim, 4) if i else
             TensorMeta(shape=tuple(parts[0].shape), dtype="float32", format=format)
             for i in range(2)]  # fmt: skip
    assert metas[1].strides is not None
    problem = asked(dim, metas, format, constant=True)
    assert join_rows.fits(problem) is None
    out = problem.output.empty(whole.device)
    join_rows.bind(problem, {0: parts[0]})(parts[1], out=out)
    assert torch.equal(out, whole)


def test_what_has_no_rows_is_left_to_others() -> None:
    turned = TensorMeta(shape=(2, 3, 4), dtype="float32", format="strided")
    plain = TensorMeta(shape=(2, 3, 4), dtype="float32")
    pixels = TensorMeta(shape=(2, 3, 4, 4), dtype="float32", format=LAST)
    assert "equal distances" in str(join_rows.fits(asked(1, [plain, turned], "contiguous")))
    assert "equal distances" in str(join_rows.fits(asked(2, [pixels, pixels], LAST)))
    assert "two to" in str(join_rows.fits(asked(1, [plain] * 9, "contiguous")))
