"""The text that Prometheus scrapes, read back by Prometheus' own parser."""

from __future__ import annotations

import socket

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tessella.telemetry import gpus as gpus_module
from tessella.telemetry.prometheus import TelemetryCollector
from tests.support.nvml import H200, FakeNvml


def scrape() -> dict[str, list]:
    registry = CollectorRegistry()
    registry.register(TelemetryCollector())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {family.name: family.samples for family in families}


def test_gpus_have_the_names_and_labels_of_dcgm_exporter(monkeypatch):
    clocks = {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201}
    monkeypatch.setattr(gpus_module, "nvml", FakeNvml({**H200, "clocks": clocks}))
    found = scrape()
    values = {name: s[0].value for name, s in found.items() if name.startswith("DCGM")}
    assert values == {
        "DCGM_FI_DEV_SM_CLOCK": 1980,
        "DCGM_FI_DEV_MEM_CLOCK": 3201,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_POWER_USAGE": 512.3,
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 41,
        "DCGM_FI_DEV_FB_FREE": 133 * 1024,
        "DCGM_FI_DEV_FB_USED": 10 * 1024,
        "DCGM_FI_DEV_FB_RESERVED": 1024,
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123_456_789,
    }
    assert found["DCGM_FI_DEV_GPU_UTIL"][0].labels == {
        "gpu": "0",
        "UUID": "GPU-1111-aaaa",
        "pci_bus_id": "00000000:0A:00.0",
        "device": "nvidia0",
        "modelName": "NVIDIA H200",
        "hostname": socket.gethostname(),
        "DCGM_FI_DRIVER_VERSION": "580.1",
    }


def test_a_missing_reading_is_no_sample(monkeypatch):
    monkeypatch.setattr(gpus_module, "nvml", FakeNvml({"nvmlDeviceGetTemperature": 50}, None))
    found = scrape()
    assert [s.labels["gpu"] for s in found["DCGM_FI_DEV_GPU_TEMP"]] == ["0"]
    assert found["DCGM_FI_DEV_GPU_UTIL"] == []


def test_the_host_is_told_without_any_gpu(monkeypatch):
    monkeypatch.setattr(gpus_module, "nvml", FakeNvml(driver=None))
    found = scrape()
    assert 0 <= found["nv_cpu_utilization"][0].value <= 1
    total = found["nv_cpu_memory_total_bytes"][0].value
    assert 0 < found["nv_cpu_memory_used_bytes"][0].value < total
    assert found["tessella_disk_free_bytes"][0].value > 0


@pytest.mark.parametrize("name", ["a\\b", 'say "x"', "line\nbreak", "µ-GPU"])
def test_labels_are_escaped(monkeypatch, name):
    monkeypatch.setattr(gpus_module, "nvml", FakeNvml({**H200, "nvmlDeviceGetName": name}))
    assert scrape()["DCGM_FI_DEV_GPU_TEMP"][0].labels["modelName"] == name
