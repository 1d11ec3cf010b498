"""Occupancy against published cases; on a GPU, tests/gpu compares with CUDA's own answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tessella.core.errors import UsageError
from tessella.device import machine
from tessella.device.machine import HOPPER, aimed_at, multiprocessors
from tessella.device.occupancy import occupancy


@pytest.mark.parametrize(
    ("threads", "registers", "blocks", "percent"),
    [
        # CUDA C++ Best Practices Guide, "Calculating Occupancy", compute capability 7.0
        (128, 32, 16, 100),
        (128, 37, 12, 75),
        (320, 37, 4, 63),
    ],
)
@pytest.mark.parametrize("target", ["sm_70", "sm_80", "sm_90"])
def test_published_cases(target, threads, registers, blocks, percent):
    made = occupancy(threads=threads, registers=registers, shared_bytes=0, target=target)
    assert (made.blocks, round(100 * made.share + 1e-9)) == (blocks, percent)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes", "blocks", "limited_by"),
    [
        (32, 16, 0, 32, "blocks"),
        (1024, 16, 0, 2, "warps"),
        (128, 168, 0, 3, "registers"),  # 168 · 32 = 5376: three warps in a quarter of 16384
        (128, 32, 227 << 10, 1, "shared memory"),  # with the system's KB, the whole 228
        (128, 32, 113 << 10, 2, "shared memory"),
        (128, 32, (113 << 10) + 1, 1, "shared memory"),
        (384, 168, 180_000, 1, "registers"),
    ],
)
def test_limits_of_hopper(threads, registers, shared_bytes, blocks, limited_by):
    made = occupancy(threads=threads, registers=registers, shared_bytes=shared_bytes)
    assert (made.blocks, made.limited_by) == (blocks, limited_by)
    assert made.warps == blocks * threads // 32
    assert str(blocks) in str(made)
    assert limited_by in str(made)


@pytest.mark.parametrize(
    ("threads", "registers", "shared_bytes"),
    [(1025, 16, 0), (1024, 72, 0), (32, 256, 0), (32, 16, (227 << 10) + 1)],
)
def test_a_block_that_does_not_fit(threads, registers, shared_bytes):
    with pytest.raises(UsageError, match="cannot hold one"):
        occupancy(threads=threads, registers=registers, shared_bytes=shared_bytes)


def test_multiprocessors_are_those_of_the_gpu_that_is_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(multi_processor_count=114)  # an H100 for PCIe
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "_target_here", lambda: "sm_90")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(machine, "_units_of", machine._units_of.__wrapped__)
    assert multiprocessors() == 114
    with aimed_at("sm_80"):
        assert multiprocessors() == 108  # of another GPU, those of its largest chip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "_target_here", lambda: None)
    assert multiprocessors() == HOPPER.multiprocessors == 132


def test_shared_memory_of_hopper():
    """CUDA C++ Programming Guide: 228 KB of a multiprocessor, of which each block loses one."""
    assert [HOPPER.shared_bytes_of_block(n) for n in (1, 2)] == [227 << 10, 113 << 10]
