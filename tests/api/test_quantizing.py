"""Quantization-aware training: evaluated as the plan computes, and not worse than rounding after."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_static,
)
from sklearn.datasets import load_digits
from torch import nn

import tessella as ts
from tessella import api, compiler, runtime
from tessella.api.sources import ANY, opened
from tessella.artifacts.plan import Plan
from tessella.artifacts.run import Run
from tessella.core.errors import CompileError, UsageError
from tessella.core.spec import TensorSpec
from tessella.graph.interpret import interpret
from tessella.graph.onnx import read, write
from tessella.graph.quantization_aware import QuantizationAware, _Rounded
from tessella.kernels.shared import onednn
from tests.support.cli import in_process
from tests.support.networks import network
from tests.support.training import recipe, write_dataset

pytestmark = pytest.mark.instructions

TRAIN, BATCH = 1200, 199  # of 1,797 digits; three batches of the others judge
IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 1, 8, 8))


class Residual(nn.Module):
    """A block whose first layer, sum and last layer differ in their scales."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, made, 3, 2, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1)
        self.norm, self.past = nn.BatchNorm2d(made), nn.Conv2d(channels, made, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.past(x))


def separable(channels: int, made: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, made, 1, bias=False), nn.BatchNorm2d(made), nn.ReLU(),
    ]  # fmt: skip


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    return images[order], torch.tensor(data.target)[order]


def learn(net: nn.Module, epochs: int, rate: float) -> None:
    images, labels = (t[:TRAIN] for t in digits())
    solver = torch.optim.AdamW(net.parameters(), rate)
    torch.manual_seed(0)
    net.train()
    for _ in range(epochs):
        for batch in torch.randperm(TRAIN).split(50):
            solver.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            solver.step()
    net.eval()


def right(scores: torch.Tensor) -> int:
    return int((scores.argmax(1) == digits()[1][TRAIN:]).sum())


@torch.inference_mode()
def evaluated(net: nn.Module) -> torch.Tensor:
    made: torch.Tensor = net(digits()[0][TRAIN:])
    return made


