"""Layers on our kernels: torch's values, gradients, names and training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella import graph
from tessella.core.errors import UsageError
from tessella.core.spec import TensorSpec
from tessella.nn import convert, layers
from tessella.training.loop import train
from tests.support.training import losses, recipe, write_dataset

CONVOLUTIONS = {
    "plain": {"kernel_size": 3},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "same": {"kernel_size": 4, "padding": "same"},
    "valid": {"kernel_size": (1, 3), "padding": "valid"},
    "groups": {"kernel_size": 3, "groups": 2, "bias": False, "dilation": (1, 2)},
    "reflect": {"kernel_size": 3, "padding": (1, 2), "padding_mode": "reflect"},
}


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The result, and the gradients of the input and the parameters, for a fixed cotangent."""
    x = x.detach().requires_grad_()
    made = layer(x)
    cotangent = torch.sin(torch.arange(made.numel(), dtype=torch.float32)).view(made.shape)
    made.backward(cotangent.to(made.dtype))
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    layer.zero_grad()
    return [made.detach(), *grads]


def agree(layer: nn.Module, x: Tensor, rel: float = 1e-5) -> None:
    wanted = gradients(layer, x)
    made = gradients(convert(layer), x)
    for ours, torchs in zip(made, wanted, strict=True):
        assert ours.dtype == torchs.dtype
        assert ours.shape == torchs.shape
        assert (ours - torchs).abs().max() <= rel * torchs.abs().max()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("format", ["contiguous_format", "channels_last"])
@pytest.mark.parametrize("arguments", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolution(arguments, format):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, **arguments)
    x = torch.randn(3, 4, 7, 8).contiguous(memory_format=getattr(torch, format))
    agree(layer, x)
    assert type(layer) is layers.Conv2d


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape, bias):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias)
    agree(layer, torch.randn(shape))
    assert type(layer) is layers.Linear


def test_a_gradient_that_is_a_broadcast_view():
    layer = convert(nn.Conv2d(2, 3, 3))
    x = torch.randn(2, 2, 5, 5)
    layer(x).sum().backward()
    wanted = nn.Conv2d(2, 3, 3)
    wanted.load_state_dict(layer.state_dict())
    wanted(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, wanted.weight.grad)


def test_derivatives_by_differences(monkeypatch):
    monkeypatch.setattr(layers, "DTYPES", (torch.float64,))
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True)
        for s in ((2, 4, 5, 4), (6, 2, 3, 2), (6,))
    )
    window = ((2, 1), (1, 0), (1, 2), 2)
    assert torch.autograd.gradcheck(
        lambda *tensors: layers.conv2d(*tensors, window), (x, weight, bias)
    )
    x, weight, bias = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 4), (5, 4), (5,))
    )
    assert torch.autograd.gradcheck(layers.linear, (x, weight, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    x = torch.randn(2, 2, 5, 5)
    made = []
    for module in (network, convert(network)):
        with torch.autocast("cpu", dtype):
            result = module(x)
        assert result.dtype == dtype
        result.float().square().sum().backward()
        made.append([result.detach(), *(p.grad for p in module.parameters())])
        module.zero_grad()
    for ours, torchs in zip(*made, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=2e-2, atol=2e-2)


def test_kernels_run_outside_of_autocast(monkeypatch):
    """One that sums in float32 by torch's functions would be rounded otherwise."""
    seen = []
    for name in ("conv2d", "linear"):
        run = getattr(layers.kernels, name)
        monkeypatch.setattr(
            layers.kernels,
            name,
            lambda *a, run=run, **k: seen.append(torch.is_autocast_enabled("cpu")) or run(*a, **k),
        )
    network = convert(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.randn(1, 2, 4, 4))
    assert seen == [False, False]


def test_a_gradient_nobody_wants_is_not_computed(monkeypatch):
    asked = []
    for name in ("conv2d_dgrad", "conv2d_wgrad"):
        run = getattr(layers.kernels, name)
        monkeypatch.setattr(
            layers.kernels,
            name,
            lambda *a, name=name, run=run, **k: asked.append(name) or run(*a, **k),
        )
    layer = convert(nn.Conv2d(2, 3, 3))
    layer(torch.randn(1, 2, 4, 4)).sum().backward()
    assert asked == ["conv2d_wgrad"]
    layer.weight.requires_grad_(False)
    layer(torch.randn(1, 2, 4, 4, requires_grad=True)).sum().backward()
    assert asked == ["conv2d_wgrad", "conv2d_dgrad"]


def test_convert_keeps_everything_and_goes_back():
    class Own(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    network = nn.Sequential(nn.Conv2d(2, 2, 1), Own(2, 2, 1), nn.Flatten(), nn.Linear(8, 2))
    names, parameters = list(network.state_dict()), list(network.parameters())
    called = []
    network[0].register_forward_hook(lambda *a: called.append(1))
    assert convert(network) is network
    assert [type(m) for m in network] == [layers.Conv2d, Own, nn.Flatten, layers.Linear]
    assert list(network.state_dict()) == names
    assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
    network(torch.randn(1, 2, 2, 2))
    assert called == [1]
    convert(network, backend="torch")
    assert [type(m) for m in network] == [nn.Conv2d, Own, nn.Flatten, nn.Linear]
    with pytest.raises(UsageError, match="unknown backend"):
        convert(network, backend="cudnn")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_the_compiler_sees_torchs_operators():
    network = convert(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)))
    image = TensorSpec(name="image", dtype="float32", shape=(1, 2, 4, 4))
    assert [n.op for n in graph.capture(network, [image]).nodes] == ["conv2d", "reshape", "linear"]


def test_what_no_kernel_of_ours_takes_is_torchs():
    layer = convert(nn.Conv2d(2, 3, 3)).double()
    x = torch.randn(2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), F.conv2d(x, layer.weight, layer.bias))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_has_torchs_loss_curve(tmp_path: Path, precision):
    dataset = write_dataset(tmp_path / "stripes", train=40, val=18)
    runs = [
        train(recipe(dataset, backend=backend, precision=precision), tmp_path / backend)
        for backend in ("torch", "tessella")
    ]
    torchs, ours = map(losses, runs)
    assert ours[-1] < 0.5 * ours[0]
    # bfloat16 has 8 bits: small losses are as far apart as those of the first steps
    near = {"rel": 1e-4} if precision == "fp32" else {"rel": 2e-2, "abs": torchs[0] * 2**-9}
    assert ours == pytest.approx(torchs, **near)
    assert list(runs[0].latest().weights()) == list(runs[1].latest().weights())
