"""What detectors do that no other network does: looking where a box lies, boxes of a map, and
leaving out boxes that say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.operations.operation import Attributes, Shape, Shapes, differs, first_of, row

CENTRE, SIDES, KINDS = 0, 1, 5  # first channels of what a place tells
MOST_LOG = 6.0  # e^6 · 2 places are more than any picture has


def boxes_of(sides_NP4: Tensor, places_NP4: Tensor, *, down: float, along: float) -> Tensor:
    """Boxes x0 y0 x1 y1 [N, P, 4] in fractions of the picture.

    Args:
        sides_NP4: logarithms of their distances from the middle of their places, in two steps.
        places_NP4: these middles, as x y x y.
        down, along: fractions of the picture from one place to the next.
    """
    far = sides_NP4.float().clamp(max=MOST_LOG).exp().unbind(-1)
    # no tensor of the four factors: a CUDA graph could not bring one to the device
    steps = (-2 * along, -2 * down, 2 * along, 2 * down)
    return places_NP4 + torch.stack([d * step for d, step in zip(far, steps, strict=True)], -1)


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
    if input.is_meta:  # the rules of that device import torch's compiler: 1.5 s
        return input.new_empty(len(input), most, 4 + input.shape[1] - KINDS)
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


def deformable_attention(
    value: Tensor,
    boxes: Tensor,
    offsets: Tensor,
    scores: Tensor,
    *,
    heads: int,
    sizes: Sequence[int],
    points: Sequence[int],
    spread: float,
) -> Tensor:
    """What each query sees at a few points around its box, [N, Q, channels].

    A head of a query sees the weighted mean of its points' values, bilinear between pixels and zero
    outside of the map. A point lies at the box's centre + offset · sides · spread / points of its
    level, and its weight is the softmax of the head's scores.

    Args:
        value: [N, S, channels]: the pixels of maps one behind another, row by row; a head has
            channels / heads of them.
        boxes: [N, Q, 4]: centre x y, width and height in fractions of the picture.
        offsets: [N, Q, heads · P · 2], x first; P points of all levels.
        scores: [N, Q, heads · P].
        sizes: height and width of each level's map, one behind another.
        points: how many points a head has in each level.

    Sources: Zhu et al., Deformable DETR, arXiv:2010.04159; unequal points: Lv et al., RT-DETRv2,
    arXiv:2407.17140.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    images, queries = boxes.shape[:2]
    depth, total = value.shape[2] // heads, sum(points)
    levels = list(zip(sizes[::2], sizes[1::2], strict=True))
    places = boxes[:, :, None, None].to(wide)
    middles, sides = places[..., :2], places[..., 2:]
    apart = offsets.reshape(images, queries, heads, total, 2).to(wide)
    # no tensor of the levels' factors: a CUDA graph could not bring one to the device
    grids = [
        (2 * (middles + part * (spread / count) * sides) - 1).transpose(1, 2).flatten(0, 1)
        for part, count in zip(torch.split(apart, list(points), 3), points, strict=True)
    ]
    pixels = (
        value.reshape(*value.shape[:2], heads, depth).permute(0, 2, 3, 1).flatten(0, 1).to(wide)
    )
    maps = torch.split(pixels, [height * width for height, width in levels], 2)
    seen = [
        F.grid_sample(map.reshape(images * heads, depth, *size), grid, align_corners=False)
        for map, grid, size in zip(maps, grids, levels, strict=True)
    ]
    weights = scores.reshape(images, queries, heads, total).to(wide).softmax(3)
    mean = (torch.cat(seen, 3) * weights.transpose(1, 2).flatten(0, 1)[:, None]).sum(3)
    told = mean.reshape(images, heads, depth, queries).permute(0, 3, 1, 2)
    return told.flatten(2).to(value.dtype).contiguous()


