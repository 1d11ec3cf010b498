"""What detectors do last, in ONNX."""

from __future__ import annotations

import torch

from tessella.graph.graph import Node
from tessella.graph.onnx.export import Export, cast, first, static
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


DETECT: dict[str, Export] = {"peak_boxes": _peak_boxes}
