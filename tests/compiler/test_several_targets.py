"""One plan with programs for several targets: built, loaded where it fits, tuned, built again."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tessella as ts
from tessella.artifacts.outline import UNTUNED
from tessella.artifacts.plan import Plan, from_bytes, load_outline, load_plan, to_bytes
from tessella.core.errors import ArtifactError, CompileError, UsageError, WrongDevice
from tessella.core.spec import TensorSpec
from tests.support.plans.fuzz_plans import members_of

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 3, 16, 16))
BOTH = ("cpu", "sm_80")


class Net(nn.Module):
    """A convolution that normalizes, and enough weights to see them twice in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.wide, self.fc = nn.Linear(32 * 16 * 16, 128), nn.Linear(128, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv(image))).flatten(1)
        return self.fc(torch.relu(self.wide(x)))


@pytest.fixture(scope="module")
def module() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def compiled(module: nn.Module, target: Any, **how: Any) -> Plan:
    return ts.compile(module, inputs=[IMAGE], target=target, batch=(1, 2, 2), **how)


@pytest.fixture(scope="module")
def both(module: nn.Module) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compiled(module, BOTH)


@pytest.fixture(scope="module")
def path(both: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return both.save(tmp_path_factory.mktemp("plans") / "both.plan")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Puts a GPU of a compute capability into this machine."""

    def install(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA X")

    return install


def test_the_machine_that_is_here_is_measured_and_the_other_is_estimated(both: Plan) -> None:
    here, there = both, both.at("sm_80")
    assert (here.target, there.target) == BOTH
    assert here.targets == there.targets == BOTH
    assert not here.manifest.untuned
    assert all(c.time_us is not None for c in here.tuning if c.chosen)
    assert here.lock
    assert "target='cpu,sm_80'" in here.manifest.rebuild
    assert there.manifest.untuned
    assert {c.time_us for c in there.tuning} == {None}
    assert there.compiled.kernels
    assert there.compiled.wrong("sm_80") is None
    assert not here.compiled.kernels
    assert UNTUNED in str(there)
    assert "a program for sm_80 (any A100, A30) too" in str(here)
    assert "and for sm_80" in repr(here)


def test_it_answers_as_the_plan_for_this_machine_alone(
    both: Plan, path: Path, module: nn.Module
) -> None:
    alone = compiled(module, "cpu", lock=both)
    assert alone.program == both.program
    images = torch.randn(3, 3, 16, 16)
    with ts.load(path) as engine, ts.load(alone) as other, torch.inference_mode():
        made = engine(images)["output"]
        assert torch.equal(made, other(images)["output"])
        torch.testing.assert_close(made, module(images), rtol=0, atol=1e-4)


def test_the_weights_are_in_the_file_once(both: Plan, path: Path) -> None:
    weights = sum(tensor.nbytes for tensor in both.weights.values())
    apart = {t: replace(both.at(t), others=()) for t in both.targets}
    with zipfile.ZipFile(path) as archive:
        stored = archive.getinfo("weights.safetensors").file_size
        code = sum(i.file_size for i in archive.infolist() if i.filename.endswith(".cubin"))
    assert weights <= stored < 1.01 * weights
    assert path.stat().st_size - code < 1.1 * len(to_bytes(apart["cpu"]))


def test_it_comes_back_byte_for_byte_whichever_program_is_in_use(both: Plan, path: Path) -> None:
    for target in BOTH:
        again = load_plan(path, target=target)
        assert again.target == target
        assert to_bytes(again) == path.read_bytes()
        assert again.weights.keys() == both.at(target).weights.keys()
        for name, tensor in both.at(target).weights.items():
            assert torch.equal(again.weights[name], tensor)
    outline = load_outline(path)
    assert (outline.target, outline.targets) == ("cpu", BOTH)
    assert outline.at("sm_80").program == load_plan(path, target="sm_80").program
    with pytest.raises(UsageError, match="--target cpu,sm_80,sm_75"):
        load_plan(path, target="sm_75")


def test_loading_takes_the_program_of_the_gpu_that_is_there(
    path: Path, install: Callable[[tuple[int, int]], None]
) -> None:
    assert load_plan(path).target == "cpu"
    install((8, 0))
    assert load_plan(path).target == "sm_80"


def test_a_gpu_without_a_program_stands_idle_and_that_is_told(
    path: Path, install: Callable[[tuple[int, int]], None]
) -> None:
    install((9, 0))
    with pytest.warns(UserWarning, match=r"NVIDIA X \(sm_90\) is not used.*cpu,sm_80,sm_90"):
        assert load_plan(path).target == "cpu"


def test_an_unknown_gpu_takes_the_nearest_older_program(
    path: Path, both: Plan, install: Callable[[tuple[int, int]], None]
) -> None:
    there = both.at("sm_80")
    ada = replace(there.manifest.fingerprint, target="sm_86", arch="sm_87")
    more = replace(there, manifest=replace(there.manifest, fingerprint=ada), others=())
    content = to_bytes(replace(both, others=(*both.others, replace(more, compiled=both.compiled))))
    install((8, 7))
    with pytest.warns(UserWarning, match="built for sm_86, the nearest"):
        assert from_bytes(content).target == "sm_86"


def test_a_machine_that_can_run_none_is_told_what_there_is_and_how_to_build_it(
    both: Plan, tmp_path: Path
) -> None:
    there = replace(both.at("sm_80"), others=())
    hopper = replace(there.manifest.fingerprint, target="sm_90", arch="sm_90")
    other = replace(there, manifest=replace(there.manifest, fingerprint=hopper))
    other = replace(other, compiled=both.compiled)  # none
    path = replace(there, others=(other,)).save(tmp_path / "gpus.plan")
    assert load_plan(path).targets == ("sm_80", "sm_90")
    with pytest.raises(WrongDevice) as told:
        ts.load(path)
    assert "built for sm_80" in str(told.value)
    assert "and for sm_90" in str(told.value)
    assert "target='cpu'" in str(told.value)


def test_tune_measures_the_program_of_this_machine_and_keeps_the_others(
    path: Path, tmp_path: Path
) -> None:
    tuned = ts.tune(path, cache=tmp_path / "timings")
    assert (tuned.target, tuned.targets) == ("cpu", BOTH)
    before, after = members_of(path.read_bytes()), members_of(to_bytes(tuned))
    kept = [name for name in before if not name.startswith("targets/cpu/")]
    kept.remove("manifest.json")
    assert all(before[name] == after[name] for name in kept)
    assert tuned.at("sm_80").manifest.untuned
    assert not tuned.manifest.untuned
    with ts.load(tuned.save(tmp_path / "tuned.plan")) as engine:
        assert engine.manifest.fingerprint.target == "cpu"


def test_a_lock_makes_the_same_bytes(both: Plan, path: Path, module: nn.Module) -> None:
    assert to_bytes(compiled(module, "cpu,sm_80", lock=path)) == to_bytes(both)


def test_all_untuned_measures_nothing(module: nn.Module) -> None:
    made = compiled(module, "cpu,sm_75", untuned=True)
    assert made.manifest.untuned
    assert made.at("sm_75").manifest.untuned
    assert not made.lock


def test_the_programs_in_one_plan_are_of_one_network(both: Plan) -> None:
    there = both.at("sm_80")
    other = replace(there, manifest=replace(there.manifest, precision="fp16"), others=())
    with pytest.raises(ArtifactError, match="one network"):
        to_bytes(replace(both, others=(other,)))


def test_a_target_that_cannot_be_built_ends_the_build(
    module: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessella.compiler.pipeline.compile_kernels", _refuse)
    with pytest.raises(CompileError, match="no such chip"):
        compiled(module, BOTH, untuned=True)


def _refuse(*_: Any, **__: Any) -> None:
    raise CompileError("no such chip")


def test_the_same_constant_under_two_names_lies_in_the_file_once(both: Plan) -> None:
    name = max(both.weights, key=lambda name: both.weights[name].nbytes)
    plan = replace(both, weights={**both.weights, "copy": both.weights[name].clone()})
    content = to_bytes(plan)
    assert len(content) < len(to_bytes(both)) + 4096
    again = from_bytes(content, target="cpu")
    assert torch.equal(again.weights["copy"], both.weights[name])
