from __future__ import annotations

import pytest
import torch
from torch import nn

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.run import Run, Solver
from tessella.core.errors import TrainError
from tessella.training import meter
from tessella.training.loop import train
from tessella.training.precision import MixedPrecision, arithmetic
from tessella.training.solver import optimizer_for
from tests.support.training import curve, losses, recipe, tell_late

CPU = torch.device("cpu")


def matmul_and_conv() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision


@pytest.mark.parametrize(("precision", "inside"), [("fp32", "ieee"), ("tf32", "tf32")])
def test_tf32_is_on_where_asked_for_and_put_back(precision, inside):
    before = (*matmul_and_conv(), torch.backends.cudnn.benchmark)
    with arithmetic(precision):
        assert matmul_and_conv() == (inside, inside)
        assert torch.backends.cudnn.benchmark
    assert (*matmul_and_conv(), torch.backends.cudnn.benchmark) == before


def test_the_order_of_sums_is_fixed_where_asked_for_and_put_back():
    """A cumulative sum backward, say, would be an operation without such a kernel on a GPU."""
    with arithmetic("fp32", deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(TrainError, match=r"same order each time.*put_ does not"):
        with arithmetic("fp32", deterministic=True):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_autocast_computes_in_the_precision(precision, dtype):
    module = nn.Linear(4, 2)
    with MixedPrecision(precision, CPU).autocast():
        assert module(torch.zeros(1, 4)).dtype == dtype
    assert module.weight.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(("factor", "length"), [(0.01, None), (100.0, 0.5)])
def test_gradients_longer_than_the_limit_are_shortened_to_it(precision, factor, length):
    """All together, as a vector; those of a scaled loss by what they are without its scale."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 2), nn.Linear(4, 2)]
    modules[1].load_state_dict(modules[0].state_dict())
    x, moved = torch.randn(3, 4), []
    for module, clip in zip(modules, (0.0, 0.5), strict=True):
        before = [p.detach().clone() for p in module.parameters()]
        optimizer = optimizer_for(module, Solver(name="sgd", lr=1.0, momentum=0, weight_decay=0))
        mixed = MixedPrecision(precision, CPU)
        mixed.backward(factor * module(x).square().mean())
        mixed.step(optimizer, clip=clip)
        pairs = zip(before, module.parameters(), strict=True)
        moved.append(torch.cat([(b - p.detach()).flatten() for b, p in pairs]))
    plain, clipped = moved
    expected = plain if length is None else plain * length / plain.norm()
    torch.testing.assert_close(clipped, expected, rtol=1e-4, atol=1e-6)
    assert bool(plain.norm() > 0.5) is (length is not None)


def test_fp16_skips_a_step_with_infinite_gradients_and_halves_the_scale():
    module = nn.Linear(4, 2)
    optimizer = optimizer_for(module, Solver(name="sgd"))
    mixed = MixedPrecision("fp16", CPU)
    before = module.weight.detach().clone()
    scale = mixed.scaler.get_scale()
    mixed.update((module(torch.ones(1, 4)) * 1e38).sum(), optimizer)  # · 65,536 overflows
    assert torch.equal(module.weight, before)
    assert mixed.scaler.get_scale() == scale / 2
    optimizer.zero_grad()
    mixed.update(module(torch.ones(1, 4)).sum(), optimizer)
    assert not torch.equal(module.weight, before)
    assert (int(mixed.skipped), int(mixed.in_a_row)) == (1, 0)
    plain = MixedPrecision("bf16", CPU)
    plain.update(module(torch.ones(1, 4)).sum(), optimizer)
    assert plain.skipped is None


NEVER = """
import torch
from torch import nn

class Never(nn.Sequential):
    def __init__(self, num_classes=3):
        super().__init__(nn.Flatten(), nn.Linear(144, num_classes))
    def forward(self, x):
        zero = (self[1].bias - self[1].bias).sum()
        return super().forward(x) + zero.sqrt()  # whose gradient at zero is infinite
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_training_that_only_skips_ends(dataset, tmp_path, monkeypatch, late):
    """The loss is finite, and no scale makes its gradients so."""
    (tmp_path / "never.py").write_text(NEVER)
    monkeypatch.setattr(meter, "HOPELESS", 6)
    expected = r"last 6 steps .*step 6; the gradient of 1.bias is not finite\."
    if late:  # by then there are the gradients of the next step, and no others
        tell_late(monkeypatch)
        expected = r"last 16 .*step 16; the gradient of 1.bias is not finite at step 17\."
    settings = recipe(
        dataset, network=f"{tmp_path / 'never.py'}:Never", precision="fp16", epochs=5,
        val_interval=9, snapshot_interval=9,
    )  # fmt: skip
    with pytest.raises(TrainError, match=expected):
        train(settings, tmp_path / "run")
    assert len(losses(Run(tmp_path / "run"))) == (16 if late else 6)


@pytest.fixture(scope="module")
def full(dataset, tmp_path_factory) -> Run:
    return train(recipe(dataset), tmp_path_factory.mktemp("full") / "run")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_trains_close_to_fp32(dataset, full, tmp_path, precision):
    run = train(recipe(dataset, precision=precision), tmp_path / "run")
    # The first loss differs by rounding only; later ones may, since fp16 skips steps that overflow.
    assert losses(run)[0] == pytest.approx(losses(full)[0], rel=0.01)
    assert losses(run)[0] != losses(full)[0]
    assert losses(run)[-1] < 0.3 * losses(run)[0]
    assert all(w.dtype == torch.float32 for w in run.latest().weights().values())
    assert run.latest().info.precision == precision


def test_the_loss_scale_survives_a_resume(dataset, tmp_path):
    settings = recipe(dataset, precision="fp16", keep_last=9)
    whole = train(settings, tmp_path / "run")
    expected = curve(whole), _scaler(whole.latest())
    first, *later = whole.checkpoints()
    assert _scaler(first)["scale"] < 2.0**16  # it has changed: there is something to lose
    for checkpoint in later:
        (checkpoint.path / "checkpoint.json").unlink()
    resumed = train(settings, whole.path, resume=True)
    assert (curve(resumed), _scaler(resumed.latest())) == expected


def _scaler(checkpoint: Checkpoint) -> dict[str, float]:
    return checkpoint.training_state()[1]["scaler"]
