"""The targets of GPUs: which one a machine has, and what a plan says on another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tessella.core.architectures import GPU_TARGETS, capability, has, target_of
from tessella.core.compiled import CompiledKernel, CompiledKernels
from tessella.core.device import (
    Fingerprint,
    default_target,
    described,
    fingerprint,
    gpu_target,
    torch_device,
)
from tessella.core.errors import WrongDevice
from tessella.device.ahead_of_time import KernelCache, PlanKernels, stored

HOPPER = Fingerprint(
    target="sm_90", arch="sm_90", name="NVIDIA H200", units=132, memory_bytes=0, libraries={}
)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Puts a GPU of a compute capability into this machine, or none."""

    def install(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA X")

    return install


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"), ((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"),
        ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((12, 0), "sm_120"),
    ],
)  # fmt: skip
def test_a_gpu_that_is_known_is_the_target(install, capability, target) -> None:
    install(capability)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert default_target() == gpu_target() == target
    assert torch_device(target) == torch.device("cuda", 0)
    for other in set(GPU_TARGETS) - {target}:
        with pytest.raises(WrongDevice, match=rf"use target='{target}'"):
            torch_device(other)


@pytest.mark.parametrize(
    ("capability", "target", "told"),
    [
        ((8, 7), "sm_86", r"NVIDIA X \(sm_87\) .*built for sm_86"),
        ((10, 3), "sm_100", "sm_103.*built for sm_100"),
        ((12, 1), "sm_120", "sm_121.*built for sm_120"),
        ((13, 0), "sm_120", "sm_130.*built for sm_120"),
        ((7, 0), "cpu", "sm_70.*run on the CPU"),
        ((6, 1), "cpu", "sm_61.*run on the CPU"),
    ],
)
def test_an_unknown_gpu_is_the_nearest_older_one_and_that_is_told(
    install, capability, target, told
) -> None:
    install(capability)
    with pytest.warns(UserWarning, match=told):
        assert default_target() == target
    if target != "cpu":  # it is asked for by this name, too
        assert torch_device(target) == torch.device("cuda", 0)


@pytest.mark.parametrize("target", ["sm_120", "sm_86"])
def test_a_plan_for_the_nearest_older_gpu_runs_and_its_kernels_are_compiled(
    install, monkeypatch, target
) -> None:
    """An ``sm_121`` runs no code for ``sm_120a``, a Jetson (``sm_87``) none for ``sm_86``."""
    major, minor = divmod(capability(target) + 1, 10)
    install((major, minor))
    chip = SimpleNamespace(
        major=major, minor=minor, name="NVIDIA X", multi_processor_count=48, total_memory=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: chip)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90000)
    elsewhere = described(target)
    with pytest.warns(UserWarning, match=f"built for {target}.*compiled here.*tessella tune"):
        elsewhere.require_here(rebuild="x")
    kernel = CompiledKernel(key="k", name="n", cubin="c", parameters=(), threads=32, shared_bytes=0)
    code = CompiledKernels(kernels=(kernel,), cubins={"c": b""})
    assert stored(code, target) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprint(target).require_here(rebuild="x")  # it was tuned here
        install(divmod(capability(target), 10))
        replace(elsewhere, name="another chip of this kind").require_here(rebuild="x")
    assert isinstance(stored(code, target), PlanKernels)
    assert isinstance(stored(CompiledKernels(), target), KernelCache)


def test_no_gpu_is_the_cpu(install) -> None:
    install(None)
    assert default_target() == "cpu"
    with pytest.raises(WrongDevice, match=r"no CUDA device.*'cpu'"):
        torch_device("sm_80")


@pytest.mark.parametrize(
    ("capability", "seen", "target"),
    [((8, 0), r"NVIDIA X \(sm_80\)", "sm_80"), ((7, 0), "sm_70", "cpu"), (None, "no CUDA", "cpu")],
)
@pytest.mark.parametrize(
    ("command", "again"),
    [
        ("tessella compile a --target sm_90", "tessella compile a --target {}[.]$"),
        ("tessella compile sm_90 --out sm_90.plan", "tessella compile sm_90 --out sm_90.plan[.]$"),
        ("tessella.compile(net, target='sm_90')", r"tessella.compile\(net, target='{}'\)"),
    ],
)
def test_a_plan_for_another_gpu_is_refused_with_the_command_for_this_one(
    install, capability, seen, target, command, again
) -> None:
    install(capability)
    with pytest.raises(WrongDevice, match=f"(?s){seen}.*{again.format(target)}"):
        HOPPER.require_here(rebuild=command)


def test_a_plan_for_this_processor_runs_here() -> None:
    here = fingerprint("cpu")
    here.require_here(rebuild="x")
    with pytest.raises(WrongDevice, match="rebuild it here: x"):
        replace(here, arch="armv9").require_here(rebuild="x")


def test_newer_gpus_have_what_older_ones_have_but_for_hoppers_own() -> None:
    """So the nearest older target asks nothing of an unknown GPU that it lacks."""
    features = ("cp_async", "sparse_mma", "fp16_mma", "bf16_mma", "tf32_mma", "int8_mma",
                "fp8_mma", "dependent_launch", "tma")  # fmt: skip
    for feature in features:
        having = [has(target, feature) for target in GPU_TARGETS]
        assert having == sorted(having), feature
    assert [t for t in GPU_TARGETS if has(t, "wgmma")] == ["sm_90"]
    assert not has("cpu", "fp16_mma")
    assert target_of(7, 2) is None
