"""What every benchmark writes: JSON with machine, versions and command, and a Markdown table of
it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tessella.core.device import fingerprint
from tessella.core.record import to_plain

RESULTS = Path(__file__).parent / "results"


def document(target: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document of the rows with machine, library versions and command."""
    return {
        "command": " ".join(["python -m", _module(), *_without_paths(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "python": sys.version.split()[0],
        "torch_threads": torch.get_num_threads(),
        "device": to_plain(fingerprint(target)),
        "gpu": _gpu_state() if target.startswith("sm_") else None,
        "rows": list(rows),
    }


def _without_paths(arguments: Sequence[str]) -> list[str]:
    """The command's arguments without paths of this machine and words about it."""
    parser = argparse.ArgumentParser(add_help=False)
    for option in ("--out", "--cache", "--about", "--alone"):
        parser.add_argument(option)
    return parser.parse_known_args(arguments)[1]


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else "?"


def _gpu_state() -> dict[str, str]:
    """Clock, power and temperature of the GPU just after the measurement."""
    fields = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "driver_version")
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(fields, answer.stdout.splitlines()[0].split(", "), strict=True))


def write(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c) for c in line) + " |" for line in lines)
