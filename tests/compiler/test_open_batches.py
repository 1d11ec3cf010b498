"""Networks with an open batch, several inputs, masks, or weights made for each sample: compiled,
saved, loaded, and compared with torch in float64."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tessella as ts
from tessella.artifacts import program
from tessella.core.errors import CompileError
from tessella.core.spec import TensorSpec


class Modulated(nn.Module):
    """A convolution whose weights each sample's style scales (https://arxiv.org/abs/1912.04958)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.style = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        weight = self.weight[None] * self.style(z)[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        x = x.reshape(1, n * c, h, w)
        y = F.conv2d(x, weight.reshape(n * 6, c, 3, 3), padding=1, groups=n)
        return y.reshape(n, 6, h, w)


class DynamicFilters(nn.Module):
    """A filter for each channel of each sample, which another network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Linear(5, 4 * 3 * 3)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        weight = self.filters(z).reshape(n * c, 1, 3, 3)
        y = F.conv2d(x.reshape(1, n * c, h, w), weight, padding=1, groups=n * c)
        return y.reshape(n, c, h, w)


class Spectral(nn.Module):
    """Complex weights for each frequency (https://arxiv.org/abs/2010.08895)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 6, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        mixed = torch.einsum("nihw,iohw->nohw", spectrum, self.weight.to(spectrum.dtype))
        return torch.fft.irfft2(mixed, s=x.shape[-2:])


class Masked(nn.Module):
    """A transformer's layer with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layers(x, src_key_padding_mask=padding)
        return made


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=(1, *shape))


NETWORKS = {
    Modulated: (spec("x", 4, 6, 6), spec("z", 5)),
    DynamicFilters: (spec("x", 4, 6, 6), spec("z", 5)),
    Spectral: (spec("x", 4, 6, 6),),
    Masked: (spec("x", 6, 8), spec("padding", 6, dtype="bool")),
}


@pytest.mark.parametrize("batch", [(1, 1, 2), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)
def test_several_inputs_and_an_open_batch(
    make: type[nn.Module], batch: tuple[int, int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    network, specs = make().eval(), NETWORKS[make]
    plan = ts.compile(network, inputs=specs, batch=batch, target="cpu")
    engine = ts.load(plan.save(tmp_path / "network.plan"))
    exact = copy.deepcopy(network).double()
    for n in (1, 2, 5):
        given = [torch.randn(s.at(n)) for s in specs]
        given = [t > 0.9 if s.dtype == "bool" else t for s, t in zip(specs, given, strict=True)]
        right = exact(*(t.double() if t.is_floating_point() else t for t in given))
        made = engine(*given)["output"]
        torch.testing.assert_close(made.double(), right, rtol=1e-4, atol=1e-5)


def test_a_plan_that_could_not_be_loaded_is_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: groups that follow the batch were written, and refused when the plan was read."""
    known = program._FOLLOW_BATCH - {"groups"}
    monkeypatch.setattr(program, "_FOLLOW_BATCH", known)
    network, specs = DynamicFilters().eval(), NETWORKS[DynamicFilters]
    with pytest.raises(CompileError, match=r"cannot be loaded again.*groups") as raised:
        ts.compile(network, inputs=specs, batch=(1, 1, 2), target="cpu")
    assert "batch=" in str(raised.value.fix)
