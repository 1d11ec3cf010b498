"""GPU readings through a simulated NVML; ``tests/gpu/test_telemetry.py`` reads a real one."""

from __future__ import annotations

import dataclasses

import pynvml
import pytest

from tessella.core.errors import UsageError
from tessella.core.record import to_plain
from tessella.telemetry import gpus as gpus_module
from tessella.telemetry.gpus import (
    Gpu,
    GpuProcess,
    driver_version,
    gpus,
    seeing_only,
    visible_gpus,
)
from tessella.telemetry.readings import readings
from tests.support.nvml import H200, FakeNvml

CLOCKS = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}


@pytest.fixture
def driver(monkeypatch):
    def driver(*gpus, **settings):
        fake = FakeNvml(*gpus, **settings)
        monkeypatch.setattr(gpus_module, "nvml", fake)
        return fake

    return driver


def test_every_reading(driver):
    driver({**H200, "clocks": CLOCKS})
    assert gpus() == (
        Gpu(
            index=0,
            uuid="GPU-1111-aaaa",
            name="NVIDIA H200",
            pci_bus_id="00000000:0A:00.0",
            utilization=97.0,
            memory_utilization=41.0,
            memory_total_bytes=144 << 30,
            memory_used_bytes=10 << 30,
            memory_free_bytes=133 << 30,
            memory_reserved_bytes=1 << 30,
            temperature_c=61,
            power_w=512.3,
            power_limit_w=700.0,
            energy_mj=123_456_789,
            sm_clock_mhz=1980,
            memory_clock_mhz=3201,
            throttle=("power limit", "too hot (hardware slowdown)"),
            processes=(GpuProcess(pid=77, memory_bytes=9 << 30),),
        ),
    )
    assert driver_version() == "580.1"


@pytest.mark.parametrize("missing", sorted(H200))
def test_a_missing_reading_is_none_and_takes_no_other_with_it(driver, missing):
    whole = {**H200, "clocks": CLOCKS}
    driver(whole)
    (complete,) = gpus()
    driver({name: answer for name, answer in whole.items() if name != missing})
    (partial,) = gpus()
    lost = {
        f.name
        for f in dataclasses.fields(Gpu)
        if getattr(partial, f.name) != getattr(complete, f.name)
    }
    assert lost
    assert all(getattr(partial, name) is None for name in lost)
    related = {
        "nvmlDeviceGetMemoryInfo": 4,
        "nvmlDeviceGetUtilizationRates": 2,
    }
    assert len(lost) == related.get(missing, 1)


def test_a_gpu_that_fell_off_the_bus_keeps_its_place(driver):
    driver(None, H200)
    lost, other = gpus()
    assert lost == Gpu(index=0)
    assert (other.index, other.name) == (1, "NVIDIA H200")


def test_no_driver_no_gpus(driver):
    fake = driver(H200, driver=None)
    assert gpus() == ()
    assert driver_version() is None
    assert visible_gpus() == ()
    assert fake.inits == 1  # not tried again at each reading


def test_not_throttled_and_not_told_are_not_the_same(driver):
    driver({"nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x2})
    assert gpus()[0].throttle == ()
    driver({})
    assert gpus()[0].throttle is None


def test_the_words_belong_to_the_bits_that_nvml_names():
    bits = {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
        pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksEventReasonSyncBoost: "synchronized with a slower GPU",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "too hot (software slowdown)",
        pynvml.nvmlClocksEventReasonHwThermalSlowdown: "too hot (hardware slowdown)",
        pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
    }
    assert bits == gpus_module.THROTTLE_REASONS


@pytest.mark.parametrize(
    ("mask", "visible"),
    [
        (None, (0, 1, 2)),
        ("", ()),
        ("1", (1,)),
        ("2, 0", (2, 0)),
        ("0,9,1", (0,)),  # as CUDA does: nothing after an unknown entry
        ("-1", ()),
        ("GPU-b,GPU-c", (1, 2)),
        ("NoDevFiles", ()),
    ],
)
def test_the_mask_of_cuda_is_kept(driver, monkeypatch, mask, visible):
    driver(*({"nvmlDeviceGetUUID": f"GPU-{letter}000"} for letter in "abc"))
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    assert visible_gpus() == visible


@pytest.mark.parametrize(
    ("mask", "device", "seen"),
    [
        (None, "cpu", ""), (None, "cuda", None), (None, "cuda:0", "0"), (None, "cuda:2", "2"),
        ("2, 0", "cuda:0", "2"), ("2, 0", "cuda:1", "0"), ("GPU-b,GPU-c", "cuda:1", "GPU-c"),
        ("", "cpu", ""),
    ],
)  # fmt: skip
def test_a_process_sees_only_the_gpu_that_was_asked_for(driver, monkeypatch, mask, device, seen):
    driver(*({"nvmlDeviceGetUUID": f"GPU-{letter}000"} for letter in "abc"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask or "")
    if mask is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert seeing_only(device) == seen


def test_a_gpu_that_is_not_there_is_told_with_those_that_are(driver, monkeypatch):
    driver({"nvmlDeviceGetName": "NVIDIA A"}, {"nvmlDeviceGetName": "NVIDIA B"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=r"cuda:2. Seen: cuda:0 \(NVIDIA A\), cuda:1 \(NVIDIA B\)"):
        seeing_only("cuda:2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UsageError, match=r"cuda:1. Seen: cuda:0 \(NVIDIA B\)"):
        seeing_only("cuda:1")
    driver(driver=None)
    with pytest.raises(UsageError, match=r"Seen: no GPU\. To do: use cpu"):
        seeing_only("cuda")
    with pytest.raises(UsageError, match=r"no device. Seen: gpu1"):
        seeing_only("gpu1")


def test_all_readings_are_plain_data(driver, tmp_path):
    driver(H200, None)
    now = readings(tmp_path)
    assert now.gpus == gpus()
    assert to_plain(now)["gpus"][0]["power_w"] == 512.3
