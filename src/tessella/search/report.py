"""``find`` as people call it: all algorithms on their tensors, and what bounds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tessella.core.count import with_spread
from tessella.core.dtype import dtype_name
from tessella.core.errors import UsageError
from tessella.kernels import catalog
from tessella.kernels.sparse.two_four import LAYERS, TWO_FOUR, is_two_four
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import meta_of
from tessella.search import find as search
from tessella.search.find import SearchOptions
from tessella.search.functional import check_algorithm, current, target_of, timing_cache
from tessella.search.limits import Limits, limits
from tessella.search.tuning import CACHE_FOLDER, Trial, Tried

ATTENTION = "scaled_dot_product_attention"
PROBLEMS: dict[str, Callable[..., Problem]] = {
    "conv1d": problems.conv,
    "conv2d": problems.conv,
    "conv3d": problems.conv,
    "conv2d_dgrad": problems.conv_dgrad,
    "conv2d_wgrad": problems.conv_wgrad,
    "matmul": problems.matmul,
    "linear": problems.linear,
    ATTENTION: problems.attention,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One kernel on one problem.

    Attributes:
        algorithm: cuDNN's name of the method, or the library's name.
        kernel: its id in the catalog.
        source: who wrote it.
        config: its fastest configuration; ``tried`` has all.
        time_us: median, in a CUDA graph with a cold L2 on a GPU; None if refused.
        spread_us: half the distance between the quartiles.
        workspace_bytes: scratch memory, exact for our kernels.
        max_rel_error: against float64: largest deviation over the largest value.
        repeatable: two runs gave the same bits.
        registers, shared_bytes, occupancy: of its largest launch, if it is ours.
        tflops: 10¹² operations a second, counting a direct sum of products.
        tbytes: 10¹² bytes a second, counting every operand once.
        limit_share: time that the machine's measured limits allow, over the time taken; above 1
            where an algorithm needs fewer operations than the direct sum.
        refused: why it did not take part.
        noisy: other work on the machine disturbed the measurement.
        close: its spread and the fastest one's overlap: either may be the faster.
    """

    algorithm: str
    kernel: str
    source: str
    config: dict[str, Any]
    time_us: float | None = None
    spread_us: float | None = None
    workspace_bytes: int = 0
    max_rel_error: float | None = None
    repeatable: bool | None = None
    launches: int = 0
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    tflops: float | None = None
    tbytes: float | None = None
    limit_share: float | None = None
    tried: tuple[Tried, ...] = ()
    refused: str | None = None
    noisy: bool = False
    close: bool = False


