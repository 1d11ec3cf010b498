"""Deformable attention on a GPU: our kernel beside the reference in float64, and how fast."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessella.kernels.detect import nms_rounds, sampled
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import deformable_attention, nms
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.find import SearchOptions, find
from tests.support.gpu_target import TARGET
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
    best, *others = find(problem, {}, target=TARGET, options=named)
    rest = ", ".join(f"{t.kernel} {t.time_us:.0f}" for t in others if t.time_us)
    print(f"{name} of {images}: {best.kernel} {best.config} {best.time_us:.1f} µs; {rest}")
    assert best.kernel == "deformable_attention.sampled"


SUPPRESSED = {
    "few": (2, 3, 60, 60), "one box": (1, 2, 1, 4), "odd": (3, 5, 1001, 100),
    "yolo": (1, 20, 8192, 300), "retinanet": (2, 1, 4441, 1000),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["spread", "whole", "nan", "groups", "threshold", "float16"])
@pytest.mark.parametrize("name", SUPPRESSED)
def test_suppression_is_the_reference_s(name: str, kind: str) -> None:
    """``whole``: of few integers, with ties, doubles and boxes of no area."""
    tensors, attrs = boxes_and_scores(*SUPPRESSED[name], kind)
    right = nms(*tensors, **attrs)
    outputs = (TensorMeta(shape=tuple(right.shape), dtype="int64"),)
    metas = tuple(
        TensorMeta(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for t in tensors
    )
    problem = Problem(op="nms", inputs=metas, outputs=outputs, attrs=attrs)
    assert nms_rounds.fits(problem) is None
    for config in nms_rounds.configs(problem):
        out = torch.full(right.shape, 77, device="cuda")
        made = nms_rounds.bind(problem, {}, **config)(*(t.cuda() for t in tensors), out=out)
        assert torch.equal(made.cpu(), right), config


def boxes_and_scores(
    images: int, classes: int, boxes: int, most: int, kind: str
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    attrs = {"iou_threshold": 0.5, "score_threshold": None, "most": most}
    if kind == "whole":
        low = torch.randint(0, 6, (images, boxes, 2), generator=generator).float()
        size = torch.randint(0, 5, (images, boxes, 2), generator=generator).float()
        scores = torch.randint(0, 4, (images, classes, boxes), generator=generator).float() / 4
    else:
        low = torch.rand(images, boxes, 2, generator=generator) * 60
        size = torch.rand(images, boxes, 2, generator=generator) * 40
        scores = torch.rand(images, classes, boxes, generator=generator)
    made = [torch.cat([low, low + size], 2), scores]
    if kind == "nan":
        made[1][:, :, ::7] = torch.nan
        made[0][:, ::5] = torch.nan
    if kind == "threshold":
        attrs["score_threshold"] = 0.7
    if kind == "float16":
        made = [t.half() for t in made]
    if kind == "groups":
        made.append(torch.randint(0, 3, (images, boxes), generator=generator))
    return made, attrs


def test_the_kernel_of_suppression_beside_the_reference() -> None:
    """A figure to read (-s): a search is allowed to run it by its name."""
    tensors, attrs = boxes_and_scores(8, 1, 4096, 300, "threshold")
    metas = tuple(TensorMeta(shape=tuple(t.shape), dtype="float32") for t in tensors)
    outputs = (TensorMeta(shape=(8, 1, 300), dtype="int64"),)
    problem = Problem(op="nms", inputs=metas, outputs=outputs, attrs=attrs)
    named = SearchOptions(algorithms=("rounds", "reference"))
    for trial in find(problem, {}, target=TARGET, options=named):
        print(trial.kernel, trial.config, trial.time_us, trial.refused)
        assert trial.refused is None or trial.kernel == "reference"
