"""TensorSpec says what fits; the fingerprint says where a plan may run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessella.core.device import fingerprint, torch_device
from tessella.core.dtype import BY_WIRE, DTYPES, dtype
from tessella.core.errors import InputError, UsageError, WrongDevice
from tessella.core.record import from_plain, to_plain
from tessella.core.spec import DimRange, TensorSpec

SPEC = TensorSpec(
    name="image",
    dtype="float32",
    shape=(DimRange(min=1, opt=8, max=32), 3, DimRange(min=16, opt=32, max=64)),
)


def test_shapes_that_fit() -> None:
    SPEC.check(shape=(1, 3, 16), dtype="float32")
    SPEC.check(shape=(1000, 3, 64), dtype="float32")  # engines split a large batch
    assert SPEC.at(5) == (5, 3, 32)
    assert SPEC.nbytes(5) == 5 * 3 * 32 * 4
    assert str(SPEC) == "image: float32[1..8..32, 3, 16..32..64]"


@pytest.mark.parametrize(
    "shape", [(), (1, 3), (1, 3, 15), (1, 3, 65), (1, 4, 32), (0, 3, 32), (1, 3, 32, 1)]
)
def test_shapes_that_do_not(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        SPEC.check(shape=shape, dtype="float32")
    assert "image" in str(caught.value)
    assert str(list(shape)) in str(caught.value)


def test_a_wrong_element_type_is_named() -> None:
    with pytest.raises(InputError, match="send float32"):
        SPEC.check(shape=(1, 3, 32), dtype="float64")


@pytest.mark.parametrize(("low", "usual", "high"), [(0, 1, 2), (2, 1, 3), (1, 3, 2)])
def test_a_range_must_rise(low: int, usual: int, high: int) -> None:
    with pytest.raises(UsageError):
        DimRange(min=low, opt=usual, max=high)


def test_spec_survives_json() -> None:
    assert from_plain(TensorSpec, to_plain(SPEC), where="s") == SPEC


def test_element_types_agree_with_torch() -> None:
    for name, known in DTYPES.items():
        assert getattr(torch, name).itemsize == known.itemsize
        assert BY_WIRE[known.wire] is known
    with pytest.raises(UsageError, match="float32"):
        dtype("float31")


def test_fingerprint_is_stable_and_survives_json() -> None:
    here = fingerprint("cpu")
    assert here == fingerprint("cpu")
    back = from_plain(type(here), to_plain(here), where="f")
    assert back == here
    assert back.hash == here.hash
    assert torch_device("cpu") == torch.device("cpu")


def test_a_plan_for_another_device_is_refused_with_the_command() -> None:
    here = fingerprint("cpu")
    here.require_same(replace(here, name="another CPU of the same kind"), rebuild="x")
    with pytest.raises(WrongDevice, match="tessella compile x"):
        replace(here, arch="armv9").require_same(here, rebuild="tessella compile x")
    with pytest.raises(UsageError):
        torch_device("tpu")
