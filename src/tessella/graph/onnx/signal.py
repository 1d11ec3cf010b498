"""ONNX's Fourier transforms, as products with matrices of cosines and sines; and image sampling."""

from __future__ import annotations

import math

import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.budget import LONGEST_TRANSFORM
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.onnx.layers import static
from tessella.graph.value import fixed


def _dft(call: Call) -> Result:
    """Along one axis of [..., 1 or 2]: real numbers, or pairs of real and imaginary parts."""
    x = call.value(0)
    rank = len(x.shape)
    if call.opset >= 20:
        axis = int(call.number(2, "", -2))
    else:
        axis = call.attrs.get("axis", 1)
    axis = call.from_front(axis, rank)
    inverse, one_sided = call.attrs.get("inverse", 0), call.attrs.get("onesided", 0)
    known = static(call, (x.shape[axis], x.shape[-1]))
    half = bool(inverse and one_sided)  # the other half follows from symmetry
    length = int(call.number(1, "", 2 * (known[0] - 1) if half else known[0]))
    bins = length // 2 + 1 if one_sided and not inverse else length
    given = length // 2 + 1 if half else length
    x = _resized(call, x, axis, given)
    last = [i for i in range(rank - 1) if i != axis]
    order = [*last, axis, rank - 1]
    x = call.emit("permute", x, dims=order) if order != list(range(rank)) else x
    flat = call.emit("reshape", x, shape=(*x.shape[:-2], given * known[1]))
    weights = _fourier(call, length, bins, given, known[1], bool(inverse), half)
    made = call.emit("linear", flat, call.tensor(weights.to(getattr(torch, x.dtype))))
    parts = weights.shape[0] // bins
    made = call.emit("reshape", made, shape=(*flat.shape[:-1], bins, parts))
    back = [order.index(i) for i in range(rank)]
    return call.emit("permute", made, dims=back) if back != list(range(rank)) else made


def _fourier(
    call: Call, length: int, bins: int, given: int, parts: int, inverse: bool, half: bool
) -> torch.Tensor:
    """[bins · results, given · parts] in float64: a transform of interleaved numbers."""
    if length > LONGEST_TRANSFORM:
        raise call.wrong(f"it is longer than {LONGEST_TRANSFORM}", seen=length)
    turn = torch.arange(bins)[:, None] * torch.arange(given)[None, :] % length
    angle = turn.double() * (2 * math.pi / length) * (1 if inverse else -1)
    cos, sin = angle.cos(), angle.sin()
    if half:  # twice what has a mirror image; the result is real
        twice = torch.full((given,), 2.0, dtype=torch.float64)
        twice[0] = 1.0
        if length % 2 == 0:
            twice[-1] = 1.0
        rows = torch.stack([cos * twice, -sin * twice], -1).reshape(bins, -1)
    else:
        real = torch.stack([cos, -sin], -1)[..., :parts]
        imaginary = torch.stack([sin, cos], -1)[..., :parts]
        rows = torch.stack([real, imaginary], 1).reshape(2 * bins, given * parts)
    return rows / length if inverse else rows


def _resized(call: Call, x: Value, axis: int, size: int) -> Value:
    """Cut, or filled with zeros at the end, to ``size``."""
    have = static(call, x.shape[axis : axis + 1])[0]
    if have > size:
        return call.emit("slice", x, dim=axis, start=0, end=size, step=1)
    if have < size:
        pad = [0, 0] * (len(x.shape) - 1 - axis) + [0, size - have]
        return call.emit("pad", x, pad=pad, mode="constant", value=0.0)
    return x


def _stft(call: Call) -> Result:
    """Transforms of windows that slide along [N, T, 1 or 2]: [N, frames, bins, 2]."""
    x, step = call.value(0), int(call.number(1, ""))
    window = call.optional(2)
    time, parts = static(call, x.shape[1:])
    length = int(call.number(3, "", window.shape[0] if window is not None else time))
    one_sided = call.attrs.get("onesided", 1)
    bins = length // 2 + 1 if one_sided else length
    frames = (time - length) // step + 1
    call.modest(frames, length)
    place = torch.arange(frames)[:, None] * step + torch.arange(length)[None, :]
    rows = call.aten("index_select", x, 1, call.tensor(place.reshape(-1)))
    rows = call.emit("reshape", rows, shape=(x.shape[0], frames, length, parts))
    if window is not None:
        rows = call.emit("mul", rows, call.emit("reshape", window, shape=(length, 1)))
    flat = call.emit("reshape", rows, shape=(x.shape[0], frames, length * parts))
    weights = _fourier(call, length, bins, length, parts, False, False)
    made = call.emit("linear", flat, call.tensor(weights.to(getattr(torch, x.dtype))))
    return call.emit("reshape", made, shape=(x.shape[0], frames, bins, 2))


