"""Plans for machines that are not here: chosen by the cost model, tuned where they shall run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tessella as ts
from tessella.artifacts.build import BuildRequest
from tessella.artifacts.plan import Plan, load_plan
from tessella.compiler import absent, verify
from tessella.compiler.retune import read_graph
from tessella.core.architectures import GPU_TARGETS
from tessella.core.errors import CompileError, UsageError, WrongDevice
from tessella.core.preprocess import Preprocess
from tessella.core.spec import TensorSpec
from tessella.graph.interpret import interpret
from tessella.kernels import catalog
from tessella.operations.problems import conv
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.estimate import estimate_us, estimated

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 3, 16, 16))
RECORD = Preprocess(height=16, width=16)


class Joined(nn.Module):
    """Two branches that are concatenated, and a sum: places for slices and residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.left, self.right = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(32, 16, 1)
        self.fc = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(image))
        y = torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x))], 1)
        return self.fc(torch.relu(self.last(y) + x).mean((2, 3)))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Joined().eval()


def compiled(module: nn.Module, **how: Any) -> Plan:
    return ts.compile(module, inputs=[IMAGE], preprocess=RECORD, **how)


@pytest.fixture(scope="module")
def ampere(module: nn.Module) -> Plan:
    return compiled(module, target="sm_80", precision="fp16", batch=(1, 2, 2), untuned=True)


@pytest.fixture(scope="module")
def here(module: nn.Module) -> Plan:
    return compiled(module, target="cpu", batch=(1, 2, 2), untuned=True)


def test_a_plan_for_a_gpu_that_is_not_here_measures_nothing_and_says_so(
    ampere: Plan, tmp_path: Path
) -> None:
    plan = load_plan(ampere.save(tmp_path / "a.plan"))
    assert plan.manifest.untuned
    assert plan.manifest.fingerprint.target == "sm_80"
    assert plan.lock == ""
    assert {c.time_us for c in plan.tuning} == {None}
    chosen = [c for c in plan.tuning if c.chosen]
    assert len(chosen) == sum(len(bucket.steps) for bucket in plan.program.buckets)
    for one in chosen:
        rivals = [c for c in plan.tuning if (c.step, c.batch) == (one.step, one.batch)]
        assert one.estimate_us == min(c.estimate_us for c in rivals if c.estimate_us is not None)
    for text in (str(plan), repr(plan)):
        assert "untuned" in text
    assert "tessella tune" in str(plan)


def test_it_carries_the_machine_code_of_its_own_kernels(ampere: Plan) -> None:
    kernels = {step.kernel for bucket in ampere.program.buckets for step in bucket.steps}
    assert {catalog.kernel(k).source for k in kernels} > {"tessella"}
    assert ampere.compiled.kernels
    assert ampere.compiled.wrong("sm_80") is None


def test_another_machine_refuses_it_with_the_command_that_rebuilds(ampere: Plan) -> None:
    for refused in (ts.load, ts.tune):
        with pytest.raises(WrongDevice) as told:
            refused(ampere)
        assert "rebuild it here" in str(told.value)
        assert "untuned" not in ampere.manifest.rebuild  # there everything can be measured


def test_without_untuned_the_gpu_must_be_here(module: nn.Module) -> None:
    with pytest.raises(WrongDevice, match="--untuned"):
        compiled(module, target="sm_89", batch=1)


