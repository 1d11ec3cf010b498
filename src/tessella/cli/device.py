"""``tessella --device cuda:1 VERB``: this process and its children see no other GPU."""

from __future__ import annotations

import os

from tessella.cli.output import output
from tessella.telemetry.gpus import seeing_only


def choose(device: str) -> None:
    """Hide every other GPU from CUDA, which must not have started yet; all of them for ``cpu``."""
    with output():
        mask = seeing_only(device)
        if mask is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = mask
