"""The cost model: which kernel is taken for a machine that is not here, where nothing can run.

A kernel takes what its products need at its share of the chip's rate, or what its bytes need, and
its launches. The shares are rough, and only order the kernels of one step; ``tessella tune`` on the
machine replaces all that was chosen by them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tessella.core.architectures import ARCHITECTURES, Rates, has, is_gpu
from tessella.device.machine import aimed_at
from tessella.kernels import catalog
from tessella.kernels.catalog import Kernel
from tessella.operations.problem import Problem
from tessella.search.tuning import Trial, require_one

# What a kernel's products reach of the chip's rate. On the H200, 78 convolutions in float16 and
# products of 4096³: cuDNN and cuBLAS 0.75, ours with Hopper's instructions as much, plain Triton
# half of it (docs/benchmarks.md). On CPUs, ResNet-50's layers: our machine code before oneDNN.
_SHARES = {
    "cudnn": 0.7, "cublaslt": 0.75, "cusparselt": 0.75, "onednn": 0.7, "mkl": 0.6, "aten": 0.55,
    "tessella": 0.45, "user": 0.45,
}  # fmt: skip
_HOPPER_SHARE, _X86_SHARE = 0.75, 0.75
_FOURIER_SHARE = 0.02  # of what the direct sum would reach, for the usual small filters
# a kernel that reads every product's operand through memory once more
_UNFOLDS = ("gemm",)
_START_US = {"gpu": 2.0, "cpu": 3.0}  # of one launch, in a CUDA graph; of one step
_BANDWIDTH_SHARE, _TORCH_BANDWIDTH_SHARE = 0.8, 0.6
_CPU_CORE = Rates(memory_gb=8, float32=0.06, int8=0.12)  # AVX2 at 2 GHz or so


@dataclass(frozen=True, kw_only=True)
class _Machine:
    rates: Rates
    start_us: float
    target: str

    def operations_us(self, count: float, problem: Problem, on_tensor_cores: bool) -> float:
        """The least microseconds of so many operations of a problem's type."""
        return count / (1e6 * self._rate(problem, on_tensor_cores))

    def bytes_us(self, count: float, row: Kernel) -> float:
        share = _TORCH_BANDWIDTH_SHARE if row.source == "aten" else _BANDWIDTH_SHARE
        return count / (1e3 * self.rates.memory_gb * share)

    def _rate(self, problem: Problem, on_tensor_cores: bool) -> float:
        rates, dtype = self.rates, problem.given[0].dtype
        kind = dtype
        if dtype == "float32" and problem.math == "tf32" and has(self.target, "tf32_mma"):
            kind = "tf32"
        known = {
            "float16": rates.float16, "bfloat16": rates.float16, "int8": rates.int8,
            "tf32": rates.tf32, "float8_e4m3fn": rates.fp8, "float8_e5m2": rates.fp8,
        }  # fmt: skip
        return (known.get(kind, 0.0) if on_tensor_cores else 0.0) or rates.float32


def estimated(
    problem: Problem,
    *,
    target: str,
    max_workspace_bytes: int | None = None,
    refused: Mapping[str, str] | None = None,
) -> tuple[Trial, ...]:
    """Every kernel of the catalog for this problem in its first configuration, by the cost model.

    Args:
        refused: kernels that were found wrong, with the reason.

    Returns:
        The one that should be fastest first, refused ones last; ``estimate_us`` instead of times.

    Raises:
        CompileError: no kernel can carry the problem out.
    """
    known = refused or {}

    def trial_of(row: Kernel) -> Trial:
        if row.id in known:
            return Trial(kernel=row.id, refused=known[row.id])
        return _trial(row, problem, target, max_workspace_bytes)

    with aimed_at(target):
        rows = catalog.candidates(problem.op, target)
        trials = [trial_of(row) for row in rows if not row.last_resort]
        if all(trial.refused for trial in trials):
            trials += [trial_of(row) for row in rows if row.last_resort]
    require_one(trials, problem.op, target)
    return tuple(sorted(trials, key=lambda t: (t.refused is not None, t.estimate_us or 0.0)))


def _trial(row: Kernel, problem: Problem, target: str, most_bytes: int | None) -> Trial:
    refused = row.refusal(problem) or row.outclassed(problem)
    if refused is None and row.unproven:
        refused = "has not run on a GPU yet"
    configs = () if refused else row.configs(problem)
    fitting = (c for c in configs if row.workspace_bytes(problem, c) <= (most_bytes or math.inf))
    config = next(fitting, None)
    if config is None:
        why = refused or ("needs more workspace than is allowed" if configs else "no configuration")
        return Trial(kernel=row.id, refused=why)
    workspace_bytes = row.workspace_bytes(problem, config)
    return Trial(
        kernel=row.id,
        config=config,
        workspace_bytes=workspace_bytes,
        estimate_us=estimate_us(row, problem, target, workspace_bytes),
    )


def estimate_us(row: Kernel, problem: Problem, target: str, workspace_bytes: int = 0) -> float:
    """About how many microseconds a kernel takes on a machine of this kind."""
    machine = _machine(target)
    passes = _passes(row, problem)
    moved = problem.nbytes + 2 * workspace_bytes + 2 * (passes - 1) * problem.outputs[0].nbytes
    if row.algorithm in _UNFOLDS and problem.op.startswith("conv"):
        moved += 2 * problem.given[0].nbytes * math.prod(problem["weight"].shape[2:])
    product_us = 0.0
    if (work := problem.flops) is not None:
        on_tensor_cores = row.tensor_cores or row.source != "tessella" or bool(row.needs)
        least_us = machine.operations_us(work, problem, on_tensor_cores and is_gpu(target))
        product_us = least_us / _share(row)
    return round(max(product_us, machine.bytes_us(moved, row)) + passes * machine.start_us, 2)


def _machine(target: str) -> _Machine:
    if is_gpu(target):
        return _Machine(rates=ARCHITECTURES[target].rates, start_us=_START_US["gpu"], target=target)
    cores = len(os.sched_getaffinity(0))
    rates = Rates(
        memory_gb=_CPU_CORE.memory_gb * cores,
        float32=_CPU_CORE.float32 * cores,
        int8=_CPU_CORE.int8 * cores,
    )
    return _Machine(rates=rates, start_us=_START_US["cpu"], target=target)


def _share(row: Kernel) -> float:
    if row.algorithm.startswith("fft"):
        return _FOURIER_SHARE
    if row.isa is not None:
        return _X86_SHARE
    return _HOPPER_SHARE if "wgmma" in row.needs else _SHARES[row.source]


def _passes(row: Kernel, problem: Problem) -> int:
    """How often a kernel goes through its result: torch's operators once for each operation."""
    if row.algorithm == "reference" or row.source == "aten":
        if problem.op == "pointwise":
            return max(1, len(problem.attrs["program"]))
        epilogue = problem.epilogue
        later = (epilogue.residual, epilogue.scale, epilogue.activation)
        return 1 + sum(part is not None for part in later)
    return 1