@pytest.fixture(scope="module")
def residual() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), Residual(16, 32),
        Residual(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    learn(net, 3, 5e-3)
    return net


@pytest.fixture(scope="module")
def uneven() -> nn.Module:
    """A depthwise network whose channels differ by up to 400 times, as folded batch norms do."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        *separable(16, 32, 1), *separable(32, 32, 2), *separable(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    learn(net, 8, 5e-3)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for place in (6, 12):  # a pointwise convolution; what follows its norm takes it back
            factor = torch.exp(6 * torch.rand(32, generator=drawn) - 3)
            net[place + 1].weight.mul_(factor)
            net[place + 1].bias.mul_(factor)
            net[place + 3].weight.div_(factor[:, None, None, None])
    return net


class _Images(CalibrationDataReader):
    """ONNX Runtime's way to be shown batches."""

    def __init__(self) -> None:
        self._left = iter(digits()[0][:300].split(50))

    def get_next(self) -> dict[str, Any] | None:
        batch = next(self._left, None)
        return None if batch is None else {"image": batch.numpy()}


def rounding(net: nn.Module, **settings: object) -> QuantizationAware:
    shown = [{"image": batch} for batch in digits()[0][:300].split(50)]
    return ts.quantization_aware(net, shown, inputs=[IMAGE], target="cpu", **settings).eval()


def every_layer(net: nn.Module) -> dict[str, str]:
    graph = opened(net, ANY, inputs=[IMAGE], trust_code=False).graph
    return dict.fromkeys(compiler.layers(graph), "int8")


def plan_of(net: QuantizationAware) -> Plan:
    return ts.compile(net.graph(), batch=BATCH, target="cpu", untuned=True)


@torch.inference_mode()
def differing(plan: Plan, net: QuantizationAware) -> tuple[int, int, int]:
    """Of the integers between the layers: how many differ, by how much at most; and all."""
    bucket = runtime.load(plan).bound(BATCH)
    lowered = net._compiled(torch.device("cpu"))
    wrong = most = count = 0
    for batch in digits()[0][TRAIN:].split(BATCH):
        seen = {}
        interpret(
            lowered,
            {"image": batch},
            watch=lambda node, read, made: seen.update(
                {
                    v.name: t
                    for v, t in zip(node.outputs, made, strict=True)
                    if t.dtype == torch.int8
                }
            ),
        )
        for bound, made in bucket.stepwise([batch]):
            for name, tensor in zip(bound.step.outputs, made, strict=True):
                if tensor.dtype == torch.int8:
                    apart = (tensor.int() - seen[name].int()).abs()
                    count += apart.numel()
                    wrong += int((apart > 0).sum())
                    most = max(most, int(apart.max()))
    return wrong, most, count


def test_an_evaluation_is_the_plan_in_every_answer(residual: nn.Module) -> None:
    """The first layer is float32, whose sums kernels order as they like: there a number between
    two steps may fall either way, which moves what follows.
    """
    net = rounding(residual)
    learn(net, 1, 1e-3)
    plan = plan_of(net)
    ours = torch.from_numpy(runtime.load(plan)(image=digits()[0][TRAIN:].numpy())["output"])
    assert torch.equal(ours.argmax(1), evaluated(net).argmax(1))
    assert right(evaluated(net)) >= right(evaluated(residual)) - 3
    wrong, most, count = differing(plan, net)
    assert most <= 1
    assert wrong <= 2e-5 * count


def test_where_all_layers_are_int8_all_integers_are_the_plans(uneven: nn.Module) -> None:
    net = rounding(uneven, precisions=every_layer(uneven))
    learn(net, 1, 3e-3)
    plan = plan_of(net)
    steps = plan.program.buckets[0].steps
    assert all(len(s.inputs) == 5 for s in steps if s.op in ("conv2d", "linear"))
    wrong, _, count = differing(plan, net)
    assert count > 1_000_000
    assert wrong == 0


def test_it_brings_back_what_rounding_afterwards_loses(uneven: nn.Module, tmp_path: Path) -> None:
    """Float32, rounded afterwards, by ONNX Runtime too, and trained with its roundings."""
    net = rounding(uneven, precisions=every_layer(uneven))
    after = right(evaluated(net))
    write(opened(uneven, ANY, inputs=[IMAGE], trust_code=False).graph, tmp_path / "net.onnx")
    quantize_static(
        tmp_path / "net.onnx",
        tmp_path / "int8.onnx",
        _Images(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
        reduce_range=onednn.saturates(),
    )
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx")
    given = {"image": digits()[0][TRAIN:].numpy()}
    theirs = right(torch.from_numpy(session.run(None, given)[0]))
    learn(net, 4, 3e-3)
    trained, best = right(evaluated(net)), right(evaluated(uneven))
    assert after < best - 30  # of 597
    assert trained > after + 30
    assert trained > theirs
    assert trained >= best - 12


def test_a_files_reader_finds_what_was_trained(residual: nn.Module, tmp_path: Path) -> None:
    """As ONNX with Q/DQ: read by us to the same plan, and by ONNX Runtime to the same classes."""
    net = rounding(residual)
    learn(net, 1, 1e-3)
    write(net.graph(), tmp_path / "net.onnx")
    again = compiler.read_quantized((tmp_path / "net.onnx").read_bytes(), target="cpu").eval()
    assert torch.equal(evaluated(again), evaluated(net))
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    theirs = session.run(None, {"image": digits()[0][TRAIN:].numpy()})[0]
    agree = torch.from_numpy(theirs).argmax(1) == evaluated(net).argmax(1)
    assert agree.float().mean() >= (0.9 if onednn.saturates() else 0.99)


def test_weights_reach_as_far_as_the_target_multiplies(residual: nn.Module) -> None:
    """7 bits on a CPU whose products saturate, 8 elsewhere; after the training as before."""
    shown = [{"image": digits()[0][:50]}]
    graph = opened(residual, ANY, inputs=[IMAGE], trust_code=False).graph
    for target, limit in (("cpu", compiler.calibration.weight_limit("cpu")), ("sm_90", 127)):
        found = compiler.calibrate(graph, shown, target=target)
        net = compiler.quantization_aware(graph, found, target="cpu")
        learn(net, 1, 1e-3)
        weights = [
            t for v, t in net.graph().constants.items() if t.dtype == torch.int8 and t.dim() > 1
        ]
        assert len(weights) == 7
        for weight in weights:
            assert set(weight.flatten(1).abs().amax(1).tolist()) == {limit}


def test_gradients_pass_roundings_but_not_what_is_out_of_range(residual: nn.Module) -> None:
    net = rounding(residual).train()
    images = digits()[0][:8].clone().requires_grad_()
    made = net(images)
    torch.testing.assert_close(made, net.eval()(images.detach()), atol=2e-4, rtol=0)
    made.sum().backward()
    assert all(bool(p.grad.abs().sum() > 0) for p in net.parameters())
    scale = torch.tensor(0.01)
    x = torch.tensor([0.5, 1.26, 1.3, -1.5], requires_grad=True)
    _Rounded.apply(x, scale, None, 0, "int8").sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([100.0, 100, 0, 0]))


@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_networks_keep_all_their_layers_in_int8(name: str) -> None:
    """Batch norms are folded; a transformer's layers on three axes go through the file, too."""
    module, spec = network(name)
    shape = (8, *spec.shape[1:])
    graph = opened(module, ANY, inputs=[spec], trust_code=False).graph
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = compiler.calibrate(graph, [{"image": images}], target="cpu")
    net = compiler.quantization_aware(graph, found, target="cpu")
    solver = torch.optim.SGD(net.parameters(), 1e-4)
    net(images).square().mean().backward()
    solver.step()
    plan = ts.compile(net.eval().graph(), batch=8, target="cpu", untuned=True)
    layers = [s for s in plan.program.buckets[0].steps if s.op in ("conv2d", "linear")]
    assert sum(len(s.inputs) == 5 for s in layers) == len(layers) - 1  # all but the first
    ours = torch.from_numpy(runtime.load(plan)(image=images.numpy())["output"])
    assert torch.equal(ours.argmax(1), net(images).argmax(1))


def test_a_network_without_roundings_is_refused() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 10)).eval()
    spec = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    with pytest.raises(CompileError, match="rounds nothing"):
        ts.quantization_aware(net, [{"x": torch.randn(4, 4)}], inputs=[spec], target="cpu")


