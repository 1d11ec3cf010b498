"""Plans on a Hopper GPU: they agree with eager, replay as CUDA graphs, are faster at batch 1."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.runtime.engine import Engine
from tessella.runtime.graphs import GraphedBucket
from tessella.runtime.profiler import profile, table
from tests.support.gpu_target import TARGET, UNTUNED

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
    # torch.export of torch 2.11 warns of itself
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

# precision → (largest error over largest value, least cosine)
TOLERANCES = {
    "fp32": (1e-4, 0.99999),
    "tf32": (5e-3, 0.9999),
    "fp16": (1e-2, 0.9999),
    "bf16": (5e-2, 0.999),
}
BATCH = DimRange(min=1, opt=8, max=8)


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 20, 5), nn.Conv2d(20, 50, 5)
        self.ip1, self.ip2 = nn.Linear(800, 500), nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.conv1(x), 2, 2)
        x = F.max_pool2d(self.conv2(x), 2, 2)
        return self.ip2(F.relu(self.ip1(x.flatten(1))))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lenet": (LeNet, 28),
    "resnet18": (lambda: models.resnet18(weights=None), 96),
    "googlenet": (lambda: models.googlenet(weights=None, init_weights=False), 96),
    "mobilenet_v2": (lambda: models.mobilenet_v2(weights=None), 96),
    "vit": (
        lambda: models.VisionTransformer(
            image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=256,
            num_classes=10,
        ),
        64,
    ),
}  # fmt: skip


def network(name: str) -> tuple[nn.Module, int]:
    """A network with random weights and batch-norm statistics, and its image size."""
    torch.manual_seed(0)
    make, size = NETWORKS[name]
    module = make().eval()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.normal_(layer.running_mean, 0.0, 0.1)
            nn.init.uniform_(layer.running_var, 0.8, 1.2)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0.0, layer.in_features**-0.5)
    return module, size


def build(module: nn.Module, size: int, precision: str) -> Plan:
    spec = TensorSpec(name="image", dtype="float32", shape=(BATCH, 3, size, size))
    graph = capture(module.cpu(), (spec,), outputs=("scores",))
    return compiler.compile_graph(
        graph,
        target=TARGET,
        batch=BATCH,
        precision=precision,
        about=compiler.About(built_from="test", rebuild="tessella compile test --target sm_90"),
        measuring=compiler.Measuring(untuned=UNTUNED),
    )


def eager(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The answer in float64, on the GPU."""
    with torch.inference_mode():
        return module.double().cuda()(x.double().cuda()).cpu()


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_agrees_with_eager_at_every_batch_size(name: str, precision: str) -> None:
    module, size = network(name)
    plan = build(module, size, precision)
    print(plan)
    engine = runtime.load(from_bytes(to_bytes(plan)))
    assert all(isinstance(engine.bound(b), GraphedBucket) for b in engine.buckets)
    tolerance, least_cosine = TOLERANCES[precision]
    generator = torch.Generator().manual_seed(1)
    for count in (1, 2, 3, 8, 11):
        x = torch.randn(count, 3, size, size, generator=generator)
        right = eager(module, x)
        scores = engine(image=x.numpy())["scores"]
        again = engine(image=x.cuda())["scores"]
        assert again.device.type == "cuda"
        assert torch.equal(again.cpu(), torch.from_numpy(scores))
        made = again.double().cpu()
        assert (made - right).abs().max() / right.abs().max() <= tolerance
        cosine = F.cosine_similarity(made.flatten(), right.flatten(), dim=0)
        assert cosine >= least_cosine


def test_fp32_is_not_tf32() -> None:
    """The two differ by what TF32 rounds away, whatever the process allows elsewhere."""
    module, size = network("resnet18")
    x = torch.randn(4, 3, size, size)
    right = eager(module, x)
    errors = {}
    for precision in ("fp32", "tf32"):
        made = runtime.load(build(module.float(), size, precision))(image=x)["scores"].double()
        errors[precision] = float((made - right).abs().max() / right.abs().max())
    assert errors["fp32"] < 1e-5 < errors["tf32"]


def test_threads_get_their_own_answers() -> None:
    module, size = network("lenet")
    engine = runtime.load(build(module, size, "fp32"))
    inputs = [torch.randn(1 + i % 9, 3, size, size) for i in range(8)]
    right = [engine(image=x)["scores"] for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            answers = [engine(image=inputs[index])["scores"] for _ in range(50)]
        wrong.extend(index for answer in answers if not torch.equal(answer, right[index]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.skipif(UNTUNED, reason="nothing was measured")
@pytest.mark.parametrize("name", ["lenet", "resnet18", "googlenet"])
def test_faster_than_eager_at_batch_one(name: str) -> None:
    module, size = network(name)
    engine = runtime.load(build(module, size, "fp16"))
    half = module.half().cuda().to(memory_format=torch.channels_last)
    x = torch.randn(1, 3, size, size).cuda()
    x_half = x.half().contiguous(memory_format=torch.channels_last)

    def run_eager() -> None:
        with torch.inference_mode():
            half(x_half)

    times = {"eager": [], "plan": []}
    for _ in range(30):
        times["eager"].append(_time_us(run_eager))
        times["plan"].append(_time_us(lambda: engine(image=x)))
    eager_us, plan_us = (statistics.median(t[5:]) for t in times.values())
    print(f"{name}: eager {eager_us:.0f} µs, plan {plan_us:.0f} µs")
    assert plan_us < eager_us


def _time_us(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def test_profile_names_every_step() -> None:
    module, size = network("resnet18")
    plan = build(module, size, "fp16")
    engine: Engine = runtime.load(plan)
    times = profile(engine, 8)
    print(table(times))
    assert [t.kernel for t in times] == [s.kernel for s in plan.program.buckets[-1].steps]
    assert sum(t.share for t in times) == pytest.approx(1.0)
