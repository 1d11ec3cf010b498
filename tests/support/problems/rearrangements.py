"""Rearrangements that networks do, and random ones, beside torch's own views and rolls."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta, memory_format

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
    rows = [catalog.candidates("rearrange", target) for target in ("sm_90", "cpu")]
    for row in dict.fromkeys(itertools.chain(*rows[: 1 + (device == CPU)])):
        if row.last_resort or row.refusal(asked):
            continue
        for config in row.configs(asked):
            out = asked.output.empty(device).fill_(77)
            assert row.load().bind(asked, {}, **config)(x, out=out) is out
            assert torch.equal(bits(out), right), (row.id, config)
        ran.append(row.id.partition(".")[2])
    return ran


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