# ── recipes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    folder = tmp_path_factory.mktemp("quantizing")
    dataset = write_dataset(folder / "stripes", train=160, val=60)
    return dataset, ts.train("lenet", dataset, out=folder / "float", epochs=2, batch_size=20)


def quantized(trained: tuple[Path, Run], out: Path, **more: object) -> Run:
    dataset, run = trained
    settings = {"epochs": 2, "batch_size": 20, "quantize": "int8", "init": str(run.path)}
    return ts.train("lenet", dataset, out=out, **{**settings, **more})


def test_a_runs_plan_says_what_its_evaluation_said(
    trained: tuple[Path, Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the commands: train, compile with nothing more, verify sample by sample."""
    tessella = in_process(monkeypatch, capsys)
    dataset, run = trained
    out, made = str(tmp_path / "int8"), str(tmp_path / "int8.plan")
    commands = (
        ["train", "lenet", str(dataset), "--out", out, "--quantize", "int8", "--init",
         str(run.path), "--epochs", "1", "--batch-size", "20"],
        ["compile", out, "--out", made, "--batch", "20", "--untuned"],
    )  # fmt: skip
    for command in commands:
        done = tessella(*command)
        assert done.code == 0, done
    plan = api.load_plan(made)
    assert plan.manifest.precision == "int8"
    layers = [s for s in plan.program.buckets[0].steps if s.op in ("conv2d", "linear")]
    assert sum(len(s.inputs) == 5 for s in layers) == len(layers) - 1
    found = ts.verify(made, against=out, data=dataset)
    assert found.agreement == 1.0
    best = api.open_checkpoint(out)
    assert found.plan_score == pytest.approx(best.info.metrics["val/accuracy"])


def test_a_resumed_training_goes_on_exactly(trained: tuple[Path, Run], tmp_path: Path) -> None:
    whole = quantized(trained, tmp_path / "whole", keep_last=9)
    broken = tmp_path / "broken"
    shutil.copytree(whole.path, broken)
    for checkpoint in Run(broken).checkpoints()[1:]:
        shutil.rmtree(checkpoint.path)
    resumed = quantized(trained, broken, keep_last=9, resume=True)
    before, after = whole.latest().weights(), resumed.latest().weights()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert whole.latest().info.metrics == resumed.latest().info.metrics


def test_sparse_weights_stay_sparse(trained: tuple[Path, Run], tmp_path: Path) -> None:
    dataset, run = trained
    pruned = ts.train(
        "lenet", dataset, out=tmp_path / "sparse", epochs=1, batch_size=20, sparsity="2:4",
        init=str(api.open_checkpoint(run).path),
    )  # fmt: skip
    made = quantized(
        (dataset, pruned), tmp_path / "int8", epochs=1, sparsity="2:4", ema=0.9
    ).latest()
    weights = [t for t in read(made.quantized()).constants.values() if t.dtype == torch.int8]
    sparse = [
        w for w in weights
        if w.dim() > 1 and w.shape[1] % 16 == 0
        and int((w.movedim(1, -1).reshape(-1, 4) != 0).sum(1).max()) <= 2
    ]  # fmt: skip
    assert sparse


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"init": "random"}, "goes on from a trained network"),
        ({"gpus": 2, "batch_size": 20}, "cannot be had with quantize"),
        ({"precision": "bf16"}, "cannot be had with quantize"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, object], wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        recipe(Path("d"), **{"quantize": "int8", "init": "runs/a", **settings})


def test_a_start_of_other_classes_is_refused(trained: tuple[Path, Run], tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", train=40, val=20, classes=("rows", "columns"))
    with pytest.raises(UsageError, match="the same network and classes"):
        quantized((other, trained[1]), tmp_path / "out")
