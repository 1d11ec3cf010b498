"""``python -m tests.attack KIND --seed 0 --count 20000``: attacks, and what came of them."""

from __future__ import annotations

import argparse
import sys
import time

from tests.attack.children import PATTERNS, Report, attack

SUBJECTS = {
    "fallback": "tests.attack.fallback",
    "plans": "tests.attack.plans",
    "images": "tests.attack.images",
    "onnx": "tests.attack.onnx_files",
    "prototxt": "tests.attack.prototxts",
    "datasets": "tests.attack.datasets",
    "http": "tests.attack.http_server",
    "stops": "tests.attack.stops",
}
TWICE = ("fallback",)  # run with fresh memory of two contents, to see what nothing has written


def run(kind: str, seed: int, first: int, count: int, *, once: bool = False) -> Report:
    """The cases of one kind, and what became of them."""
    patterns = PATTERNS if kind in TWICE and not once else PATTERNS[:1]
    return attack(SUBJECTS[kind], seed, first, count, patterns=patterns)


def main() -> int:
    """Print what became of the cases; 1 if one of them did what none may."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=[*SUBJECTS, "all"], metavar="KIND",
                        help=f"of {', '.join(SUBJECTS)}, all")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--once", action="store_true", help="do not look for unwritten memory")
    chosen = parser.parse_args()
    failed = False
    for kind in SUBJECTS if "all" in chosen.kinds else chosen.kinds:
        began = time.perf_counter()
        report = run(kind, chosen.seed, chosen.first, chosen.count, once=chosen.once)
        for failure in report.failures:
            number = failure.partition(" ")[0].rpartition("/")[2]
            again = f"--seed {chosen.seed} --first {number} --count 1"
            print(f"FAILED {failure}\n  again: python -m tests.attack {kind} {again}")
        told = ", ".join(f"{count:,} {word}" for word, count in report.outcomes.most_common())
        print(
            f"{kind}: {chosen.count:,} cases of {len(report.tried):,} sorts: {told};"
            f" {len(report.failures)} failures, {time.perf_counter() - began:.0f} s"
        )
        failed |= bool(report.failures)
    return failed


if __name__ == "__main__":
    sys.exit(main())
