"""Training on our kernels gives torch's loss curve, within the noise that torch itself has.

The noise is measured here: the same training on torch once more, with cuDNN's algorithms for the
other memory format, and without cuDNN.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessella.artifacts.run import Precision
from tessella.kernels import catalog
from tessella.nn import convert
from tessella.search import find as search
from tessella.search import functional
from tessella.training.loop import train
from tessella.training.precision import MixedPrecision, arithmetic
from tests.support.training import losses, recipe, write_dataset

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

STEPS = 50
# how much further than torch from torch our curve may be; and where torch's own noise is almost
# nothing, a part of the first loss
MARGIN, LEAST = 4.0, {"fp32": 1e-5, "tf32": 1e-3, "fp16": 2e-3, "bf16": 1e-2}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, 16),
    )  # fmt: skip


def curve(precision: Precision, *, backend: str = "torch", layout: torch.memory_format) -> Tensor:
    """The losses of 50 steps of momentum SGD: 64 random images, whose means decide the class."""
    module = convert(network(), backend=backend).cuda().to(memory_format=layout)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(64, 8, 16, 16, generator=generator)
    images += torch.randn(64, 8, 1, 1, generator=generator)
    labels = images.mean((2, 3)).argmax(1).cuda()
    images = images.cuda().contiguous(memory_format=layout)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    mixed = MixedPrecision(precision, torch.device("cuda"))
    made = []
    with arithmetic(precision):
        for _ in range(STEPS):
            optimizer.zero_grad()
            with mixed.autocast():
                logits = module(images)
            loss = F.cross_entropy(logits.float(), labels)
            mixed.update(loss, optimizer)
            made.append(loss.detach())
    return torch.stack(made).double().cpu()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("timings")


@pytest.fixture(autouse=True)
def _one_configuration_a_kernel(monkeypatch, folder: Path) -> None:
    """Every algorithm, but only its most promising configuration: minutes become seconds."""
    every = catalog.Kernel.configs
    monkeypatch.setattr(catalog.Kernel, "configs", lambda row, problem: every(row, problem)[:1])
    monkeypatch.setattr(functional, "CACHE_FOLDER", folder)
    monkeypatch.setattr(functional, "_ready", {})


@pytest.fixture
def choices(monkeypatch, request) -> dict[str, str]:
    """By problem: the kernel that training took. With ``ours``, no library wins where we fit."""
    taken: dict[str, str] = {}
    found = search.find

    def find(problem, constants, **arguments):
        trials = found(problem, constants, **arguments)
        if request.param == "ours":
            source = {t.kernel: catalog.kernel(t.kernel).source for t in trials}
            trials = tuple(
                sorted(
                    trials, key=lambda t: (t.refused is not None, source[t.kernel] != "tessella")
                )
            )
        shapes = " ".join("×".join(map(str, m.shape)) for m in problem.inputs if m)
        taken[f"{problem.op} {shapes} {problem.inputs[0].dtype}"] = trials[0].kernel
        return trials

    monkeypatch.setattr(functional.search, "find", find)
    return taken


@pytest.mark.parametrize("choices", ["fastest", "ours"], indirect=True)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32", "tf32"])
def test_the_loss_curve_is_torchs(precision: Precision, choices: dict[str, str], request):
    last, first = torch.channels_last, torch.contiguous_format
    torchs = curve(precision, layout=last)
    others = [curve(precision, layout=first)]
    torch.backends.cudnn.enabled = False
    try:
        others.append(curve(precision, layout=last))
    finally:
        torch.backends.cudnn.enabled = True
    noise = torch.stack([(o - torchs).abs() for o in others]).amax(0).cummax(0).values
    ours = curve(precision, backend="tessella", layout=last)
    apart = (ours - torchs).abs()
    print(
        f"\n{request.node.name}: loss {ours[0]:.4f} → {ours[-1]:.4f} (torch {torchs[-1]:.4f}); "
        f"apart at most {apart.max():.1e}, torch from torch {noise.max():.1e}"
    )
    for problem, kernel in choices.items():
        print(f"   {problem}: {kernel}")
    assert {p.split()[0] for p in choices} == {
        "conv2d", "conv2d_dgrad", "conv2d_wgrad", "linear", "matmul"
    }  # fmt: skip
    assert ours[-1] < 0.5 * ours[0]
    allowed = MARGIN * noise + LEAST[precision] * torchs[0]
    assert (apart <= allowed).all(), (apart / allowed).max()


def test_a_run_on_our_kernels(tmp_path: Path):
    dataset = write_dataset(tmp_path / "stripes", train=40, val=18)
    ours = train(recipe(dataset, epochs=5, backend="tessella"), tmp_path / "ours")
    torchs = train(recipe(dataset, epochs=5), tmp_path / "torch")
    assert ours.recipe.backend == "tessella"
    assert losses(ours)[:8] == pytest.approx(losses(torchs)[:8], rel=1e-3)
    assert set(ours.latest().weights()) == set(torchs.latest().weights())