def nms(
    boxes: Tensor,
    scores: Tensor,
    groups: Tensor | None = None,
    *,
    iou_threshold: float,
    score_threshold: float | None,
    most: int,
) -> Tensor:
    """The boxes that no surer one suppresses: their places, int64 [N, K, most], the surest first.

    The surest box is taken, and all whose intersection over union with it is above the threshold
    are suppressed; and so on with those that are left. Of equal scores the first is taken. Behind
    the last one taken places are −1. A box without an area suppresses none. A score that is no
    number counts as the highest, so that it does not pass unseen; one of −inf is no box.

    Args:
        boxes: [N, P, 4]: x0 y0 x1 y1.
        scores: [N, K, P]: each of K classes is done by itself.
        groups: [N, P], integers: a box suppresses those of its own group alone.
        score_threshold: scores of so much and less are no boxes.
    """
    if scores.is_meta:  # a hundred rounds of it take seconds
        return scores.new_empty(*scores.shape[:2], most, dtype=torch.int64)
    wide = torch.promote_types(boxes.dtype, torch.float32)
    boxes, left = boxes.to(wide), scores.to(wide)
    if score_threshold is not None:
        left = left.masked_fill(left <= score_threshold, -torch.inf)
    x0, y0, x1, y1 = boxes[:, None].unbind(3)  # [N, 1, P] each
    area = (x1 - x0) * (y1 - y0)
    number = torch.arange(boxes.shape[1], device=boxes.device)
    told = []

    def of(place_NK1: Tensor, values_N1P: Tensor) -> Tensor:
        return values_N1P.expand_as(left).gather(2, place_NK1)

    for _ in range(min(most, boxes.shape[1])):
        place = left.argmax(2, keepdim=True)  # the first of equal ones
        told.append(torch.where(left.gather(2, place) == -torch.inf, -1, place))
        across = torch.minimum(of(place, x1), x1) - torch.maximum(of(place, x0), x0)
        along = torch.minimum(of(place, y1), y1) - torch.maximum(of(place, y0), y0)
        common = across.clamp(min=0) * along.clamp(min=0)
        gone = common / (of(place, area) + area - common) > iou_threshold
        if groups is not None:
            gone = gone & (of(place, groups[:, None]) == groups[:, None])
        left = left.masked_fill(gone | (number == place), -torch.inf)
    if not told:
        return scores.new_full((*scores.shape[:2], most), -1, dtype=torch.int64)
    return F.pad(torch.cat(told, 2), (0, most - len(told)), value=-1)