def test_a_kernel_that_does_not_compile_is_replaced_by_the_next(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = absent.compile_absent, set()

    def broken(requests: Any, target: str) -> Any:
        wrong = {row.id for problem, row, _ in requests if problem.op == "linear"}
        refused.update(wrong)
        made = real([one for one in requests if one[1].id not in wrong], target)
        return [None if one[1].id in wrong else made.pop(0) for one in requests]

    monkeypatch.setattr(absent, "compile_absent", broken)
    plan = compiled(module, target="sm_80", precision="fp16", batch=1, untuned=True)
    linear = [c for c in plan.tuning if c.step == plan.program.outputs[0]]
    (taken,) = [c.kernel for c in linear if c.chosen]
    assert refused
    assert taken not in refused
    reasons = [c.refused for c in linear if c.kernel in refused]
    assert all("does not compile" in str(reason) for reason in reasons)


def test_what_the_passes_made_is_checked_without_the_gpu(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = verify.interpret

    def spoiled(graph: Any, *given: Any, **how: Any) -> Any:
        made = real(graph, *given, **how)
        half = any(v.dtype == "float16" for v in graph.values())
        return {name: 1.5 * t if half else t for name, t in made.items()}

    monkeypatch.setattr(verify, "interpret", spoiled)
    with pytest.raises(CompileError, match="would not compute what the network computes"):
        compiled(module, target="sm_80", precision="fp16", batch=1, untuned=True)


def test_an_untuned_plan_for_a_cpu_is_run_and_right(here: Plan, module: nn.Module) -> None:
    assert here.manifest.untuned
    images = torch.randn(3, 3, 16, 16)
    with ts.load(here) as engine, torch.inference_mode():
        torch.testing.assert_close(engine(images)["output"], module(images), rtol=0, atol=1e-5)


def test_tune_measures_and_keeps_everything_else(
    here: Plan, module: nn.Module, tmp_path: Path
) -> None:
    path = here.save(tmp_path / "a.plan")
    tuned = ts.tune(path, cache=tmp_path / "timings")
    assert not tuned.manifest.untuned
    kept = ("inputs", "outputs", "precision", "preprocess", "labels", "rebuild", "tolerance")
    for name in kept:
        assert getattr(tuned.manifest, name) == getattr(here.manifest, name), name
    for tensors in ("weights", "golden"):
        before, after = getattr(here, tensors), getattr(tuned, tensors)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(c.time_us is not None for c in tuned.tuning if c.chosen)
    assert tuned.lock
    images = torch.randn(3, 3, 16, 16)
    with ts.load(tuned.save(path)) as engine, torch.inference_mode():
        torch.testing.assert_close(engine(images)["output"], module(images), rtol=0, atol=1e-5)
    again = ts.tune(tuned, cache=tmp_path / "timings")  # also of a plan that was tuned before
    assert again.program.outputs == tuned.program.outputs


def test_tune_suits_a_plan_to_a_cpu_of_another_kind(here: Plan) -> None:
    elsewhere = replace(here.manifest.fingerprint, arch="x86_64-other", name="another")
    plan = replace(here, manifest=replace(here.manifest, fingerprint=elsewhere))
    with pytest.raises(WrongDevice, match="tessella tune"):
        ts.load(plan)
    assert ts.tune(plan).manifest.fingerprint == here.manifest.fingerprint


def test_a_plan_that_lies_about_its_answers_is_not_tuned(here: Plan) -> None:
    golden = {n: t + 1 if n.startswith("output") else t for n, t in here.golden.items()}
    with pytest.raises(CompileError, match="does not compute"):
        ts.tune(replace(here, golden=golden))


def test_the_graph_of_a_bucket_is_the_network(here: Plan, module: nn.Module) -> None:
    for plan in (here, ts.compile(module, inputs=[IMAGE], target="cpu", batch=(1, 2, 2))):
        for bucket in plan.program.buckets:
            graph, formats = read_graph(plan, bucket)
            images = torch.randn(bucket.batch, 3, 16, 16)
            with torch.inference_mode():
                made = interpret(graph, {"image": images})["output"]
                torch.testing.assert_close(made, module(images), rtol=0, atol=1e-5)
            assert "strided" not in formats.values()  # parts of the concatenation are whole again


def test_requests_that_cannot_be(here: Plan, module: nn.Module) -> None:
    for given in ({"cache": "x"}, {"time_limit_s": 1.0}, {"lock": "x"}, {"target": "reference"}):
        with pytest.raises(UsageError, match="tuned"):
            BuildRequest(source="lenet", untuned=True, **given)  # type: ignore[arg-type]
    request = BuildRequest(source="lenet", untuned=True, target="sm_89")
    with pytest.raises(UsageError, match=r"no lock.*tessella tune"):
        ts.compile(module, inputs=[IMAGE], preprocess=RECORD, batch=(1, 2, 2), lock=here)
    with pytest.raises(UsageError, match="a time limit is seconds"):
        ts.tune(here, time_limit_s=math.nan)
    assert "--untuned" in request.argv()
    assert "--untuned" not in request.rebuild()


@pytest.mark.parametrize("target", [t for t in GPU_TARGETS if t != "sm_75"])
def test_tensor_cores_come_before_plain_units(target: str) -> None:
    x = TensorMeta(shape=(32, 64, 56, 56), dtype="float16", format="channels_last")
    problem = conv(x, replace(x, shape=(64, 64, 3, 3)), padding=1)
    times = {t.kernel: t.estimate_us for t in estimated(problem, target=target) if not t.refused}
    assert min(times, key=lambda k: times[k] or 0.0) != "conv2d.direct"
    whole = estimate_us(catalog.kernel("conv2d.implicit_gemm"), problem, target)
    twice = replace(
        problem,
        inputs=(replace(x, shape=(64, 64, 56, 56)), *problem.inputs[1:]),
        outputs=(replace(problem.output, shape=(64, 64, 56, 56)),),
    )
    assert 1.5 < estimate_us(catalog.kernel("conv2d.implicit_gemm"), twice, target) / whole < 2.1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 8, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cells(rows)[0]
        return found


@pytest.mark.parametrize(
    ("module", "shape", "why"),
    [
        (nn.Conv2d(32, 32, 3, groups=4), (1, 32, 6, 6), "are grouped or read fewer than 16"),
        (Recurrent(), (1, 4, 16), "no convolution or linear layer"),
        (nn.Conv3d(32, 32, 3), (1, 32, 4, 4, 4), "over one axis, or three"),
        (nn.Sequential(nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 8, 1)), (1, 32, 6, 6), ""),
    ],
)
def test_a_plan_in_which_nothing_rounds_says_so_and_why(
    module: nn.Module, shape: tuple[int, ...], why: str
) -> None:
    told: list[str] = []
    plan = ts.compile(
        module.eval(), inputs=[TensorSpec(name="x", dtype="float32", shape=shape)], batch=1,
        precision="int8", calibration=[{"x": torch.randn(4, *shape[1:])}], untuned=True,
        target="cpu", emit=lambda event: told.append(event.text),
    )  # fmt: skip
    assert bool(plan.unrounded) == bool(why)
    assert why in plan.unrounded
    assert (plan.unrounded in str(plan).splitlines()) == bool(why)
    assert [text for text in told if "no layer computes" in text] == [plan.unrounded] * bool(why)
    assert not replace(plan, manifest=replace(plan.manifest, precision="fp32")).unrounded
