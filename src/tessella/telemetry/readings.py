"""Readings of host and GPUs at one moment, for the studio and ``tessella doctor``."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tessella.telemetry.gpus import Gpu, gpus
from tessella.telemetry.host import Host, host


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Host and GPUs at ``time`` (seconds since 1970); no GPUs without an NVIDIA driver."""

    time: float
    host: Host
    gpus: tuple[Gpu, ...]


def readings(disk: str | Path = "/") -> Readings:
    """Read everything once, in a few milliseconds; disk space is that of ``disk``'s file system."""
    return Readings(time=time.time(), host=host(disk), gpus=gpus())