def pyramid_roi_align(
    value: Tensor,
    boxes: Tensor,
    levels: Tensor,
    *,
    sizes: Sequence[int],
    strides: Sequence[int],
    side: int,
    samples: int,
) -> Tensor:
    """What a network's maps show in each box, [N, P, channels, side, side].

    A box is cut into side · side cells, and a cell is the mean of samples · samples points of its
    level's map, bilinear between pixels; half a pixel and more outside of the map nothing is seen.
    A box is as wide and as high as a pixel of its map at least. As torchvision's ``roi_align`` with
    ``aligned=False``, for each box of the level that it names.

    Args:
        value: [N, S, channels]: the pixels of maps one behind another, row by row.
        boxes: [N, P, 4]: x0 y0 x1 y1 in pixels of the picture.
        levels: [N, P], int64: the map that each box looks at.
        sizes: height and width of each level's map, one behind another.
        strides: how many pixels of the picture a pixel of each map is.

    Source: He et al., Mask R-CNN, arXiv:1703.06870.
    """
    (images, pixels, channels), places = value.shape, boxes.shape[1]
    if value.is_meta:
        return value.new_empty(images, places, channels, side, side)
    wide = torch.promote_types(value.dtype, torch.float32)
    known = levels.long().clamp(0, len(strides) - 1)  # in float64 where it is what is right
    height = width = stride = first = torch.zeros_like(known)  # [N, P] each
    begin = 0
    # no table: a CUDA graph could not bring one to the device
    for level, (h, w, s) in enumerate(zip(sizes[::2], sizes[1::2], strides, strict=True)):
        mine = known == level
        height, width = torch.where(mine, h, height), torch.where(mine, w, width)
        stride, first = torch.where(mine, s, stride), torch.where(mine, begin, first)
        begin += h * w
    scaled = boxes.to(wide) / stride[:, :, None]
    low = scaled[..., :2]
    cell = (scaled[..., 2:] - low).clamp(min=1) / side
    step = (torch.arange(side * samples, device=value.device, dtype=wide) + 0.5) / samples
    ends = torch.stack([width, height], 2)
    at = low[..., None] + cell[..., None] * step  # [N, P, x and y, side · samples]
    last = (ends[..., None] - 1).to(wide)
    seen = (at >= -1) & (at <= last + 1)  # of a number that is none: not
    at = torch.where(seen, at, 0).clamp(min=0).minimum(last)
    before = at.floor()
    far = (at - before) * seen
    near = seen.to(wide) - far
    after = (before + 1).minimum(last)
    rows_2 = torch.stack([before[:, :, 1], after[:, :, 1]], 3).long() * width[:, :, None, None]
    columns_2 = torch.stack([before[:, :, 0], after[:, :, 0]], 3).long()
    (right, down), (left, up) = far.unbind(2), near.unbind(2)
    across, along = torch.stack([left, right], 3), torch.stack([up, down], 3)
    first = first + torch.arange(images, device=value.device)[:, None] * pixels

    def cells(of_rows: Tensor, of_columns: Tensor) -> tuple[Tensor, Tensor]:
        """Values of a cell's points, [N, P, side, side, points], of rows and of columns."""
        parts = (images, places, side, 2 * samples)
        grid = (images, places, side, side, 2 * samples, 2 * samples)
        return (
            of_rows.reshape(parts)[:, :, :, None, :, None].expand(grid),
            of_columns.reshape(parts)[:, :, None, :, None, :].expand(grid),
        )

    row, column = cells(rows_2, columns_2)
    one, other = cells(along, across)
    index = (row + column + first[:, :, None, None, None, None]).flatten(4).flatten(0, 3)
    weight = (one * other / samples**2).flatten(4).flatten(0, 3)
    table = value.to(wide).reshape(images * pixels, channels)
    made = F.embedding_bag(index, table, per_sample_weights=weight, mode="sum")
    made = made.reshape(images, places, side, side, channels).permute(0, 1, 4, 2, 3)
    return made.to(value.dtype).contiguous()


