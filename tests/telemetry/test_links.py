"""Links between GPUs, seen through a simulated NVML."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from tessella.telemetry import links
from tessella.telemetry.links import Link, gpu_links


class FakeNvml:
    """``ends[gpu]``: for each NVLink "switch", the number of another GPU, or None (down)."""

    def __init__(self, ends, levels):
        self._ends, self._levels, self.open = ends, levels, 0

    def __getattr__(self, name):
        return getattr(pynvml, name)  # constants and errors are the real ones

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self._ends)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=f"0000:0{gpu}:00.0")

    def _end(self, gpu, link):
        if link >= len(self._ends[gpu]):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._ends[gpu][link]

    def nvmlDeviceGetNvLinkState(self, gpu, link):
        up = self._end(gpu, link) is not None
        return pynvml.NVML_FEATURE_ENABLED if up else pynvml.NVML_FEATURE_DISABLED

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, gpu, link):
        switch = self._end(gpu, link) == "switch"
        return (
            pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU
        )

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, link):
        return SimpleNamespace(busId=f"0000:0{self._end(gpu, link)}:00.0".encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, first, second):
        if (first, second) not in self._levels:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return self._levels[first, second]


@pytest.fixture
def machine(monkeypatch):
    def machine(ends, levels):
        fake = FakeNvml(ends, levels)
        monkeypatch.setattr(links, "nvml", fake)
        return fake

    return machine


def test_all_to_all_through_switches(machine):
    fake = machine([["switch"] * 18, ["switch"] * 18, ["switch"] * 16 + [None] * 2], {(0, 1): 50})
    assert gpu_links() == (
        Link(first=0, second=1, nvlinks=18, pcie="across NUMA nodes"),
        Link(first=0, second=2, nvlinks=16, pcie=None),
        Link(first=1, second=2, nvlinks=16, pcie=None),
    )
    assert fake.open == 0


def test_direct_links_and_pcie(machine):
    machine([[1, 1, 2, None], [0, 0], [0]], {(0, 1): 10, (0, 2): 30, (1, 2): 50})
    assert gpu_links() == (
        Link(first=0, second=1, nvlinks=2, pcie="one PCIe switch"),
        Link(first=0, second=2, nvlinks=1, pcie="one host bridge"),
        Link(first=1, second=2, nvlinks=0, pcie="across NUMA nodes"),
    )


def test_one_gpu_or_no_driver(machine, monkeypatch):
    machine([["switch"]], {})
    assert gpu_links() == ()

    def no_driver():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(links.nvml, "nvmlInit", no_driver, raising=False)
    assert gpu_links() == ()
