"""What detectors do last: from a map of places to boxes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.operations.operation import Attributes, Shape, Shapes, row

CENTRE, SIDES, KINDS = 0, 1, 5  # first channels of what a place tells
MOST_LOG = 6.0  # e^6 · 2 places are more than any picture has


def boxes_of(sides_NP4: Tensor, places_NP4: Tensor, *, down: float, along: float) -> Tensor:
    """Boxes x0 y0 x1 y1 [N, P, 4] in fractions of the picture.

    Args:
        sides_NP4: logarithms of their distances from the middle of their places, in two steps.
        places_NP4: these middles, as x y x y.
        down, along: fractions of the picture from one place to the next.
    """
    far = torch.tensor([-along, -down, along, down], device=sides_NP4.device) * 2
    return places_NP4 + sides_NP4.float().clamp(max=MOST_LOG).exp() * far


def places(rows: int, columns: int, device: torch.device, *, down: float, along: float) -> Tensor:
    """The middle of each place as x y x y in fractions of the picture, row by row, [P, 4]."""
    y = (torch.arange(rows, device=device) + 0.5) * down
    x = (torch.arange(columns, device=device) + 0.5) * along
    pairs = torch.meshgrid(y, x, indexing="ij")[::-1]
    return torch.stack([*pairs, *pairs], 2).flatten(0, 1)


def peak_boxes(input: Tensor, *, down: float, along: float, most: int) -> Tensor:
    """A box for each peak of a map of centres, [N, most, 4 + classes]; zeros where there is none.

    A peak's score is as high as any of the 8 around it. A class's score is that of the centre,
    times the class's share. The surest peaks are taken, the surest first.

    Args:
        input: [N, 5 + classes, H, W]: logit of the centre, four sides (``boxes_of``), classes.
        down, along: fractions of the picture from one place to the next.

    Source: Zhou et al., Objects as points, arXiv:1904.07850.
    """
    rows, columns = input.shape[2:]
    centres = input[:, :1]
    lower = centres < F.max_pool2d(centres, 3, 1, 1)  # of a number that is none: not lower
    best = centres.masked_fill(lower, -torch.inf).flatten(1).topk(min(most, rows * columns))
    index = best.indices[:, :, None].expand(-1, -1, input.shape[1])
    told = input.flatten(2).transpose(1, 2).gather(1, index)
    at = F.embedding(best.indices, places(rows, columns, input.device, down=down, along=along))
    boxes = boxes_of(told[..., SIDES:KINDS], at, down=down, along=along).clamp(0, 1)
    scores = best.values.sigmoid()[:, :, None]
    boxes = boxes.to(input.dtype) * (scores > 0)
    found = torch.cat([boxes, scores * told[..., KINDS:].softmax(2)], 2)
    return F.pad(found, (0, 0, 0, most - found.shape[1]))


def _map(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    given = shapes["input"]
    if len(given) != 4 or given[1] <= KINDS:
        return f"a map has a centre, four sides and a class at least, not {given}"
    return None


ROWS = (row(peak_boxes, "input", "down along most", aten="peak_boxes.default", rule=_map),)

_LIBRARY = torch.library.Library("tessella", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "peak_boxes(Tensor input, *, float down, float along, int most) -> Tensor"
)
_LIBRARY.impl("peak_boxes", peak_boxes, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shape(input: Tensor, *, down: float, along: float, most: int) -> Tensor:
    return input.new_empty(input.shape[0], most, input.shape[1] - 1)


torch.library.register_fake("tessella::peak_boxes", _shape, lib=_LIBRARY)
