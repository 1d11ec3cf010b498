"""Suppression of boxes: the reference and every kernel beside torchvision's and beside loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torchvision.ops import batched_nms
from torchvision.ops import nms as theirs

from tessella.kernels.detect import nms_rounds, numpy_nms
from tessella.operations.problem import Problem
from tessella.operations.reference.detect import nms
from tessella.operations.tensor_meta import TensorMeta
from tests.support.kernels.compile_only import compile_all

Tensors = tuple[torch.Tensor, ...]
MODULES = [None, numpy_nms, nms_rounds]
# a box of no area divides 0 by 0: NumPy, by which the kernel is interpreted here, tells of it
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


def asked(tensors: Tensors, most: int, **attrs: Any) -> Problem:
    metas = [
        TensorMeta(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for t in tensors
    ]
    shape = (*tensors[1].shape[:2], most)
    given = {"iou_threshold": 0.5, "score_threshold": None, "most": most, **attrs}
    outputs = (TensorMeta(shape=shape, dtype="int64"),)
    return Problem(op="nms", inputs=tuple(metas), outputs=outputs, attrs=given)


def answered(module: ModuleType | None, tensors: Tensors, most: int, **attrs: Any) -> torch.Tensor:
    problem = asked(tensors, most, **attrs)
    assert problem.misfit is None
    if module is None:
        return nms(*tensors, **problem.attrs)
    assert module.fits(problem) is None
    out = torch.full(problem.output.shape, 77)
    assert module.bind(problem, {})(*tensors, out=out) is out
    return out


def drawn(n: int, k: int, p: int, *, whole: bool = False, seed: int = 0) -> Tensors:
    """Boxes and scores; ``whole``: of few integers, with ties, doubles and boxes of no area."""
    generator = torch.Generator().manual_seed(seed)
    if whole:
        low = torch.randint(0, 6, (n, p, 2), generator=generator).float()
        size = torch.randint(0, 5, (n, p, 2), generator=generator).float()
        scores = torch.randint(0, 4, (n, k, p), generator=generator).float() / 4
    else:
        low, size = (torch.rand(n, p, 2, generator=generator) * s for s in (60, 40))
        scores = torch.rand(n, k, p, generator=generator)
    return torch.cat([low, low + size], 2), scores


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("module", MODULES)
def test_each_image_and_class_is_as_torchvision_has_it(
    module: ModuleType | None, whole: bool
) -> None:
    """Of whole numbers many overlaps are exactly one half, and many scores the same."""
    boxes, scores = drawn(2, 3, 60, whole=whole)
    made = answered(module, (boxes, scores), 60)
    for image in range(2):
        for kind in range(3):
            right = theirs(boxes[image], scores[image, kind], 0.5)
            told = made[image, kind]
            assert told[: len(right)].tolist() == right.tolist()
            assert (told[len(right) :] == -1).all()
    fewer = answered(module, (boxes, scores), 7)
    assert torch.equal(fewer, made[:, :, :7])


@pytest.mark.parametrize("module", MODULES)
def test_groups_are_apart_as_in_batched_nms(module: ModuleType | None) -> None:
    boxes, scores = drawn(2, 1, 90, seed=1)
    groups = torch.randint(0, 4, (2, 90), generator=torch.Generator().manual_seed(2))
    made = answered(module, (boxes, scores, groups), 90)
    for image in range(2):
        right = batched_nms(boxes[image], scores[image, 0], groups[image], 0.5)
        told = made[image, 0]
        assert told[told >= 0].tolist() == right.tolist()


def test_more_boxes_than_a_block_holds() -> None:
    boxes, scores = drawn(1, 1, 1000, seed=3)
    assert numpy_nms.BLOCK < 200
    made = answered(numpy_nms, (boxes, scores), 1000)[0, 0]
    assert made[made >= 0].tolist() == theirs(boxes[0], scores[0, 0], 0.5).tolist()
    few = answered(numpy_nms, (boxes, scores), 200)[0, 0]
    assert torch.equal(few, made[:200])


@pytest.mark.parametrize("module", MODULES)
def test_scores_decide_who_takes_part(module: ModuleType | None) -> None:
    """A score of the threshold is none, as is −inf; one that is no number comes first."""
    boxes = torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7]]).float()[None]
    scores = torch.tensor([[[0.5, 0.25, torch.nan, -torch.inf]]])
    told = answered(module, (boxes, scores), 3, score_threshold=0.25)
    assert told.tolist() == [[[2, 0, -1]]]
    assert answered(module, (boxes, scores), 3).tolist() == [[[2, 0, 1]]]
    more = answered(module, (boxes, scores), 6)  # than there are
    assert more.tolist() == [[[2, 0, 1, -1, -1, -1]]]


@pytest.mark.parametrize("module", MODULES)
def test_a_box_that_is_none_suppresses_nobody(module: ModuleType | None) -> None:
    boxes, scores = drawn(1, 1, 40)
    odd = torch.tensor([[torch.nan] * 4, [5.0, 5.0, 5.0, 9.0], [-torch.inf, 0.0, torch.inf, 1.0]])
    others = answered(module, (boxes, scores), 40)[0, 0]
    spoiled = torch.cat([boxes, odd[None]], 1), torch.cat([scores, torch.full((1, 1, 3), 2.0)], 2)
    made = answered(module, spoiled, 43)[0, 0]
    assert made[:3].tolist() == [40, 41, 42]
    assert torch.equal(made[3:], others)


@pytest.mark.parametrize(
    ("shapes", "most", "what"),
    [
        (((2, 9, 5), (2, 3, 9)), 4, "boxes has the shape"),
        (((2, 9, 4), (2, 3, 8)), 4, "scores has the shape"),
        (((2, 9, 4), (1, 3, 9)), 4, "scores has the shape"),
        (((2, 9, 4), (2, 3, 9), (2, 8)), 4, "groups has the shape"),
        (((2, 9, 4), (2, 9)), 4, "takes boxes"),
        (((2, 9, 4), (2, 3, 9)), 0, "takes boxes"),
    ],
)
def test_operands_of_strangers_belong_together(
    shapes: tuple[tuple[int, ...], ...], most: int, what: str
) -> None:
    assert what in str(asked(tuple(torch.zeros(shape) for shape in shapes), most).misfit)


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    """RetinaNet's candidates, of which a hundred are told; YOLO's places, a class at a time."""
    cases: Mapping[str, tuple[int, int, int]] = {
        "mixed": (1, 1, 4507),
        "classes": (1, 8, 8400 // 2),
    }
    for name, (n, k, p) in cases.items():
        tensors = drawn(n, k, p)
        if name == "mixed":
            tensors = (*tensors, torch.zeros(n, p, dtype=torch.int64))
        problem = asked(tensors, 100)
        out = torch.zeros(problem.output.shape, dtype=torch.int64)
        for config in nms_rounds.configs(problem):
            call = nms_rounds.bind(problem, {}, **config)
            yield f"{name} {config}", functools.partial(call, *tensors, out=out)


def test_compiled_for_hopper_hardly_anything_spills() -> None:
    for launches in compile_all(f"{__name__}:on_hopper").values():
        (launch,) = launches
        assert launch["spilled_bytes"] < 64
