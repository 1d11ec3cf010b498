"""The problems that a report tries: a few of each operation, with shapes that networks have.

The most important come first, as time may end before all of them have run. Every kernel of the
catalog that has an operation of its own takes one of them; a test asks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from tessella.core.architectures import is_gpu
from tessella.kernels.shared import onednn
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.operations import problems, shapes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta, memory_format
from tessella.search.inputs import sample_inputs

Named = Iterator[tuple[str, Problem]]
LAST: Format = "channels_last"
VARIANCE_OF_INT8 = 127.0**2 / 3  # of whole numbers that are equally likely from -127 to 127
SCALE = 0.02  # of quantized values: normal numbers reach over most of int8 and of fp8
SUM: dict[str, Any] = {"scalar": None, "alpha": 1}
PAIR: dict[str, Any] = {"scalar": None}
_UNARY: dict[str, dict[str, Any]] = {
    "relu": {}, "relu6": {}, "sigmoid": {}, "tanh": {}, "silu": {}, "gelu": {"approximate": "none"},
    "hardswish": {}, "hardsigmoid": {}, "mish": {}, "leaky_relu": {"negative_slope": 0.1},
    "elu": {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}, "softplus": {"beta": 1.0,
    "threshold": 20.0}, "clamp": {"min": -0.5, "max": 0.5}, "exp": {}, "log": {}, "sqrt": {},
    "rsqrt": {}, "reciprocal": {}, "neg": {}, "abs": {}, "erf": {},
    "sin": {}, "cos": {},
}  # fmt: skip
POSITIVE = ("log", "sqrt", "rsqrt", "reciprocal")  # their inputs are above zero


def problems_of(target: str) -> dict[str, Problem]:
    """The problems by name, the most important first; a name begins with the operation's."""
    gpu = is_gpu(target)
    found: dict[str, Problem] = {}
    for family in (
        _convolutions, _products, _attention, _pooling, _norms, _pointwise, _gradients, _recurrent,
        _quantization, _reductions, _elements, _moves,
    ):  # fmt: skip
        for name, problem in family(gpu):
            found[f"{problem.op} {name}".strip()] = problem
    return found


