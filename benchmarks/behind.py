"""The distance of each kernel from the fastest one, over all problems of timing caches.

``python -m benchmarks.behind CACHE...`` reads caches that builds have filled (``--cache`` of
``tessella compile`` or ``benchmarks.engine``). It measures nothing. What ``outclassed`` says in a
kernel's file stands in ``benchmarks/results/behind-sm_90.json``. With ``--beside KERNEL``, the
fastest of ours for each problem that the kernel takes, beside it, and which one that is.
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
from tessella.kernels import catalog

LEAST_PROBLEMS = 20  # of a kernel; fewer say nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("caches", type=Path, nargs="+")
    parser.add_argument("--beside", metavar="KERNEL", help="conv2d.cudnn_graph, for example")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    name = f"beside-{args.beside}" if args.beside else "behind"
    path = args.out or RESULTS / f"{name}-sm_90.json"
    lines = [line for path in args.caches for line in path.read_text().splitlines()]
    rows = beside(lines, args.beside) if args.beside else behind(lines)
    if args.beside:
        ratio = statistics.geometric_mean(row["ratio"] for row in rows)
        print(f"{len(rows)} problems, ratio {ratio:.2f} (geometric mean)")
    path.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))
    print(f"wrote {path}")


def beside(lines: Iterable[str], peer: str) -> list[dict[str, Any]]:
    """Our fastest kernel beside a library's, problem by problem; ratios above 1 are ours.

    Args:
        lines: lines of timing caches; the last one of a problem and kernel counts.
        peer: the library's kernel.
    """
    rows = []
    for found in _times(lines).values():
        if peer not in found:
            continue
        ours = {k: t for k, t in found.items() if catalog.kernel(k).source == "tessella"}
        if ours:
            best = min(ours, key=lambda kernel: ours[kernel])
            ratio = round(found[peer] / ours[best], 3)
            rows.append({"ours": best, "us": ours[best], "peer us": found[peer], "ratio": ratio})
    return sorted(rows, key=lambda row: row["ratio"])


def behind(lines: Iterable[str]) -> list[dict[str, Any]]:
    """By kernel, the number of problems that it ran for, and its time over the fastest one's.

    Args:
        lines: lines of timing caches; the last one of a problem and kernel counts.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for found in _times(lines).values():
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


def _times(lines: Iterable[str]) -> dict[tuple[str, str], dict[str, float]]:
    """By device and problem, the kernels that ran and their microseconds."""
    times: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in lines:
        known = json.loads(line)
        if (time_us := known["trial"].get("time_us")) is not None:
            times[known["device"], known["problem"]][known["trial"]["kernel"]] = time_us
    return times


if __name__ == "__main__":
    main()
