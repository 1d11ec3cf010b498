"""Our kernels beside cuBLAS and cuDNN, in one run: ``python -m benchmarks.kernels``.

For each shape our kernels race among themselves; the winner then runs in turn with every peer, cold
L2, in CUDA graphs. cuDNN searches too (``cudnn.benchmark``). A ratio above 1 means that we win.
``python -m benchmarks.older_gpu sm_80 benchmarks.kernels`` takes an older GPU's kernels.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import FAMILIES
from benchmarks.cases.case import TARGET, Case, Peer, drawn, drawn_constants, operand
from benchmarks.report import RESULTS, document, markdown, write
from tessella.core.device import torch_device
from tessella.core.dtype import Math
from tessella.core.errors import CompileError
from tessella.core.record import to_plain
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.search import find as search
from tessella.search.evidence import Candidate
from tessella.search.find import OWN, SearchOptions
from tessella.search.inputs import sample_inputs
from tessella.search.limits import Limits, measured
from tessella.search.prefetch import Prefetch
from tessella.search.timing import Run, measure
from tessella.search.tuning import TimingCache, Trial

WRITE_S = 10.0
CUTOFF = 1.3  # as the compiler's searches
Tensors = list[torch.Tensor]


def main() -> None:
    args = _arguments()
    path = Path(args.out or RESULTS / f"kernels-{TARGET}.json")
    torch.backends.cudnn.benchmark = True
    ceilings = measured(TARGET, torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    written = time.monotonic()
    selected = set(args.families.split(",")) if args.families else set(FAMILIES)
    for name in (name for name in FAMILIES if name in selected):
        cases = list(FAMILIES[name]())
        for case, candidates in zip(cases, _compiled(cases, args.seconds), strict=True):
            row = _row(case, candidates, ceilings, args.seconds)
            rows.append(row)
            print(_line(row), flush=True)
            if time.monotonic() - written > WRITE_S:  # what was measured is kept
                write(path, {**document(TARGET, rows), "limits": to_plain(ceilings)})
                written = time.monotonic()
    write(path, {**document(TARGET, rows), "limits": to_plain(ceilings)})
    print(markdown(*summary(rows)))
    print(markdown(*published(rows)))
    print(f"wrote {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", help=f"some of {','.join(FAMILIES)}; default all")
    parser.add_argument("--seconds", type=float, default=0.05, help="a row, about")
    parser.add_argument("--out")
    return parser.parse_args()


def _options(case: Case, seconds: float) -> SearchOptions:
    """Ours race; in the published table every algorithm is at its best, however far behind."""
    return SearchOptions(
        sources=OWN,
        algorithms=case.algorithms,
        budget_s=seconds / 2,
        cutoff=math.inf if case.published_ms else CUTOFF,
        inspect=True,
    )


def _compiled(cases: Sequence[Case], seconds: float) -> Iterator[Sequence[Candidate] | None]:
    """What each search of a family will run, when it is compiled; later ones compile meanwhile."""
    prefetch = Prefetch(
        {case.problem.key: (case.problem, drawn_constants(case.problem)) for case in cases},
        target=TARGET,
        cache=TimingCache(),
        options=_options(cases[0], seconds),
    )
    for case in cases:
        yield prefetch.candidates(case.problem.key)


def _weights(problem: Problem) -> Tensors:
    """Copies of the weight, as many as drive each other out of the L2 cache."""
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    weight = operand(problem, 1)
    count = max(8, math.ceil(2 * l2_bytes / weight.nbytes))
    return [drawn(weight) for _ in range(count)]


def _row(
    case: Case, candidates: Sequence[Candidate] | None, ceilings: Limits, seconds: float
) -> dict[str, Any]:
    problem, device = case.problem, torch_device(TARGET)
    inputs = sample_inputs(problem, device)
    constants = drawn_constants(case.problem)
    row: dict[str, Any] = {
        "family": case.family, "name": case.name, "op": problem.op, "shapes": _shapes(problem)
    }  # fmt: skip
    try:
        trials = search.find(
            problem,
            constants,
            target=TARGET,
            options=_options(case, seconds),
            inputs=inputs,
            candidates=candidates,
        )
    except CompileError as error:
        return {**row, "refused": error.seen}
    best = trials[0]
    weights = _weights(problem) if case.chained else []
    several = [{1: weight} for weight in weights] or [constants]
    runs = {"ours": _ours(best, problem, inputs, several)}
    for name, peer in {**case.peers, **case.others}.items():
        runs[name] = _warmed(peer, inputs, weights, problem.math)
    with torch.inference_mode(), _math(problem.math):
        timings = measure(runs, device=device, budget_s=seconds)
    times = {name: round(t.time_us / max(1, len(weights)), 3) for name, t in timings.items()}
    row |= {
        "kernel": best.kernel,
        "config": best.config,
        "workspace_bytes": best.workspace_bytes,
        "inspection": to_plain(best.inspection),
        "times_us": times,
        "algorithms": [_algorithm(trial, case.published_ms) for trial in trials],
        "limit_share": round(ceilings.least_us(problem) / times["ours"], 3),
        "tflops": round((problem.flops or 0) / times["ours"] * 1e-6, 1),
        "tbytes": round(problem.nbytes / times["ours"] * 1e-6, 3),
    }
    if case.peers:
        row["ratio"] = round(min(times[peer] for peer in case.peers) / times["ours"], 3)
    return row


def _algorithm(trial: Trial, published_ms: Mapping[str, float]) -> dict[str, Any]:
    """A trial of one of our kernels in a few fields."""
    inspection = trial.inspection
    published = published_ms.get(catalog.kernel(trial.kernel).algorithm)
    faster = published and trial.time_us and round(published * 1e3 / trial.time_us, 2)
    return {
        "kernel": trial.kernel,
        "time_us": trial.time_us,
        "workspace_bytes": trial.workspace_bytes,
        "max_rel_error": None if inspection is None else inspection.max_rel_error,
        "refused": trial.refused,
        **({"published_ms": published, "times_faster": faster} if published else {}),
    }


def _ours(
    best: Trial, problem: Problem, inputs: Tensors, constants: Sequence[Mapping[int, torch.Tensor]]
) -> Run:
    """A run of the fastest kernel, once for each set of constants."""
    row, device = catalog.kernel(best.kernel), torch_device(TARGET)
    bound = [search.bind(row, problem, each, device, best.config) for each in constants]
    buffers = bound[0][1]
    return lambda: [call(*inputs, **buffers) for call, _ in bound]


def _warmed(peer: Peer, inputs: Tensors, weights: Tensors, math: Math) -> Run:
    """A run of the peer on these operands, after warm-up runs that search and allocate."""
    operands = [(*inputs, weight) for weight in weights] or [tuple(inputs)]
    with torch.inference_mode(), _math(math):
        for _ in range(3):
            peer(*operands[0])
    return lambda: [peer(*each) for each in operands]


class _math:
    """Set how libraries round float32 products; cuDNN's search stays on."""

    def __init__(self, math: Math) -> None:
        self.math = math

    def __enter__(self) -> None:
        torch.backends.cudnn.conv.fp32_precision = self.math  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = self.math

    def __exit__(self, *_: object) -> None:
        torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def _shapes(problem: Problem) -> str:
    return " ".join("x".join(map(str, t.shape)) for t in problem.inputs[:2] if t is not None)


