"""Single Caffe layers against loops in float64 that follow Caffe's formulas."""

import math

import numpy as np
import pytest
import torch

from tessella.core.errors import UsageError
from tessella.nn.prototxt.definition import read
from tessella.nn.prototxt.layer_types import make


def layer_module(kind: str, settings: str, *shapes: tuple[int, ...]) -> torch.nn.Module:
    bottoms = " ".join(f'bottom: "b{i}"' for i in range(len(shapes)))
    text = f'layer {{ name: "x" type: "{kind}" {bottoms} top: "x" {settings} }}'
    return make(read(text).layers[0], [torch.Size(s) for s in shapes]).double()


def caffe_pool(x: np.ndarray, kind: str, kernel, stride, pad) -> np.ndarray:
    """Caffe's pooling, window by window."""
    size = []
    for axis in range(2):
        n = x.shape[2 + axis]
        out = math.ceil((n + 2 * pad[axis] - kernel[axis]) / stride[axis]) + 1
        if pad[axis] and (out - 1) * stride[axis] >= n + pad[axis]:
            out -= 1
        size.append(out)
    y = np.empty((*x.shape[:2], *size))
    for row in range(size[0]):
        for column in range(size[1]):
            low = [row * stride[0] - pad[0], column * stride[1] - pad[1]]
            high = [min(low[a] + kernel[a], x.shape[2 + a] + pad[a]) for a in range(2)]
            area = (high[0] - low[0]) * (high[1] - low[1])
            window = x[:, :, max(low[0], 0) : high[0], max(low[1], 0) : high[1]]
            if kind == "MAX":
                y[:, :, row, column] = window.max((2, 3))
            else:
                y[:, :, row, column] = window.sum((2, 3)) / area
    return y


@pytest.mark.parametrize("kind", ["MAX", "AVE"])
@pytest.mark.parametrize(
    ("height", "width", "kernel", "stride", "pad"),
    [
        (8, 8, (3, 3), (2, 2), (0, 0)),  # rounds up
        (7, 10, (3, 3), (2, 2), (1, 1)),  # a last window that would start in the padding
        (6, 9, (2, 3), (2, 2), (1, 0)),
        (5, 5, (4, 4), (3, 3), (2, 2)),
        (13, 12, (3, 2), (3, 2), (0, 1)),
        (2, 3, (3, 3), (2, 2), (0, 0)),  # window larger than the image
        (4, 4, (4, 4), (1, 1), (0, 0)),
    ],
)
def test_pooling_follows_caffes_windows(kind, height, width, kernel, stride, pad):
    x = torch.randn(2, 3, height, width, dtype=torch.float64)
    settings = (
        f"pooling_param {{ pool: {kind} kernel_h: {kernel[0]} kernel_w: {kernel[1]} "
        f"stride_h: {stride[0]} stride_w: {stride[1]} pad_h: {pad[0]} pad_w: {pad[1]} }}"
    )
    expected = caffe_pool(x.numpy(), kind, kernel, stride, pad)
    found = layer_module("Pooling", settings, x.shape)(x)
    torch.testing.assert_close(found, torch.from_numpy(expected))


def test_pooling_can_round_down_and_be_global():
    x = torch.randn(1, 2, 8, 8, dtype=torch.float64)
    down = layer_module(
        "Pooling", "pooling_param { kernel_size: 3 stride: 2 round_mode: FLOOR }", x.shape
    )
    assert down(x).shape == (1, 2, 3, 3)
    whole = layer_module("Pooling", "pooling_param { pool: MAX global_pooling: true }", x.shape)
    torch.testing.assert_close(whole(x), x.amax((2, 3), keepdim=True))


def test_lrn_within_a_channel():
    x = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    module = layer_module(
        "LRN",
        "lrn_param { local_size: 3 alpha: 2 beta: 0.5 norm_region: WITHIN_CHANNEL }",
        x.shape,
    )
    y = torch.empty_like(x)
    for h in range(5):
        for w in range(6):
            near = x[:, :, max(h - 1, 0) : h + 2, max(w - 1, 0) : w + 2]
            y[:, :, h, w] = x[:, :, h, w] / (1 + 2 * near.square().sum((2, 3)) / 9) ** 0.5
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4, 5)])
def test_scale_and_its_gradients(shape):
    x = torch.randn(shape, dtype=torch.float64)
    module = layer_module("Scale", "scale_param { bias_term: true }", shape).train()
    with torch.no_grad():
        module.weight.normal_()
        module.bias.normal_()
    per_channel = (1, -1, *[1] * (len(shape) - 2))
    y = module(x)
    torch.testing.assert_close(
        y, x * module.weight.view(per_channel) + module.bias.view(per_channel)
    )
    seed = torch.randn_like(y)
    y.backward(seed)
    others = [axis for axis in range(len(shape)) if axis != 1]
    torch.testing.assert_close(module.weight.grad, (seed * x).sum(others))
    torch.testing.assert_close(module.bias.grad, seed.sum(others))


