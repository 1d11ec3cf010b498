"""Untuned plans in int8 are built and right for each set of instructions that there is here."""

from __future__ import annotations

import ctypes
import errno
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tessella as ts
from tessella import runtime
from tessella.core import processor
from tessella.core.device import fingerprint
from tessella.core.errors import KernelError
from tessella.core.spec import TensorSpec
from tessella.device.x86 import code, tiles
from tessella.device.x86.assembler import AVX512
from tessella.kernels import catalog
from tessella.kernels.shared import onednn
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.estimate import estimated

IMAGE = TensorSpec(name="image", dtype="float32", shape=(2, 3, 12, 12))
NEEDED = {  # torch's vectors, and the extension whose kernel is then taken
    "avx2": ("AVX2 AVX512", None),
    "avx2_vnni": ("AVX2 AVX512", "avx2_vnni"),
    "avx512": ("AVX512", None),
    "avx512_vnni": ("AVX512", "avx512_vnni"),
    "avx512_amx": ("AVX512", "amx_int8"),
}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that takes instructions away from our machine code, not from torch."""

    def to(isa: str) -> None:
        monkeypatch.setenv(processor.VARIABLE, isa)
        monkeypatch.setattr(catalog, "_known_configs", {})
        code.instructions.cache_clear()

    yield to
    monkeypatch.undo()
    code.instructions.cache_clear()


@pytest.mark.parametrize("has_onednn", [True, False])
@pytest.mark.parametrize("isa", NEEDED)
def test_an_untuned_network_in_int8_is_right(
    isa: str, has_onednn: bool, limited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors, extension = NEEDED[isa]
    if torch.backends.cpu.get_cpu_capability() not in vectors.split():
        pytest.skip(f"this process has not the vectors of {isa}")
    limited(isa)
    if not has_onednn:
        monkeypatch.setattr(onednn, "has_onednn", lambda: False)
        monkeypatch.setattr(onednn, "saturates", lambda: False)
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 32, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32),
    ).eval()  # fmt: skip
    image = torch.randn(2, 3, 12, 12)
    made = ts.compile(
        network,
        inputs=[IMAGE],
        target="cpu",
        precision="int8",
        calibration=[{"image": image}],
        untuned=True,
        trust_code=True,
    )
    (found,) = runtime.load(made)(image=image).values()
    with torch.inference_mode():
        right = network.double()(image.double())
    assert (found - right).abs().max() < 0.03 * right.abs().max()
    small = [s.kernel for s in made.program.buckets[0].steps if s.op == "conv2d"][1:]
    if extension is not None and code.refusal(extension) is None:
        assert small == [f"conv2d.{extension}{'' if 'int8' in extension else '_int8'}"] * 2
    elif isa == "avx2":
        assert small == ["conv2d.avx2_int8"] * 2


@pytest.mark.parametrize("untuned", [True, False])
def test_weights_of_8_bits_from_another_processor_are_multiplied_right(
    untuned: bool, limited: Any
) -> None:
    """AVX2 without VNNI adds two products in 16 bits: its own calibrations have 7 bits."""
    if code.instructions() is None:
        pytest.skip("this processor has not the vectors of avx2")
    limited("avx2")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.Hardswish(), nn.Conv2d(32, 32, 3, padding=1),
        nn.Hardswish(), nn.Conv2d(32, 32, 3, padding=1), nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32),
    ).eval()  # fmt: skip
    second = network[2]
    assert isinstance(second, nn.Conv2d)
    with torch.no_grad():
        second.weight[:, ::2] = 0  # of two products one is 0: their sum stays within 16 bits
    image = torch.randn(2, 3, 12, 12)
    calibration = ts.calibrate(network, [{"image": image}], inputs=[IMAGE], trust_code=True)
    made = ts.compile(
        network, inputs=[IMAGE], target="cpu", precision="int8", untuned=untuned,
        calibration=replace(calibration, weight_limit=127), trust_code=True,
    )  # fmt: skip
    if untuned:
        taken = [step.kernel for step in made.program.buckets[0].steps if step.op == "conv2d"]
        assert (taken[1], taken[2]) == ("conv2d.avx2_int8", "conv2d.onednn_int8")
        made = ts.tune(made)
    (found,) = runtime.load(made)(image=image).values()
    with torch.inference_mode():
        right = network.double()(image.double())
    assert (found - right).abs().max() < 0.03 * right.abs().max()


@pytest.mark.parametrize(
    ("number", "why"), [(errno.ENOSPC, "sigaltstack"), (errno.EPERM, "does not let this process")]
)
def test_where_linux_refuses_tiles_no_plan_has_them(
    number: int, why: str, limited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Library:
        def __init__(self, *_: object, **__: object) -> None:
            def syscall(*_: int) -> int:
                ctypes.set_errno(number)
                return -1

            self.syscall = syscall

    limited("avx512_amx")
    monkeypatch.setattr(code, "instructions", lambda: AVX512)
    shape = (3, 96, 7, 5)
    problem = Problem(
        op="conv2d",
        inputs=(
            TensorMeta(shape=shape, dtype="int8", format="channels_last"),
            TensorMeta(shape=(80, 96, 1, 1), dtype="int8"),
        ),
        outputs=(TensorMeta(shape=(3, 80, 7, 5), dtype="float32", format="channels_last"),),
        attrs={"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        | {"activation": None, "dtype": "float32"},
        constant=(1,),
    )
    has = {"avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"}
    monkeypatch.setattr(processor, "flags", lambda: has)
    monkeypatch.setattr(processor, "_granted", [True])
    assert estimated(problem, target="cpu")[0].kernel == "conv2d.amx_int8"
    granted = fingerprint("cpu")
    monkeypatch.setattr(processor, "_granted", [])
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", Library)
        patch.setattr(platform, "machine", lambda: "x86_64")
        patch.setattr(platform, "system", lambda: "Linux")
        assert why in (code.refusal("amx_int8") or "")
        with pytest.raises(KernelError, match=why):
            tiles.require_tiles()
        best, *others = estimated(problem, target="cpu")
        refused_here = fingerprint("cpu")
    assert granted.name == f"{refused_here.name}, amx_int8, amx_bf16"
    assert granted.hash != refused_here.hash  # no time of the one is believed by the other
    assert best.kernel == "conv2d.avx512_vnni_int8"
    (refused,) = [trial.refused for trial in others if trial.kernel == "conv2d.amx_int8"]
    assert refused is not None
    assert why in refused
