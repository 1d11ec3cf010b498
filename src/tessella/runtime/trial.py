"""A trial: a plan that runs operators of torch runs first in a process that may end.

Their arguments come from the plan, and torch does not survive all that it does not refuse. So who
cannot afford to end, a server, has such a plan loaded and run at every batch size by a child with
limits, once: a file in the user's cache remembers that this very plan passed. Plans that run our
own kernels alone are loaded at once.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tessella.artifacts.files import write_atomic
from tessella.artifacts.plan import load_plan
from tessella.core.device import using
from tessella.core.errors import ArtifactError
from tessella.core.record import digest
from tessella.core.version import VERSION
from tessella.operations.user_operators import module
from tessella.runtime.engine import Engine, load
from tessella.search.tuning import CACHE_FOLDER

log = logging.getLogger(__name__)

TRIAL_S = 300.0  # for loading the plan and running each batch size once
FOREIGN = ("fallback", "user")  # operations that are not ours


def load_tried(
    path: str | Path,
    *,
    device: str | None = None,
    compiled: bool = True,
    folder: Path | None = None,
    trial_s: float = TRIAL_S,
) -> Engine:
    """``load``, after a trial where the plan needs one.

    Args:
        device: as for ``load``, of the trial too.
        compiled: as for ``load``, of the trial too.
        folder: where it is remembered which plans passed; default ``~/.cache/tessella``.
        trial_s: the longest that a trial may take.

    Raises:
        ArtifactError: as ``load``, or the plan ended the process that tried it, or hung.
    """
    with using(device):
        plan = load_plan(path)
    steps = [s for bucket in plan.program.buckets for s in bucket.steps if s.op in FOREIGN]
    if steps:
        modules = sorted({m for n in plan.manifest.imports if (m := module(n)) is not None})
        if "__main__" in modules:  # a notebook's: nobody else can import them
            log.warning("%s is not tried first: its operators are defined in __main__", path)
        else:
            asked = {
                "path": str(path),
                "plan": digest(plan.manifest),  # it vouches for every member
                "modules": modules,
                "compiled": compiled,
                "device": device,
            }
            _require_passed(asked, folder or CACHE_FOLDER, trial_s, plan.manifest.rebuild)
    return load(plan, device=device, compiled=compiled, every_size=True)


def _require_passed(asked: Mapping[str, Any], folder: Path, trial_s: float, rebuild: str) -> None:
    """Try the plan, unless it is known to have passed here with these versions."""
    path = asked["path"]
    known = {**asked, "path": "", "version": VERSION, "torch": torch.__version__}
    record = folder / "tried" / digest(known)
    if record.exists():
        return
    began = time.perf_counter()
    _try(asked, trial_s, rebuild)
    log.info("tried %s in a child process: %.1f s", path, time.perf_counter() - began)
    try:
        write_atomic(record, b"")
    except (OSError, ArtifactError) as error:
        log.warning("that %s passed its trial cannot be remembered: %s", path, error)


def _try(asked: Mapping[str, Any], trial_s: float, rebuild: str) -> None:
    """Run the child, and raise what became of the plan there if it did not pass."""
    command = [sys.executable, "-P", "-m", "tessella.runtime.trial_child", json.dumps(asked)]
    paths = [p or os.getcwd() for p in sys.path]  # a user's modules are found where they were
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MALLOC_ARENA_MAX": "2"}
    fix = f"do not serve it; if you trust its author, rebuild it here: {rebuild}"
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=trial_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            "the plan does not end in the process that tried it",
            seen=f"{trial_s:.0f} s for loading it and running each batch size once",
            fix=fix,
        ) from error
    if child.returncode == 0:
        return
    lines = child.stdout.splitlines()
    if child.returncode == ArtifactError.exit_code and lines:
        told = json.loads(lines[-1])
        raise ArtifactError(told["wrong"], seen=told["seen"], fix=told["fix"])
    ended = f"exit code {child.returncode}, {(child.stderr.splitlines() or [''])[-1][:200]}"
    if child.returncode < 0:
        ended = signal.Signals(-child.returncode).name
    raise ArtifactError("the plan ended the process that tried it", seen=ended, fix=fix)
