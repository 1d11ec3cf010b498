"""Readings of a real GPU, beside torch's and under a known load."""

from __future__ import annotations

import time

import pytest
import torch

from tessella.telemetry.gpus import driver_version, gpus
from tessella.telemetry.links import gpu_links
from tessella.telemetry.prometheus import TelemetryCollector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def this_gpu():
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    return next(g for g in gpus() if g.uuid == uuid)


def test_what_a_gpu_is():
    gpu = this_gpu()
    properties = torch.cuda.get_device_properties(0)
    assert gpu.name == properties.name
    total = gpu.memory_total_bytes
    assert properties.total_memory <= total < 1.1 * properties.total_memory
    used = gpu.memory_used_bytes + gpu.memory_free_bytes + gpu.memory_reserved_bytes
    assert abs(used - total) < 64 << 20
    assert driver_version().split(".")[0].isdigit()


def test_memory_that_is_taken_is_seen():
    torch.zeros(1, device="cuda")  # the context's own memory
    before = this_gpu().memory_used_bytes
    taken = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    after = this_gpu().memory_used_bytes
    assert abs(after - before - taken.nbytes) < 256 << 20


def test_work_is_seen():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    idle = this_gpu()
    end = time.monotonic() + 3
    seen = []
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
        seen.append(this_gpu())
    assert max(g.utilization for g in seen) > 80
    assert max(g.power_w for g in seen) > idle.power_w
    assert seen[-1].energy_mj > idle.energy_mj
    assert max(g.sm_clock_mhz for g in seen) > 500
    assert all(20 < g.temperature_c < 100 for g in seen)
    assert all(g.throttle is not None for g in seen)
    samples = [s for metric in TelemetryCollector().collect() for s in metric.samples]
    assert idle.name in {s.labels.get("modelName") for s in samples}


def test_links_between_gpus():
    count = len(gpus())
    assert len(gpu_links()) == count * (count - 1) // 2
