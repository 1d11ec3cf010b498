"""A function for each Caffe layer type that makes a torch module of settings and input shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tessella.nn.prototxt.definition import Layer
from tessella.nn.prototxt.modules import (
    BatchNorm,
    Concat,
    InnerProduct,
    LocalResponseNormWithinChannel,
    Maximum,
    Power,
    Product,
    Reshape,
    Scale,
    Sum,
)
from tessella.nn.prototxt.text_format import Entry, Message

Shapes = list[torch.Size]
Make = Callable[[Layer, Message, Shapes], nn.Module]


MAX_WEIGHTS = 1 << 28  # of a network, 1 GiB; the largest of Caffe's time has 144 million


def require_modest(layer: Layer, *weights: int) -> None:
    """Refuse a weight of these sizes before memory is taken for it."""
    if math.prod(weights) > MAX_WEIGHTS:
        raise layer.message.error(
            "the network has too many weights",
            seen=f"{' × '.join(map(str, weights))}, at most {MAX_WEIGHTS:,}",
            fix="correct num_output or kernel_size, or pool before this layer",
        )


def outputs(layer: Layer, settings: Message) -> int:
    """``num_output``, which every layer with weights needs, except for the classifier."""
    count = settings.take("num_output", int)
    if count is None or count < 1:
        raise layer.message.error(
            "num_output is missing", seen=count, fix="only the last layer may leave it out"
        )
    return count


def _sides(
    settings: Message, name: str, default: int, *, plain: str | None = None
) -> tuple[int, int]:
    """Height and width of a setting: ``name: 3``, twice ``name``, or ``name_h`` and ``name_w``."""
    plain = plain or name
    both = settings.take_all(plain, int)
    height, width = (settings.take(f"{name}_{side}", int) for side in "hw")
    if height is not None and width is not None and not both:
        return height, width
    if height is not None or width is not None:
        raise settings.error(f"{name}_h and {name}_w go together and exclude {plain}")
    if len(both) > 2:
        raise settings.error(f"{plain} has more than two values", seen=both)
    height, width = both if len(both) == 2 else (both or [default]) * 2
    return height, width


def _require_channels(settings: Message) -> None:
    if (axis := settings.take("axis", int, default=1)) != 1:
        raise settings.error("this axis is not supported", seen=axis, fix="use axis 1")


def _fill(
    settings: Message, name: str, tensor: Tensor, *, default: str, value: float = 0.0
) -> None:
    """Initialize a tensor as its filler says.

    Without a filler, weights get Caffe's "xavier" and not Caffe's zeros, which would never learn: a
    text for deployment leaves the fillers out.
    """
    filler = settings.message(name)
    kind = filler.take("type", str, default=default)
    if tensor.ndim > 1:
        fan_in, fan_out = tensor[0].numel(), tensor.numel() // tensor.shape[1]
    else:
        fan_in = fan_out = max(tensor.numel(), 1)
    norm = filler.choose("variance_norm", "FAN_IN", ("FAN_IN", "FAN_OUT", "AVERAGE"))
    fan = {"FAN_IN": fan_in, "FAN_OUT": fan_out, "AVERAGE": (fan_in + fan_out) / 2}[norm]
    if kind == "constant":
        nn.init.constant_(tensor, filler.take("value", float, default=value))
    elif kind == "uniform":
        low, high = filler.take("min", float, default=0.0), filler.take("max", float, default=1.0)
        nn.init.uniform_(tensor, low, high)
    elif kind == "gaussian":
        mean, std = filler.take("mean", float, default=0.0), filler.take("std", float, default=1.0)
        nn.init.normal_(tensor, mean, std)
    elif kind == "xavier":
        nn.init.uniform_(tensor, -math.sqrt(3 / fan), math.sqrt(3 / fan))
    elif kind == "msra":
        nn.init.normal_(tensor, 0.0, math.sqrt(2 / fan))
    else:
        known = "constant, uniform, gaussian, xavier or msra"
        raise filler.error(f"{name} is not supported", seen=kind, fix=f"use {known}")
    filler.finish("value", "std", "mean", "min", "max")


def _fill_both(settings: Message, module: nn.Conv2d | nn.Linear) -> None:
    _fill(settings, "weight_filler", module.weight, default="xavier")
    if module.bias is not None:
        _fill(settings, "bias_filler", module.bias, default="constant")
    settings.taken.add("bias_filler")  # may stand beside bias_term: false


def convolution(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    kernel = _sides(settings, "kernel", 0, plain="kernel_size")
    stride, pad = _sides(settings, "stride", 1), _sides(settings, "pad", 0)
    dilations = (settings.take_all("dilation", int) or [1]) * 2
    dilation = (dilations[0], dilations[1])
    group = settings.take("group", int, default=1)
    _require_channels(settings)
    count, channels = outputs(layer, settings), shapes[0][1]
    if min(kernel + stride + dilation) < 1 or min(pad) < 0:
        raise layer.message.error(
            "kernel, stride and dilation are at least 1, pad at least 0",
            seen=f"kernel {kernel}, stride {stride}, dilation {dilation}, pad {pad}",
        )
    if group < 1 or count % group or channels % group:
        raise layer.message.error(
            "group must divide the input's channels and num_output",
            seen=f"group {group}, {channels} channels, num_output {count}",
        )
    require_modest(layer, count, channels // group, *kernel)
    module = nn.Conv2d(
        channels,
        count,
        kernel,
        stride=stride,
        padding=pad,
        dilation=dilation,
        groups=group,
        bias=settings.take("bias_term", bool, default=True),
    )
    _fill_both(settings, module)
    return module


def inner_product(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    _require_channels(settings)
    fan_in, count = math.prod(shapes[0][1:]), outputs(layer, settings)
    require_modest(layer, count, fan_in)
    module = InnerProduct(
        fan_in,
        count,
        bias=settings.take("bias_term", bool, default=True),
    )
    _fill_both(settings, module)
    return module


def pooling(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    """Caffe's windows: sizes round up; the last window starts inside image and padding; AVE divides
    by the window's size within image and padding. torch's ``ceil_mode`` is the same rule."""
    kind = settings.choose("pool", "MAX", ("MAX", "AVE"))
    kernel = _sides(settings, "kernel", 0, plain="kernel_size")
    stride, pad = _sides(settings, "stride", 1), _sides(settings, "pad", 0)
    ceil = settings.choose("round_mode", "CEIL", ("CEIL", "FLOOR")) == "CEIL"
    if settings.take("global_pooling", bool, default=False):
        return nn.AdaptiveMaxPool2d(1) if kind == "MAX" else nn.AdaptiveAvgPool2d(1)
    size = shapes[0][2:]
    if min(kernel + stride) < 1 or any(p < 0 or 2 * p > k for p, k in zip(pad, kernel)):
        raise layer.message.error(
            "pooling needs kernel and stride of at least 1 and a pad of at most half the kernel",
            seen=f"kernel {kernel}, stride {stride}, pad {pad}",
        )
    if any(s + 2 * p < k - st + 1 for s, p, k, st in zip(size, pad, kernel, stride)):
        raise layer.message.error(
            "the pooling window is larger than its input",
            seen=f"kernel {kernel}, input {list(size)}",
            fix="use a larger input size, or global_pooling: true",
        )
    make = nn.MaxPool2d if kind == "MAX" else nn.AvgPool2d
    return make(kernel, stride, pad, ceil_mode=ceil)


def lrn(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    size = settings.take("local_size", int, default=5)
    alpha = settings.take("alpha", float, default=1.0)
    beta = settings.take("beta", float, default=0.75)
    k = settings.take("k", float, default=1.0)
    region = settings.choose(
        "norm_region", "ACROSS_CHANNELS", ("ACROSS_CHANNELS", "WITHIN_CHANNEL")
    )
    if size < 1 or size % 2 == 0:
        raise layer.message.error("local_size must be odd", seen=size)
    if region == "ACROSS_CHANNELS":
        return nn.LocalResponseNorm(size, alpha, beta, k)
    return LocalResponseNormWithinChannel(size, alpha=alpha, beta=beta)


def relu(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    slope = settings.take("negative_slope", float, default=0.0)
    return nn.LeakyReLU(slope) if slope else nn.ReLU()


def prelu(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    shared = settings.take("channel_shared", bool, default=False)
    require_modest(layer, shapes[0][1])
    module = nn.PReLU(1 if shared else shapes[0][1])
    _fill(settings, "filler", module.weight, default="constant", value=0.25)
    return module


def batch_norm(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    """``use_global_stats`` says how Caffe's phases use stored statistics; a text brings none, so
    training uses the batch's and inference the running ones, whatever it says."""
    settings.take("use_global_stats", bool)
    require_modest(layer, shapes[0][1])
    return BatchNorm(
        shapes[0][1],
        eps=settings.take("eps", float, default=1e-5),
        fraction=settings.take("moving_average_fraction", float, default=0.999),
    )


