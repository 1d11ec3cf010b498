"""Fused networks beside the same in float64: what is fused, what is not, and the gradients."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torchvision.models.resnet import Bottleneck

from tessella.artifacts.run import Recipe
from tessella.core.errors import UsageError
from tessella.kernels.conv import trained, volumes
from tessella.kernels.norm import projection
from tessella.kernels.softmax import entropy
from tessella.nn import fused as module_of
from tessella.nn.fused import compiled, fused
from tessella.nn.fused_calls import normed
from tessella.training.ways import usual_way


class Net(nn.Module):
    """Two convolutions, two norms, and what a case makes of them."""

    def __init__(self, how: Callable[..., Tensor], *, channels: int = 16, affine: bool = True):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels, affine=affine)
        self.other = nn.BatchNorm2d(channels)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.how(self, x, self.second(x)).mean((2, 3))


def in_place(net: Net, x: Tensor, y: Tensor) -> Tensor:
    made = net.norm(y)
    made += x
    return F.relu_(made)


def changed_behind(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """The residual is written into before the sum is read by the activation."""
    residual = net.second(x)
    made = net.norm(y) + residual
    residual.mul_(2)
    return F.relu(made) + residual


# how, and the calls: how many norms each has, whether it has a residual, and its activation
CASES = {
    "relu": (lambda n, x, y: F.relu(n.norm(y)), [(1, False, "relu")]),
    "relu6": (lambda n, x, y: F.relu6(n.norm(y)), [(1, False, "relu6")]),
    "silu": (lambda n, x, y: F.silu(n.norm(y), inplace=True), [(1, False, "silu")]),
    "residual": (lambda n, x, y: (x + n.norm(y)).relu(), [(1, True, "relu")]),
    "residual alone": (lambda n, x, y: n.norm(y) + x, [(1, True, None)]),
    "in place": (in_place, [(1, True, "relu")]),
    "two": (lambda n, x, y: F.relu(n.norm(y) + n.other(n.second(x))), [(2, False, "relu")]),
    "gelu": (lambda n, x, y: F.gelu(n.norm(y)), [(1, False, None)]),
    "silu of a sum": (lambda n, x, y: F.silu(n.norm(y) + x), [(1, False, None)]),
    "used twice": (lambda n, x, y: F.relu(n.norm(x)) + y, []),
    "norm read twice": (lambda n, x, y: F.relu(z := n.norm(y)) + z, [(1, False, None)]),
    "changed behind": (changed_behind, [(1, False, None)]),
    "into the residual": (lambda n, x, y: F.relu(n.second(x).add_(n.norm(y))), [(1, False, None)]),
}


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, bool, str | None]]:
    """Of each call that a graph got: norms, whether there is a residual, and the activation."""
    seen: list[tuple[int, bool, str | None]] = []
    fuse = module_of.fuse

    def spy(graph: fx.GraphModule) -> int:
        count = fuse(graph)
        found = [node for node in graph.graph.nodes if node.target is normed]
        seen.extend((len(n.args[0]), n.args[1] is not None, n.args[2]) for n in found)
        assert len(found) == count
        return count

    monkeypatch.setattr(module_of, "fuse", spy)
    return seen


def prepared(net: nn.Module) -> nn.Module:
    """With affine numbers that matter, in channels_last."""
    torch.manual_seed(1)
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d) and part.affine:
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.normal_(part.bias)
    return net.to(memory_format=torch.channels_last).train()


def agree(net: nn.Module, x: Tensor, rel: float = 2e-5, *, compiler: str | None = None) -> None:
    """Results, gradients and buffers of a fused call equal those in float64."""
    reference = copy.deepcopy(net).double()
    x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    call = fused(net) if compiler is None else compiled(net, compiler)
    for _ in range(2):
        found, expected = call(x), reference(x.double())
        assert (found - expected).norm() < rel * expected.norm()
        cotangent = torch.sin(torch.arange(found.numel())).view(found.shape)
        found.backward(cotangent)
        expected.backward(cotangent.double())
    pairs = [
        (name, one, other)
        for (name, one), other in zip(net.named_parameters(), reference.parameters(), strict=True)
        if other.grad is not None
    ]
    largest = max(float(other.grad.norm()) for _, _, other in pairs)
    for name, one, other in pairs:
        off = (one.grad - other.grad).norm()
        assert off < rel * other.grad.norm() + 1e-6 * largest, name
    for one, other in zip(net.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_what_follows_a_norm_is_fused_where_it_may_be(case, calls):
    how, expected = CASES[case]
    agree(prepared(Net(how)), torch.randn(4, 3, 6, 5))
    assert calls == expected


@pytest.mark.parametrize("what", ["no affine", "odd channels", "evaluation"])
def test_what_is_not_ours_runs_in_torch(what, calls):
    net = prepared(Net(CASES["residual"][0], channels=12, affine=what != "no affine"))
    if what == "evaluation":
        net.norm.eval()
    agree(net, torch.randn(4, 3, 6, 5))
    assert len(calls) == (what == "odd channels")  # asked again when it is called


def test_a_residual_network(calls):
    """Gradients of branches arrive apart; pooling is ours; counts of batches are right."""
    beside = nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32))
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
        Bottleneck(16, 8, downsample=beside), Bottleneck(32, 8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5),
    )  # fmt: skip
    agree(prepared(net), torch.randn(4, 3, 10, 10), rel=1e-4)
    assert calls == [(1, False, "relu")] * 3 + [(2, False, "relu")] + [
        (1, False, "relu"), (1, False, "relu"), (1, True, "relu")
    ]  # fmt: skip


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_projections_are_taken_with_their_norms(compiler, monkeypatch):
    """Of one norm and of two, with a step; kernels that are for 16 bits take float32 here, too."""
    beside = [nn.Sequential(nn.Conv2d(c, 64, 1, s, bias=False), nn.BatchNorm2d(64))
              for c, s in ((16, 1), (32, 2))]  # fmt: skip
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        Bottleneck(16, 16, downsample=beside[0]), Bottleneck(64, 16),
        nn.Conv2d(64, 32, 1), nn.BatchNorm2d(32), nn.ReLU(),
        Bottleneck(32, 16, stride=2, downsample=beside[1]),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip
    run: list[str] = []
    monkeypatch.setattr(projection, "TAKEN", {(16, 64), (32, 64)})
    monkeypatch.setattr(projection, "project", spied(run, projection.project))
    x = torch.randn(3, 3, 9, 8).contiguous(memory_format=torch.channels_last)
    net = prepared(net)
    call = fused(net) if compiler is None else compiled(net, compiler)
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        low = call(x)
    assert run == ["project"] * 3
    assert (low - net(x)).norm() < 2e-2 * low.norm()
    monkeypatch.setattr(projection, "_DTYPES", {torch.float32: "tf32_mma"})
    agree(net, x, rel=1e-4, compiler=compiler)
    assert run == ["project"] * 9


class Mobile(nn.Module):
    """Depthwise convolutions between norms, as in an EfficientNet, and one as in a ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.apart = nn.Sequential(
            nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.SiLU()
        )
        self.wide = nn.Conv2d(8, 8, 7, padding="same", groups=8)
        self.far = nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.join = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.apart(self.stem(x)), 3, 2, 1)
        return F.relu(self.join(self.far(self.wide(x))) + x).mean((2, 3))


