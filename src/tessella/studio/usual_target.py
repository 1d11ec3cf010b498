"""Which target this machine has, as the driver says: a CUDA context would hold 500 MB here."""

from __future__ import annotations

from tessella.core.architectures import GPU_TARGETS, target_of
from tessella.telemetry.gpus import capability, visible_gpus


def usual_target() -> str:
    """The target of the newest GPU of this machine, ``cpu`` where there is none."""
    capabilities = (capability(index) for index in visible_gpus())
    targets = [target for found in capabilities if found and (target := target_of(*found))]
    return max(targets, key=GPU_TARGETS.index, default="cpu")
