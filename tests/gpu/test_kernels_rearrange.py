"""``rearrange`` on a Hopper GPU: what torch moves, by every kernel, and how fast."""

from __future__ import annotations

import pytest
import torch

from tessella.kernels.transform import rearrange_rows
from tessella.operations.problem import Problem
from tessella.search.find import find
from tests.support.gpu_target import TARGET
from tests.support.problems import rearrangements as moves

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)

GPU = torch.device("cuda")
TYPES = ("float32", "bfloat16", "int8", "uint8", "float8_e4m3fn")
HALF = {"dtype": "float16"}
LARGE = {
    "windows": moves.windows(128, 56, 7, 96, **HALF),
    "windows of a rolled image": moves.windows(128, 56, 7, 96, 3, **HALF),
    "an image of windows, rolled back": moves.image(128, 56, 7, 96, 3, **HALF),
    "stage 3": moves.windows(128, 14, 7, 384, 3, **HALF),
    "shuffled channels": moves.shuffle(128, 116, 28, "channels_last", **HALF),
    "planes to pixels": moves.turned(128, 768, 14, **HALF),
}


@pytest.mark.parametrize("name", moves.CASES)
def test_every_kernel_moves_the_same(name: str) -> None:
    ran = moves.agrees(moves.CASES[name], GPU)
    assert len(ran) > 1


@pytest.mark.parametrize("seed", range(100))
def test_random_parts(seed: int) -> None:
    moves.agrees(moves.random_parts(seed), GPU)


@pytest.mark.parametrize("dtype", TYPES)
def test_element_types(dtype: str) -> None:
    for asked in (moves.windows(3, 28, 7, 48, 3, dtype=dtype), moves.turned(3, 80, 14, dtype=dtype),
                  moves.shuffle(3, 58, 14, "channels_last", dtype=dtype)):  # fmt: skip
        assert len(moves.agrees(asked, GPU)) > 1


def test_where_offsets_in_bytes_have_more_than_32_bits() -> None:
    moves.agrees(moves.windows(1900, 56, 7, 384, 3, **HALF), GPU)


@pytest.mark.parametrize("name", LARGE)
def test_ours_is_the_fastest(name: str) -> None:
    asked: Problem = LARGE[name]
    best, *others = find(asked, {}, target=TARGET)
    moved = 2 * asked.output.nbytes / (best.time_us or 1e9) / 1e6
    rest = ", ".join(f"{t.kernel} {t.time_us:.0f}" for t in others if t.time_us)
    print(f"{name}: {best.kernel} {best.config} {best.time_us:.1f} µs, {moved:.2f} TB/s; {rest}")
    assert best.kernel != "rearrange.aten"


def test_a_tensor_at_any_address() -> None:
    """Compiled again for one that does not begin at 16 bytes."""
    asked = moves.windows(2, 14, 7, 32, 3, **HALF)
    x = moves.numbers(asked.inputs[0], GPU)
    call = rearrange_rows.bind(asked, {})
    for start in (0, 1, 4, 8):
        flat = torch.empty(x.numel() + 8, dtype=x.dtype, device=GPU)
        moved = flat[start : start + x.numel()].view(x.shape).copy_(x)
        made = call(moved, out=asked.output.empty(GPU))
        assert torch.equal(made, moves.eager(x, asked)), start
