"""What INT8 by calibration does to networks that learned: ``python -m benchmarks.rounding``.

    tessella data import DIGITS --out digits --size 96 --holdout 0.3
    tessella train timm/inception_v3 digits --out run
    python -m benchmarks.rounding run digits
    TESSELLA_ISA=avx2 python -m benchmarks.rounding run digits

Each run is compiled to INT8 by default settings, calibrated by its training split, and judged by
its validation split, answer by answer beside its float32 checkpoint. Kernels are not measured: how
fast they are does not matter here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, document, markdown, write
from benchmarks.runs import origins_of, runs_of
from tessella import api
from tessella.artifacts.run import Run
from tessella.core.processor import widest_allowed

BATCH = (1, 32, 32)
SCALED = 5  # operands of a layer in int8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", type=Path, metavar="RUN DATASET")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    isa = widest_allowed()
    said = "" if isa is None else f"TESSELLA_ISA={isa} "
    command = {"command": f"{said}python -m benchmarks.rounding RUN DATASET ..."}
    name = "rounding-cpu.json" if isa is None else f"rounding-cpu-{isa}.json"
    rows = []
    for run, data in zip(args.pairs[::2], args.pairs[1::2], strict=True):
        rows.append(measure(run, data))
        print(rows[-1], flush=True)
        write(args.out or RESULTS / name, document("cpu", rows) | command)


def measure(run: Path, data: Path) -> dict[str, Any]:
    """The scores of a run's best checkpoint and of its INT8 plan, and the layers that INT8 does not
    suit.
    """
    begun = time.perf_counter()
    plan = api.compile(
        run, batch=BATCH, precision="int8", calibration=data, target="cpu", untuned=True
    )
    found = api.verify(plan, against=run, data=data)
    exact = sorted(n for n, precision in plan.manifest.precisions.items() if precision == "fp32")
    steps = plan.program.buckets[0].steps
    rounded = sum(s.op in ("conv2d", "linear") and len(s.inputs) == SCALED for s in steps)
    return {
        "network": Run(run).recipe.network,
        "samples": found.samples,
        "fp32": found.checkpoint_score,
        "int8": found.plan_score,
        "alike": found.agreement,
        "layers": rounded + len(exact),
        "in_fp32": exact,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def tables() -> Iterator[str]:
    """The part of docs/benchmarks.md."""
    yield "## INT8 of networks that learned: `rounding-cpu.json`, `rounding-cpu-avx2.json`\n"
    yield (
        "Accuracy on scikit-learn's handwritten digits that no training saw, by plans of default"
        " settings; *alike* are the answers that are float32's. The second file's processor was"
        " told to use AVX2 alone.\n"
    )
    head = ("network", "samples", "float32", "int8", "alike", "layers in float32", "run")
    runs = [
        run for name in ("rounding-cpu.json", "rounding-cpu-avx2.json") for run in runs_of(name)
    ]
    lines = [
        (
            row["network"], row["samples"], *(f"{100 * row[n]:.2f} %" for n in ("fp32", "int8")),
            f"{100 * row['alike']:.1f} %", f"{len(row['in_fp32'])} of {row['layers']}", number,
        )
        for number, run in enumerate(runs, 1)
        for row in run["rows"]
    ]  # fmt: skip
    yield markdown(head, lines) + "\n"
    yield from origins_of(runs)


if __name__ == "__main__":
    main()