def test_depthwise_convolutions_and_a_compiler(calls, monkeypatch):
    """Those whose margins are numbers are ours, and a compiler that traces keeps our calls."""
    run: list[str] = []
    monkeypatch.setattr(trained, "convolve", spied(run, trained.convolve))
    agree(prepared(Mobile()), torch.randn(2, 3, 9, 10), rel=1e-4, compiler="aot_eager")
    assert calls == [(1, False, "silu")] * 2 + [(1, True, "relu")]
    assert run == ["convolve"] * 4  # two in each of two passes


def spied(told: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: object, **named: object) -> Any:
        told.append(function.__name__)
        return function(*given, **named)

    return call


class Solid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Conv3d(2, 4, (3, 1, 5), padding=(1, 0, 2))
        self.less = nn.Conv3d(4, 3, 3, padding=1, bias=False)
        self.last = nn.Conv3d(3, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.less(self.odd(x).relu())).mean((2, 3, 4))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_convolutions_of_volumes_and_the_gradients_of_what_they_read(monkeypatch, compiler):
    """The kernel's part is torch's here: what it is asked for gives the gradients of float64."""
    run: list[str] = []

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        made = F.conv3d(x, weight, padding=tuple(t // 2 for t in weight.shape[2:]))
        return made.contiguous(memory_format=torch.channels_last_3d)

    monkeypatch.setattr(volumes, "runs", lambda x, w, window, groups: window[0] == (1, 1, 1))
    monkeypatch.setattr(volumes, "convolve", spied(run, convolve))
    torch.manual_seed(0)
    agree(Solid(), torch.randn(2, 2, 4, 5, 6), **({"compiler": compiler} if compiler else {}))
    assert len(run) >= 3  # two forward, one backward: nothing wants the gradient of the volume


class Instances(nn.Module):
    """Volumes that are normed one by one, with and without factors, and with what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 6, 3, padding=1, bias=False)
        self.norm, self.plain = nn.InstanceNorm3d(6, affine=True), nn.InstanceNorm3d(6)
        self.kept = nn.InstanceNorm3d(4, track_running_stats=True)
        self.second, self.last = nn.Conv3d(6, 6, 3, padding=1), nn.Conv3d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.norm(self.first(x)), 0.01, inplace=True)
        y = self.plain(self.second(y)) + y
        return self.kept(self.last(y)).square().mean((3, 4))


def test_instance_norms_keep_the_order_in_memory(monkeypatch):
    """torch's give contiguous values and gradients, so that no convolution behind one is ours."""
    asked: list[tuple[bool, bool]] = []

    def runs(x: Tensor, weight: Tensor, window: object, groups: int) -> bool:
        asked.append((x.shape[1] == 6, x.is_contiguous(memory_format=torch.channels_last_3d)))
        return False

    monkeypatch.setattr(volumes, "runs", runs)
    torch.manual_seed(0)
    net = Instances().to(memory_format=torch.channels_last_3d)
    nn.init.uniform_(net.norm.weight, 0.5, 1.5)
    nn.init.normal_(net.norm.bias)
    x = torch.randn(3, 2, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    agree(net, x, compiler="aot_eager")
    assert (True, True) in asked
    assert (True, False) not in asked


class Scored(nn.Module):
    """A network that knows its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 40)

    def forward(self, x: Tensor) -> Tensor:
        labels = torch.arange(len(x)) * 3
        smooth = F.cross_entropy(self.last(x), labels, label_smoothing=0.1)
        return torch.stack([smooth, F.cross_entropy(self.last(x), labels)])


def test_a_loss_in_a_network(monkeypatch):
    run: list[str] = []
    monkeypatch.setattr(entropy, "losses", spied(run, entropy.losses))
    torch.manual_seed(0)
    agree(Scored(), torch.randn(5, 6))
    assert run == ["losses"] * 2  # the smoothed one is torch's


def test_without_gradients():
    net = prepared(Net(CASES["residual"][0]))
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        torch.testing.assert_close(fused(copy.deepcopy(net))(x), net(x), rtol=1e-4, atol=1e-5)


class Asks(nn.Module):
    """Wants a number from the device in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(x)
        return made * 2 if float(made.detach().amax()) > 0 else made


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, where it goes on
def test_an_interruption_counts():
    x = torch.randn(2, 3, 4, 4)
    before = module_of.interruptions()
    fused(prepared(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())))(x)
    assert module_of.interruptions() == before
    fused(prepared(Asks()))(x)
    assert module_of.interruptions() > before


def test_without_triton_torch_trains(monkeypatch):
    """A torch without CUDA comes without it."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    with pytest.raises(UsageError, match="Triton"):
        fused(nn.BatchNorm2d(8))
    assert usual_way(Recipe(network="", dataset=""), torch.device("cuda")).way == "eager"
    code = (
        "import sys; sys.modules['triton'] = None\nimport tessella.training.loop, tessella.nn.fused"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
