"""``pad`` with a number: the kernel beside torch's own, in every configuration.

Without a GPU Triton's interpreter runs it; tests/gpu has no more of it than this.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tessella.kernels.transform import pad_rows
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta, memory_format
from tests.support.kernels.compile_only import compile_all

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs a GPU, or Triton's interpreter",
)
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], str, str, float | None]] = {
    "behind": ((2, 5, 4, 6), (0, 1, 0, 1), "float16", "channels_last", 0.0),
    "around": ((1, 3, 5, 4), (2, 1, 0, 3), "float32", "contiguous", None),
    "channels": ((2, 3, 2, 2), (1, 0, 0, 2, 4, 1), "float32", "channels_last", -1.5),
    "images": ((2, 3, 2, 2), (0, 0, 0, 0, 0, 0, 1, 2), "float16", "channels_last", 2.0),
    "one axis": ((7,), (3, 2), "float32", "contiguous", 1.0),
    "volumes": ((1, 2, 3, 4, 5), (1, 1, 2, 0, 0, 1), "bfloat16", "contiguous", 0.5),
    "bytes": ((1, 300, 2, 3), (1, 1, 1, 1), "int8", "channels_last", -128.0),
}  # fmt: skip


def asked(name: str, **changed: Any) -> Problem:
    shape, pairs, dtype, format, value = CASES[name]
    attrs = {"pad": pairs, "mode": "constant", "value": value, **changed}
    made = tuple(F.pad(torch.empty(shape, device="meta"), pairs).shape)
    metas = [TensorMeta(shape=s, dtype=dtype, format=format) for s in (shape, made)]  # type: ignore[arg-type]
    return Problem(op="pad", inputs=(metas[0],), outputs=(metas[1],), attrs=attrs)


@runs
@pytest.mark.parametrize("name", CASES)
def test_every_configuration_makes_what_torch_makes(name: str) -> None:
    problem = asked(name)
    if name == "bytes":
        assert "does not hold" in str(pad_rows.fits(asked(name, value=-129.0)))
        problem = asked(name, value=-7.0)
    assert pad_rows.fits(problem) is None
    x = torch.randint(-9, 9, problem["input"].shape, generator=torch.Generator().manual_seed(0))
    x = x.to(DEVICE, getattr(torch, problem["input"].dtype))
    x = x.contiguous(memory_format=memory_format(problem["input"].format, x.dim()))
    right = F.pad(x, problem.attrs["pad"], value=problem.attrs["value"])
    for config in pad_rows.configs(problem):
        out = problem.output.empty(x.device).fill_(77)
        assert torch.equal(pad_rows.bind(problem, {}, **config)(x, out=out), right), config


@pytest.mark.parametrize(("changed", "why"), [
    ({"mode": "reflect"}, "adds a number"), ({"pad": (0, -1)}, "takes nothing away"),
])  # fmt: skip
def test_other_ways_are_left_to_torch(changed: dict[str, Any], why: str) -> None:
    assert why in str(pad_rows.fits(asked("behind", **changed)))


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    problem = asked("behind")
    x, out = (meta.empty(torch.device("cpu")) for meta in (problem["input"], problem.output))
    for config in pad_rows.configs(problem):
        yield str(config), functools.partial(pad_rows.bind(problem, {}, **config), x, out=out)


def test_it_compiles_for_hopper() -> None:
    for launches in compile_all(f"{__name__}:on_hopper").values():
        assert [launch["spilled_bytes"] for launch in launches] == [0]
