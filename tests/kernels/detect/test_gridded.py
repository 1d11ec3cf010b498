"""Pictures looked at by a grid, and maps in boxes: compiled for Hopper, and beside torch's own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tessella.core.spec import TensorSpec
from tessella.graph.capture import capture
from tessella.kernels.detect import gridded, regions
from tessella.kernels.detect.assigned import assign
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.kernels.compile_only import compile_all

runs = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
)


def asked(
    shape: tuple[int, ...], places: tuple[int, int], *modes: Any, dtype: str = "float32", **of: Any
) -> Problem:
    metas = (
        TensorMeta(shape=shape, dtype=dtype, **of),
        TensorMeta(shape=(shape[0], *places, 2), dtype=dtype),
    )
    args = ({"input": 0}, {"input": 1}, *modes)
    return Problem(
        op="fallback", inputs=metas,
        outputs=(TensorMeta(shape=(*shape[:2], *places), dtype=dtype),),
        attrs={"target": "aten::grid_sampler_2d", "args": args, "kwargs": {}},
    )  # fmt: skip


@runs
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border"])
def test_places_are_seen_as_torch_sees_them(padding: str, align: bool) -> None:
    """In the picture, at its edge, far outside, and at no place at all."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 9, 5, 7, generator=generator)
    grid = torch.rand(2, 6, 11, 2, generator=generator) * 3 - 1.5
    grid[0, 0, :4] = torch.tensor([[-1.0, -1.0], [1.0, 1.0], [1e30, 0.0], [-9.0, 1e9]])
    right = F.grid_sample(x.double(), grid.double(), padding_mode=padding, align_corners=align)
    number = ("zeros", "border").index(padding)
    formats = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
    for format, memory_format in formats.items():
        problem = asked(tuple(x.shape), (6, 11), 0, number, align, format=format)
        assert problem.misfit is None
        assert gridded.fits(problem) is None
        given = x.to(memory_format=memory_format)
        for config in gridded.configs(problem)[:2]:
            made = gridded.bind(problem, {}, **config)(given, grid)
            torch.testing.assert_close(made.double(), right, atol=2e-5, rtol=1e-5)
    grid[0, 0, 0] = torch.nan
    with np.errstate(invalid="ignore"):
        made = gridded.bind(asked(tuple(x.shape), (6, 11), 0, number, align), {})(x, grid)
    assert torch.isfinite(made[1]).all()


def test_what_a_network_asks_is_taken_and_other_modes_are_left_to_torch() -> None:
    class Looks(torch.nn.Module):
        def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
            return F.grid_sample(x, grid, align_corners=False)

    specs = [TensorSpec(name=n, dtype="float32", shape=s)
             for n, s in (("x", (1, 3, 8, 8)), ("grid", (1, 5, 6, 2)))]  # fmt: skip
    (node,) = capture(Looks().eval(), specs).nodes
    problem = asked((1, 3, 8, 8), (5, 6), 0, 0, False)
    asks = {name: node.attrs[name] for name in ("target", "args", "kwargs")}
    taken = Problem(op=node.op, inputs=problem.inputs, outputs=problem.outputs, attrs=asks)
    assert gridded.fits(taken) is None
    for modes in ((1, 0, False), (0, 2, False), (2, 0, True)):
        assert "bilinear" in str(gridded.fits(asked((1, 3, 8, 8), (5, 6), *modes)))
    assert "dense" in str(gridded.fits(asked((1, 3, 8, 8), (5, 6), 0, 0, True, format="strided")))
    double = asked((1, 3, 8, 8), (5, 6), 0, 0, True, dtype="float64")
    assert "floating" in str(gridded.fits(double))


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    """A grid's first configuration, those of Mask R-CNN's masks that are likeliest to spill, and
    the assignment of 300 queries."""
    problem = asked((2, 64, 32, 32), (32, 32), 0, 0, False, dtype="float16")
    tensors = [meta.empty(torch.device("cpu")) for meta in problem.given]
    yield "grid", functools.partial(gridded.bind(problem, {}), *tensors)
    metas = (
        TensorMeta(shape=(1, 336, 256), dtype="float16"),
        TensorMeta(shape=(1, 100, 4), dtype="float32"),
        TensorMeta(shape=(1, 100), dtype="int64"),
    )
    problem = Problem(
        op="pyramid_roi_align", inputs=metas,
        outputs=(TensorMeta(shape=(1, 100, 256, 14, 14), dtype="float16"),),
        attrs={"sizes": (16, 16, 8, 8, 4, 4), "strides": (4, 8, 16), "side": 14, "samples": 2},
    )  # fmt: skip
    tensors = [meta.empty(torch.device("cpu")) for meta in metas]
    out = problem.output.empty(torch.device("cpu"))
    for config in regions.configs(problem)[:2]:
        call = regions.bind(problem, {}, **config)
        yield f"boxes {config}", functools.partial(call, *tensors, out=out)
    counts = torch.zeros(4, dtype=torch.int32)
    yield "things", functools.partial(assign, torch.empty(4, 8, 300), counts)


def test_compiled_for_hopper_nothing_spills() -> None:
    for name, launches in compile_all(f"{__name__}:on_hopper").items():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0, name
