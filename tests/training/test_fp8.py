"""Layers that train in 8 bits beside exact products of the same rounded numbers in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessella.artifacts.run import Recipe, Solver
from tessella.core.errors import UsageError
from tessella.nn import fp8
from tessella.training.loop import train
from tests.support.training import VIT, curve, losses, recipe

HALF = 2.0**-8  # the distance of bfloat16's numbers


def exact(x: Tensor, dim: int, dtype: torch.dtype, largest: float) -> Tensor:
    """Float64 numbers that eight bits hold with a factor for each slice."""
    factor = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-30) / largest
    return (x.float() / factor).to(dtype).double() * factor.double()


@pytest.mark.parametrize("shape", [(3, 7, 64), (5, 64)])
def test_a_layer_beside_exact_products(shape):
    torch.manual_seed(0)
    x = torch.randn(shape) * torch.logspace(-6, 6, shape[-2])[:, None]  # rows of many magnitudes
    x, weight, bias = x.bfloat16().requires_grad_(), torch.randn(96, 64) / 8, torch.randn(96)
    weight[3] *= 1e4
    weight[:, 5], weight[7] = 0, 0
    weight.requires_grad_()
    bias.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        made = fp8.linear(x, weight, bias)
    gradient = torch.randn_like(made) * torch.logspace(-9, 0, shape[-2])[:, None].bfloat16()
    made.backward(gradient)
    rows, g, w = x.detach().flatten(0, -2), gradient.flatten(0, -2), weight.detach()
    values, wide = torch.float8_e4m3fn, torch.float8_e5m2
    low, other = exact(rows, 1, values, 448), exact(w, 1, values, 448)
    added = bias.detach().bfloat16().double()
    sizes = low.abs() @ other.abs().T + added.abs()
    assert off(made.flatten(0, -2), low @ other.T + added, sizes) < 1
    factors = w.abs().amax(1).clamp(min=1e-30) / 448
    codes, low = other / factors[:, None].double(), exact(g * factors, 1, wide, 57344)
    assert off(x.grad.flatten(0, -2), low @ codes, low.abs() @ codes.abs()) < 1
    low, other = g.double().T, rows.double()
    assert off(weight.grad, low @ other, low.abs() @ other.abs()) < 1
    assert off(bias.grad, low.sum(1), low.abs().sum(1)) < 1


def off(made: Tensor, wanted: Tensor, sizes: Tensor) -> float:
    """The largest error in units of what a rounding to bfloat16 may do, and float32 sums of terms
    of these ``sizes``."""
    allowed = HALF * wanted.abs() + 2.0**-20 * sizes + 1e-30
    return float(((made.detach().double() - wanted).abs() / allowed).max())


def test_rows_that_lie_otherwise_are_laid_side_by_side():
    x = torch.randn(64, 16).t()
    codes, scale = fp8.rounded(x, fp8.VALUES)
    assert codes.is_contiguous()
    torch.testing.assert_close(codes.float() * scale, x, rtol=2**-4, atol=0.05)


def test_what_is_not_finite_stays_so():
    x = torch.randn(16, 64)
    x[3, 4], x[5, 6] = torch.inf, torch.nan
    with torch.autocast("cpu", torch.bfloat16):
        made = fp8.linear(x, torch.randn(32, 64))
    assert made.isfinite().all(1).tolist() == [n not in (3, 5) for n in range(16)]


def test_which_layers_change(monkeypatch):
    monkeypatch.setattr(fp8, "LEAST", 64)
    heads = nn.MultiheadAttention(64, 2, batch_first=True)
    odd = nn.MultiheadAttention(64, 2, batch_first=True, add_zero_attn=True)
    block = nn.ModuleDict({"heads": heads, "odd": odd, "wide": nn.Linear(64, 128),
                           "thin": nn.Linear(64, 32), "uneven": nn.Linear(72, 64)})  # fmt: skip
    net = nn.Sequential(nn.Linear(64, 64), block, nn.Linear(64, 64))
    before = dict(net.state_dict())
    assert fp8.to_fp8(net) == 3  # two of the heads
    changed = {n for n, layer in net.named_modules() if isinstance(layer, fp8.LAYERS)}
    assert changed == {"1.heads", "1.wide"}
    assert dict(net.state_dict()).keys() == before.keys()
    headless = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)), Twice())
    assert fp8.to_fp8(headless) == 3  # the last stage is a block, and no head
    x = torch.randn(2, 9, 64)
    with torch.autocast("cpu", torch.bfloat16):
        in_training = heads(x, x, x, need_weights=False)[0]
        masked = heads(x, x, x, need_weights=False, attn_mask=torch.zeros(9, 9))[0]
        plain = heads.eval()(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(masked, plain, rtol=0, atol=2e-2)
    off = (in_training - plain).float().norm() / plain.float().norm()
    assert 1e-3 < off < 0.1  # eight bits in training, and near what they round


def test_what_fp8_cannot_do_is_refused(dataset, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"no linear layer that 8 bits.*precision bf16"):
        train(recipe(dataset, precision="fp8"), tmp_path / "run")
    with pytest.raises(UsageError, match="leave backend out"):
        recipe(dataset, precision="fp8", backend="tessella")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(UsageError, match=r"sm_89 or later.*A100 is sm_80.*precision bf16"):
        fp8.require_products(torch.device("cuda"))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.other(self.one(x))


@pytest.fixture
def settings(dataset, tmp_path, monkeypatch) -> Recipe:
    """A ViT for 60 steps."""
    monkeypatch.setattr(fp8, "LEAST", 64)
    (tmp_path / "vit.py").write_text(VIT)
    return recipe(
        dataset, network=f"{tmp_path / 'vit.py'}:Small", precision="fp8", epochs=15.0,
        val_interval=15.0, snapshot_interval=7.5, keep_last=9, solver=Solver(name="adamw", lr=1e-3),
    )  # fmt: skip


def test_a_curve_is_near_that_of_bf16_and_goes_on_as_it_was(settings, tmp_path):
    """Within 5 % at each of 60 steps, in which it falls to a fifth; 2 % were seen."""
    plain = train(replace(settings, precision="bf16"), tmp_path / "bf16")
    run = train(settings, tmp_path / "run")
    ours, theirs = losses(run), losses(plain)
    assert ours == pytest.approx(theirs, rel=0.05)
    assert ours != theirs
    assert ours[-1] < 0.25 * ours[0]
    assert run.latest().info.precision == "fp8"
    expected = curve(run)
    (run.checkpoints()[-1].path / "checkpoint.json").unlink()
    assert curve(train(settings, run.path, resume=True)) == expected
    short = losses(train(replace(settings, epochs=2.0), tmp_path / "short"))
    again = train(replace(settings, epochs=2.0, recompute=True), tmp_path / "again")
    assert losses(again) == short
    # a row's factor is its own, so that a part of a batch is rounded as in the whole one
    parts = train(replace(settings, epochs=2.0, accumulate=2), tmp_path / "parts")
    assert losses(parts) == pytest.approx(short, rel=2e-3)
