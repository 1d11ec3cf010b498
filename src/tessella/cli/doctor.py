"""``tessella doctor``: this machine's devices and libraries, and advice on what is missing.

With ``--report`` it tests and times every kernel, and writes a file to send.
"""

from __future__ import annotations

import importlib.metadata
import json as json_text
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella.artifacts.files import write_atomic
from tessella.cli.output import Json, Output, grid, output
from tessella.core.count import counted
from tessella.core.device import default_target, fingerprint
from tessella.core.errors import TessellaError, UnknownVersion, UsageError
from tessella.core.record import to_plain
from tessella.kernels import catalog
from tessella.search.kernel_report.record import KernelReport, Row, read_report
from tessella.search.kernel_report.survey import Survey
from tessella.telemetry import readings
from tessella.telemetry.links import Link, gpu_links
from tessella.telemetry.ring_costs import ring_all_reduce_us, ring_broadcast_us

LIBRARIES = (
    "torch", "torchvision", "triton", "timm", "onnx", "safetensors", "pyarrow", "numpy", "pillow",
    "opencv-python-headless", "tifffile", "fastapi", "nicegui", "sqlalchemy", "nvidia-ml-py",
)  # fmt: skip

NVLINK4_BYTES_PER_S = 25e9  # one link of Hopper's generation, each way (NVIDIA's data sheet)
RESNET50_BYTES = 25_557_032 * 4  # of its weights, and of their gradients
PIECE_BYTES = 2**19  # that a ring sends at a time, as NCCL does by default


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


REPORT = Path("tessella-report.json")
SAVED_S = 10.0  # a machine that hangs for good leaves a file that is at most so old
FAULTS = ("wrong", "failed", "crashed", "timed out")
HEAD = (
    "family", "right", "wrong", "failed", "crashed", "timed out", "refused",
    "ours slower than torch",
)  # fmt: skip
MOST_FAULTS = 30  # that are listed; the file has all


def doctor(
    file: Annotated[
        Path | None, Argument(help=f"Of --report and --read: the report; default {REPORT}.")
    ] = None,
    report: Annotated[
        bool,
        Option("--report", help="Test and time every kernel, and write a file to send to us."),
    ] = False,
    minutes: Annotated[float, Option(help="About how long --report may take.")] = 5.0,
    read: Annotated[bool, Option("--read", help="Show a report.")] = False,
    json: Json = False,
) -> None:
    """Check this machine: GPU, libraries, disk; say what to do where something is missing.

    Example: tessella doctor

    On a GPU or a processor that we may not have: tessella doctor --report
    """
    with output(json_only=json) as out:
        if read and report:
            raise UsageError(
                "a report is read or written", seen="--read and --report", fix="give one of them"
            )
        if read:
            _show(out, read_report(file or REPORT))
        elif report:
            _report(out, file or REPORT, minutes)
        elif file is not None:
            raise UsageError(
                "a file alone says nothing",
                seen=file,
                fix="add --report to write a report of the kernels there, or --read to show it",
            )
        else:
            _check(out)


def _report(out: Output, path: Path, minutes: float) -> None:
    """Try every kernel, write what is known now and then, and in the end."""
    if not 0 < minutes < math.inf:
        raise UsageError("--minutes is above zero", seen=minutes, fix="for example --minutes 5")
    _require_ours(path)
    registered = {row.module for row in catalog.rows() if row.id not in catalog.BY_ID}
    survey = Survey(minutes, sorted(registered - {"__main__"}))
    _save(path, survey.report())  # or say now that it cannot be written
    out.note(f"every kernel, for about {minutes:g} minutes; Ctrl-C ends it and keeps what is known")
    survey.run(out.emit, _now_and_then(lambda: _save(path, survey.report())))
    report = survey.report()
    _save(path, report)
    _show(out, report)
    out.note(f"{path}: send us this file. It names neither you nor this machine, nor any path")
    if report.ended == "stopped":
        raise KeyboardInterrupt


def _require_ours(path: Path) -> None:
    """Refuse to replace a file that is no report."""
    if not path.exists():
        return
    try:
        read_report(path)
    except UnknownVersion:
        return
    except TessellaError as error:
        raise UsageError(
            "there is another file of this name, which is no report",
            seen=path,
            fix="give another name, or remove it",
        ) from error


def _now_and_then(save: Callable[[], None]) -> Callable[[], None]:
    saved = time.monotonic()

    def changed() -> None:
        nonlocal saved
        if time.monotonic() - saved > SAVED_S:
            save()
            saved = time.monotonic()

    return changed


