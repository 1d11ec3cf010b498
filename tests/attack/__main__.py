"""``python -m tests.attack fallback --seed 0 --count 20000``: attacks, and what came of them."""

from __future__ import annotations

import argparse
import sys
import time

from tests.attack.children import PATTERNS, attack

SUBJECTS = {"fallback": "tests.attack.fallback"}


def main() -> int:
    """Print what became of the cases; 1 if one of them did what none may."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("subjects", nargs="*", help=f"of {', '.join(SUBJECTS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--once", action="store_true", help="do not look for unwritten memory")
    chosen = parser.parse_args()
    failed = False
    for name in chosen.subjects or SUBJECTS:
        began = time.perf_counter()
        patterns = PATTERNS[:1] if chosen.once else PATTERNS
        report = attack(SUBJECTS[name], chosen.seed, chosen.first, chosen.count, patterns=patterns)
        print(*report.failures, sep="\n")
        never = sorted(t for t in report.tried if not report.answered[t])
        print(f"{name}: never answered: {', '.join(never) or 'none'}")
        print(
            f"{name}: {chosen.count} cases of {len(report.tried)} kinds, {dict(report.outcomes)},"
            f" {len(report.failures)} failures, {time.perf_counter() - began:.0f} s"
        )
        failed |= bool(report.failures)
    return failed


if __name__ == "__main__":
    sys.exit(main())
