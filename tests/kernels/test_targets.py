"""Every kernel in Triton compiles for the GPUs that it is for, within what these have.

Without a GPU, by Triton's own ptxas. ``python -m tests.kernels.test_targets`` writes
docs/targets.md.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.older_gpu import spelled_out
from tessella.compiler.budget.mixes import offered
from tessella.core.architectures import ARCHITECTURES, GPU_TARGETS
from tessella.device.ahead_of_time import kernel_cache
from tessella.device.machine import aimed_at, stages_that_fit
from tessella.device.overlap import overlapping
from tessella.kernels import catalog
from tessella.search import compile_ahead as compilers
from tests.support.kernels import for_targets

DOCUMENT = Path(__file__).parents[2] / "docs" / "targets.md"
COMPILED = tuple(target for target in GPU_TARGETS if target != "sm_90")
# targets as whose code these modules answered on an H200 (``tests/gpu/test_every_kernel.py``)
ANSWERED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")
_ASKED = frozenset((
    "attention.flash", "attention.windows", "conv.ampere.direct", "conv.ampere.implicit_gemm",
    "conv.dgrad", "conv.direct", "conv.fourier.fft", "conv.fourier.fft_tiling", "conv.gemm",
    "conv.implicit_gemm", "conv.implicit_precomp_gemm", "conv.transposed", "conv.wgrad",
    "conv.winograd.fused", "conv.winograd.nonfused", "detect.gathered", "detect.gridded",
    "detect.nms_rounds", "detect.ranked", "detect.regions", "detect.sampled", "gemm.skinny",
    "gemm.tiled", "norm.group",
    "pointwise.generated", "pointwise.generated_several", "pool.windows", "quant.tiled",
    "reduce.columns", "transform.image", "transform.pad_rows",
    "transform.rearrange_rows", "transform.rearrange_tiles", "transform.resize_rows",
))  # fmt: skip
# of all kernels and problems: ``--all`` says it
WITHIN = {
    "sm_75": "64 of 64", "sm_80": "125 of 126", "sm_86": "131 of 131", "sm_89": "128 of 128",
    "sm_90": "128 of 128", "sm_100": "128 of 128", "sm_120": "128 of 128",
}  # fmt: skip
# of a thread; more would be registers that do not fit. Loops' pointers and counters are less
MOST_SPILLED_BYTES = 64
BEGINNING = """# GPU targets

A plan is built for one target and refuses every other GPU, with the command that rebuilds it there.
`default_target()` and every command take the GPU that is there; a GPU without a target of its own
gets the nearest older one, and a warning that says so; what it runs is compiled on it. This page is
written by `python -m tests.kernels.test_targets` from `core/architectures.py` and
`kernels/catalog.py`; a test compares.

**Only Hopper has been run on (H100, H200).** For all other targets, `tests/kernels/test_targets.py`
compiles the kernels with Triton's ptxas, without a GPU, and reads registers, spilled registers and
shared memory against that chip's limits. Libraries (cuDNN, cuBLASLt, cuSPARSELt, ATen) are asked
there as on Hopper; what they refuse, a build leaves out.

What Triton writes for all of them but `sm_100`, with the configurations and the shared memory of
these chips, also ran on an H200 (`benchmarks/older_gpu.py` says how; CUDA C++ is compiled for the
GPU that runs it, there too), and its answers are right: every kernel that is marked `answers`, with
the problems that a kernel report tries, beside float64 (`TARGET=sm_86 python -m pytest
tests/gpu/test_every_kernel.py`); and as `sm_80` and `sm_89` all of `tests/gpu` but what is Hopper's
alone. How fast a kernel is on these chips, nobody knows; `python -m benchmarks.older_plans` times
whole networks on a Hopper GPU (`benchmarks/results/older-plans-*.json`).

On a chip of this table that you have, `tessella doctor --report` runs all kernels, compares each
with float64, times it beside torch's, and writes a file to send us: see
[the report](kernel-report.md). Nobody has sent one yet.

| target | GPUs | shared memory of a block | what it has | our kernels |
| --- | --- | --- | --- | --- |
"""
LIMITS = """
Kernels in Hopper's own instructions need `wgmma` and `tma`. Chains of 1×1 convolutions and products
that normalize their rows are Hopper's alone: a chain takes 208 to 224 KB of shared memory, and for
chips with 163 or 99 KB none was written or tried. The portable ones are in Triton, which writes
their products with `mma.sync`, on `sm_90` with `wgmma`, on `sm_100` with `tcgen05.mma`. For `sm_75`
it writes none for tensor cores: there our products are in float32 only, and bfloat16 and FP8 are
the libraries'. Plans for `sm_100` and `sm_120` carry no machine code: its second form is not
checked yet, so kernels are compiled where such a plan is loaded.

`tessella compile` measures, so it needs the target's GPU. For one that is not here, `--untuned`
lets a cost model choose, and `tessella tune` measures there: see [plans](plans.md).

## Kernels

