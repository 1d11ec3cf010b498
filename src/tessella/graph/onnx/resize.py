"""ONNX's Resize: torch's own interpolations where they mean the same, else one product an axis.

Along an axis, every way to resize is a matrix: row ``i`` holds how much each element of the input
counts in element ``i`` of the result. Formulas: the specification of ONNX's Resize.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tessella.graph.graph import Dim, Value
from tessella.graph.onnx.budget import MOST_ELEMENTS, MOST_ROWS
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.value import fixed

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class _Rule:
    """How coordinates and weights are found; names as in ONNX."""

    mode: str
    where: str
    rounding: str
    coefficient: float
    exclude_outside: bool
    antialias: bool
    outside: float


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """One axis: from ``old`` to ``new`` elements by ``scale``, within ``start`` to ``end``."""

    old: int
    new: int
    scale: float
    start: float
    end: float


def _resize(call: Call) -> Result:
    x = call.value(0)
    old = call.op == "Upsample" or call.opset < 11
    rule = _Rule(
        mode=call.attrs.get("mode", "nearest"),
        where=call.attrs.get(
            "coordinate_transformation_mode", "asymmetric" if old else "half_pixel"
        ),
        rounding=call.attrs.get("nearest_mode", "floor" if old else "round_prefer_floor"),
        coefficient=call.attrs.get("cubic_coeff_a", -0.75),
        exclude_outside=bool(call.attrs.get("exclude_outside", 0)),
        antialias=bool(call.attrs.get("antialias", 0)),
        outside=call.attrs.get("extrapolation_value", 0.0),
    )
    axes = _axes(call, x, old, rule)
    size, scales = _size(axes), [a.scale for a in axes.values()]
    direct = _torch_way(x, axes, rule)
    if direct is not None:
        return call.emit("interpolate", x, size=size, **direct)
    if not all(math.isfinite(s) and s > 0 for s in scales):
        raise call.wrong("its scales are not positive", seen=scales)
    dtype = x.dtype
    if not dtype.startswith(("float", "bfloat")):
        x = call.emit("to", x, dtype="float32")
    made = x
    for index, axis in axes.items():
        if axis.new == axis.old and axis.scale == 1.0 and rule.where != "tf_crop_and_resize":
            continue
        call.modest(axis.new, axis.old)
        reach = 4 / min(1.0, axis.scale) if rule.antialias else 4.0
        if axis.new > MOST_ROWS or axis.new * reach > MOST_ELEMENTS:
            raise call.wrong("it makes too many numbers", seen=f"{axis.new} of scale {axis.scale}")
        weights, inside = _weights(axis, rule)
        made = _along(call, made, index, weights)
        if not inside.all():
            shape = [axis.new if i == index else 1 for i in range(len(x.shape))]
            mask = call.tensor(torch.from_numpy(inside.reshape(shape)))
            outside = call.tensor(torch.tensor(rule.outside, dtype=getattr(torch, made.dtype)))
            made = call.aten("where.self", mask, made, outside)
    return made if made.dtype == dtype else call.emit("to", call.aten("round", made), dtype=dtype)


def _axes(call: Call, x: Value, old: bool, rule: _Rule) -> dict[int, _Axis]:
    """The axes that are resized, by their index."""
    rank = len(x.shape)
    scales_at, sizes_at = (1, 3) if old else (2, 3)
    given = [call.from_front(a, rank) for a in call.attrs.get("axes", range(rank))]
    policy = call.attrs.get("keep_aspect_ratio_policy", "stretch")
    region = call.known(1).tolist() if not old and call.has(1) else []
    if rule.where != "tf_crop_and_resize" or not region:
        region = [0.0] * len(given) + [1.0] * len(given)
    sizes: list[int | Dim] | None = None
    scales: list[float] | None = None
    if call.has(sizes_at):
        sizes = call.sizes(sizes_at).flatten().tolist()
    if sizes is None and call.op == "Upsample" and "scales" in call.attrs:
        scales = call.attrs["scales"]
    elif not sizes:
        sizes, scales = None, call.known(scales_at).tolist()
    if len(sizes or scales or ()) != len(given):
        raise call.wrong("it needs a size or a scale for each axis")
    if sizes and policy != "stretch":
        ratios = [fixed(s) / fixed(x.shape[a]) for s, a in zip(sizes, given, strict=True)]
        one = min(ratios) if policy == "not_larger" else max(ratios)
        sizes = [int(fixed(x.shape[a]) * one + 0.5) for a in given]
        scales = [one] * len(given)
    found = {}
    for i, axis in enumerate(given):
        length = x.shape[axis]
        scale = 1.0 if scales is None else scales[i]
        same = sizes[i] == length if sizes else scale == 1.0
        if same and (rule.where != "tf_crop_and_resize" or isinstance(length, Dim)):
            continue
        if isinstance(length, Dim) or (sizes and isinstance(sizes[i], Dim)):
            raise call.wrong("it resizes the batch")
        start, end = region[i], region[len(given) + i]
        new = fixed(sizes[i]) if sizes else math.floor(length * (end - start) * scale)
        found[axis] = _Axis(
            old=length,
            new=new,
            scale=scale if scales is not None else new / length,
            start=start,
            end=end,
        )
    return found


def _size(axes: dict[int, _Axis]) -> tuple[int, ...]:
    return tuple(a.new for a in axes.values())


def _torch_way(x: Value, axes: dict[int, _Axis], rule: _Rule) -> dict[str, Any] | None:
    """torch's mode that means the same, or None: all spatial axes, and sizes that scales give."""
    rank = len(x.shape)
    if tuple(axes) != tuple(range(2, rank)) or not x.dtype.startswith(("float", "bfloat")):
        return None
    if rule.antialias or any(a.scale != a.new / a.old for a in axes.values()):
        return None
    whole = all(a.new % a.old == 0 for a in axes.values())
    if rule.mode == "nearest":
        exact = rule.where == "asymmetric" and rule.rounding == "floor"
        halves = whole and rule.where == "half_pixel" and "round" in rule.rounding
        return {"mode": "nearest", "antialias": False} if exact or halves else None
    linear = {3: "linear", 4: "bilinear", 5: "trilinear"}.get(rank)
    cubic = "bicubic" if rank == 4 and rule.coefficient == -0.75 else None
    name = linear if rule.mode == "linear" else cubic if rule.mode == "cubic" else None
    corners = {"align_corners": True, "half_pixel": False}.get(rule.where)
    if name is None or corners is None or rule.exclude_outside:
        return None
    return {"mode": name, "align_corners": corners, "antialias": False}