def _suppressed(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    boxes, scores = shapes["boxes"], shapes["scores"]
    if len(boxes) != 3 or len(scores) != 3 or attrs["most"] < 1:
        return f"takes boxes N×P×4, scores N×K×P and tells 1 at least, not {boxes}, {scores}"
    n, places = boxes[:2]
    return first_of(
        differs(shapes, "boxes", (n, places, 4)),
        differs(shapes, "scores", (n, scores[1], places)),
        differs(shapes, "groups", (n, places)),
    )


def _regions(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    value, boxes = shapes["value"], shapes["boxes"]
    sizes, strides = tuple(attrs["sizes"]), tuple(attrs["strides"])
    if len(value) != 3 or len(boxes) != 3 or value[0] != boxes[0]:
        return f"takes pixels N×S×channels and boxes N×P×4, not {value} and {boxes}"
    if not strides or len(sizes) != 2 * len(strides):
        return f"{len(strides)} levels, and sizes {sizes}"
    if min(*sizes, *strides, attrs["side"], attrs["samples"]) < 1:
        return "a size, a stride, a side or samples of less than 1"
    if value[1] != sum(h * w for h, w in zip(sizes[::2], sizes[1::2], strict=True)):
        return f"{value[1]} pixels are not those of maps of the sizes {sizes}"
    n, places = boxes[:2]
    return first_of(
        differs(shapes, "boxes", (n, places, 4)), differs(shapes, "levels", (n, places))
    )


def _looks(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    value, boxes = shapes["value"], shapes["boxes"]
    heads, sizes, points = attrs["heads"], tuple(attrs["sizes"]), tuple(attrs["points"])
    if len(value) != 3 or len(boxes) != 3 or value[0] != boxes[0]:
        return f"takes pixels N×S×channels and boxes N×Q×4, not {value} and {boxes}"
    if heads < 1 or value[2] % heads or len(sizes) != 2 * len(points) or not points:
        return f"{heads} heads of {value[2]} channels, or levels without a size or points"
    if min(*sizes, *points) < 1 or value[1] != sum(
        h * w for h, w in zip(sizes[::2], sizes[1::2], strict=True)
    ):
        return f"{value[1]} pixels are not those of maps of the sizes {sizes}"
    n, queries = boxes[:2]
    each = heads * sum(points)
    return first_of(
        differs(shapes, "boxes", (n, queries, 4)),
        differs(shapes, "offsets", (n, queries, 2 * each)),
        differs(shapes, "scores", (n, queries, each)),
    )


def _map(shapes: Shapes, result: Shape, attrs: Attributes) -> str | None:
    given = shapes["input"]
    if len(given) != 4 or given[1] <= KINDS:
        return f"a map has a centre, four sides and a class at least, not {given}"
    return None


ROWS = (
    row(peak_boxes, "input", "down along most", aten="peak_boxes.default", rule=_map),
    row(
        deformable_attention,
        "value boxes offsets scores",
        "heads sizes points spread",
        aten="deformable_attention.default",
        rule=_looks,
    ),
    row(
        nms,
        "boxes scores groups?",
        "iou_threshold score_threshold most",
        aten="nms.default",
        rule=_suppressed,
    ),
    row(
        pyramid_roi_align,
        "value boxes levels",
        "sizes strides side samples",
        aten="pyramid_roi_align.default",
        rule=_regions,
    ),
)

_LIBRARY = torch.library.Library("tessella", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _meaning in (
    ("peak_boxes(Tensor input, *, float down, float along, int most) -> Tensor", peak_boxes),
    (
        "deformable_attention(Tensor value, Tensor boxes, Tensor offsets, Tensor scores, *,"
        " int heads, int[] sizes, int[] points, float spread) -> Tensor",
        deformable_attention,
    ),
    (
        "nms(Tensor boxes, Tensor scores, Tensor? groups=None, *, float iou_threshold,"
        " float? score_threshold, int most) -> Tensor",
        nms,
    ),
    (
        "pyramid_roi_align(Tensor value, Tensor boxes, Tensor levels, *, int[] sizes,"
        " int[] strides, int side, int samples) -> Tensor",
        pyramid_roi_align,
    ),
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _name = _meaning.__name__
    _LIBRARY.impl(_name, _meaning, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def _shape(input: Tensor, *, down: float, along: float, most: int) -> Tensor:
    return input.new_empty(input.shape[0], most, input.shape[1] - 1)


def _seen_shape(value: Tensor, boxes: Tensor, *_: Tensor, **attributes: object) -> Tensor:
    return value.new_empty(*boxes.shape[:2], value.shape[2])


def _kept_shape(boxes: Tensor, scores: Tensor, *_: object, most: int, **__: object) -> Tensor:
    return scores.new_empty(*scores.shape[:2], most, dtype=torch.int64)


def _regions_shape(value: Tensor, boxes: Tensor, *_: Tensor, side: int, **__: object) -> Tensor:
    return value.new_empty(*boxes.shape[:2], value.shape[2], side, side)


torch.library.register_fake("tessella::pyramid_roi_align", _regions_shape, lib=_LIBRARY)
torch.library.register_fake("tessella::nms", _kept_shape, lib=_LIBRARY)
torch.library.register_fake("tessella::peak_boxes", _shape, lib=_LIBRARY)
torch.library.register_fake("tessella::deformable_attention", _seen_shape, lib=_LIBRARY)