`run`: on an H100 or H200, in `tests/gpu` or in the plans of [the benchmarks](benchmarks.md).
`answers`: not on the target's chip, but as its code on an H200, and right; timed nowhere.
`compiled`: by ptxas, with the first configuration of a problem; on `sm_80` with the smallest one,
too. A line is a module of `src/tessella/kernels`.

`python -m tests.kernels.test_targets --all sm_80` compiles every kernel with every problem of the
list, in its first configuration and its smallest, which CI has no time for, and reads the same of
each. On 2026-11-27, with Triton 3.9, so many were within the limits:

| target | {targets} |
| --- |{lines}
| within | {counts} |

The one of `sm_80` that is not is attention of windows in float32, which takes 112 bytes more than
its 255 registers where 64 are allowed. By eight warps instead of four it is slower on an H200 with
Hopper's code: 360 µs for 234 (2,048 windows of 49, 3 heads). Of `sm_90` these are the
kernels that it shares with the others; Hopper's own tests compile its own.

"""


def document() -> str:
    counts = " | ".join(WITHIN.values())
    lists = LIMITS.format(
        targets=" | ".join(f"`{target}`" for target in WITHIN),
        lines=" --- |" * len(WITHIN),
        counts=counts,
    )
    parts = [BEGINNING]
    for target in GPU_TARGETS:
        unit = ARCHITECTURES[target]
        has = ", ".join(f"`{feature}`" for feature in sorted(unit.has)) or "–"
        done = "run" if target == "sm_90" else "compiled, never run on this chip"
        shared = f"{unit.shared_bytes_of_block() >> 10} KB"
        parts.append(f"| `{target}` | {unit.chips} | {shared} | {has} | {done} |\n")
    parts += [lists, "| kernels | ", " | ".join(f"`{t}`" for t in GPU_TARGETS), " |\n"]
    parts.append("| --- " * (1 + len(GPU_TARGETS)) + "|\n")
    for module in dict.fromkeys(row.module for row in ours()):
        row = next(row for row in ours() if row.module == module)
        cells = " | ".join(state(row, target) for target in GPU_TARGETS)
        parts.append(f"| `{short(module)}` | {cells} |\n")
    return "".join(parts)


def ours() -> list[catalog.Kernel]:
    return [k for k in catalog.KERNELS if k.source == "tessella" and "gpu" in k.targets]


def short(module: str) -> str:
    return module.removeprefix("tessella.kernels.")


def state(row: catalog.Kernel, target: str) -> str:
    if not row.runs_on(target):
        return "–"
    if target == "sm_90" and not row.unproven:
        return "run"
    asked = target in ANSWERED and short(row.module) in _ASKED and not row.unproven
    done = "answers" if asked else "compiled"
    return f"{done}, float32" if row.tensor_cores and target == "sm_75" else done


def test_the_document_is_what_the_catalog_says() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.kernels.test_targets"


@pytest.mark.timeout(900)  # the first waits for all: 130 s of a fast processor
@pytest.mark.parametrize("target", COMPILED)
def test_kernels_compile_within_the_limits_of_the_chip(target: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # 400 s, which a busy machine needs for them
    unit = ARCHITECTURES[target]
    assert unit.shared_bytes_of_block() <= {
        "sm_75": 64 << 10, "sm_80": 163 << 10, "sm_100": 227 << 10,
    }.get(target, 99 << 10)  # fmt: skip
    found = for_targets.results()[target]
    assert not [wrong for case, made in found.items() if (wrong := beyond(target, case, made))]
    wanted = {row.module for row in ours() if row.runs_on(target) and not row.id.endswith(".sm90")}
    assert {catalog.kernel(case.split("|")[1]).module for case in found} == wanted


def beyond(target: str, case: str, launches: for_targets.Launches) -> str | None:
    """What a case takes that the chip does not have, or why it did not compile; or None."""
    unit = ARCHITECTURES[target]
    if isinstance(launches, str) or not launches:
        return f"{case}: {launches or 'no launch'}"
    for used in launches:
        right = (
            used["registers"] <= unit.registers_per_thread
            and used["registers"] * used["threads"] <= unit.registers
            and used["shared_bytes"] <= unit.shared_bytes_of_block()
            and used["threads"] <= unit.threads_per_block
            and used["spilled_bytes"] <= MOST_SPILLED_BYTES
            and not used["faults"]
            # what plans carry is checked; Blackwell's second form of machine code is not yet
            and used["is_complete"] == (target not in ("sm_100", "sm_120"))
        )
        if not right:
            return f"{case}: {used}"
    return None


def test_every_problem_is_some_kernels() -> None:
    used = {name for target in GPU_TARGETS for name, _, _ in for_targets.cases(target)}
    assert used == set(for_targets.problems())


def test_hoppers_kernels_are_hoppers_alone() -> None:
    for row in ours():
        alone = [target for target in GPU_TARGETS if row.runs_on(target)] == ["sm_90"]
        assert alone == row.id.endswith(".sm90"), row.id


def test_a_kernel_refuses_what_a_gpu_lacks() -> None:
    problem = for_targets.problems()
    tiled, winograd = catalog.kernel("linear.tiled"), catalog.kernel("conv2d.winograd")

    def refusal(target: str, name: str) -> str | None:
        with aimed_at(target):
            return tiled.refusal(problem[f"linear {name}"])

    assert refusal("sm_75", "half") == "sm_75 has no fp16"
    assert refusal("sm_75", "bfloat16") == "sm_75 has no bf16"
    assert refusal("sm_75", "ieee") is None
    assert refusal("sm_80", "fp8") == "sm_80 has no fp8"
    assert all(refusal("sm_89", name) is None for name in ("half", "ieee", "bfloat16", "fp8"))
    assert not winograd.runs_on("sm_75")  # it copies by cp.async
    assert winograd.runs_on("sm_80")
    assert not catalog.kernel("linear.tiled").runs_on("cpu")
    user = replace(tiled, source="user")  # knows itself what it takes
    with aimed_at("sm_75"):
        assert user.refusal(problem["linear half"]) is None


def test_stages_fit_the_shared_memory() -> None:
    for target, most, nbytes, stages in [
        ("sm_90", 5, 40 << 10, 5), ("sm_80", 5, 40 << 10, 4), ("sm_89", 5, 40 << 10, 2),
        ("sm_89", 5, 60 << 10, 0), ("sm_75", 5, 60 << 10, 2), ("sm_75", 5, 70 << 10, 0),
    ]:  # fmt: skip
        with aimed_at(target):
            assert stages_that_fit(most, nbytes) == stages, (target, nbytes)


def test_configurations_of_a_problem_are_those_of_each_gpu() -> None:
    """A process asks for several: what it remembers of one is not another's."""
    row, problem = catalog.kernel("linear.tiled"), for_targets.problems()["linear half"]

    def deepest(target: str) -> int:
        with aimed_at(target):
            return max(
                config["num_stages"] * (config["tile_m"] + config["tile_n"]) * config["tile_k"] * 2
                for config in row.configs(problem)
            )

    assert deepest("sm_90") > 99 << 10 >= deepest("sm_89")
    assert deepest("sm_90") > 99 << 10  # still


