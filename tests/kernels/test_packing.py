"""Packed weights are shared while they are used, and an auction leaves none behind."""

from __future__ import annotations

import torch

from tessella.kernels import packing
from tessella.kernels.auction import find
from tessella.kernels.problem import Problem, TensorMeta


def double(weight: torch.Tensor) -> torch.Tensor:
    return 2 * weight


def test_equal_forms_are_one_until_they_are_forgotten() -> None:
    weight = torch.ones(3)
    first = packing.packed(weight, ("doubled",), double)
    assert packing.packed(weight, ("doubled",), double) is first
    assert packing.packed(weight, ("otherwise",), double) is not first
    packing.forget([weight, torch.ones(2)])
    assert packing.packed(weight, ("doubled",), double) is not first


def test_an_auction_leaves_no_packed_weights() -> None:
    weight = torch.randn(32, 64)
    metas = [TensorMeta(shape=shape, dtype="float32") for shape in ((8, 64), (32, 64), (8, 32))]
    problem = Problem(op="linear", inputs=tuple(metas[:2]), outputs=(metas[2],), constant=(1,))
    trials = find(problem, {1: weight}, target="cpu")
    assert {"linear.onednn", "linear.mkl"} <= {t.kernel for t in trials if not t.refused}
    assert weight not in packing._packed
