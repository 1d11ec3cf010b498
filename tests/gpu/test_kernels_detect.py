"""Deformable attention on a GPU: our kernel beside the reference in float64, and how fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessella.kernels.detect import sampled
from tessella.operations.reference.detect import deformable_attention
from tessella.search.find import SearchOptions, find
from tests.support.problems.looks import asked, drawn

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

D_FINE: dict[str, Any] = {"heads": 8, "queries": 300}
NETWORKS: dict[str, dict[str, Any]] = {
    "d_fine_n": {"depth": 16, "sizes": (40, 40, 20, 20), "points": (6, 6), **D_FINE},
    "d_fine_s": {"depth": 32, "sizes": (80, 80, 40, 40, 20, 20), "points": (3, 6, 3), **D_FINE},
    "odd": {"depth": 5, "sizes": (7, 2, 3, 4), "points": (1, 3), "heads": 3, "queries": 37},
}
LIMITS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_configuration_sees_what_the_reference_sees(name: str, dtype: str) -> None:
    problem = asked(images=3, dtype=dtype, **NETWORKS[name])
    assert sampled.fits(problem) is None
    tensors = drawn(problem, "cuda")
    right = deformable_attention(*(t.double() for t in tensors), **problem.attrs)
    for config in sampled.configs(problem):
        made = torch.full(right.shape, torch.nan, dtype=tensors[0].dtype, device=right.device)
        sampled.bind(problem, {}, **config)(*tensors, out=made)
        assert (made.double() - right).abs().max() < LIMITS[dtype] * right.abs().max()


@pytest.mark.parametrize("images", [1, 32])
@pytest.mark.parametrize("name", ["d_fine_n", "d_fine_s"])
def test_ours_is_the_fastest(name: str, images: int) -> None:
    problem = asked(images=images, dtype="float16", **NETWORKS[name])
    named = SearchOptions(algorithms=("sampled", "reference"))  # it waits for a run of this test
    best, *others = find(problem, {}, target="sm_90", options=named)
    rest = ", ".join(f"{t.kernel} {t.time_us:.0f}" for t in others if t.time_us)
    print(f"{name} of {images}: {best.kernel} {best.config} {best.time_us:.1f} µs; {rest}")
    assert best.kernel == "deformable_attention.sampled"
