"""find: run every kernel that fits a problem, and say how fast it was or why it was refused."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.core.device import fingerprint, torch_device
from tessella.core.errors import CompileError
from tessella.kernels import catalog
from tessella.kernels.catalog import Call, Kernel
from tessella.kernels.float32_math import float32_math
from tessella.kernels.problem import MEMORY_FORMATS, Problem, TensorMeta
from tessella.kernels.timing import Run, measure
from tessella.kernels.tuning import TimingCache, Trial


def find(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    *,
    target: str,
    cache: TimingCache | None = None,
    budget_s: float = 0.02,
) -> tuple[Trial, ...]:
    """Every kernel of the catalog for this problem: the fastest first, refused ones last.

    Args:
        constants: the constant inputs by position, on the target's device.
        cache: times from here are believed; new ones are added.
        budget_s: about how long to measure.

    Raises:
        CompileError: no kernel can carry the problem out.
    """
    cache = cache or TimingCache()
    rows = catalog.candidates(problem.op, target)
    refusals = {row.id: row.load().fits(problem) for row in rows if not row.last_resort}
    fitting = [row for row in rows if row.id in refusals and refusals[row.id] is None]
    trials = [Trial(kernel=k, refused=r) for k, r in refusals.items() if r is not None]
    trials += _trials(fitting, problem, constants, target, cache, budget_s)
    if all(trial.refused for trial in trials):
        last = [row for row in rows if row.last_resort]
        trials += _trials(last, problem, constants, target, cache, budget_s)
    if all(trial.refused for trial in trials):
        raise CompileError(
            f"no kernel on {target} can carry out {problem.op}",
            seen="; ".join(f"{t.kernel}: {t.refused}" for t in trials),
            fix="choose another precision or target",
        )
    order = {row.id: i for i, row in enumerate(rows)}
    return tuple(
        sorted(trials, key=lambda t: (t.refused is not None, t.time_us or 0.0, order[t.kernel]))
    )


def _trials(
    rows: list[Kernel],
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    target: str,
    cache: TimingCache,
    budget_s: float,
) -> list[Trial]:
    """A trial of each row: from the cache if it knows all of them, else measured side by side."""
    if target == "reference":
        return [Trial(kernel=row.id) for row in rows]
    device, key = fingerprint(target).hash, problem.key
    known = [cache.get(device, key, row.id, row.version) for row in rows]
    if all(known):
        return [trial for trial in known if trial is not None]
    trials = _measured(rows, problem, constants, torch_device(target), budget_s)
    for row, trial in zip(rows, trials, strict=True):
        cache.put(device, key, row.version, trial)
    return trials


def _measured(
    rows: list[Kernel],
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    device: torch.device,
    budget_s: float,
) -> list[Trial]:
    inputs = sample_inputs(problem, device)
    runs: dict[str, Run] = {}
    failures: dict[str, str] = {}
    with torch.inference_mode(), float32_math(problem.math):
        for row in rows:
            try:
                runs[row.id] = _ready(row, problem, constants, inputs, device)
            except (RuntimeError, ValueError, TypeError) as error:
                failures[row.id] = f"failed: {str(error).splitlines()[0][:120]}"
        timings = measure(runs, device=device, budget_s=budget_s)
    return [
        Trial(kernel=row.id, refused=failures[row.id])
        if row.id in failures
        else Trial(
            kernel=row.id,
            time_us=timings[row.id].time_us,
            spread_us=timings[row.id].spread_us,
        )
        for row in rows
    ]


def _ready(
    row: Kernel,
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    inputs: list[torch.Tensor],
    device: torch.device,
) -> Run:
    """The kernel as a call without arguments, after a first run that made what it promised."""
    call, buffers = bind(row, problem, constants, device)
    made = call(*inputs, **buffers)
    made = (made,) if isinstance(made, torch.Tensor) else made
    for tensor, meta in zip(made, problem.outputs, strict=True):
        if not meta.matches(tensor):
            seen = f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()}"
            raise ValueError(f"made {seen} instead of {meta}")
    return lambda: call(*inputs, **buffers)


def bind(
    row: Kernel, problem: Problem, constants: Mapping[int, torch.Tensor], device: torch.device
) -> tuple[Call, dict[str, torch.Tensor]]:
    """A kernel ready to run, and its ``out=`` buffer if it writes into one."""
    module = row.load()
    call = module.bind(problem, constants)
    return call, {"out": problem.output.empty(device)} if module.WRITES_OUT else {}


def sample_inputs(problem: Problem, device: torch.device) -> list[torch.Tensor]:
    """Normal numbers (zeros for integers) for every input that is not a constant."""
    generator = torch.Generator().manual_seed(0)

    def sample(meta: TensorMeta) -> torch.Tensor:
        dtype = getattr(torch, meta.dtype)
        if not dtype.is_floating_point:
            return torch.zeros(meta.shape, dtype=dtype, device=device)
        made = torch.randn(meta.shape, generator=generator).to(device, dtype)
        return made.contiguous(memory_format=MEMORY_FORMATS[meta.format])

    return [
        sample(meta)
        for i, meta in enumerate(problem.inputs)
        if meta is not None and i not in problem.constant
    ]
