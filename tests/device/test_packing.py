"""Packed weights are shared while they are used, and a search leaves none behind."""

from __future__ import annotations

import weakref

import torch

from tessella.device import packing
from tessella.device.launch import preparing
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.find import find


def double(weight: torch.Tensor) -> torch.Tensor:
    return 2 * weight


def test_a_weight_is_packed_once_for_all_buckets() -> None:
    weight, packed = torch.ones(3), []

    def counting(weight: torch.Tensor) -> torch.Tensor:
        packed.append(weight)
        return 2 * weight

    for _ in range(3):
        packing.packed(weight, ("doubled",), counting)
    assert len(packed) == 1
    for _ in range(2):  # which of its layouts a library takes shows only then
        packing.packed(weight, ("blocked",), counting, layout=lambda made: made.stride())
    assert len(packed) == 3


def test_equal_forms_are_one_until_they_are_forgotten() -> None:
    weight = torch.ones(3)
    first = packing.packed(weight, ("doubled",), double)
    assert packing.packed(weight, ("doubled",), double) is first
    assert packing.packed(weight, ("otherwise",), double) is not first
    packing.forget([weight, torch.ones(2)])
    assert packing.packed(weight, ("doubled",), double) is not first


def test_what_is_packed_while_kernels_only_compile_is_not_kept() -> None:
    """A kernel that packs has not run there: the conv's first layer was bound to such memory."""
    weight = torch.ones(3)
    with preparing():
        unmade = packing.packed(weight, ("doubled",), torch.empty_like)
    made = packing.packed(weight, ("doubled",), double)
    assert made is not unmade
    assert torch.equal(made, torch.full((3,), 2.0))


def test_a_search_leaves_no_packed_weights() -> None:
    weight = torch.randn(32, 64)
    metas = [TensorMeta(shape=shape, dtype="float32") for shape in ((8, 64), (32, 64), (8, 32))]
    problem = Problem(op="linear", inputs=tuple(metas[:2]), outputs=(metas[2],), constant=(1,))
    trials = find(problem, {1: weight}, target="cpu")
    assert {"linear.onednn", "linear.mkl"} <= {t.kernel for t in trials if not t.refused}
    assert weight not in packing._packed


def test_side_by_side_they_share_large_memory_that_goes_with_them() -> None:
    weights = [torch.randn(33, 70), torch.randn(5, 2), torch.randn(1500, 1500)]
    with packing.side_by_side():
        made = [packing.packed(w, ("turned",), lambda w: w.t().contiguous()) for w in weights]
        view = packing.packed(weights[0], ("view",), lambda w: w.t())
    for weight, tensor in zip(weights, made, strict=True):
        assert torch.equal(tensor, weight.t())
        assert tensor.data_ptr() % packing.CACHE_LINE == 0
    assert view.data_ptr() == weights[0].data_ptr()  # it is no memory of its own
    first, second, _ = (t.untyped_storage() for t in made)
    assert first.data_ptr() == second.data_ptr()
    alone = packing.packed(weights[0], ("alone",), torch.clone)
    assert alone.untyped_storage().nbytes() == alone.nbytes
    held, owner = weakref.ref(made[2]), weakref.ref(weights[0])
    del weights, weight, made, tensor, view, alone
    assert held() is None
    assert owner() is None