@dataclass(frozen=True, kw_only=True)
class Report(Sequence[Finding]):
    """All kernels for a problem on this machine, the fastest first, refused ones last."""

    problem: Problem
    target: str
    limits: Limits
    findings: tuple[Finding, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.findings[index]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        rows = [COLUMNS, *(cells(finding) for finding in self.findings)]
        widths = [max(len(row[c]) for row in rows) for c in range(len(COLUMNS) - 1)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        return "\n".join([title(self), *(line.rstrip() for line in lines)])


def find(
    op: str,
    *operands: torch.Tensor | None,
    max_workspace_bytes: int | None = None,
    algorithms: Sequence[str] | None = None,
    constant_weight: bool = False,
    budget_s: float = 0.2,
    folder: Path | None = None,
    **arguments: Any,
) -> Report:
    """Run every kernel that fits, and say how fast and how right it was, or why it was refused.

    >>> print(find("conv2d", x, weight, padding=1))

    Args:
        op: ``conv2d`` (also 1d, 3d), ``conv2d_dgrad``, ``conv2d_wgrad``, ``matmul``, ``linear``,
            ``scaled_dot_product_attention``.
        operands: tensors in the operation's order: x, weight, bias, residual, scale, the last three
            also by name; query, key, value, attn_mask, the last also by name.
        max_workspace_bytes: kernels that need more are refused.
        algorithms: only these.
        constant_weight: the weight is known in advance, as in a plan: packing it is not timed. One
            that is 2:4 sparse may then be multiplied as such.
        budget_s: about how long to measure.
        folder: of the timing cache; default ``~/.cache/tessella``.
        arguments: the operation's, as for the function of the same name.

    Raises:
        UsageError: arguments that do not go together.
        CompileError: no kernel can carry it out.
    """
    if op not in PROBLEMS:
        raise UsageError("no such operation to search", seen=op, fix=f"use {', '.join(PROBLEMS)}")
    if not op.endswith("grad"):
        operands = _with_named(op, operands, arguments)
    device = _device(op, operands)
    given = {i: tensor for i, tensor in enumerate(operands) if tensor is not None}
    target = target_of(device)
    algorithms = (algorithms,) if isinstance(algorithms, str) else algorithms
    for algorithm in algorithms or ():
        check_algorithm(op, target, algorithm)
    constant = (1,) if constant_weight else ()
    problem = _problem(op, operands, constant, arguments)
    with current(device):
        trials = search.find(
            problem,
            {i: given[i] for i in constant},
            target=target,
            cache=timing_cache(folder),
            inputs=[tensor for i, tensor in given.items() if i not in constant],
            options=SearchOptions(
                budget_s=budget_s,
                max_workspace_bytes=max_workspace_bytes,
                algorithms=algorithms,
                cutoff=math.inf,
                inspect=True,
            ),
        )
        ceilings = limits(target, folder or CACHE_FOLDER)
    return Report(
        problem=problem,
        target=target,
        limits=ceilings,
        findings=tuple(
            replace(_finding(t, problem, ceilings), close=i > 0 and _is_close(t, trials[0]))
            for i, t in enumerate(trials)
        ),
    )


def _with_named(
    op: str, operands: Sequence[torch.Tensor | None], arguments: dict[str, Any]
) -> tuple[torch.Tensor | None, ...]:
    """The operands in order; those given by name, behind the second, leave the arguments."""
    names = operation(op).operands
    made = [*operands, *(None,) * (len(names) - len(operands))]
    for position, name in enumerate(names[2:], 2):
        if (given := arguments.pop(name, None)) is not None:
            made[position] = given
    while len(made) > 2 and made[-1] is None:
        made.pop()
    return tuple(made)


def _device(op: str, operands: Sequence[Any]) -> torch.device:
    """The device of the operands, after a check that they are tensors on one device."""
    tensors = all(isinstance(t, torch.Tensor | None) for t in operands)
    if not tensors or len(operands) < 2 or any(t is None for t in operands[:2]):
        raise UsageError(
            f"{op} is searched on two tensors or more",
            seen=", ".join(type(t).__name__ for t in operands) or "none",
            fix="give the operands in order, everything else by name",
        )
    devices: set[torch.device] = {t.device for t in operands if t is not None}
    if len(devices) > 1:
        raise UsageError("tensors must be on one device", seen=devices, fix="move them")
    return devices.pop()


def _problem(
    op: str,
    operands: Sequence[torch.Tensor | None],
    constant: tuple[int, ...],
    arguments: dict[str, Any],
) -> Problem:
    """The problem of these operands; ``out_dtype`` may be torch's or its name."""
    metas = [None if t is None else meta_of(t) for t in operands]
    if isinstance(out_dtype := arguments.get("out_dtype"), torch.dtype):
        arguments = {**arguments, "out_dtype": dtype_name(out_dtype)}
    if not constant:
        return PROBLEMS[op](*metas, **arguments)
    if op.endswith("grad"):
        raise UsageError("a gradient has no constant weight", seen=op, fix="leave it out")
    problem = PROBLEMS[op](*metas, constant=constant, **arguments)
    weight = operands[1]
    if op not in LAYERS or weight is None or not is_two_four(weight):
        return problem
    return replace(problem, attrs={**problem.attrs, "sparsity": TWO_FOUR})


def _finding(trial: Trial, problem: Problem, ceilings: Limits) -> Finding:
    row = catalog.kernel(trial.kernel)
    found = Finding(
        algorithm=row.algorithm,
        kernel=row.id,
        source=row.source,
        config=trial.config,
        workspace_bytes=trial.workspace_bytes,
        tried=trial.tried,
        refused=trial.refused,
    )
    if trial.time_us is None:
        return found
    work = problem.flops
    return replace(
        found,
        **(vars(trial.inspection) if trial.inspection else {}),
        time_us=trial.time_us,
        spread_us=trial.spread_us,
        noisy=trial.noisy,
        tflops=None if work is None else work / trial.time_us * 1e-6,
        tbytes=problem.nbytes / trial.time_us * 1e-6,
        limit_share=ceilings.least_us(problem) / trial.time_us,
    )


# --- for people -----------------------------------------------------------------------------------

COLUMNS = (
    "algorithm", "kernel", "by", "time µs", "workspace", "error", "regs", "shared", "occupancy",
    "TFLOP/s", "TB/s", "of limit", "note",
)  # fmt: skip


def title(report: Report) -> str:
    """One line: the problem, the machine and its limits."""
    problem = report.problem
    first, second, *_ = (meta for meta in problem.inputs if meta is not None)
    shapes = " × ".join("×".join(map(str, meta.shape)) for meta in (first, second))
    math = f" {problem.math}" if first.dtype == "float32" else ""
    rate = report.limits.flops_limit(problem)
    flops_limit = f"{rate * 1e-12:.4g} TFLOP/s and " if rate else ""
    return (
        f"{problem.op} {shapes}, {first.dtype} {first.format}{math}, on {report.limits.device}"
        f" (measured limits: {flops_limit}{report.limits.copy_bytes_s * 1e-12:.3g} TB/s)"
    )


def cells(finding: Finding) -> tuple[str, ...]:
    """A finding as a row under ``COLUMNS``."""
    if finding.time_us is None:
        refused = f"refused: {finding.refused}"
        return (finding.algorithm, finding.kernel, finding.source, *("",) * 9, refused)
    return (
        finding.algorithm,
        finding.kernel,
        finding.source,
        _time(finding),
        _bytes(finding.workspace_bytes) if finding.workspace_bytes else "none",
        _shown(finding.max_rel_error, ".1e"),
        _shown(finding.registers, "d"),
        "" if finding.shared_bytes is None else _bytes(finding.shared_bytes),
        _shown(finding.occupancy, ".0%"),
        _shown(finding.tflops, ".3g"),
        _shown(finding.tbytes, ".3g"),
        _shown(finding.limit_share, ".0%"),
        _note(finding),
    )


def _is_close(trial: Trial, best: Trial) -> bool:
    if trial.time_us is None or best.time_us is None:
        return False
    return trial.time_us - best.time_us <= (trial.spread_us or 0.0) + (best.spread_us or 0.0)


def _time(finding: Finding) -> str:
    return with_spread(finding.time_us or 0.0, finding.spread_us)


def _note(finding: Finding) -> str:
    config = " ".join(f"{k}={v}" for k, v in finding.config.items())
    tried = f"best of {len(finding.tried)}: {config}" if finding.tried else config
    notes = [
        tried,
        "" if finding.repeatable else "not repeatable",
        "close to the fastest" if finding.close else "",
        "noisy: the machine was busy" if finding.noisy else "",
    ]
    return "; ".join(filter(None, notes))


def _shown(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
