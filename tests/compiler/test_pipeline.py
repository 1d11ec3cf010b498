"""Whole networks become plans that agree with eager, the same ones every time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import load_plan, to_bytes
from tessella.compiler.passes import of_stage
from tessella.compiler.pipeline import bucket_sizes
from tessella.core.errors import ArtifactError, CompileError, UsageError
from tessella.core.events import Event
from tessella.core.spec import DimRange, TensorSpec
from tessella.kernels import catalog
from tessella.kernels.conv.libraries import aten as conv_aten
from tessella.kernels.conv.libraries import onednn as conv_onednn
from tessella.runtime import profiler
from tessella.search import timing
from tests.support.kernels import scratch
from tests.support.networks import NETWORKS, build, captured, graph_of, network, plan

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 3, 8, 8))


def error(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made.double() - right).abs().max() / right.abs().max())


def float64(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        right = module.double()(x.double())
    module.float()
    return right


@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "cpu") for name in NETWORKS), ("lenet", "reference"), ("resnet18", "reference")],
)
def test_agrees_with_eager_at_every_batch_size(name: str, target: str) -> None:
    module, spec = network(name)
    engine = runtime.load(plan(captured(name), target=target))
    for count in (1, 2, 5):
        x = torch.randn(count, *spec.shape[1:], generator=torch.Generator().manual_seed(count))
        made = engine(image=x)["scores"]
        assert made.shape[0] == count
        assert error(made, float64(module, x)) < 1e-4


@pytest.mark.parametrize("name", ["lenet", "resnet18", "mobilenet_v3", "vit"])
def test_bf16_is_close_and_really_used(name: str) -> None:
    module, spec = network(name)
    lowered = plan(captured(name), precision="bf16")
    x = torch.randn(3, *spec.shape[1:])
    made, right = runtime.load(lowered)(image=x)["scores"].double(), float64(module, x)
    assert 1e-5 < error(made, right) < 5e-2
    cosine = torch.nn.functional.cosine_similarity(made.flatten(), right.flatten(), dim=0)
    assert cosine > 0.999
    floats = {t.dtype for t in lowered.weights.values() if t.is_floating_point()}
    assert floats == {torch.bfloat16}


def test_fuses_a_residual_network_into_one_step_a_convolution() -> None:
    steps = plan(captured("resnet18"), (1, 1, 1)).program.buckets[0].steps
    ops = [s.op for s in steps]
    assert ops.count("conv2d") == 20
    assert not {"batch_norm", "relu", "add"} & set(ops)


def test_unknown_operations_are_visible_steps() -> None:
    class Flips(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.flip(x, [2]).flatten(1)

    flips = build(Flips(), IMAGE)
    (step,) = [s for s in flips.program.buckets[0].steps if s.op == "fallback"]
    assert step.kernel == "fallback.aten"
    assert "fallback.aten aten::flip" in str(flips)
    x = torch.randn(3, 3, 8, 8)
    assert torch.equal(runtime.load(flips)(image=x)["scores"], torch.flip(x, [2]).flatten(1))


def test_complex_numbers_may_pass_between_unknown_operations(tmp_path: Path) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.fft2(x)
            return (spectrum * spectrum).abs().flatten(1)

    path = build(Spectrum(), IMAGE).save(tmp_path / "spectrum.plan")
    x = torch.randn(3, 3, 8, 8)
    right = torch.fft.fft2(x.double()).abs().square().flatten(1)
    engine = runtime.load(path)
    assert error(engine(image=x)["scores"], right) < 1e-5
    assert any(t.kernel == "fallback.aten" for t in profiler.profile(engine, 1))


def test_tuning_names_every_candidate() -> None:
    tuned = plan(captured("lenet"))
    for bucket in tuned.program.buckets:
        for step in bucket.steps:
            tried = [
                c for c in tuned.tuning if (c.batch, c.step) == (bucket.batch, step.outputs[0])
            ]
            assert [c.kernel for c in tried if c.chosen] == [step.kernel]
            rows = catalog.candidates(step.op, "cpu")
            assert {c.kernel for c in tried} >= {r.id for r in rows if not r.last_resort}
            assert all((c.time_us is None) == (c.refused is not None) for c in tried)
            fastest = min(c.time_us for c in tried if c.time_us is not None)
            assert next(c.time_us for c in tried if c.chosen) == fastest


def test_equal_bytes_with_equal_timings(tmp_path: Path) -> None:
    cache = tmp_path / "timings.jsonl"
    first = to_bytes(plan(captured("lenet"), cache=cache))
    lines = cache.read_text()
    assert to_bytes(plan(captured("lenet"), cache=cache)) == first
    assert cache.read_text() == lines  # nothing was measured again


def test_a_cache_with_a_torn_line_still_works(tmp_path: Path) -> None:
    cache = tmp_path / "timings.jsonl"
    first = to_bytes(plan(captured("lenet"), cache=cache))
    with cache.open("a") as file:
        file.write('{"device": "half a li')
    assert to_bytes(plan(captured("lenet"), cache=cache)) == first


def test_weights_are_stored_once_for_all_buckets() -> None:
    lenet = plan(captured("lenet"), (1, 4, 8))
    parameters = sum(p.numel() for p in network("lenet")[0].parameters())
    assert sum(t.numel() for t in lenet.weights.values()) == parameters
    assert [b.batch for b in lenet.program.buckets] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [((1, 1, 1), [1]), ((1, 8, 32), [1, 2, 4, 8, 16, 32]), ((3, 5, 9), [3, 4, 5, 8, 9])],
)
def test_bucket_sizes(batch: tuple[int, int, int], sizes: list[int]) -> None:
    span = DimRange(min=batch[0], opt=batch[1], max=batch[2])
    assert bucket_sizes(span) == sizes


def test_a_wrong_kernel_loses_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv_aten, conv_onednn):
        right = module.bind
        monkeypatch.setattr(
            module, "bind", lambda p, c, right=right: lambda *xs: right(p, c)(*xs) * 1.01
        )
    net = nn.Sequential(nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Sigmoid(), nn.Flatten())
    made = build(net, IMAGE)
    (step,) = (s for s in made.program.buckets[0].steps if s.op == "conv2d")
    assert step.kernel == "reference"
    wrong = {c.kernel: c.refused for c in made.tuning if c.refused and "wrong" in c.refused}
    assert wrong.keys() <= {"conv2d.aten", "conv2d.onednn"}
    assert all("deviates from float64 by 1.0e-02" in str(said) for said in wrong.values())
    x = torch.randn(2, *IMAGE.shape[1:])
    torch.testing.assert_close(runtime.load(made)(x)["scores"], net(x))


def test_samples_that_see_each_other_are_refused() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x - x.mean(0, keepdim=True)).flatten(1)

    with pytest.raises(CompileError, match="depends on the others in its batch"):
        build(Centred(), IMAGE)


def test_an_answer_that_is_not_finite_is_refused() -> None:
    class Logs(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x).flatten(1)

    with pytest.raises(CompileError, match="not finite"):
        build(Logs(), IMAGE)


def test_an_answer_that_is_chance_is_refused() -> None:
    """Which rows a top-k takes of scores that only the last bits tell apart; a clear one passes."""

    class Best(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 1)
            nn.init.normal_(self.layer.weight, std=scale)
            nn.init.constant_(self.layer.bias, 1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = self.layer(x)[..., 0].topk(4).indices
            return x.gather(1, places[..., None].expand(-1, -1, 64))

    rows = TensorSpec(name="x", dtype="float32", shape=(1, 32, 64))
    torch.manual_seed(0)
    with pytest.raises(CompileError, match=r"last bits of float32.*samples="):
        build(Best(1e-9), rows)
    build(Best(1.0), rows)


class _Squeezed(nn.Module):
    """Volumes whose channels are weighed, and what is made of five axes besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weigh = nn.Conv3d(4, 8, 3, padding=1), nn.Conv3d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = y * torch.sigmoid(self.weigh(y.mean((2, 3, 4), keepdim=True)))
        up = nn.functional.interpolate(nn.functional.pad(y, (0, 1, 1, 0, 0, 2)), size=(6, 5, 4))
        return self.weigh(up) + up.sum(2, keepdim=True)


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_means_sums_pads_and_sizes_of_volumes(target: str) -> None:
    torch.manual_seed(0)
    module = _Squeezed().eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 4, 4, 4, 5))
    made = plan(graph_of(module, spec, DimRange(min=1, opt=1, max=2)), target=target)
    x = torch.randn(2, 4, 4, 4, 5)
    (answer,) = runtime.load(made)(image=x).values()
    assert error(answer, float64(module, x)) < 1e-4