def scale(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    _require_channels(settings)
    if settings.take("num_axes", int, default=1) != 1 or len(shapes) != 1:
        raise layer.message.error("only a scale for each channel, learned, is supported")
    require_modest(layer, shapes[0][1])
    module = Scale(shapes[0][1], bias=settings.take("bias_term", bool, default=False))
    _fill(settings, "filler", module.weight, default="constant", value=1.0)
    if module.bias is not None:
        _fill(settings, "bias_filler", module.bias, default="constant")
    return module


def dropout(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    return nn.Dropout(settings.take("dropout_ratio", float, default=0.5))


def concat(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    axis = settings.take("axis", int, default=1)
    return Concat(settings.take("concat_dim", int, default=axis))


def eltwise(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    operation = settings.choose("operation", "SUM", ("PROD", "SUM", "MAX"))
    coefficients = settings.take_all("coeff", float)
    settings.take("stable_prod_grad", bool)
    if len(set(shapes)) != 1:
        raise layer.message.error("inputs of different shapes", seen=[list(s) for s in shapes])
    if coefficients and (operation != "SUM" or len(coefficients) != len(shapes)):
        raise layer.message.error(
            "coeff goes with SUM, one for each bottom", seen=f"{operation}, {coefficients}"
        )
    if operation == "SUM":
        return Sum(coefficients or [1.0] * len(shapes))
    return Product() if operation == "PROD" else Maximum()


def flatten(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    start = settings.take("axis", int, default=1)
    return nn.Flatten(start, settings.take("end_axis", int, default=-1))


def reshape(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    return Reshape(settings.message("shape").take_all("dim", int))


def softmax(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    return nn.Softmax(settings.take("axis", int, default=1))


def power(layer: Layer, settings: Message, shapes: Shapes) -> nn.Module:
    return Power(
        power=settings.take("power", float, default=1.0),
        scale=settings.take("scale", float, default=1.0),
        shift=settings.take("shift", float, default=0.0),
    )


def _plain(module: type[nn.Module]) -> Make:
    return lambda layer, settings, shapes: module()


# Type of the layer: the field that has its settings, and what makes its module.
LAYERS: dict[str, tuple[str, Make]] = {
    "BatchNorm": ("batch_norm_param", batch_norm),
    "Concat": ("concat_param", concat),
    "Convolution": ("convolution_param", convolution),
    "Dropout": ("dropout_param", dropout),
    "Eltwise": ("eltwise_param", eltwise),
    "Flatten": ("flatten_param", flatten),
    "InnerProduct": ("inner_product_param", inner_product),
    "LRN": ("lrn_param", lrn),
    "PReLU": ("prelu_param", prelu),
    "Pooling": ("pooling_param", pooling),
    "Power": ("power_param", power),
    "ReLU": ("relu_param", relu),
    "Reshape": ("reshape_param", reshape),
    "Scale": ("scale_param", scale),
    "Sigmoid": ("sigmoid_param", _plain(nn.Sigmoid)),
    "Softmax": ("softmax_param", softmax),
    "Split": ("split_param", _plain(nn.Identity)),
    "TanH": ("tanh_param", _plain(nn.Tanh)),
}

# Fields of a layer that say how it is trained or which engine runs it, not what it computes.
IGNORED_IN_LAYER = (
    "param", "blobs_lr", "weight_decay", "propagate_down", "loss_weight", "phase", "include",
    "exclude", "name", "type", "bottom", "top",
)  # fmt: skip
IGNORED_IN_SETTINGS = ("engine", "force_nd_im2col")


def make(layer: Layer, shapes: Shapes, *, classes: int | None = None) -> nn.Module:
    """The module of a layer for inputs of these shapes.

    Args:
        classes: what ``num_output`` is, if this layer is the classifier.

    Raises:
        UsageError: the type or a setting is not supported; the message names layer and line.
    """
    if layer.type not in LAYERS:
        raise layer.message.error(
            "this layer type is not supported",
            seen=layer.type,
            fix=f"use {', '.join(LAYERS)}, or write the network in Python (file.py:Class)",
        )
    if not layer.bottoms or not layer.tops:
        raise layer.message.error("a layer needs a bottom and a top")
    field, maker = LAYERS[layer.type]
    settings = layer.message.message(field)
    if classes is not None:
        settings.entries.append(Entry(name="num_output", value=classes, line=settings.line))
    try:
        module = maker(layer, settings, shapes)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise layer.message.error(
            "the layer cannot be made",
            seen=f"inputs {[list(s) for s in shapes]}: {str(error).strip()[:200]}",
            fix="correct its settings, or the layers before it",
        ) from error
    settings.finish(*IGNORED_IN_SETTINGS)
    layer.message.finish(*IGNORED_IN_LAYER)
    return module
