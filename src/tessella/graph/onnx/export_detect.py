"""What detectors do last, in ONNX."""

from __future__ import annotations

import torch

from tessella.graph.graph import Node, Value
from tessella.graph.onnx.export import Export, cast, first, reduced, static
from tessella.graph.onnx.types import NUMBERS
from tessella.graph.onnx.writer import Writer
from tessella.operations.reference.detect import CENTRE, KINDS, MOST_LOG, SIDES, places


def _peak_boxes(w: Writer, node: Node) -> None:
    """As the reference has it: the surest peaks, what these places tell, and boxes of it."""
    x, attrs = first(node), node.attrs
    channels, rows, columns = static(node, x.shape[1:])
    most = min(attrs["most"], rows * columns)
    padding = attrs["most"] - most

    def part(of: str, begin: int, end: int, axis: int) -> str:
        return w.add("Slice", [of, w.ints(begin), w.ints(end), w.ints(axis)])

    def float32(number: float) -> str:
        return w.constant(torch.tensor(number))

    centres = part(x.name, CENTRE, CENTRE + 1, 1)
    around = w.add("MaxPool", [centres], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    lower = w.add("Less", [centres, around])
    peaks = w.add("Where", [lower, w.number(-torch.inf, x), centres])
    peaks = w.add("Reshape", [peaks, w.ints(0, -1)])
    best, found = w.fresh(f"{w.layer}.best"), w.fresh(f"{w.layer}.places")
    w.add("TopK", [peaks, w.ints(most)], out=[best, found], axis=1)
    index = w.add("Unsqueeze", [found, w.ints(2)])
    index = w.add("Tile", [index, w.ints(1, 1, channels)])
    lines = w.add("Transpose", [x.name], perm=[0, 2, 3, 1])
    lines = w.add("Reshape", [lines, w.ints(0, -1, channels)])
    told = w.add("GatherElements", [lines, index], axis=1)

    down, along = attrs["down"], attrs["along"]
    table = places(rows, columns, torch.device("cpu"), down=down, along=along)
    at = w.add("Gather", [w.constant(table), found], axis=0)
    far = w.constant(2 * torch.tensor([-along, -down, along, down]))
    sides = cast(w, part(told, SIDES, KINDS, 2), "float32", x.dtype)
    sides = w.add("Mul", [w.add("Exp", [w.add("Min", [sides, float32(MOST_LOG)])]), far])
    boxes = w.add("Clip", [w.add("Add", [at, sides]), float32(0.0), float32(1.0)])
    best = w.add("Unsqueeze", [w.add("Sigmoid", [best]), w.ints(2)])
    seen = w.add("Cast", [w.add("Greater", [best, w.number(0.0, x)])], to=NUMBERS[x.dtype])
    boxes = w.add("Mul", [cast(w, boxes, x.dtype, "float32"), seen])
    kinds = w.add("Softmax", [part(told, KINDS, channels, 2)], axis=2)
    parts = [boxes, w.add("Mul", [best, kinds])]
    made = w.add("Concat", parts, out="" if padding else node.output.name, axis=2)
    if padding:
        w.add("Pad", [made, w.ints(0, 0, 0, 0, padding, 0)], out=node.output.name)


def _deformable_attention(w: Writer, node: Node) -> None:
    """Each level sampled, and the weighted mean of all points; in float32."""
    value, boxes, offsets, scores = (v for v in node.inputs if v is not None)
    heads, sizes, points = (node.attrs[n] for n in ("heads", "sizes", "points"))
    (queries, channels), total = static(node, node.output.shape[1:]), sum(points)
    depth = channels // heads

    def read(of: Value, *shape: int) -> str:
        return w.add("Reshape", [cast(w, of, "float32"), w.ints(*shape)])

    def part(of: str, begin: int, end: int) -> str:
        return w.add("Slice", [of, w.ints(begin), w.ints(end), w.ints(2)])

    shares = [node.attrs["spread"] / count for count in points for _ in range(count)]
    box = cast(w, boxes, "float32")
    middle, sides = (w.add("Unsqueeze", [part(box, a, a + 2), w.ints(2, 3)]) for a in (0, 2))
    apart = w.add(
        "Mul", [read(offsets, 0, 0, heads, total, 2), w.constant(torch.tensor(shares)[:, None])]
    )
    at = w.add("Add", [middle, w.add("Mul", [apart, sides])])
    two, one = w.constant(torch.tensor(2.0)), w.constant(torch.tensor(1.0))
    grid = w.add("Sub", [w.add("Mul", [at, two]), one])
    grid = w.add("Transpose", [grid], perm=[0, 2, 1, 3, 4])
    grid = w.add("Reshape", [grid, w.ints(-1, queries, total, 2)])
    maps = w.add("Transpose", [read(value, 0, 0, heads, depth)], perm=[0, 2, 3, 1])
    maps = w.add("Reshape", [maps, w.ints(-1, depth, *static(node, value.shape[1:2]))])

    seen, pixel, point = [], 0, 0
    for height, width, count in zip(sizes[::2], sizes[1::2], points, strict=True):
        map = part(maps, pixel, pixel + height * width)
        map = w.add("Reshape", [map, w.ints(0, depth, height, width)])
        looks = [map, part(grid, point, point + count)]
        mode = "linear" if w.opset >= 20 else "bilinear"
        seen.append(w.add("GridSample", looks, mode=mode, padding_mode="zeros", align_corners=0))
        pixel, point = pixel + height * width, point + count
    weights = w.add("Softmax", [read(scores, 0, 0, heads, total)], axis=3)
    weights = w.add("Transpose", [weights], perm=[0, 2, 1, 3])
    weights = w.add("Reshape", [weights, w.ints(-1, 1, queries, total)])
    told = w.add("Mul", [w.add("Concat", seen, axis=3), weights])
    told = reduced(w, "ReduceSum", told, [3], keep=False)
    told = w.add("Reshape", [told, w.ints(-1, heads, depth, queries)])
    told = w.add("Transpose", [told], perm=[0, 3, 1, 2])
    told = w.add("Reshape", [told, w.ints(0, 0, channels)])
    w.add("Cast", [told], out=node.output.name, to=NUMBERS[node.output.dtype])


def _nms(w: Writer, node: Node) -> None:
    """ONNX tells of all boxes that stay, one behind another: each goes to its place in the table.

    ONNX knows no groups: boxes of another group are moved apart.
    """
    boxes, scores, groups = (node.get(name) for name in ("boxes", "scores", "groups"))
    assert boxes is not None
    assert scores is not None
    (classes, _), most = static(node, scores.shape[1:]), node.attrs["most"]
    places = cast(w, boxes, "float32")
    if groups is not None:
        farthest = reduced(w, "ReduceMax", w.add("Abs", [places]), [1, 2], keep=True)
        # twice the farthest side, and a little more: what lies apart has no common area
        apart = w.add("Mul", [farthest, w.constant(torch.tensor(2.5))])
        steps = w.add("Unsqueeze", [w.add("Cast", [groups.name], to=NUMBERS["float32"]), w.ints(2)])
        places = w.add("Add", [places, w.add("Mul", [apart, steps])])
    least = node.attrs["score_threshold"]
    if least is None:  # of −inf there is no box, which ONNX says of no score by itself
        least = torch.finfo(torch.float32).min
    limits = [
        w.constant(torch.tensor([limit], dtype=torch.float32))
        for limit in (node.attrs["iou_threshold"], least)
    ]
    told = cast(w, scores, "float32")
    found = w.add("NonMaxSuppression", [places, told, w.ints(most), *limits])  # [M, 3]

    def column(number: int) -> str:
        return w.add("Gather", [found, w.constant(torch.tensor(number))], axis=1)

    # the table's row of each, and how many of its row come before: it counts through the rows
    rows = w.add("Add", [w.add("Mul", [column(0), w.ints(classes)]), column(1)])
    images = w.add("Shape", [scores.name], start=0, end=1)
    lines = w.add("Mul", [images, w.ints(classes)])
    number = w.add("Range", [w.constant(torch.tensor(0)), w.add("Squeeze", [lines]),
                             w.constant(torch.tensor(1))])  # fmt: skip
    before = w.add("Less", [w.add("Unsqueeze", [rows, w.ints(0)]),
                            w.add("Unsqueeze", [number, w.ints(1)])])  # fmt: skip
    counts = w.add("Cast", [before], to=NUMBERS["int64"])
    begins = reduced(w, "ReduceSum", counts, [1], keep=False)
    every = w.add("Squeeze", [w.add("Shape", [rows])])
    order = w.add("Range", [w.constant(torch.tensor(0)), every, w.constant(torch.tensor(1))])
    within = w.add("Sub", [order, w.add("Gather", [begins, rows], axis=0)])
    at = w.add("Add", [w.add("Mul", [rows, w.ints(most)]), within])
    size = w.add("Mul", [lines, w.ints(most)])
    empty = w.add("Expand", [w.ints(-1), size])
    table = w.add("ScatterElements", [empty, at, column(2)], axis=0)
    w.add("Reshape", [table, w.ints(-1, classes, most)], out=node.output.name)


def _pyramid_roi_align(w: Writer, node: Node) -> None:
    """Each level's boxes are picked, look at its map, and go back to their places."""
    value, boxes, levels = (v for v in node.inputs if v is not None)
    sizes, strides, side = (node.attrs[n] for n in ("sizes", "strides", "side"))
    places, channels = static(node, node.output.shape[1:3])
    rows = w.add("Reshape", [cast(w, boxes, "float32"), w.ints(-1, 4)])
    level = w.add("Reshape", [levels.name, w.ints(-1)])
    count = w.add("Shape", [level])
    pixels = w.add("Transpose", [cast(w, value, "float32")], perm=[0, 2, 1])
    empty = w.add("Concat", [count, w.ints(channels, side, side)], axis=0)
    told = w.add("Expand", [w.constant(torch.zeros(1)), empty])
    begin = 0
    for number, stride in enumerate(strides):
        height, width = sizes[2 * number : 2 * number + 2]
        end = begin + height * width
        map = w.add("Slice", [pixels, w.ints(begin), w.ints(end), w.ints(2)])
        map = w.add("Reshape", [map, w.ints(0, 0, height, width)])
        mine = w.add("Equal", [level, w.constant(torch.tensor(number))])
        at = w.add("Transpose", [w.add("NonZero", [mine])], perm=[1, 0])  # [M, 1]
        flat = w.add("Squeeze", [at, w.ints(1)])
        image = w.add("Div", [flat, w.constant(torch.tensor(places))])
        looks = [map, w.add("Gather", [rows, flat], axis=0), image]
        seen = w.add(
            "RoiAlign", looks, mode="avg", output_height=side, output_width=side,
            sampling_ratio=node.attrs["samples"], spatial_scale=1.0 / stride,
            **({"coordinate_transformation_mode": "output_half_pixel"} if w.opset >= 16 else {}),
        )  # fmt: skip
        told = w.add("ScatterND", [told, at, seen])
        begin = end
    told = w.add("Reshape", [told, w.ints(-1, places, channels, side, side)])
    w.add("Cast", [told], out=node.output.name, to=NUMBERS[node.output.dtype])


DETECT: dict[str, Export] = {
    "peak_boxes": _peak_boxes,
    "deformable_attention": _deformable_attention,
    "nms": lambda w, node: w.told(node, _nms),
    "pyramid_roi_align": lambda w, node: w.told(node, _pyramid_roi_align),
}