# ── sampling of images ────────────────────────────────────────────────────────────────────────────


def _grid_sample(call: Call) -> Result:
    x, grid = call.value(0), call.value(1)
    modes = {"linear": 0, "bilinear": 0, "nearest": 1, "cubic": 2, "bicubic": 2}
    mode = modes[call.attrs.get("mode", "linear")]
    outside = {"zeros": 0, "border": 1, "reflection": 2}[call.attrs.get("padding_mode", "zeros")]
    corners = bool(call.attrs.get("align_corners", 0))
    if len(x.shape) not in (4, 5) or (mode == 2 and len(x.shape) == 5):
        raise call.wrong("sampling over 2 axes, or over 3 without cubic, is known", seen=x)
    target = "grid_sampler_2d" if len(x.shape) == 4 else "grid_sampler_3d"
    return call.aten(target, x, grid, mode, outside, corners)


def _affine_grid(call: Call) -> Result:
    size = [int(n) for n in call.sizes(1).flat]
    corners = bool(call.attrs.get("align_corners", 0))
    return call.aten("affine_grid_generator", call.value(0), size, corners)


def _roi_align(call: Call) -> Result:
    x, boxes, index = call.value(0), call.value(1), call.value(2)
    where = call.attrs.get("coordinate_transformation_mode", "half_pixel")
    if call.attrs.get("mode", "avg") != "avg":
        raise call.wrong("regions by their largest value")
    if call.opset < 16:
        where = "output_half_pixel"
    column = call.emit("reshape", index, shape=(*index.shape, 1))
    rows = call.emit("cat", call.emit("to", column, dtype=boxes.dtype), boxes, dim=1)
    size = [call.attrs.get(f"output_{side}", 1) for side in ("height", "width")]
    (made,) = call.build.fallback(
        "torchvision::roi_align",
        [
            *(x, rows, call.attrs.get("spatial_scale", 1.0), *size),
            *(call.attrs.get("sampling_ratio", 0), where == "half_pixel"),
        ],
        {},
        name=call.outputs[0],
    )
    return made


def _deform_conv(call: Call) -> Result:
    x, weight, offset = call.value(0), call.value(1), call.value(2)
    kernel = static(call, weight.shape[2:])
    stride = call.attrs.get("strides", (1, 1))
    dilation = call.attrs.get("dilations", (1, 1))
    pads = call.attrs.get("pads", (0, 0, 0, 0))
    if len(kernel) != 2 or tuple(pads[:2]) != tuple(pads[2:]):
        raise call.wrong("a deformable convolution over 2 axes with equal padding is known")
    out, n = fixed(weight.shape[0]), x.shape[0]
    masked = call.has(4)
    dtype = getattr(torch, x.dtype)
    mask = call.value(4) if masked else call.tensor(torch.ones(1, 1, dtype=dtype))
    bias = call.value(3) if call.has(3) else call.tensor(torch.zeros(out, dtype=dtype))
    mask = mask if masked else call.emit("expand", mask, shape=(n, 1))
    groups, offsets = call.attrs.get("group", 1), call.attrs.get("offset_group", 1)
    (made,) = call.build.fallback(
        "torchvision::deform_conv2d",
        [x, weight, offset, mask, bias, *stride, *pads[:2], *dilation, groups, offsets, masked],
        {},
        name=call.outputs[0],
    )
    return made


def _col_to_im(call: Call) -> Result:
    """Columns of blocks back into images, overlaps added."""
    image, block = ([int(n) for n in call.sizes(i).flat] for i in (1, 2))
    if len(image) != 2:
        raise call.wrong("images of 2 axes are known", seen=image)
    pads = call.attrs.get("pads", (0, 0, 0, 0))
    if tuple(pads[:2]) != tuple(pads[2:]):
        raise call.wrong("unequal padding", seen=pads)
    dilation, stride = (call.attrs.get(k, (1, 1)) for k in ("dilations", "strides"))
    return call.aten("col2im", call.value(0), image, block, dilation, pads[:2], stride)


SIGNAL: dict[str, Translator] = table(
    ("DFT", _dft),
    ("STFT", _stft),
    ("GridSample", _grid_sample),
    ("AffineGrid", _affine_grid),
    ("RoiAlign", _roi_align),
    ("DeformConv", _deform_conv),
    ("Col2Im", _col_to_im),
)