def _along(call: Call, x: Value, axis: int, weights: Floats) -> Value:
    """``x`` with ``weights`` [new, old] applied along one axis."""
    rank = len(x.shape)
    if ((weights == 0) | (weights == 1)).all() and (weights.sum(1) == 1).all():
        index = call.tensor(torch.from_numpy(weights.argmax(1)))
        return call.aten("index_select", x, axis, index)
    matrix = call.tensor(torch.from_numpy(weights).to(getattr(torch, x.dtype)))
    order = [d for d in range(rank) if d != axis] + [axis]
    back = [order.index(d) for d in range(rank)]
    turned = x if axis == rank - 1 else call.emit("permute", x, dims=order)
    made = call.emit("linear", turned, matrix)
    return made if axis == rank - 1 else call.emit("permute", made, dims=back)


def _weights(axis: _Axis, rule: _Rule) -> tuple[Floats, np.ndarray[Any, np.dtype[np.bool_]]]:
    """The matrix [new, old] of an axis, and which of its rows lie inside the input."""
    at = _coordinates(axis, rule.where)
    inside = np.ones(axis.new, dtype=bool)
    if rule.where == "tf_crop_and_resize":
        inside = (at >= 0) & (at <= axis.old - 1)
    weights = np.zeros((axis.new, axis.old))
    shrink = min(1.0, axis.scale) if rule.antialias else 1.0
    for row, place in enumerate(at):
        if rule.mode == "nearest":
            weights[row, min(max(_nearest(place, rule.rounding), 0), axis.old - 1)] = 1.0
            continue
        reach = (2 if rule.mode == "cubic" else 1) / shrink
        near = np.arange(math.ceil(place - reach), math.floor(place + reach) + 1)
        distance = np.abs((near - place) * shrink)
        share = (
            _cubic(distance, rule.coefficient)
            if rule.mode == "cubic"
            else np.maximum(0.0, 1.0 - distance)
        )
        if rule.exclude_outside:
            share = np.where((near >= 0) & (near < axis.old), share, 0.0)
        if rule.antialias or rule.exclude_outside:
            share = share / share.sum()
        np.add.at(weights[row], np.clip(near, 0, axis.old - 1), share)
    return weights, inside


def _coordinates(axis: _Axis, where: str) -> Floats:
    """Where each element of the result lies in the input."""
    out = np.arange(axis.new, dtype=np.float64)
    length = axis.scale * axis.old  # not rounded
    if where == "asymmetric":
        return out / axis.scale
    if where == "align_corners":
        return out * ((axis.old - 1) / (length - 1)) if length != 1 else out * 0
    if where == "pytorch_half_pixel":
        return (out + 0.5) / axis.scale - 0.5 if length > 1 else out * 0
    if where == "half_pixel_symmetric":
        offset = axis.old / 2 * (1 - axis.new / length)
        return offset + (out + 0.5) / axis.scale - 0.5
    if where == "tf_crop_and_resize":
        if axis.new == 1:
            return out + 0.5 * (axis.start + axis.end) * (axis.old - 1)
        step = (axis.end - axis.start) * (axis.old - 1) / (axis.new - 1)
        return axis.start * (axis.old - 1) + out * step
    return (out + 0.5) / axis.scale - 0.5


def _nearest(place: float, rounding: str) -> int:
    if rounding == "floor":
        return math.floor(place)
    if rounding == "ceil":
        return math.ceil(place)
    return math.ceil(place - 0.5) if rounding == "round_prefer_floor" else math.floor(place + 0.5)


def _cubic(distance: Floats, a: float) -> Floats:
    """Keys' kernel (1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


RESIZE: dict[str, Translator] = table(("Resize Upsample", _resize))
