"""How far behind the fastest each kernel was, over all problems of timing caches.

``python -m benchmarks.behind CACHE...`` reads caches that builds have filled (``--cache`` of
``tessella compile`` or ``benchmarks.engine``). It measures nothing. What ``outclassed`` says in a
kernel's file stands in ``benchmarks/results/behind-sm_90.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, markdown

LEAST_PROBLEMS = 20  # of a kernel; fewer say nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("caches", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=RESULTS / "behind-sm_90.json")
    args = parser.parse_args()
    rows = behind(line for path in args.caches for line in path.read_text().splitlines())
    args.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"wrote {args.out}")


def behind(lines: Iterable[str]) -> list[dict[str, Any]]:
    """By kernel: in how many problems it ran, and its time over the fastest one's.

    Args:
        lines: of timing caches; of the same problem and kernel the last one counts.
    """
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in lines:
        known = json.loads(line)
        if (time_us := known["trial"].get("time_us")) is not None:
            times[known["device"], known["problem"]][known["trial"]["kernel"]] = time_us
    ratios: dict[str, list[float]] = defaultdict(list)
    for found in times.values():
        for kernel, time_us in found.items():
            ratios[kernel].append(time_us / min(found.values()))
    return [
        {
            "kernel": kernel,
            "problems": len(found),
            "at best": round(min(found), 2),
            "median": round(statistics.median(found), 2),
        }
        for kernel, found in sorted(ratios.items(), key=lambda item: -min(item[1]))
        if len(found) >= LEAST_PROBLEMS and not kernel.startswith("program.")
    ]


if __name__ == "__main__":
    main()