def _line(row: Mapping[str, Any]) -> str:
    if "refused" in row:
        return f"{row['family']:14} {row['name']:28} refused: {row['refused'][:120]}"
    times = "  ".join(f"{name} {time:.1f}" for name, time in row["times_us"].items())
    return (
        f"{row['family']:14} {row['name']:28} {row.get('ratio', 0):5.2f}x  {times} µs"
        f"  {row['limit_share']:.0%}  {row['kernel']} {row['config']}"
    )


def summary(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """A table with mean ratio, worst ratio and number of refused cases for each family."""
    head = (
        "family",
        "shapes",
        "ratio (geometric mean)",
        "worst",
        "best",
        "share of limit",
        "refused",
    )
    lines: list[tuple[object, ...]] = []
    for family in dict.fromkeys(row["family"] for row in rows):
        mine = [row for row in rows if row["family"] == family]
        ran = [row for row in mine if row.get("ratio")]
        if not ran:
            continue
        ratios = [row["ratio"] for row in ran]
        mean = math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
        share = sorted(row["limit_share"] for row in ran)[len(ran) // 2]
        lines.append(
            (family, len(ran), f"{mean:.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}",
             f"{share:.0%}", len(mine) - len(ran))
        )  # fmt: skip
    return head, lines


def published(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """A table of each algorithm's time beside the published one."""
    head = ("filter", "kernel", "ms", "GV100 ms", "times faster", "workspace MB", "error")
    lines: list[tuple[object, ...]] = [
        (row["name"], a["kernel"], f"{a['time_us'] / 1e3:.3f}", a.get("published_ms", ""),
         a.get("times_faster", ""), f"{a['workspace_bytes'] / 1e6:.2f}",
         f"{a['max_rel_error']:.1e}")
        for row in rows
        if row["family"].startswith("conv FP32")
        for a in row.get("algorithms", [])
        if a["time_us"]
    ]  # fmt: skip
    return head, lines


# --- matrix products ------------------------------------------------------------------------------


if __name__ == "__main__":
    main()
