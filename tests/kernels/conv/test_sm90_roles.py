"""The Hopper convolution's roles, played on the CPU in any order: exact on small whole numbers."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.kernels import catalog
from tessella.kernels.conv.hopper import implicit_gemm as kernel
from tests.support.emulators import gluon_roles
from tests.support.problems import convolutions
from tests.support.problems.convolutions import Case

ROW = catalog.kernel("conv2d.implicit_gemm.sm90")

# 16 pixels × 32 channels, of 16 input channels a stage
CONFIG = {
    "tile_n": 1, "tile_h": 2, "tile_w": 8, "tile_k": 32, "tile_c": 16, "stages": 2, "slots": 1,
    "groups": 1, "residents": 1, "warps": 4, "swap": False, "splits": 1, "taps": 1,
}  # fmt: skip
PLAIN = Case(
    x=(2, 40, 7, 11), w=(40, 40, 3, 3), padding=1, dtype="float16", out="float32",
    x_format="channels_last", w_format="channels_last",
)  # fmt: skip
EIGHT_BITS = replace(
    PLAIN, x=(2, 48, 7, 11), w=(80, 48, 1, 3), padding=(0, 1), dtype="int8", out="int8"
)
VOLUME = replace(PLAIN, x=(2, 40, 3, 7, 11), w=(40, 40, 3, 3, 3))
EPILOGUE = {"bias": "float32", "scale": True, "residual": True, "activation": "relu"}
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "stride": (replace(PLAIN, stride=2, bias="float32"), {}),
    "dilation": (replace(PLAIN, dilation=(2, 1), padding=(2, 0)), {"tile_n": 2, "tile_h": 1}),
    "epilogue": (replace(PLAIN, alpha=0.5, beta=2.0, **EPILOGUE), {}),
    "factor": (replace(PLAIN, alpha=0.5, gamma=0.25, **EPILOGUE), {}),
    "factor alone": (replace(PLAIN, gamma=0.25, **EPILOGUE), {}),
    "int8, factor": (replace(EIGHT_BITS, gamma=0.25, **EPILOGUE), {"tile_k": 64}),
    "int8, factor, swapped": (
        replace(EIGHT_BITS, gamma=0.25, **EPILOGUE),
        {"tile_k": 64, "swap": True},
    ),
    "a column of taps": (replace(PLAIN, residual=True), {"taps": 3}),
    "int8": (replace(EIGHT_BITS, **EPILOGUE), {"tile_k": 64}),
    "int8, swapped": (replace(EIGHT_BITS, **EPILOGUE), {"tile_k": 64, "swap": True}),
    "int8 to int32": (replace(EIGHT_BITS, out="int32"), {}),
    "volumes": (replace(VOLUME, w=(40, 40, 3, 1, 3), padding=(1, 0, 1), **EPILOGUE), {}),
    "volumes, each slice by itself": (replace(VOLUME, w=(40, 40, 1, 3, 3), padding=(0, 1, 1)), {}),
    "volumes, a column of held taps": (
        replace(VOLUME, residual=True, w_format="contiguous"),
        {"taps": 3, "held": True, "tile_n": 2},
    ),
}


STRUCTURES = [{"groups": 1, "slots": 2}, {"groups": 2, "stages": 3}, {"residents": 2}]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_roles_in_any_order_make_the_convolution(
    name: str, structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles a block, on two multiprocessors; tiles and chunks that end outside.

    One order of two for each: every case and every structure meets both.
    """
    case, changes = CASES[name]
    seed = (list(CASES).index(name) + STRUCTURES.index(structure)) % 2
    monkeypatch.setattr(kernel, "multiprocessors", lambda: 2)
    monkeypatch.setattr(kernel, "launch", functools.partial(gluon_roles.run, seed=seed))
    config = {**CONFIG, **structure, **changes}
    convolutions.check(ROW, case, config, integers=True, seed=seed)


def test_a_residual_times_zero_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(PLAIN, residual=True, beta=0.0)
    monkeypatch.setattr(kernel, "multiprocessors", lambda: 2)
    monkeypatch.setattr(kernel, "launch", functools.partial(gluon_roles.run, seed=0))
    operands = convolutions.draw(case, integers=True)
    right = convolutions.right(case, operands)
    operands[3].fill_(torch.inf)  # times zero it is not a number
    made = convolutions.run(ROW, case, operands, {**CONFIG, "slots": 2})
    assert torch.equal(made.double(), right)