def test_an_output_without_a_batch_axis_is_refused() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    with pytest.raises(CompileError, match="first axis is not the batch"):
        build(Sums(), IMAGE)


@pytest.mark.parametrize("settings", [{"precision": "fp12"}, {"target": "tpu"}])
def test_unknown_settings(settings: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        build(nn.Flatten(), IMAGE, **settings)


def test_a_signal_of_1e_10_is_compared_like_any_other() -> None:
    """Untrained networks shrink theirs so far: relative errors must not drown in a floor."""
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 1e-6
    tiny = build(module, IMAGE)
    x = torch.randn(2, 3, 8, 8)
    assert 0 < float64(module, x).abs().max() < 1e-5
    assert error(runtime.load(tiny)(image=x)["scores"], float64(module, x)) < 1e-4


def test_tells_what_it_does() -> None:
    events: list[Event] = []
    lenet = plan(captured("lenet"), emit=events.append)
    phases = [e.name for e in events if e.kind == "phase"]
    assert phases[:1] == ["optimize"]
    assert {p.name for p in of_stage("optimize")} < set(phases)
    tuned = [e for e in events if e.kind == "progress" and e.name == "batch 2"]
    count = len(lenet.program.buckets[-1].steps)
    assert [e.values for e in tuned] == [{"done": i + 1, "total": count} for i in range(count)]


def test_a_kernel_with_configurations_and_a_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = tuple(k for k in catalog.KERNELS if k.op != "linear")
    monkeypatch.setattr(catalog, "KERNELS", (*others, scratch.ROW))
    monkeypatch.setattr(catalog, "BY_ID", {**catalog.BY_ID, scratch.ROW.id: scratch.ROW})
    monkeypatch.setattr(scratch, "fits", lambda p: None if len(p.output.shape) == 2 else "rows")
    path = plan(captured("lenet")).save(tmp_path / "lenet.plan")
    loaded = load_plan(path)
    bucket = loaded.program.buckets[-1]
    linear = [step for step in bucket.steps if step.op == "linear"]
    sizes = {b.name: b for b in bucket.buffers}
    for step in linear:
        rows, columns = sizes[step.outputs[0]].shape
        assert step.config["pieces"] in (1, 2)
        scratch_bytes = 4 * step.config["pieces"] * rows * columns
        assert sizes[step.workspace].shape == (scratch_bytes,)
        assert sizes[step.workspace].offset is not None
    module, spec = network("lenet")
    x = torch.randn(bucket.batch, *spec.shape[1:])
    (made,) = runtime.load(path)(x).values()
    assert error(made, float64(module, x)) < 1e-4
    # a plan is hostile: a configuration that no kernel proposed, a workspace that is too small
    for change, what in (
        ({"config": {"pieces": 4}}, "does not know the configuration"),
        ({"config": {"pieces": 2}, "workspace": None}, "too little workspace"),
    ):
        steps = tuple(replace(s, **change) if s is linear[0] else s for s in bucket.steps)
        program = replace(loaded.program, buckets=(replace(bucket, steps=steps),))
        with pytest.raises(ArtifactError, match=what):
            runtime.load(replace(loaded, program=program))


def test_sizes_are_searched_beside_those_that_are_done_and_stand_in_order() -> None:
    told: list[Event] = []
    made = plan(captured("lenet"), (1, 4, 8), emit=told.append)
    searched = [event.text for event in told if event.name == "tune"]
    assert searched == ["batch 4", "batch 8", "batch 2", "batch 1"]
    assert [bucket.batch for bucket in made.program.buckets] == [1, 2, 4, 8]
    batches = [candidate.batch for candidate in made.tuning]
    assert batches == sorted(batches)


@pytest.mark.parametrize("noisy", [True, False])
def test_a_build_on_a_busy_machine_says_so(noisy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    timing_of = timing._timing
    monkeypatch.setattr(timing, "_timing", lambda samples: replace(timing_of(samples), noisy=noisy))
    told: list[Event] = []
    made = plan(captured("lenet"), emit=told.append)
    warnings = [event.text for event in told if event.kind == "warning"]
    assert made.is_noisy == noisy
    assert len(warnings) == noisy
    assert all("the machine was busy: 100% of the steps' time" in text for text in warnings)
    told.clear()
    again = plan(captured("lenet"), emit=told.append, lock=made.lock)  # nothing is measured
    assert again.is_noisy == noisy  # the mark is that of the lock's times
    assert not [event for event in told if event.kind == "warning"]
