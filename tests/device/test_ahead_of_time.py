"""Compiled kernels: collected, stored, found again by key, and launched without a compiler."""

from __future__ import annotations

import base64
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.core import cubin
from tessella.core.compiled import CompiledKernel, CompiledKernels, Parameter
from tessella.core.errors import CorruptArtifact
from tessella.core.record import from_plain
from tessella.device import ahead_of_time
from tessella.kernels.user import cuda
from tessella.runtime.engine import compiled_here
from tests.support.networks import captured, plan
from tests.support.plans.fuzz_fields import member
from tests.support.plans.fuzz_plans import honest, members_of
from tests.support.plans.linear import linear_plan

ROOT = Path(__file__).parents[2]


def compiled_in(folder: Path, source: Path = ROOT / "src") -> dict[str, Any]:
    """What ``ahead_of_time_only`` finds, with an empty cache and the package at another place."""
    out = folder / "found.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{source}{os.pathsep}{ROOT}"
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command = [sys.executable, "-m", "tests.support.kernels.ahead_of_time_only", str(out)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return compiled_in(tmp_path_factory.mktemp("here"))


def kernels_of(found: dict[str, Any]) -> CompiledKernels:
    return CompiledKernels(
        kernels=tuple(from_plain(CompiledKernel, k, where="test") for k in found["kernels"]),
        cubins={h: base64.b64decode(text) for h, text in found["cubins"].items()},
    )


@pytest.fixture(scope="module")
def compiled(found: dict[str, Any]) -> CompiledKernels:
    return kernels_of(found)


@pytest.fixture(scope="module")
def plan_with_kernels(compiled: CompiledKernels) -> Plan:
    """A plan that says it is for a GPU, with kernels."""
    made = plan(captured("lenet"))
    there = replace(made.manifest.fingerprint, target="sm_90", arch="sm_90")
    return replace(made, manifest=replace(made.manifest, fingerprint=there), compiled=compiled)


# --- the way there and back -----------------------------------------------------------------------


def test_what_was_compiled_is_launched_without_a_compiler(found: dict[str, Any]) -> None:
    assert found["missed"] == []
    assert found["left_out"] == {}
    names = [one["name"] for one in found["launches"]]
    assert names == ["multiply", "add_ranges", "_tiled_kernel"] == found["watched"]
    multiply, add, tiled = found["launches"]
    # a split product: 12 warps (8 that multiply, 4 that load), deep buffers, four tensor maps
    assert multiply["block"] == [384, 1, 1]
    assert multiply["shared_bytes"] > 200_000
    assert multiply["sizes"].count(128) == 4
    assert add["grid"] == [128, 1, 1]
    assert add["shared_bytes"] == 0
    assert tiled["numbers"][4:7] == [128, 1000, 2048]  # M, N, K, behind four tensors


def test_a_launch_hands_over_what_the_machine_code_takes(
    found: dict[str, Any], compiled: CompiledKernels, tmp_path: Path
) -> None:
    """The sizes of all parameters, as NVIDIA's own disassembler reads them out of the cubin."""
    by_name = {k.name: compiled.cubins[k.cubin] for k in compiled.kernels}
    for one in found["launches"]:
        text = cuobjdump(by_name[one["name"]], "-elf", tmp_path)
        entries = re.findall(
            r"KPARAM_INFO.*?Ordinal\s*:\s*(0x\w+)\s*Offset\s*:\s*(0x\w+)\s*Size\s*:\s*(0x\w+)",
            text,
            flags=re.DOTALL,
        )
        sizes = {int(ordinal, 16): int(size, 16) for ordinal, _, size in entries}
        assert one["sizes"] == [sizes[i] for i in range(len(sizes))], one["name"]


def halves(items: list[Any]) -> tuple[list[Any], list[Any]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


def test_a_kernel_cache_compiles_once_and_launches_like_a_plan(found: dict[str, Any]) -> None:
    first, again, by_plan = (
        [{**one, "numbers": ()} for one in launches]  # addresses are among them
        for launches in (*halves(found["in a kernel cache"]), found["launches"])
    )
    assert first == again == by_plan
    assert found["kernel cache"]  # collected there: what a plan carries


def test_what_is_missing_is_asked_of_the_compiler(found: dict[str, Any]) -> None:
    said, *missed = found["without"]
    assert said == "something is compiled"
    assert missed == ["tessella.kernels.gemm.wgmma_device.multiply"]


def test_a_plan_brings_its_kernels_back(plan_with_kernels: Plan) -> None:
    content = to_bytes(plan_with_kernels)
    back = from_bytes(content)
    assert back.compiled == plan_with_kernels.compiled
    assert len(back.compiled.cubins) == 3
    assert to_bytes(back) == content


def test_equal_sources_give_equal_bytes_wherever_they_lie(
    compiled: CompiledKernels, tmp_path: Path
) -> None:
    """From another folder, in another process, with an empty cache; no path is in them."""
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(
        ROOT / "src/tessella", elsewhere / "tessella", ignore=shutil.ignore_patterns("__pycache__")
    )
    assert kernels_of(compiled_in(tmp_path, elsewhere)) == compiled
    for code in compiled.cubins.values():
        assert not re.search(rb"/\w+/|\.py|tessella", code)


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_as_fine_as_what_triton_compiles_for(found: dict[str, Any]) -> None:
    keys = found["keys"]
    assert keys["first"] == keys["other numbers of the kind"]
    by_key: dict[str, set[str]] = {}
    for key, of_triton in keys.values():
        by_key.setdefault(key, set()).add(of_triton)
    assert all(len(hashes) == 1 for hashes in by_key.values())
    assert len(by_key) == len(keys) - 1


def test_a_key_follows_all_of_the_source(found: dict[str, Any]) -> None:
    hashes = found["sources"]
    assert hashes["first"] == hashes["again"]
    assert len(set(hashes.values())) == 3


# --- machine code from strangers ------------------------------------------------------------------


def cuobjdump(code: bytes, option: str, folder: Path) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    path = folder / "kernel.cubin"
    path.write_bytes(code)
    return subprocess.run(
        [program, option, path], capture_output=True, text=True, check=True
    ).stdout


def test_stripped_code_is_checked_and_stays_as_it_is(compiled: CompiledKernels) -> None:
    for kernel in compiled.kernels:
        code = compiled.cubins[kernel.cubin]
        assert cubin.wrong(code, kernel.name, 90) is None
        assert cubin.stripped(code) == code
        assert cubin.wrong(code, "other", 90) == "it has no kernel 'other'"


def test_garbled_code_is_refused_or_harmless_but_never_read_past(
    compiled: CompiledKernels,
) -> None:
    rng = random.Random(0)
    kernel = compiled.kernels[0]
    code = compiled.cubins[kernel.cubin]
    refused = 0
    for _ in range(1500):
        changed = bytearray(code)
        kind = rng.randrange(3)
        if kind == 0:
            del changed[rng.randrange(len(changed)) :]
        else:  # the header, or the tables at the end
            start = 0 if kind == 1 else len(changed) - 2000
            for _ in range(rng.choice((1, 2, 8))):
                changed[start + rng.randrange(64 if kind == 1 else 2000)] = rng.randrange(256)
        refused += cubin.wrong(bytes(changed), kernel.name, 90) is not None
    assert refused > 1200
    assert cubin.wrong(code, kernel.name, 80) == "machine code for something else than sm_80"
    for length in (0, 1, 63, 64, 100):
        assert cubin.wrong(code[:length], kernel.name, 90)
    assert cubin.wrong(b"\x7fELF" + bytes(200), kernel.name, 90)


def first(change: Callable[[CompiledKernel], CompiledKernel]) -> Callable[..., CompiledKernels]:
    return lambda c: replace(c, kernels=(change(c.kernels[0]), *c.kernels[1:]))


def recoded(change: Callable[[bytes], bytes]) -> Callable[..., CompiledKernels]:
    """The first kernel with changed machine code, under its honest hash."""

    def changed(c: CompiledKernels) -> CompiledKernels:
        kernel = c.kernels[0]
        code = change(c.cubins[kernel.cubin])
        hashed = sha256(code).hexdigest()
        cubins = {h: b for h, b in c.cubins.items() if h != kernel.cubin} | {hashed: code}
        return CompiledKernels(
            kernels=(replace(kernel, cubin=hashed), *c.kernels[1:]),
            cubins=dict(sorted(cubins.items())),
        )

    return changed


TILES = {"element": 6, "element_bytes": 2, "box": (1, 64, 64), "swizzle": 3}
LIES: dict[str, Callable[[CompiledKernels], CompiledKernels]] = {
    "another name": first(lambda k: replace(k, name="more")),
    "no name": first(lambda k: replace(k, name="a b")),
    "many threads": first(lambda k: replace(k, threads=2048)),
    "no threads": first(lambda k: replace(k, threads=0)),
    "much shared memory": first(lambda k: replace(k, shared_bytes=1 << 30)),
    "less than nothing": first(lambda k: replace(k, shared_bytes=-1)),
    "endless scratch": first(lambda k: replace(k, scratch_bytes=1 << 40)),
    "an argument twice": first(lambda k: replace(k, parameters=(k.parameters[0],) * 2)),
    "an argument far away": first(
        lambda k: replace(k, parameters=(Parameter(place=(10**9,), type="i32"),))
    ),
    "before the first": first(
        lambda k: replace(k, parameters=(Parameter(place=(-1,), type="i32"),))
    ),
    "a tensor without tiles": first(
        lambda k: replace(k, parameters=(Parameter(place=(0,), type="tensor"),))
    ),
    "out of order": lambda c: replace(c, kernels=c.kernels[::-1]),
    "twice": lambda c: replace(c, kernels=(c.kernels[0], *c.kernels)),
    "code that none uses": lambda c: replace(c, kernels=c.kernels[1:]),
    "no code": lambda c: replace(c, cubins={}),
    "cut code": recoded(lambda code: code[: len(code) // 2]),
    "code with more behind": recoded(lambda code: code[:64] + b"\xff" * 200),
    "code for another GPU": recoded(lambda code: code[:48] + b"\x50\x05\x50\0" + code[52:]),
    "flags that no compiler sets": recoded(lambda code: code[:48] + b"\xff" * 4 + code[52:]),
    "not code": recoded(lambda code: b"#!/bin/sh"),
    "empty code": recoded(lambda code: b""),
}


@pytest.mark.parametrize("name", LIES)
def test_a_plan_that_lies_about_its_kernels_is_refused(plan_with_kernels: Plan, name: str) -> None:
    from_bytes(to_bytes(plan_with_kernels))
    lying = replace(plan_with_kernels, compiled=LIES[name](plan_with_kernels.compiled))
    with pytest.raises(CorruptArtifact):
        from_bytes(to_bytes(lying))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "f128"),
        ("type", 3),
        ("place", "0"),
        ("place", []),
        ("place", [0, -1]),
        ("place", [0] * 99),
        ("tiles", {**TILES, "box": [4096]}),
        ("tiles", {**TILES, "box": []}),
        ("tiles", {**TILES, "element_bytes": 3}),
        ("tiles", {**TILES, "swizzle": 99}),
        ("tiles", {"box": 1}),
    ],
)
def test_parameters_that_cannot_be_are_refused(
    plan_with_kernels: Plan, field: str, value: Any
) -> None:
    members = members_of(to_bytes(plan_with_kernels))
    lines = [json.loads(line) for line in member(members, "kernels.jsonl").splitlines()]
    mapped = next(k for k in lines if k["parameters"][0]["type"] == "tensor")
    mapped["parameters"][0][field] = value
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with pytest.raises(CorruptArtifact):
        from_bytes(honest(members, kernels=text))


def test_a_plan_for_a_cpu_has_no_machine_code(plan_with_kernels: Plan) -> None:
    manifest = plan(captured("lenet")).manifest
    with pytest.raises(CorruptArtifact, match="not valid"):
        from_bytes(to_bytes(replace(plan_with_kernels, manifest=manifest)))


def test_members_of_another_name_are_refused(plan_with_kernels: Plan) -> None:
    content = to_bytes(plan_with_kernels)
    hashed = sorted(plan_with_kernels.compiled.cubins)[0]
    for other in ("0" * 64, "../" + hashed[3:], hashed.upper()):
        with pytest.raises(CorruptArtifact):
            from_bytes(content.replace(hashed.encode(), other.encode()))


# --- CUDA C++ -------------------------------------------------------------------------------------

SCALE = 'extern "C" __global__ void scale(float* x, float by) { x[threadIdx.x] *= by; }'


def test_cuda_is_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = cuda(SCALE, "scale")
    collected = ahead_of_time.Collected("sm_90")
    collected.add_cuda(kernel.key("sm_90"), "scale", kernel.cubin("sm_90"))
    compiled = collected.compiled
    assert compiled.wrong("sm_90") is None

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr("torch.cuda._utils._nvrtc_compile", refuse)
    with ahead_of_time.using_kernels(ahead_of_time.PlanKernels(compiled, "sm_90")):
        assert cuda(SCALE, "scale").cubin("sm_90") == compiled.cubins[compiled.kernels[0].cubin]
        with pytest.raises(AssertionError, match="is compiled"):
            cuda(SCALE.replace("*=", "+="), "scale").cubin("sm_90")


def test_cuda_is_compiled_once_on_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made = cuda(SCALE, "scale").cubin("sm_90")
    (kept,) = tmp_path.rglob("scale.cubin")
    assert kept.read_bytes() == made

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr("torch.cuda._utils._nvrtc_compile", refuse)
    assert cuda(SCALE, "scale").cubin("sm_90") == made
    with pytest.raises(AssertionError, match="is compiled"):
        cuda(SCALE, "scale").cubin("sm_80")


def test_kernels_that_a_plan_lacks_are_told_at_once_and_with_their_time(caplog) -> None:
    kernels = ahead_of_time.PlanKernels(CompiledKernels(), "sm_90", driver=object())
    for name in ("gemm", "gemm", "pool"):
        assert kernels.find("a key", name) is None
    (record,) = caplog.records  # the first one, before it is compiled
    assert "does not carry gemm" in record.getMessage()
    kernels.missed_since -= 31
    told = compiled_here(linear_plan().manifest, kernels)
    (seconds,) = re.findall(r"compiled here in ([\d.]+) s", told)
    assert float(seconds) >= 31
    assert "gemm, pool" in told
    assert told.endswith("make it again"), "the command that writes the plan anew"
