"""The child of a trial: loads a plan, runs it at every batch size, and may end while it does.

Its one argument is what ``trial`` asks for, as JSON. It is no sandbox: what it keeps from the
server are crashes, and time and memory without end.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
from typing import Any

from tessella.artifacts.plan import Plan, load_plan
from tessella.core.device import torch_device, using
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.record import digest
from tessella.runtime.engine import load

SPARE_BYTES = 4 << 30  # beside what the plan says that it needs: libraries' scratch memory
SPARE_BYTES_A_CORE = 64 << 20  # stacks
CPU_S = 300  # of a core


def main(asked: dict[str, Any]) -> int:
    """0 where the plan passes, else the exit code of ``ArtifactError``, with the error told."""
    try:
        for name in asked["modules"]:
            importlib.import_module(name)
        with using(asked["device"]):
            plan = load_plan(asked["path"])
            if digest(plan.manifest) != asked["plan"]:
                raise ArtifactError("the plan's file was changed while it was loaded")
            _limit(plan)
            with load(plan, self_test=False, compiled=asked["compiled"]) as engine:
                engine.self_test(plan.golden, every_size=True)
    except TessellaError as error:
        print(json.dumps(error.to_json()))
        return ArtifactError.exit_code
    return 0


def _limit(plan: Plan) -> None:
    """Take no more time and memory than a plan like this has use for, and leave no core file."""
    cores = os.cpu_count() or 1
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S * cores, CPU_S * cores))
    if torch_device(plan.manifest.fingerprint.target).type != "cpu":
        return  # CUDA reserves addresses for all memory that there is
    weights = sum(t.nbytes for t in plan.weights.values())
    needs = max(max(b.held_bytes, b.peak_bytes, b.arena_bytes) for b in plan.program.buckets)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + 2 * (weights + needs) + SPARE_BYTES + SPARE_BYTES_A_CORE * cores
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