def test_a_kernel_starts_early_only_where_the_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    for target in GPU_TARGETS:
        with aimed_at(target):
            assert overlapping()["OVERLAP"] == (target in ("sm_90", "sm_100", "sm_120"))


@pytest.mark.parametrize("target", GPU_TARGETS)
def test_a_budget_offers_what_the_gpu_multiplies(target: str) -> None:
    kinds = set(offered(target, "fp32"))
    assert ("fp8" in kinds) == (target in ("sm_89", "sm_90", "sm_100", "sm_120"))
    assert {"fp16", "int8"} <= kinds
    assert ("int8+2:4" in kinds) == (target != "sm_75")


def test_a_relative_of_a_target_compiles_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """An sm_121 computes as an sm_120, but does not run code for sm_120a."""
    row, problem = catalog.kernel("linear.tiled"), for_targets.problems()["linear half"]
    requests = [(problem, row, config) for config in row.configs(problem)[:8]]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compilers, "_Compilers", None)
    for capability, target in [((12, 1), "sm_120"), ((8, 7), "sm_86")]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None, c=capability: c)
        assert kernel_cache(target) is None
        assert compilers.compile_ahead(requests, target).left == requests


def test_code_for_sm_120_is_spelled_out_for_hopper() -> None:
    """Each half of a pair by the instruction that there is for one; all else stays."""
    assert spelled_out("fma.rn.f32x2 %rd3, %rd1, %rd2, %rd1; ret;") == (
        "{ .reg .f32 %x<6>; mov.b64 {%x0, %x1}, %rd1; mov.b64 {%x2, %x3}, %rd2; mov.b64 {%x4, %x5},"
        " %rd1; fma.rn.f32 %x0, %x0, %x2, %x4; fma.rn.f32 %x1, %x1, %x3, %x5; mov.b64 %rd3, {%x0,"
        " %x1}; } ret;"
    )
    assert spelled_out("max.NaN.f32 %r4, %r1, %r2, %r3;") == (
        "{ .reg .f32 %x; max.NaN.f32 %x, %r1, %r2; max.NaN.f32 %r4, %x, %r3; }"
    )
    assert spelled_out("sub.f32.bf16 %r2, %rs1, %r1;") == (
        "{ .reg .f32 %x; cvt.f32.bf16 %x, %rs1; sub.f32 %r2, %x, %r1; }"
    )
    plain = "max.f32 %r3, %r1, %r2; add.rn.f32 %r4, %r3, %r1; mov.b64 %rd1, {%r3, %r4};"
    assert spelled_out(plain) == plain


def main() -> None:
    """Write the document; or with ``--all``, and targets, compile what CI has no time for."""
    if "--all" not in sys.argv[1:]:
        DOCUMENT.write_text(document())
        return
    for target, found in for_targets.results(*sys.argv[1:]).items():
        wrong = [told for case, made in found.items() if (told := beyond(target, case, made))]
        print(
            f"{target}: {len(found) - len(wrong)} of {len(found)} within its limits",
            *wrong,
            sep="\n  ",
        )


if __name__ == "__main__":
    main()
