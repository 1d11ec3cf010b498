"""``rearrange``: torch's own views and rolls say what it means, and every kernel moves the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.transform import rearrange_device, rearrange_rows, rearrange_tiles
from tessella.operations import rearrangement as parts
from tessella.operations import shapes
from tessella.operations.tensor_meta import Format
from tessella.search.find import find
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.rearrangements import (
    CASES,
    agrees,
    eager,
    image,
    problem,
    random_parts,
    shuffle,
    turned,
    windows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_moves_the_same(name: str) -> None:
    ran = agrees(CASES[name])
    tiles = name.startswith(("planes to pixels", "pixels to planes", "tiles"))
    assert {"aten", "tiles" if tiles else "rows"} <= set(ran)


@pytest.mark.parametrize("seed", range(40))
def test_random_parts(seed: int) -> None:
    agrees(random_parts(seed))


IN_MACHINE_CODE = {
    "windows": windows(2, 14, 7, 96),
    "windows of a rolled image": windows(2, 14, 7, 37, 3),
    "rows of bytes": image(2, 14, 7, 101, 3, dtype="int8"),
    "one row": problem((1, 40), (1, 40), [], (0, 1), (40, 1)),
    **{
        f"channels that are shuffled, {dtype}, {channels}": shuffle(
            2, channels, 5, "channels_last", dtype=dtype
        )
        for dtype, counts in {
            "float32": (32, 116, 128), "bfloat16": (64, 116), "int8": (128, 232)
        }.items()
        for channels in counts
    },
    "planes that are shuffled": shuffle(2, 10, 9, "contiguous"),
    "many": shuffle(3, 116, 29, "channels_last"),
    "columns in turn": problem((3, 4, 50), (3, 2, 2, 50), [((1,), 1)], (0, 1, 3, 2), (3, 2, 100)),
}  # fmt: skip


@pytest.mark.instructions
@pytest.mark.parametrize("name", IN_MACHINE_CODE)
def test_machine_code_moves_the_same(name: str) -> None:
    here = code.instructions()
    if here is None or (why := code.refusal(here.name)):
        pytest.skip(f"no machine code of ours runs here: {why if here else ''}")
    assert here.name in agrees(IN_MACHINE_CODE[name])


def test_meta_knows_the_shape() -> None:
    for asked in CASES.values():
        made = shapes.made("rearrange", asked.inputs, asked.attrs)
        assert made == [(asked.output.dtype, asked.output.shape)]


WRONG: dict[str, dict[str, Any]] = {
    "sizes in words": {"sizes": "2"},
    "no sizes": {"sizes": None},
    "sizes of numbers": {"sizes": [2.0, 2, 7, 2, 7, 4]},
    "too many": {"sizes": [2, 2, 7, 2, 7, 4, *[1] * 20], "dims": list(range(26))},
    "one left to tell": {"sizes": [-1, 2, 7, 2, 7, 4]},
    "parts across axes": {"sizes": [2, 2, 14, 7, 1, 4]},
    "other axes": {"sizes": [2, 7, 2, 2, 7, 5]},
    "nothing": {"sizes": [2, 0, 7, 2, 7, 4]},
    "beyond all memory": {"shape": [2**62, 2**62]},
    "a shape to tell": {"shape": [-1, 49, 4]},
    "another shape": {"shape": [7, 56, 4]},
    "an order twice": {"dims": [0, 1, 3, 2, 4, 4]},
    "an order of less": {"dims": [0, 1, 3, 2, 4]},
    "from behind": {"dims": [0, 1, 3, 2, 4, -1]},
    "true": {"dims": [0, True, 3, 2, 4, 5]},
    "rolls in words": {"rolls": "01"},
    "rolls that are none": {"rolls": [1, 2]},
    "a roll of nothing": {"rolls": [[[], 0]]},
    "a roll of what is not there": {"rolls": [[[6], 0]]},
    "a roll of what turns": {"rolls": [[[1, 2], 3], [[2], 1]]},
    "a roll back": {"rolls": [[[1, 2], -3]]},
    "a roll around": {"rolls": [[[1, 2], 14]]},
    "a roll by half": {"rolls": [[[1, 2], 0.5]]},
    "a roll by 10⁴⁰": {"rolls": [[[1, 2], 10**40]]},
    "a roll more": {"rolls": [[[1, 2], 3, 4]]},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_it_cannot_mean_is_refused(name: str) -> None:
    asked = windows(2, 14, 7, 4, 3)
    reasons = r"integers|sizes are|no parts|no order|roll|turn twice|no shift"
    with pytest.raises(ValueError, match=reasons):
        shapes.made("rearrange", asked.inputs, {**asked.attrs, **WRONG[name]})


@pytest.mark.parametrize("module", [rearrange_rows, rearrange_tiles])
def test_what_kernels_do_not_take(module: Any) -> None:
    views: tuple[Format, Format] = ("strided", "contiguous")
    assert "dense" in module.fits(windows(2, 14, 7, 32, formats=views))
    assert "elements of" in module.fits(windows(2, 14, 7, 32, dtype="float64"))
    assert "are near" in rearrange_rows.fits(turned(2, 64, 56))
    assert "innermost on both" in rearrange_tiles.fits(windows(2, 14, 7, 32))
    assert "fewer than 16" in rearrange_tiles.fits(turned(2, 8, 56))
    assert "turns" in rearrange_tiles.fits(
        problem((2, 20, 24), (2, 20, 24), [((1,), 1)], (0, 2, 1), (2, 24, 20))
    )


def test_a_view_of_any_strides_is_left_to_torch() -> None:
    asked = windows(2, 14, 7, 4, 3, formats=("strided", "contiguous"))
    x = torch.randn(2, 14, 4, 14).permute(0, 1, 3, 2)
    (best, *others) = find(asked, {}, target="cpu", inputs=[x])
    assert best.kernel == "rearrange.aten"
    assert all(other.refused for other in others)
    made = catalog.kernel(best.kernel).load().bind(asked, {})(x, out=asked.output.empty(CPU))
    assert torch.equal(made, eager(x, asked))


def test_what_lies_together_is_one_part() -> None:
    plain = parts.moves(windows(2, 56, 7, 96))
    assert [p.size for p in plain.parts] == [2 * 8, 8, 7, 7 * 96]
    rolled = parts.moves(windows(2, 56, 7, 96, 3))
    assert [p.size for p in rolled.parts] == [2, 8, 8, 7, 7, 96]
    assert [(t.parts, t.back) for t in rolled.turns] == [((1, 3), 3), ((2, 4), 3)]
    dense = parts.moves(problem((4, 6, 8), (4, 6, 8), [((0, 1), 5)], (0, 1, 2), (24, 8)))
    assert [p.size for p in dense.parts] == [24, 8]
    assert [(t.parts, t.back) for t in dense.turns] == [((0,), 19)]


@pytest.mark.parametrize("size", [2, 3, 5, 7, 12, 49, 56, 64, 96, 1000, 2**16 + 1, 2**30 - 35])
def test_a_product_and_a_shift_divide(size: int) -> None:
    _, factor, shift = rearrange_device.divisor(size)
    assert -(2**31) <= factor < 2**31  # as an argument of 32 bits
    rng = random.Random(size)
    near = {k * size + d for k in (0, 1, 2, 2**30 // size, (2**31 - 2) // size) for d in (-1, 0, 1)}
    for x in {*near, *(rng.randrange(2**31) for _ in range(1000)), 2**31 - 1}:
        if 0 <= x < 2**31:
            assert (x * (factor % 2**32) >> 32) >> shift == x // size


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    big = {
        "windows": windows(128, 56, 7, 96, dtype="float16"),
        "rolled": windows(128, 56, 7, 96, 3, dtype="float16"),
        "back": image(128, 56, 7, 96, 3, dtype="float16"),
        "of float32": windows(8, 56, 7, 96, 3),
        "of bytes": image(8, 56, 7, 96, dtype="int8"),
        "shuffled": shuffle(128, 116, 28, "channels_last", dtype="float16"),
        "planes": turned(8, 768, 14, dtype="float16"),
        "planes of float32": turned(8, 768, 14),
        "planes of bytes": turned(8, 768, 16, dtype="int8"),
    }
    for name, asked in big.items():
        small = torch.empty(16, dtype=getattr(torch, asked.output.dtype))
        (module,) = (m for m in (rearrange_rows, rearrange_tiles) if m.fits(asked) is None)
        call = module.bind(asked, {}, **module.configs(asked)[0])
        yield name, lambda c=call, t=small: c(t, out=t)


def test_compiled_for_hopper() -> None:
    found = compile_all("tests.kernels.transform.test_rearrange:on_hopper")
    assert len(found) == 9
    for name, launches in found.items():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0
        assert launch["registers"] <= 80  # six blocks, 48 KB on their way
        assert (launch["shared_bytes"] > 0) == name.startswith("planes")
