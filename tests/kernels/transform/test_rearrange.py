"""``rearrange``: torch's own views and rolls say what it means, and every kernel moves the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from tessella.kernels import catalog
from tessella.kernels.transform import rearrange_device, rearrange_rows, rearrange_tiles
from tessella.operations import rearrangement as parts
from tessella.operations import shapes
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta, memory_format
from tessella.search.find import find
from tests.kernels.compile_only import compile_all

CPU = torch.device("cpu")
Rolls = Sequence[tuple[Sequence[int], int]]


def problem(
    shape: Sequence[int],
    sizes: Sequence[int],
    rolls: Rolls,
    dims: Sequence[int],
    made: Sequence[int],
    dtype: str = "float32",
    formats: tuple[Format, Format] = ("contiguous", "contiguous"),
) -> Problem:
    attrs = {"sizes": list(sizes), "rolls": [[list(a), n] for a, n in rolls]}
    return Problem(
        op="rearrange",
        inputs=(TensorMeta(shape=tuple(shape), dtype=dtype, format=formats[0]),),
        outputs=(TensorMeta(shape=tuple(made), dtype=dtype, format=formats[1]),),
        attrs={**attrs, "dims": list(dims), "shape": list(made)},
    )


def windows(n: int, size: int, window: int, channels: int, shift: int = 0, **more: Any) -> Problem:
    """Windows of an image; of a rolled one."""
    w, rolls = size // window, [((1, 2), size - shift), ((3, 4), size - shift)] if shift else []
    sizes, made = (n, w, window, w, window, channels), (n * w * w, window**2, channels)
    image = (n, size, size, channels)
    return problem(image, sizes, rolls, (0, 1, 3, 2, 4, 5), made, **more)


def image(n: int, size: int, window: int, channels: int, shift: int = 0, **more: Any) -> Problem:
    """Windows put back to an image, and rolled back."""
    w, rolls = size // window, [((1, 3), shift), ((2, 4), shift)] if shift else []
    sizes, made = (n, w, w, window, window, channels), (n, size, size, channels)
    rows = (n * w * w, window**2, channels)
    return problem(rows, sizes, rolls, (0, 1, 3, 2, 4, 5), made, **more)


def shuffle(n: int, channels: int, size: int, format: Format, **more: Any) -> Problem:
    """Channels in two groups, shuffled."""
    shape, sizes = (n, channels, size, size), (n, 2, channels // 2, size, size)
    return problem(shape, sizes, [], (0, 2, 1, 3, 4), shape, formats=(format, format), **more)


def turned(n: int, channels: int, size: int, **more: Any) -> Problem:
    """Pixels of an image in planes."""
    shape = (n, channels, size, size)
    return problem(shape, shape, [], (0, 2, 3, 1), (n, size * size, channels), **more)


LAST = ("channels_last", "contiguous")
CASES = {
    "windows": windows(2, 14, 7, 96),
    "windows of a rolled image": windows(2, 14, 7, 32, 3),
    "an image of windows": image(2, 14, 7, 32),
    "an image of windows, rolled back": image(2, 14, 7, 32, 3),
    "one sample": windows(1, 14, 7, 16, 3),
    "rows of 12 bytes": windows(2, 14, 7, 6, 3, dtype="float16"),
    "rows of 7 bytes": windows(2, 14, 7, 7, 3, dtype="int8"),
    "rows of one piece": windows(2, 14, 7, 8, 3, dtype="float16"),
    "windows of planes": problem(
        (2, 16, 8, 8), (2, 16, 2, 4, 2, 4), [], (0, 2, 4, 3, 5, 1), (2, 4, 16, 16), formats=LAST
    ),
    "2 × 2 pixels to channels": problem(
        (2, 8, 8, 12), (2, 4, 2, 4, 2, 12), [], (0, 1, 3, 4, 2, 5), (2, 4, 4, 48)
    ),
    "a roll": problem((2, 9, 6), (2, 9, 6), [((1,), 2)], (0, 1, 2), (2, 9, 6)),
    "a roll of what lies together": problem(
        (2, 9, 6), (2, 9, 6), [((2,), 5)], (0, 1, 2), (2, 9, 6)
    ),
    "shuffled channels": shuffle(2, 58, 5, "channels_last", dtype="float16"),
    "shuffled planes": shuffle(2, 58, 4, "contiguous"),
    "planes to pixels": turned(2, 40, 5),
    "planes to pixels, small": turned(3, 33, 7, dtype="int8"),
    "pixels to planes": problem(
        (2, 36, 40), (2, 6, 6, 40), [], (0, 3, 1, 2), (2, 40, 6, 6), dtype="float16"
    ),
    "tiles of rolled samples": problem(
        (6, 20, 24), (6, 20, 24), [((0,), 2)], (0, 2, 1), (6, 24, 20), dtype="float16"
    ),
    "of video, rolled": problem(
        (1, 4, 6, 6, 8), (1, 2, 2, 2, 3, 2, 3, 8), [((1, 2), 3), ((3, 4), 5), ((5, 6), 1)],
        (0, 1, 3, 5, 2, 4, 6, 7), (8, 18, 8),
    ),
    "one element": problem((1, 1), (1, 1), [], (1, 0), (1,)),
}  # fmt: skip


def eager(x: torch.Tensor, asked: Problem) -> torch.Tensor:
    """The same by ``torch.roll``, with the parts of each roll in front and as one axis."""
    a = asked.attrs
    made = x.reshape(a["sizes"])
    for axes, shift in a["rolls"]:
        front = made.movedim(list(axes), list(range(len(axes))))
        whole = front.reshape(-1, *front.shape[len(axes) :]).roll(shift, 0).reshape(front.shape)
        made = whole.movedim(list(range(len(axes))), list(axes))
    return made.permute(a["dims"]).reshape(a["shape"])


def numbers(meta: TensorMeta, device: torch.device = CPU) -> torch.Tensor:
    """Integers that no two neighbours along any axis share."""
    count = torch.arange(math.prod(meta.shape), device=device) % 251 - 125
    made = count.reshape(meta.shape).to(getattr(torch, meta.dtype))
    return made.contiguous(memory_format=memory_format(meta.format, len(meta.shape)))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Numbers of 8 bits as torch compares them."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def agrees(asked: Problem, device: torch.device = CPU) -> list[str]:
    """The kernels that take the problem: each moves what torch moves, in every configuration."""
    x, ran = numbers(asked.inputs[0], device), []
    right = eager(bits(x), asked)
    assert torch.equal(bits(operation("rearrange").call([x], asked.attrs)[0]), right)
    for row in catalog.candidates("rearrange", "sm_90"):
        if row.last_resort or row.refusal(asked):
            continue
        for config in row.configs(asked):
            out = asked.output.empty(device).fill_(77)
            assert row.load().bind(asked, {}, **config)(x, out=out) is out
            assert torch.equal(bits(out), right), (row.id, config)
        ran.append(row.id.partition(".")[2])
    return ran


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_moves_the_same(name: str) -> None:
    ran = agrees(CASES[name])
    tiles = name.startswith(("planes to pixels", "pixels to planes", "tiles"))
    assert {"aten", "tiles" if tiles else "rows"} <= set(ran)


def random_parts(seed: int) -> Problem:
    """Any parts in any order, rolled alone and together, in both formats."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3, 4, 5, 7, 8)) for _ in range(rng.randint(1, 6))]
    sizes[-1] = rng.choice((*sizes[-1:], 16, 24, 33))
    while math.prod(sizes) > 20_000:
        sizes[rng.randrange(len(sizes))] = 1
    dims, rolls = list(range(len(sizes))), []
    rng.shuffle(dims)
    free = rng.sample(dims, len(dims))
    while free and rng.random() < 0.6:
        axes = [free.pop() for _ in range(rng.randint(1, min(3, len(free))))]
        rolls.append((axes, rng.randrange(math.prod(sizes[a] for a in axes))))

    def joined(sizes: list[int]) -> list[int]:
        cuts = sorted(rng.sample(range(1, len(sizes)), rng.randint(0, len(sizes) - 1)))
        ends = zip([0, *cuts], [*cuts, len(sizes)], strict=True)
        return [math.prod(sizes[a:b]) for a, b in ends]

    shape, made = joined(sizes), joined([sizes[d] for d in dims])
    formats = [rng.choice(("contiguous", "channels_last")) if len(s) == 4 else "contiguous"
               for s in (shape, made)]  # fmt: skip
    dtype = rng.choice(("float32", "float16", "int8"))
    return problem(shape, sizes, rolls, dims, made, dtype, (formats[0], formats[1]))


@pytest.mark.parametrize("seed", range(40))
def test_random_parts(seed: int) -> None:
    agrees(random_parts(seed))


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
    assert (best.kernel, others) == ("rearrange.aten", [])
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
    found = compile_all("tests.kernels.test_rearrange:on_hopper")
    assert len(found) == 9
    for name, launches in found.items():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0
        assert launch["registers"] <= 80  # six blocks, 48 KB on their way
        assert (launch["shared_bytes"] > 0) == name.startswith("planes")