def _save(path: Path, report: KernelReport) -> None:
    text = json_text.dumps(to_plain(report), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(path, f"{text}\n".encode())


def _show(out: Output, report: KernelReport) -> None:
    """A table of families for each device, then what went wrong and what was not run."""
    shown: list[Group | Text] = []
    for device in report.devices:
        chip = device.chip
        name = device.device if chip is None else f"{device.device}: {chip.name}, {chip.arch}"
        lines: list[str] = []
        families = dict.fromkeys(row.family for row in device.rows)
        rows = [_family(f, [row for row in device.rows if row.family == f]) for f in families]
        if rows:
            rows.append(_family("all", list(device.rows)))
            shown.append(grid(HEAD, rows, title=_printable(name)))
        else:
            shown.append(Text(f"{_printable(name)}: nothing was run", style="italic"))
        if device.trouble is not None:
            lines.append(f"  {device.trouble}")
        faults = [row for row in device.rows if row.outcome in FAULTS]
        lines += [
            f"  {row.outcome}: {row.kernel} on {row.problem}: {row.why}"
            for row in faults[:MOST_FAULTS]
        ]
        if len(faults) > MOST_FAULTS:
            lines.append(f"  … {len(faults) - MOST_FAULTS} more are in the file")
        if device.left_out:
            left = counted(len(device.left_out), "case")
            lines.append(f"  left out: {left}, first {device.left_out[0]}; more --minutes do more")
        for why, kernels in device.not_run.items():
            lines.append(f"  not run: {counted(len(kernels), 'kernel')}: {why}")
        shown += [Text(_printable(line)) for line in lines]
    out.result(to_plain(report), Group(*shown))


def _printable(line: str) -> str:
    """A line without what would move the cursor: a stranger may have written it."""
    return "".join(c if c.isprintable() else "�" for c in line)


def _family(name: str, rows: list[Row]) -> tuple[object, ...]:
    """How often each outcome was, and how often ours was slower in its best configuration."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row.source == "tessella" and row.ratio is not None:
            key = row.kernel, row.problem
            best[key] = max(row.ratio, best.get(key, 0.0))
    counts = [sum(r.outcome == o for r in rows) for o in ("right", *FAULTS, "refused")]
    slower = sum(ratio < 1 for ratio in best.values())
    return (_printable(name), *counts, f"{slower} of {len(best)}" if best else "")


def _check(out: Output) -> None:
    """The devices and libraries of this machine."""
    target = default_target()
    here = fingerprint(target)
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    versions = {name: _version(name) for name in LIBRARIES}
    now = readings.readings(Path.cwd())
    links = gpu_links()
    advice = _advice(target, free_gb, versions)
    plain = {
        "target": target,
        "fingerprint": to_plain(here),
        "python": sys.version.split()[0],
        "libraries": versions,
        "free_disk_gb": round(free_gb, 1),
        "telemetry": to_plain(now),
        "links": to_plain(links),
        "advice": advice,
    }
    rows = [
        ("target", f"{target}: {here.name}, {here.arch}, {here.units} units"),
        ("python", sys.version.split()[0]),
        *((name, version or "missing") for name, version in versions.items()),
        ("free disk", f"{free_gb:.1f} GB"),
        *(("GPU", f"{g.index}: {g.name}") for g in now.gpus),
        *((f"GPU {link.first} to {link.second}", _path(link)) for link in links),
        *(("predicted", line) for line in _predictions(links, len(now.gpus))),
        *(("to do", line) for line in advice),
    ]
    out.result(plain, grid(("", ""), rows))


def _path(link: Link) -> str:
    return f"{link.nvlinks} NVLinks" if link.nvlinks else f"PCIe, {link.pcie or 'unknown path'}"


def _predictions(links: tuple[Link, ...], gpus: int) -> list[str]:
    """The least times to sum ResNet-50's gradients and to send its weights, where all GPUs are
    joined by NVLinks.
    """
    slowest = min((link.nvlinks for link in links), default=0) * NVLINK4_BYTES_PER_S
    if not slowest:
        return []
    told = f"of 102 MB (a ResNet-50) over {gpus} GPUs, by a ring"
    summed = ring_all_reduce_us(RESNET50_BYTES, gpus, slowest)
    sent = ring_broadcast_us(RESNET50_BYTES, gpus, RESNET50_BYTES // PIECE_BYTES, slowest)
    return [f"all-reduce {told}: {summed:,.0f} µs", f"broadcast {told}: {sent:,.0f} µs"]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _advice(target: str, free_gb: float, versions: dict[str, str | None]) -> list[str]:
    advice = []
    if missing := [name for name, version in versions.items() if version is None]:
        advice.append(f"install what is missing: pip install {' '.join(missing)}")
    if torch.cuda.is_available() and target == "cpu":
        name = torch.cuda.get_device_name()
        advice.append(f"{name} is no target of ours: training uses it, plans run on the CPU")
    if free_gb < 5:
        advice.append("less than 5 GB of disk are free: checkpoints need room")
    return advice
