"""``device="cuda:1"``: a machine with GPUs of two kinds, whose answers are torch's words only.

No kernel runs here: what is tested is which GPU is asked, and which program it gets.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tessella as ts
from tessella import runtime
from tessella.artifacts.plan import Plan, load_plan
from tessella.core.device import default_target, fingerprint, torch_device, using
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.spec import TensorSpec
from tessella.device import ahead_of_time, machine
from tessella.runtime import engine, trial, trial_child
from tests.support.plans.subjects import good

GPUS = (("NVIDIA A100", (8, 0), 108), ("NVIDIA H100", (9, 0), 114))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An A100 and an H100, of which the first is the current one of each thread."""
    current = threading.local()

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            self.before = now()
            current.index = self.index

        def __exit__(self, *_: object) -> None:
            current.index = self.before

    def now() -> int:
        return getattr(current, "index", 0)

    def of(device: Any) -> tuple[str, tuple[int, int], int]:
        index = device.index if isinstance(device, torch.device) else device
        return GPUS[now() if index is None else index]

    def properties(device: Any = None) -> SimpleNamespace:
        name, (major, minor), units = of(device)
        return SimpleNamespace(
            name=name, major=major, minor=minor, multi_processor_count=units, total_memory=1 << 36
        )

    fakes = {
        "is_available": lambda: True,
        "device_count": lambda: len(GPUS),
        "current_device": now,
        "device": Device,
        "get_device_name": lambda device=None: of(device)[0],
        "get_device_capability": lambda device=None: of(device)[1],
        "get_device_properties": properties,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    caches = (machine._target_of, machine._units_of, ahead_of_time._kernel_cache)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plan with programs for a CPU and for both GPUs."""
    return several(good()).save(tmp_path / "several.plan")


def several(plan: Plan) -> Plan:
    def there(target: str) -> Plan:
        told = replace(plan.manifest.fingerprint, target=target, arch=target)
        return replace(plan, manifest=replace(plan.manifest, fingerprint=told))

    return replace(plan, others=(there("sm_80"), there("sm_90")))


def test_the_device_decides_target_units_and_tensors(two: None) -> None:
    assert default_target() == "sm_80"
    with using("cuda:1"):
        assert default_target() == machine.gpu_target() == "sm_90"
        assert machine.multiprocessors() == 114
        assert torch_device("sm_90") == torch.device("cuda", 1)
        assert fingerprint("sm_90").name == "NVIDIA H100"
        with using(None):
            assert default_target() == "sm_90"
        with using("cpu"):
            assert default_target() == "cpu"
        with using("cuda:0"):
            assert (default_target(), machine.multiprocessors()) == ("sm_80", 108)
    assert torch_device("sm_80") == torch.device("cuda", 0)
    assert machine.gpu_target() == "sm_80"


def test_what_is_not_there_is_told_with_what_is(two: None) -> None:
    with (
        pytest.raises(
            UsageError, match=r"no GPU cuda:2. Seen: cuda:0 \(NVIDIA A100\), cuda:1 \(NVIDIA H100\)"
        ),
        using("cuda:2"),
    ):
        pass
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda:99999", "CUDA:0", ""):
        with pytest.raises(UsageError, match="no device"), using(wrong):
            pass


def test_without_a_gpu_every_way_says_so(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = torch.nn.Linear(4, 3)
    inputs = [TensorSpec(name="x", dtype="float32", shape=(1, 4))]
    for way in (
        lambda: ts.load(path, device="cuda:1"),
        lambda: ts.tune(path, device="cuda:1"),
        lambda: ts.compile(module, inputs=inputs, device="cuda:1"),
        lambda: ts.pareto(module, data=tmp_path, device="cuda:1"),
        lambda: runtime.load_tried(path, device="cuda:1", folder=tmp_path),
    ):
        with pytest.raises(UsageError, match=r"no GPU cuda:1. Seen: no GPU"):
            way()


def test_kernels_compiled_for_one_gpu_are_not_the_others(two: None) -> None:
    assert ahead_of_time.kernel_cache("sm_90") is None
    with using("cuda:1"):
        assert ahead_of_time.kernel_cache("sm_90") is not None
        assert ahead_of_time.kernel_cache("sm_80") is None
    assert ahead_of_time.kernel_cache("sm_80") is not None


def test_loading_takes_the_program_for_the_device(
    two: None, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int]] = []

    class Engine:
        device = torch.device("cpu")

        def __init__(self, plan: Plan, *, compiled: bool) -> None:
            seen.append((plan.target, torch.cuda.current_device()))

        def self_test(self, golden: Any) -> None:
            seen.append(("tested", torch.cuda.current_device()))

    monkeypatch.setattr(engine, "Engine", Engine)
    for device in ("cuda:1", "cuda:0", "cuda", None, "cpu"):
        ts.load(path, device=device)
    assert [target for target, _ in seen[::2]] == ["sm_90", "sm_80", "sm_80", "sm_80", "cpu"]
    assert [index for _, index in seen] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert torch.cuda.current_device() == 0


def test_the_cpu_beside_gpus_answers(two: None, path: Path) -> None:
    image = torch.randn(2, 1, 6, 6)
    with ts.load(path, device="cpu") as one, ts.load(good(), device="cpu") as other:
        assert torch.equal(one(image)["scores"], other(image)["scores"])


def test_a_trial_runs_on_the_same_device(
    two: None, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(json.loads(command[-1]))
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    loaded: list[tuple[str, str | None]] = []
    monkeypatch.setattr(subprocess, "run", run)

    def load(plan: Plan, *, device: str | None, **_: Any) -> None:
        loaded.append((plan.target, device))

    monkeypatch.setattr(trial, "load", load)
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        runtime.load_tried(path, device=device, folder=tmp_path / "cache")
    assert [one["device"] for one in asked] == ["cuda:1", "cuda:0"]  # what passed is remembered
    assert len({one["plan"] for one in asked}) == 2
    assert loaded == [("sm_90", "cuda:1"), ("sm_80", "cuda:0"), ("sm_90", "cuda:1")]


def test_the_child_of_a_trial_takes_the_device_that_it_is_told(
    two: None, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"path": str(path), "plan": "another", "modules": [], "compiled": True}
    assert trial_child.main({**told, "device": "cuda:2"}) == ArtifactError.exit_code
    assert "no GPU cuda:2" in capsys.readouterr().out
    with using("cpu"):
        assert load_plan(path).target == "cpu"
