"""``tessella doctor``: this machine's devices and libraries, and advice on what is missing."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

import torch
import typer

from tessella.cli.output import Json, grid, output
from tessella.core.device import default_target, fingerprint
from tessella.core.record import to_plain
from tessella.telemetry import readings
from tessella.telemetry.links import Link, gpu_links
from tessella.telemetry.ring_costs import ring_all_reduce_us

LIBRARIES = (
    "torch", "torchvision", "triton", "timm", "onnx", "safetensors", "pyarrow", "numpy", "pillow",
    "opencv-python-headless", "tifffile", "fastapi", "nicegui", "sqlalchemy", "nvidia-ml-py",
)  # fmt: skip

NVLINK4_BYTES_PER_S = 25e9  # one link of Hopper's generation, each way (NVIDIA's data sheet)
RESNET50_GRADIENT_BYTES = 25_557_032 * 4


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(json: Json = False) -> None:
    """Check this machine: GPU, libraries, disk; say what to do where something is missing.

    Example: tessella doctor
    """
    with output(json_only=json) as out:
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
            *(("predicted all-reduce", line) for line in _prediction(links, len(now.gpus))),
            *(("to do", line) for line in advice),
        ]
        out.result(plain, grid(("", ""), rows))


def _path(link: Link) -> str:
    return f"{link.nvlinks} NVLinks" if link.nvlinks else f"PCIe, {link.pcie or 'unknown path'}"


def _prediction(links: tuple[Link, ...], gpus: int) -> list[str]:
    """The least time to sum ResNet-50's gradients, where all GPUs are joined by NVLinks."""
    slowest = min((link.nvlinks for link in links), default=0) * NVLINK4_BYTES_PER_S
    if not slowest:
        return []
    time_us = ring_all_reduce_us(RESNET50_GRADIENT_BYTES, gpus, slowest)
    return [f"102 MB over {gpus} GPUs (ResNet-50's gradients): {time_us:,.0f} µs by a ring"]


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
