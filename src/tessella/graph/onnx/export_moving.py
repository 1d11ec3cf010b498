"""What moves, cuts and joins elements, as ONNX."""

from __future__ import annotations

import torch

from tessella.graph.graph import Dim, Node
from tessella.graph.onnx.export import (
    Export,
    cast,
    first,
    names,
    padded,
    refused,
    same,
)
from tessella.graph.onnx.writer import Writer

TO_THE_END = 2**63 - 1


def _reshape(w: Writer, node: Node) -> None:
    shape = node.output.shape
    free = [isinstance(d, Dim) for d in shape]
    sizes = (
        w.ints(*[-1 if isinstance(d, Dim) else d for d in shape])
        if sum(free) == 1
        else w.sizes(shape)
    )
    w.add("Reshape", [first(node).name, sizes], out=node.output.name)


def _slice(w: Writer, node: Node) -> None:
    a = node.attrs
    bounds = (a["start"], TO_THE_END if a["end"] is None else a["end"])
    start, end = (w.sizes((b,)) for b in bounds)
    inputs = [first(node).name, start, end, w.ints(a["dim"]), w.ints(a["step"])]
    w.add("Slice", inputs, out=node.output.name)


def _select(w: Writer, node: Node) -> None:
    index, axis = node.attrs["index"], node.attrs["dim"]
    if isinstance(index, Dim):
        raise refused(node, "an index that follows the batch")
    place = w.constant(torch.tensor(index))
    w.add("Gather", [first(node).name, place], out=node.output.name, axis=axis)


def _split(w: Writer, node: Node) -> None:
    outputs = [v.name for v in node.outputs]
    sizes = w.sizes(tuple(node.attrs["sizes"]))
    w.add("Split", [first(node).name, sizes], out=outputs, axis=node.attrs["dim"])


def _cat(w: Writer, node: Node) -> None:
    parts = [cast(w, v, node.output.dtype) for v in node.inputs if v is not None]
    w.add("Concat", parts, out=node.output.name, axis=node.attrs["dim"])


def _pad(w: Writer, node: Node) -> None:
    value = node.attrs["value"] or 0.0
    padded(w, node, node.attrs["pad"], node.attrs["mode"], value)


def _interpolate(w: Writer, node: Node) -> None:
    x, a = first(node), node.attrs
    if a["antialias"] and w.opset < 18:
        raise refused(node, "antialiasing needs opset 18")
    modes = {"nearest": "nearest", "bicubic": "cubic"}
    mode = modes.get(a["mode"], "linear")
    if a["size"] is None:
        scales = w.constant(torch.tensor([1.0, 1.0, *a["scale_factor"]], dtype=torch.float32))
        inputs = [x.name, "", scales]
    else:
        inputs = [x.name, "", "", w.sizes((*x.shape[:2], *a["size"]))]
    where = "asymmetric" if mode == "nearest" else "half_pixel"
    w.add(
        "Resize",
        inputs,
        out=node.output.name,
        mode=mode,
        coordinate_transformation_mode="align_corners" if a["align_corners"] else where,
        nearest_mode="floor" if mode == "nearest" else None,
        cubic_coeff_a=-0.75 if mode == "cubic" else None,
        antialias=1 if a["antialias"] else None,
    )


def _embedding(w: Writer, node: Node) -> None:
    rows, weight = names(node)
    w.add("Gather", [weight, rows], out=node.output.name, axis=0)


def _expand(w: Writer, node: Node) -> None:
    w.add("Expand", [first(node).name, w.sizes(node.output.shape)], out=node.output.name)


def _permute(w: Writer, node: Node) -> None:
    w.add("Transpose", names(node), out=node.output.name, perm=list(node.attrs["dims"]))


MOVING: dict[str, Export] = {
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "cat": _cat,
    "pad": _pad,
    "interpolate": _interpolate,
    "embedding": _embedding,
    "clone": same("Identity"),
}
