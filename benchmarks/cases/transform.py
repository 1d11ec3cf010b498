"""Rearrangements, alone and with a roll before or after, beside torch's copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.cases.case import Case, Peer, meta
from tessella.operations.problem import Problem

# by name: images, their size, channels, and by how much they are rolled
WINDOWS = {
    "Swin-T N128 stage 1": (128, 56, 96, 0),
    "Swin-T N128 stage 1 rolled": (128, 56, 96, 3),
    "Swin-T N128 stage 2 rolled": (128, 28, 192, 3),
    "Swin-T N128 stage 3 rolled": (128, 14, 384, 3),
    "Swin-T N1 stage 1 rolled": (1, 56, 96, 3),
}
WINDOW = 7
# images, channels, size: of two groups that are shuffled
SHUFFLES = {"ShuffleNet N128 stage 2": (128, 116, 28), "ShuffleNet N128 stage 3": (128, 232, 14)}


def forward() -> Iterator[Case]:
    for name, (n, size, channels, shift) in WINDOWS.items():
        count = size // WINDOW
        for back in (False, True):
            inner = (count, count, WINDOW, WINDOW) if back else (count, WINDOW, count, WINDOW)
            pairs = ((1, 3), (2, 4)) if back else ((1, 2), (3, 4))
            by = shift if back else size - shift
            image, rows = (n, size, size, channels), (n * count**2, WINDOW**2, channels)
            yield Case(
                family="rearrange fp16",
                name=f"{name}, back" if back else name,
                problem=_problem(
                    rows if back else image, image if back else rows, (n, *inner, channels),
                    [[list(pair), by] for pair in pairs] if shift else [], (0, 1, 3, 2, 4, 5),
                ),
                peers={"torch": _windows(shift, back=back)},
            )  # fmt: skip
    for name, (n, channels, size) in SHUFFLES.items():
        shape, half = (n, channels, size, size), channels // 2
        sizes, dims = (n, 2, half, size, size), (0, 2, 1, 3, 4)
        yield Case(
            family="rearrange fp16",
            name=name,
            problem=_problem(shape, shape, sizes, [], dims, last=True),
            peers={"torch": lambda x, c=half: _shuffled(x, c)},
        )


def _problem(
    shape: tuple[int, ...],
    made: tuple[int, ...],
    sizes: tuple[int, ...],
    rolls: list[Any],
    dims: tuple[int, ...],
    *,
    last: bool = False,
) -> Problem:
    return Problem(
        op="rearrange",
        inputs=(meta("float16", *shape, last=last),),
        outputs=(meta("float16", *made, last=last),),
        attrs={"sizes": list(sizes), "rolls": rolls, "dims": list(dims), "shape": list(made)},
    )


def _windows(shift: int, *, back: bool) -> Peer:
    def cut(x: torch.Tensor) -> torch.Tensor:
        n, size, _, channels = x.shape
        x = torch.roll(x, (-shift, -shift), (1, 2)) if shift else x
        parts = x.view(n, size // WINDOW, WINDOW, size // WINDOW, WINDOW, channels)
        return parts.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW**2, channels)

    def join(x: torch.Tensor, size: int) -> torch.Tensor:
        count = size // WINDOW
        parts = x.view(-1, count, count, WINDOW, WINDOW, x.shape[2]).permute(0, 1, 3, 2, 4, 5)
        made = parts.reshape(-1, size, size, x.shape[2])
        return torch.roll(made, (shift, shift), (1, 2)) if shift else made

    sizes = {channels: size for _, size, channels, _ in WINDOWS.values()}
    return (lambda x: join(x, sizes[x.shape[2]])) if back else cut


def _shuffled(x: torch.Tensor, half: int) -> torch.Tensor:
    n, _, height, width = x.shape
    made = x.view(n, 2, half, height, width).transpose(1, 2).reshape(x.shape)
    return made.contiguous(memory_format=torch.channels_last)