def test_dilated_rectangular_convolution():
    x = torch.randn(1, 2, 9, 9, dtype=torch.float64)
    module = layer_module(
        "Convolution",
        "convolution_param { num_output: 1 kernel_h: 3 kernel_w: 1 pad_h: 1 pad_w: 0 dilation: 2 "
        "bias_term: false }",
        x.shape,
    )
    weight, padded = module.weight.detach(), torch.nn.functional.pad(x, (0, 0, 1, 1))
    y = torch.zeros(1, 1, 7, 9, dtype=torch.float64)
    for r in range(3):
        y += (padded[:, :, 2 * r : 2 * r + 7] * weight[:, :, r : r + 1]).sum(1, keepdim=True)
    torch.testing.assert_close(module(x), y)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("eltwise_param { operation: PROD }", lambda a, b: a * b),
        ("eltwise_param { operation: MAX }", lambda a, b: torch.where(a > b, a, b)),
        ("eltwise_param { operation: 1 }", lambda a, b: a + b),
        ("eltwise_param { coeff: 2 coeff: -1 }", lambda a, b: 2 * a - b),
    ],
)
def test_eltwise(settings, expected):
    a, b = torch.randn(2, 3, 4, 4, 4, dtype=torch.float64)
    module = layer_module("Eltwise", settings, a.shape, b.shape)
    torch.testing.assert_close(module(a, b), expected(a, b))


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("ReLU", "relu_param { negative_slope: 0.1 }", lambda x: torch.where(x > 0, x, 0.1 * x)),
        ("PReLU", "", lambda x: torch.where(x > 0, x, 0.25 * x)),
        ("Sigmoid", "", lambda x: 1 / (1 + (-x).exp())),
        ("TanH", "", lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp())),
        ("Power", "power_param { power: 2 scale: 3 shift: 1 }", lambda x: (1 + 3 * x) ** 2),
        ("Softmax", "", lambda x: x.exp() / x.exp().sum(1, keepdim=True)),
        ("Split", "", lambda x: x),
        ("Flatten", "", lambda x: x.reshape(2, 48)),
        ("Reshape", "reshape_param { shape { dim: 0 dim: 6 dim: -1 } }", lambda x: x.view(2, 6, 8)),
    ],
)
def test_pointwise_and_shape_layers(kind, settings, expected):
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(layer_module(kind, settings, x.shape)(x), expected(x))


@pytest.mark.parametrize(
    ("filler", "low", "high", "std"),
    [
        ('type: "constant" value: 3', 3.0, 3.0, 0.0),
        ('type: "uniform" min: 1 max: 2', 1.0, 2.0, 1 / math.sqrt(12)),
        ('type: "gaussian" mean: 5 std: 0.1', 4.0, 6.0, 0.1),
        ('type: "xavier" variance_norm: FAN_OUT', -math.sqrt(3 / 90), math.sqrt(3 / 90), 90**-0.5),
        ('type: "msra"', -2.0, 2.0, math.sqrt(2 / 36)),
    ],
)
def test_fillers(filler, low, high, std):
    torch.manual_seed(0)
    settings = f"convolution_param {{ num_output: 10 kernel_size: 3 weight_filler {{ {filler} }} }}"
    weight = layer_module("Convolution", settings, (1, 4, 8, 8)).weight
    assert low - 1e-6 <= weight.min()
    assert weight.max() <= high + 1e-6
    assert abs(weight.std() - std) <= 0.12 * std


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("LRN", "lrn_param { local_size: 4 }", "local_size must be odd"),
        ("Scale", "scale_param { axis: 2 }", "axis is not supported"),
        ("Eltwise", "eltwise_param { coeff: 1 coeff: 2 }", "coeff goes with SUM"),
        ("Pooling", "pooling_param { kernel_size: 3 pad: 2 }", "at most half the kernel"),
        ("Dropout", "dropout_param { scale_train: false }", "scale_train"),
    ],
)
def test_what_cannot_be_built_is_refused(kind, settings, message):
    with pytest.raises(UsageError, match=f"layer 'x'.*{message}"):
        layer_module(kind, settings, (1, 4, 8, 8))
