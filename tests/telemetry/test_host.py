"""Host readings beside what psutil and the system say, and a meter with a clock in our hand."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from tessella.telemetry import host as host_module
from tessella.telemetry.host import CpuMeter, host


def test_the_host(tmp_path):
    before, now, after = os.getloadavg(), host(tmp_path), os.getloadavg()
    assert len(now.cpu_percent_by_core) == psutil.cpu_count()
    assert all(0 <= percent <= 100 for percent in now.cpu_percent_by_core)
    assert now.memory_total_bytes == psutil.virtual_memory().total
    assert 0 < now.memory_used_bytes < now.memory_total_bytes
    assert now.disk_total_bytes == shutil.disk_usage(tmp_path).total
    assert abs(now.disk_free_bytes - shutil.disk_usage(tmp_path).free) < 1 << 30
    assert now.load in (pytest.approx(before), pytest.approx(after))  # it is renewed all 5 s


@pytest.fixture
def machine(monkeypatch):
    """A machine of two cores whose clock and counters the test sets."""
    state = SimpleNamespace(now=100.0, cores=[(0, 0, 0)] * 2)

    def times(percpu):
        names = ("user", "idle", "iowait", "guest", "guest_nice")
        make = namedtuple("times", names)
        return [make(user, idle, wait, 0, 0) for user, idle, wait in state.cores]

    monkeypatch.setattr(host_module.psutil, "cpu_times", times)
    monkeypatch.setattr(host_module.time, "monotonic", lambda: state.now)
    return state


def test_the_share_is_of_the_time_since_the_reading_before(machine):
    meter = CpuMeter()
    machine.cores = [(50, 50, 0), (0, 80, 20)]
    assert meter.read() == (50.0, 0.0)  # the first: since the machine started
    machine.now += 10
    machine.cores = [(60, 50, 0), (1, 87, 22)]
    assert meter.read() == (100.0, 10.0)


def test_a_second_asker_gets_the_same_reading(machine):
    meter = CpuMeter()
    machine.cores = [(50, 50, 0)] * 2
    meter.read()
    machine.now += 0.1
    machine.cores = [(51, 50, 0)] * 2
    assert meter.read() == (50.0, 50.0)


def test_counters_that_stand_still_or_step_back(machine):
    meter = CpuMeter()
    machine.cores = [(50, 50, 0)] * 2
    meter.read()
    machine.now += 1
    machine.cores = [(50, 50, 0), (49, 51, 0)]
    assert meter.read() == (0.0, 0.0)
