"""What volumes and group norms take on a GPU: statistics, transposed and 3-D convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.kernels import catalog
from tessella.kernels.conv import transposed, volumes
from tessella.kernels.norm import group
from tessella.nn.fused_calls import volumes_convolved
from tests.support.gpu_target import TARGET
from tests.support.problems import convolutions, groups, grown
from tests.support.problems.convolutions import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGE = {
    "volume": groups.problem((1, 32, 48, 48, 48), 32),
    "boxes": groups.problem((2, 256, 50, 68), 32),
    "deep": groups.problem((1, 320, 8, 8, 8), 320),
    "float32": groups.problem((4, 64, 40, 40), 16, dtype="float32"),
}


@pytest.mark.parametrize("name", [*groups.PROBLEMS, *LARGE])
def test_statistics_of_every_configuration(name: str) -> None:
    asked = {**groups.PROBLEMS, **LARGE}[name]
    for config in group.configs(asked):
        groups.check(asked, dict(config), "cuda")


def test_statistics_far_from_zero() -> None:
    asked = groups.problem((1, 32, 64, 64), 4, dtype="float32")
    for config in group.configs(asked):
        groups.check(asked, dict(config), "cuda", far=1000.0)


@pytest.mark.parametrize("name", [*grown.PROBLEMS, "large", "bfloat16"])
def test_pixels_become_blocks(name: str) -> None:
    more = {
        "large": grown.problem((1, 64, 24, 24, 24), 32, (2, 2, 2), part_of=64),
        "bfloat16": grown.problem((2, 128, 20, 20), 64, (2, 2), dtype="bfloat16"),
    }
    asked = {**grown.PROBLEMS, **more}[name]
    for config in transposed.configs(asked):
        grown.check(asked, dict(config), "cuda")


VOLUME = Case(
    x=(1, 32, 9, 20, 24), w=(32, 32, 3, 3, 3), padding=1, dtype="float16",
    x_format="channels_last",
)  # fmt: skip
EPILOGUE: dict[str, Any] = {"bias": "float16", "residual": True, "activation": "relu"}
CASES = {
    "plain": VOLUME,
    "two": replace(VOLUME, x=(2, 64, 6, 12, 10), w=(48, 64, 3, 3, 3), **EPILOGUE),
    "deep": replace(VOLUME, x=(1, 256, 8, 8, 8), w=(256, 256, 3, 3, 3)),
    "flat": replace(VOLUME, w=(64, 32, 3, 1, 1), padding=(1, 0, 0)),
    "slices": replace(
        VOLUME, x=(2, 32, 9, 20, 24), w=(48, 32, 1, 3, 3), padding=(0, 1, 1), **EPILOGUE
    ),
    "a pixel": replace(VOLUME, w=(16, 32, 1, 1, 1), padding=0, bias="float16"),
    "bfloat16": replace(VOLUME, dtype="bfloat16", w=(64, 32, 5, 3, 3), padding=(2, 1, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_convolutions_of_volumes(name: str) -> None:
    row = catalog.kernel("conv3d.implicit_gemm.sm90")
    is_here = row.runs_on(TARGET) and torch.cuda.get_device_capability()[0] == 9
    if why := row.refusal(CASES[name].problem) if is_here else "needs a Hopper GPU":
        pytest.skip(why)
    for config in row.configs(CASES[name].problem)[:12]:
        convolutions.check(row, CASES[name], config, device="cuda")


@pytest.mark.parametrize("taps", [(3, 3, 3), (1, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_convolutions_of_volumes(
    dtype: torch.dtype, taps: tuple[int, int, int]
) -> None:
    """No further from float64 than torch's own, with a margin."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 32, 40, 33, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last_3d).requires_grad_()
    weight = torch.randn(48, 32, *taps, device="cuda", requires_grad=True)
    padding = tuple(t // 2 for t in taps)
    if not volumes.runs(x, weight, ((1,) * 3, padding, (1,) * 3), 1):
        pytest.skip("needs a Hopper GPU")
    cotangent = torch.randn(2, 48, 32, 40, 33, device="cuda")

    def step(call: Any, given: torch.Tensor, by: torch.Tensor, low: bool) -> list[torch.Tensor]:
        with torch.autocast("cuda", dtype=dtype, enabled=low):
            made = call(given, by, None, 1, padding)
        return [made, *torch.autograd.grad(made, (given, by), cotangent.to(made.dtype))]

    right = step(torch.conv3d, x.double(), weight.double(), False)
    ours, theirs = (step(call, x, weight, True) for call in (volumes_convolved, torch.conv3d))
    for expected, made, other in zip(right, ours, theirs, strict=True):
        error, bound = ((t.double() - expected).norm() for t in (made, other))
        assert error < 1.2 * bound + 1e-6
