"""What every quick start does: a workspace of its own, and the plan beside torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from tessella import api
from tessella.artifacts.files import write_atomic
from tessella.core.device import default_target, torch_device
from tessella.core.errors import UsageError
from tessella.core.record import to_plain
from tessella.search.timing import latency

MARKER = ".tessella-quickstart"
FOLDERS = ("digits", "datasets", "runs", "plans")


def prepare(workspace: Path) -> None:
    """An empty workspace, or that of an earlier quick start, emptied."""
    if workspace.exists() and any(workspace.iterdir()):
        if not (workspace / MARKER).exists():
            raise UsageError(
                "the workspace is not empty, and not from an earlier quick start",
                seen=workspace,
                fix="choose another folder with --workspace",
            )
        for name in FOLDERS:
            shutil.rmtree(workspace / name, ignore_errors=True)
    workspace.mkdir(parents=True, exist_ok=True)
    (workspace / MARKER).touch()


def save(path: Path, record: Any) -> None:
    """Write a record as JSON."""
    write_atomic(path, json.dumps(to_plain(record), indent=1).encode())


def measure_latency(module: torch.nn.Module, plan: Path) -> tuple[float, float]:
    """Median milliseconds for one image in torch and with the plan, in interleaved rounds."""
    device = torch_device(default_target())
    module, engine = module.to(device), api.load(plan)
    image = torch.randn(engine.inputs[0].at(1), device=device)
    runs = {"eager": lambda: module(image), "plan": lambda: engine(image)}
    with torch.inference_mode():
        times = latency(runs, device=device, seconds=2.0)
    return times["eager"].time_us / 1e3, times["plan"].time_us / 1e3
