"""What the files in ``results`` hold, for tables: runs, their rows, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.report import RESULTS

Run = Mapping[str, Any]  # one measurement: command, date, device, rows
Row = Mapping[str, Any]
Key = tuple[str, str, int]  # network, precision, batch


def runs_of(name: str) -> Sequence[Run]:
    """The measurements of a file, the newest first."""
    document = json.loads((RESULTS / name).read_text())
    runs: Sequence[Run] = document.get("runs", [document])
    return runs


def origins_of(runs: Sequence[Run]) -> Iterator[str]:
    yield from (f"{number}. {origin_of(run)}" for number, run in enumerate(runs, 1))
    yield ""


def origin_of(run: Run) -> str:
    """Command, date and machine of a run."""
    device = run["device"]
    versions = ", ".join(f"{name} {version}" for name, version in device["libraries"].items())
    about = f" {run['about'][:1].upper()}{run['about'][1:]}." if run.get("about") else ""
    return f"{run['date']}, {device['name']}, {versions}: `{run['command']}`.{about}"


def key_of(row: Row) -> Key:
    return row["network"], row["precision"], row["batch"]


def ms_of(row: Row, name: str) -> str:
    return f"{row['times'][name]['median_ms']:#.3g} ms".replace(". ", " ")


def peers_of(row: Row) -> str:
    """The peers with their times, the fastest first."""
    times = {n: t["median_ms"] for n, t in row["times"].items() if n != "plan"}
    return ", ".join(
        f"{n.replace('_', ' ')} {ms_of(row, n)}" for n in sorted(times, key=times.__getitem__)
    )


def optional(value: object, form: str) -> str:
    return "" if value is None else form.format(value)


def lost_and_gained(rows: Sequence[Row]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """A line a plan: what it loses of the mAP of its network's first plan, and gains in time."""
    lines: list[Sequence[object]] = []
    for row in rows:
        first = next(iter(row["plans"].values()))
        lines += [
            (f"{row['network']}, {row['size']}², {row['batch']} pictures", name, f"{p['map']:.2f}",
             f"{first['map'] - p['map']:.2f}", f"{p['map50']:.2f}",
             *((f"{p['ms']:.3f}", f"{first['ms'] / p['ms']:.2f}") if "ms" in p else ("", "")))
            for name, p in row["plans"].items()
        ]  # fmt: skip
    return ("network", "plan", "mAP, %", "lost", "mAP@50, %", "ms", "times the first"), lines
