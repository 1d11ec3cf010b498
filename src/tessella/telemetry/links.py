"""How the GPUs of this machine reach each other: over NVLinks, or over which part of PCIe."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml

from tessella.telemetry.gpus import ask, text

nvml = pynvml  # looked up at each call: tests put a simulated driver here

# NVML's nearest common ancestor of two devices on PCIe, in words.
PCIE_PATHS = {
    0: "same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one host bridge",
    40: "one NUMA node",
    50: "across NUMA nodes",
}


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two GPUs (NVML's indices, ``first`` < ``second``) reach each other.

    Attributes:
        nvlinks: active NVLinks between them, directly or through NVSwitch. 0: only PCIe.
        pcie: what a transfer over PCIe passes; None where the driver does not tell.
    """

    first: int
    second: int
    nvlinks: int
    pcie: str | None


def gpu_links() -> tuple[Link, ...]:
    """Every pair of GPUs on this machine; empty with fewer than two GPUs or no NVIDIA driver."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        ends = [_nvlink_ends(handle) for handle in handles]
        return tuple(
            Link(
                first=a,
                second=b,
                nvlinks=_between(ends[a], ends[b], _bus(handles[b])),
                pcie=_pcie(handles[a], handles[b]),
            )
            for a, b in combinations(range(len(handles)), 2)
        )
    finally:
        nvml.nvmlShutdown()


Ends = list[str | None]
_SWITCH = "switch"


def _nvlink_ends(handle: Any) -> Ends:
    """What is at the other end of each active NVLink: a switch, or a device's PCI bus id."""
    ends: Ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if ask(nvml.nvmlDeviceGetNvLinkState, handle, link) != nvml.NVML_FEATURE_ENABLED:
            continue
        kind = ask(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        remote = ask(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends.append(_SWITCH)
        elif remote is not None:
            ends.append(text(remote.busId))
    return ends


def _between(first: Ends, second: Ends, second_bus: str | None) -> int:
    """Direct links, or where both hang on NVSwitch as many as the one with fewer has."""
    direct = first.count(second_bus) if second_bus is not None else 0
    return direct or min(first.count(_SWITCH), second.count(_SWITCH))


def _pcie(first: Any, second: Any) -> str | None:
    level = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    return PCIE_PATHS.get(level)


def _bus(handle: Any) -> str | None:
    info = ask(nvml.nvmlDeviceGetPciInfo, handle)
    return None if info is None else text(info.busId)