def draw(
    problem: Problem, device: torch.device
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Numbers for a problem: its constants by position, and its other inputs in order."""
    generator = torch.Generator().manual_seed(1)  # the inputs' is 0: weights must not be like them
    # as a plan's weights are: 7 bits where the processor's sums of products have 16
    largest = onednn.NARROW if device.type == "cpu" and onednn.narrow_sums() else 127
    constants = {
        i: _constant(problem, i, meta, generator, largest).to(device)
        for i, meta in enumerate(problem.inputs)
        if meta is not None and i in problem.constant
    }
    inputs = sample_inputs(problem, device)
    if problem.op in POSITIVE:
        inputs = [tensor.abs() + 0.1 for tensor in inputs]
    return constants, inputs


def _constant(
    problem: Problem, position: int, meta: TensorMeta, generator: torch.Generator, largest: int
) -> torch.Tensor:
    """Weights such that results are about 1 (in int8, about 40), and positive variances.

    Args:
        largest: of int8 weights.
    """
    dtype, operands = getattr(torch, meta.dtype), problem.operation.operands
    name = operands[position] if operands else ""
    depth = math.prod(meta.shape[1:])
    if name == "scale" and problem.flops is not None:  # of the sums of an int8 product
        sums = math.sqrt(math.prod(problem["weight"].shape[1:]))
        deviations = VARIANCE_OF_INT8 * largest / 127  # of a weight times that of an input
        return torch.full(meta.shape, 40 / (deviations * sums), dtype=dtype)
    if name in ("scale", "code_scale"):
        return torch.full(meta.shape, SCALE, dtype=dtype)
    if dtype == torch.int8:
        size = meta.shape
        made = torch.randint(-largest, largest + 1, size, generator=generator, dtype=dtype)
    else:
        made = torch.randn(meta.shape, generator=generator) / math.sqrt(depth)
        made = (made.abs() + 0.5 if name == "running_var" else made).to(dtype)
    if problem.attr("sparsity") == TWO_FOUR and name == "weight":
        made = prune_two_four(made)
    return made.contiguous(memory_format=memory_format(meta.format, made.dim()))


def _meta(*shape: int, dtype: str = "float32", format: Format = "contiguous") -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype, format=format)


def _problem(
    op: str,
    *inputs: TensorMeta | None,
    constant: Sequence[int] = (),
    format: Format = "contiguous",
    **attrs: Any,
) -> Problem:
    """A problem whose results are what the operation's reference makes."""
    return Problem(
        op=op,
        inputs=inputs,
        outputs=tuple(
            TensorMeta(shape=shape, dtype=dtype, format=format if len(shape) > 3 else "contiguous")
            for dtype, shape in shapes.made(op, inputs, attrs)
        ),
        attrs=attrs,
        constant=tuple(constant),
    )


def _view(op: str, x: TensorMeta, **attrs: Any) -> Problem:
    made = _problem(op, x, **attrs)
    return replace(made, outputs=tuple(replace(m, format="strided") for m in made.outputs))


# --- products -------------------------------------------------------------------------------------


def _conv(
    x: Sequence[int],
    weight: Sequence[int],
    *,
    dtype: str,
    residual: bool = False,
    scale: bool = False,
    format: Format = LAST,
    **window: Any,
) -> Problem:
    """A convolution with a bias; of int8 with a scale, so that it makes int8 again."""
    dense: Format = format if len(x) > 3 else "contiguous"
    narrow = dtype in ("int8", "float8_e4m3fn")
    vector = _meta(weight[0], dtype="float32" if narrow else dtype)
    image = _meta(*x, dtype=dtype, format=dense)
    constant = (1, 2, 4) if scale else (1, 2)
    given = _meta(*weight, dtype=dtype, format=dense), vector
    factor = _meta(weight[0]) if scale else None
    asked: dict[str, Any] = {"activation": "relu", "constant": constant, **window}
    made = problems.conv(image, *given, scale=factor, **asked)
    if not residual:
        return made
    added = problems.conv(image, *given, made.output, factor, **asked)
    return replace(added, dying=(3,))


def _convolutions(gpu: bool) -> Named:
    n, main = (16, "float16") if gpu else (1, "float32")
    image, filters = (n, 64, 56, 56), (64, 64, 3, 3)
    yield f"3x3 {main}", _conv(image, filters, padding=1, dtype=main)
    small = (n, 256, 14, 14)
    yield f"1x1 and sum {main}", _conv(small, (256, 256, 1, 1), dtype=main, residual=True)
    yield f"1x1 {main}", _conv(small, (256, 256, 1, 1), dtype=main)
    yield (
        f"7x7 first {main}",
        _conv((n, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3, dtype=main),
    )
    wide = (n, 96, 28, 28)
    yield f"depthwise {main}", _conv(wide, (96, 1, 3, 3), padding=1, groups=96, dtype=main)
    yield f"groups {main}", _conv(image, (64, 16, 3, 3), padding=1, groups=4, dtype=main)
    yield "3x3 int8", _conv(image, filters, padding=1, scale=True, dtype="int8")
    yield "3x3 bfloat16", _conv(image, filters, padding=1, dtype="bfloat16")
    if gpu:
        yield "3x3 float32", _conv(image, filters, padding=1, dtype="float32")
        yield "3x3 tf32", _conv(image, filters, padding=1, dtype="float32", math="tf32")
        yield "1x1 fp8", _conv(small, (256, 256, 1, 1), dtype="float8_e4m3fn", out_dtype=main)
        plain: Format = "contiguous"
        yield "3x3 NCHW", _conv(image, filters, padding=1, dtype="float32", format=plain)
        wide = (n, 64, 28, 28)
        yield "5x5 NCHW", _conv(wide, (64, 64, 5, 5), padding=2, dtype="float32", format=plain)
        sparse = _conv(small, (256, 256, 1, 1), dtype=main)
        yield "1x1 2:4", replace(sparse, attrs={**sparse.attrs, "sparsity": TWO_FOUR})
        yield from _fused_convolutions(n, main)
    else:
        yield "3x3 8 images", _conv((8, *image[1:]), filters, padding=1, dtype=main)
        yield f"1x1 to 6 channels {main}", _conv((n, 144, 1, 1), (6, 144, 1, 1), dtype=main)
    for dtype in dict.fromkeys((main, "float32")):
        yield dtype, _conv((n, 64, 256), (64, 64, 3), padding=1, dtype=dtype)
        yield dtype, _conv((n, 16, 8, 28, 28), (32, 16, 3, 3, 3), padding=1, dtype=dtype)
        for axes in (2, 3):
            yield f"twice {dtype}", _grown((1, 64, *(28, 28, 8)[:axes]), 32, dtype)


def _grown(x: Sequence[int], filters: int, dtype: str) -> Problem:
    """A transposed convolution that makes an image or a volume twice as large."""
    axes = len(x) - 2
    weight = _meta(x[1], filters, *(2,) * axes, dtype=dtype)
    return _problem(
        f"conv_transpose{axes}d", _meta(*x, dtype=dtype, format=LAST), weight, constant=(1,),
        format=LAST, stride=(2,) * axes, padding=(0,) * axes, output_padding=(0,) * axes,
        groups=1, dilation=(1,) * axes,
    )  # fmt: skip


def _fused_convolutions(n: int, dtype: str) -> Named:
    """Two in one, and the pooling of a first layer."""
    one = _conv((n, 64, 56, 56), (256, 64, 1, 1), dtype=dtype)
    two = _conv((n, 256, 56, 56), (64, 256, 1, 1), dtype=dtype)
    yield dtype, problems.conv2d_chain(one, two)
    first = _conv((n, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3, dtype=dtype)
    yield dtype, problems.conv2d_pool(first, _max_pool(first.output, 3, 2, 1))


def _products(gpu: bool) -> Named:
    n, main = (1024, "float16") if gpu else (128, "float32")

    def linear(m: int, dtype: str, scale: bool = False, **more: Any) -> Problem:
        narrow = dtype in ("int8", "float8_e4m3fn")
        vector = _meta(768, dtype="float32" if narrow else dtype)
        return problems.linear(
            _meta(m, 768, dtype=dtype), _meta(768, 768, dtype=dtype), vector,
            scale=_meta(768) if scale else None, constant=(1, 2, 4) if scale else (1, 2), **more,
        )  # fmt: skip

    yield f"{n} rows {main}", linear(n, main, activation="relu")
    yield f"8 rows {main}", linear(8, main)
    yield f"gelu {main}", linear(n, main, activation="gelu")
    yield "int8", linear(n, "int8", scale=True)
    yield "bfloat16", linear(n, "bfloat16")
    batch = _meta(12, 128, 64, dtype=main), _meta(12, 64, 128, dtype=main)
    yield f"batch {main}", problems.matmul(*batch)
    for dtype in dict.fromkeys((main, "float32")):
        square, bias = _meta(512, 512, dtype=dtype), _meta(512, dtype=dtype)
        for rows, ending in ((n, "relu"), (8, None)):
            x = _meta(rows, 512, dtype=dtype)
            yield (
                f"{rows} rows {dtype}",
                problems.matmul(x, square, bias, constant=(1, 2), activation=ending),
            )
    if not gpu:
        few = _meta(8, 768), _meta(7, 768), _meta(7)
        yield f"7 classes {main}", problems.linear(*few, constant=(1, 2))
        return
    yield "float32", linear(n, "float32")
    yield "8 rows float32", linear(8, "float32")
    yield "tf32", linear(n, "float32", math="tf32")
    yield "fp8", linear(n, "float8_e4m3fn", out_dtype=main)
    sparse = linear(n, main)
    yield "2:4", replace(sparse, attrs={**sparse.attrs, "sparsity": TWO_FOUR})
    residual, vector = _meta(n, 768, dtype=main), _meta(768, dtype=main)
    square = _meta(768, 768, dtype=main)
    summed = problems.linear(residual, square, vector, residual, constant=(1, 2))
    norm = _problem(
        "layer_norm", summed.output, vector, vector,
        constant=(1, 2), normalized_shape=(768,), eps=1e-5,
    )  # fmt: skip
    yield main, problems.linear_norm(summed, norm, keep=True)


def _attention(gpu: bool) -> Named:
    n, types = (8, ("float16", "bfloat16", "float32")) if gpu else (1, ("float32", "bfloat16"))
    for dtype in types:
        heads = _meta(n, 12, 197, 64, dtype=dtype)
        yield dtype, problems.attention(heads, heads, heads)
        windows = _meta(8 * n, 3, 49, 32, dtype=dtype)
        yield f"windows {dtype}", problems.attention(windows, windows, windows)


def _gradients(gpu: bool) -> Named:
    n, types = (8, ("float16", "float32")) if gpu else (1, ("float32",))
    for dtype in types:
        for size in ((32,), (28, 28), (8, 14, 14)):
            taps = (3,) * len(size)
            format: Format = LAST if len(size) == 2 else "contiguous"
            x = _meta(n, 32, *size, dtype=dtype, format=format)
            weight = _meta(32, 32, *taps, dtype=dtype, format=format)
            yield dtype, problems.conv_dgrad(x, weight, x.shape, padding=1)
            yield dtype, problems.conv_wgrad(x, x, taps, padding=1)


def _recurrent(gpu: bool) -> Named:
    steps, samples, units = 16, 8, 128
    for op, gates, more in (
        ("lstm", 4, {}), ("gru", 3, {"reset_after": True}), ("rnn", 1, {"nonlinearity": "tanh"})
    ):  # fmt: skip
        weight, bias = _meta(1, gates * units, units), _meta(1, gates * units)
        yield "float32", _problem(
            op, _meta(steps, samples, units), weight, weight, bias, bias,
            constant=(1, 2, 3, 4), direction="forward", **more,
        )  # fmt: skip


# --- everything else ------------------------------------------------------------------------------


def _images(gpu: bool) -> TensorMeta:
    n, dtype = (16, "float16") if gpu else (1, "float32")
    return _meta(n, 64, 56, 56, dtype=dtype, format=LAST)


def _tokens(gpu: bool) -> TensorMeta:
    return _meta(1024, 768, dtype="float16") if gpu else _meta(197, 768)


def _max_pool(x: TensorMeta, size: int, stride: int, padding: int) -> Problem:
    window: dict[str, Any] = {
        "kernel_size": (size,) * 2,
        "stride": (stride,) * 2,
        "padding": (padding,) * 2,
    }
    return _problem("max_pool2d", x, format=LAST, **window, dilation=(1, 1), ceil_mode=False)


def _pooling(gpu: bool) -> Named:
    x = _images(gpu)
    yield x.dtype, _max_pool(x, 3, 2, 1)
    window: dict[str, Any] = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    rest: dict[str, Any] = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}
    yield x.dtype, _problem("avg_pool2d", x, format=LAST, **window, **rest)
    yield x.dtype, _problem("adaptive_avg_pool2d", x, format=LAST, output_size=(1, 1))
    yield f"7x7 {x.dtype}", _problem("adaptive_avg_pool2d", x, format=LAST, output_size=(7, 7))
    planes = replace(x, format="contiguous")
    yield f"NCHW {x.dtype}", _problem("adaptive_avg_pool2d", planes, output_size=(1, 1))
    size: dict[str, Any] = {"size": (112, 112), "mode": "nearest", "antialias": False}
    more: dict[str, Any] = {"scale_factor": None, "align_corners": None}
    yield f"nearest {x.dtype}", _problem("interpolate", x, format=LAST, **size, **more)
    around: dict[str, Any] = {"pad": (0, 1, 0, 1), "mode": "constant", "value": 0.0}
    yield x.dtype, _problem("pad", x, format=LAST, **around)
    places = _meta(1, 15, 24, 24, format=LAST)  # a detector's: centres, sides and ten classes
    yield "float32", _problem("peak_boxes", places, down=1 / 24, along=1 / 24, most=100)
    queries = [_meta(1, 300, n, dtype=x.dtype) for n in (128, 4, 192, 96)]  # as D-FINE-N's
    values = _meta(1, 2000, 128, dtype=x.dtype)
    looks: dict[str, Any] = {"heads": 8, "sizes": (40, 40, 20, 20), "points": (6, 6), "spread": 0.5}
    yield x.dtype, _problem("deformable_attention", values, *queries[1:], **looks)
    limits: dict[str, Any] = {"iou_threshold": 0.5, "score_threshold": None, "most": 100}
    yield "float32", _problem("nms", _meta(1, 1000, 4), _meta(1, 1, 1000), **limits)
    maps, levels = _meta(1, 1344, 64, dtype=x.dtype), _meta(1, 100, dtype="int64")
    seen: dict[str, Any] = {"sizes": (32, 32, 16, 16, 8, 8), "strides": (4, 8, 16), "side": 7}
    yield x.dtype, _problem("pyramid_roi_align", maps, _meta(1, 100, 4), levels, **seen, samples=2)


def _norms(gpu: bool) -> Named:
    x, tokens = _images(gpu), _tokens(gpu)
    channel, row = _meta(64, dtype=x.dtype), _meta(768, dtype=tokens.dtype)
    last: dict[str, Any] = {"normalized_shape": (768,), "eps": 1e-5}
    yield (
        x.dtype,
        _problem("batch_norm", x, *(channel,) * 4, constant=(1, 2, 3, 4), format=LAST, eps=1e-5),
    )
    groups: dict[str, Any] = {"num_groups": 8, "eps": 1e-5}
    yield x.dtype, _problem("group_factors", x, channel, channel, constant=(1, 2), **groups)
    yield tokens.dtype, _problem("layer_norm", tokens, row, row, constant=(1, 2), **last)
    yield tokens.dtype, _problem("rms_norm", tokens, row, constant=(1,), **last)
    for op in ("softmax", "log_softmax"):
        yield tokens.dtype, _problem(op, tokens, dim=-1, dtype=None)


def _pointwise(gpu: bool) -> Named:
    """Programs of several operations in one pass, some with a norm or a pooling among them."""
    x, tokens = _images(gpu), _tokens(gpu)
    row, factor = _meta(768, dtype=tokens.dtype), _meta(1, 64, 1, 1, dtype=x.dtype)

    def program(*steps: Any, inputs: Sequence[TensorMeta], **more: Any) -> Problem:
        results = more.pop("results", (len(inputs) + len(steps) - 1,))
        return _problem("pointwise", *inputs, program=steps, results=results, **more)

    yield f"sum and relu {x.dtype}", program(
        ("add", (0, 1), SUM), ("mul", (3, 2), PAIR), ("relu", (4,), {}),
        inputs=(x, x, factor), constant=(2,), format=LAST,
    )  # fmt: skip
    norm = ("layer_norm", (4, 1, 2), {"normalized_shape": (768,), "eps": 1e-5})
    yield (
        f"sum and norm {tokens.dtype}",
        program(("add", (0, 3), SUM), norm, inputs=(tokens, row, row, tokens), constant=(1, 2)),
    )
    yield (
        f"two results {tokens.dtype}",
        program(
            ("add", (0, 1), SUM), ("mul", (2, 1), PAIR), inputs=(tokens, tokens), results=(2, 3)
        ),
    )
    window = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    maximum = ("max_pool2d", (1,), {**window, "dilation": (1, 1), "ceil_mode": False})
    mean = ("adaptive_avg_pool2d", (1,), {"output_size": (1, 1)})
    for name, pool in (("relu and maximum", maximum), ("relu and mean", mean)):
        yield f"{name} {x.dtype}", program(("relu", (0,), {}), pool, inputs=(x,), format=LAST)


def _quantization(gpu: bool) -> Named:
    tokens, scale = _tokens(gpu), _meta()
    codes = replace(tokens, dtype="int8")
    yield "int8", _problem("quantize", tokens, scale, constant=(1,), axis=0, dtype="int8")
    if not gpu:
        picture = _meta(1, 3, 224, 224)
        rounds: dict[str, Any] = {"constant": (1,), "axis": 0, "dtype": "int8"}
        yield "a picture int8", _problem("quantize", picture, scale, format=LAST, **rounds)
    yield "int8", _problem("dequantize", codes, scale, constant=(1,), axis=0, dtype=tokens.dtype)


def _reductions(gpu: bool) -> Named:
    x, tokens = _images(gpu), _tokens(gpu)
    for op in ("mean", "sum"):
        pixels: dict[str, Any] = {"dim": (2, 3), "keepdim": True, "dtype": None}
        yield f"pixels {x.dtype}", _problem(op, x, format=LAST, **pixels)
        yield f"rows {tokens.dtype}", _problem(op, tokens, dim=(1,), keepdim=False, dtype=None)
    for op in ("amax", "amin"):
        yield tokens.dtype, _problem(op, tokens, dim=(1,), keepdim=False)


def _elements(gpu: bool) -> Named:
    x = _images(gpu)
    for op, attrs in _UNARY.items():
        yield x.dtype, _problem(op, x, format=LAST, **attrs)
    for op in ("add", "sub"):
        yield x.dtype, _problem(op, x, x, format=LAST, **SUM)
    for op in ("mul", "maximum", "minimum"):
        yield x.dtype, _problem(op, x, x, format=LAST, **PAIR)
    for op in ("div", "pow"):
        yield x.dtype, _problem(op, x, None, format=LAST, scalar=2)


def _moves(gpu: bool) -> Named:
    x, images = _images(gpu), 8 if gpu else 1
    n, c, h, w = x.shape
    narrow = "float32" if gpu else "bfloat16"
    yield f"to {narrow}", _problem("to", x, format=LAST, dtype=narrow)
    if not gpu:
        picture = _meta(1, 3, 224, 224)
        yield "to pixels", _problem("to", picture, format=LAST, dtype="float32")
    yield x.dtype, _problem("cat", x, x, format=LAST, dim=1)
    pixels = _meta(images, 224, 224, 3, dtype="uint8")
    scaling: dict[str, Any] = {"gain": (0.1, 0.2, 0.3), "offset": (0.0, 0.1, 0.2), "dtype": x.dtype}
    yield x.dtype, _problem("image_to_tensor", pixels, format=LAST, **scaling)
    grid, planes = _meta(images, 56, 56, 96, dtype=x.dtype), _meta(images, 384, 196, dtype=x.dtype)
    yield f"windows {x.dtype}", _problem(
        "rearrange", grid, sizes=(images, 8, 7, 8, 7, 96), dims=(0, 1, 3, 2, 4, 5),
        rolls=(((1, 2), 53), ((3, 4), 53)), shape=(images * 64, 49, 96),
    )  # fmt: skip
    yield (
        f"planes {x.dtype}",
        _problem(
            "rearrange",
            planes,
            sizes=planes.shape,
            dims=(0, 2, 1),
            rolls=(),
            shape=(images, 196, 384),
        ),
    )
    flat = _meta(n, c * h * w, dtype=x.dtype)
    yield x.dtype, _problem("reshape", flat, shape=(n, c, h * w))
    yield x.dtype, _view("permute", x, dims=(0, 2, 3, 1))
    yield x.dtype, _view("slice", x, dim=1, start=0, end=32, step=1)
    yield x.dtype, _view("select", x, dim=1, index=0)
    yield x.dtype, _view("split", x, sizes=(32, 32), dim=1)
    yield x.dtype, _view("expand", _meta(n, c, 1, 1, dtype=x.dtype), shape=x.shape)
