"""The readings for Prometheus, under names that existing dashboards know.

GPUs: dcgm-exporter's names, units and labels. Host: Triton's ``nv_cpu_*`` names.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import GaugeMetricFamily, Metric, UnknownMetricFamily
from prometheus_client.registry import Collector

from tessella.telemetry.gpus import Gpu, driver_version
from tessella.telemetry.readings import readings

LABELS = (
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "hostname", "DCGM_FI_DRIVER_VERSION",
)  # fmt: skip


def _mib(nbytes: int | None) -> float | None:
    return None if nbytes is None else nbytes / (1 << 20)


GPU_GAUGES: dict[str, tuple[str, Callable[[Gpu], float | None]]] = {
    "DCGM_FI_DEV_SM_CLOCK": ("SM clock frequency (in MHz).", lambda g: g.sm_clock_mhz),
    "DCGM_FI_DEV_MEM_CLOCK": ("Memory clock frequency (in MHz).", lambda g: g.memory_clock_mhz),
    "DCGM_FI_DEV_GPU_TEMP": ("GPU temperature (in °C).", lambda g: g.temperature_c),
    "DCGM_FI_DEV_POWER_USAGE": ("Power draw (in W).", lambda g: g.power_w),
    "DCGM_FI_DEV_GPU_UTIL": ("GPU utilization (in %).", lambda g: g.utilization),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("Memory utilization (in %).", lambda g: g.memory_utilization),
    "DCGM_FI_DEV_FB_FREE": ("Free memory (in MiB).", lambda g: _mib(g.memory_free_bytes)),
    "DCGM_FI_DEV_FB_USED": ("Used memory (in MiB).", lambda g: _mib(g.memory_used_bytes)),
    "DCGM_FI_DEV_FB_RESERVED": (
        "Memory reserved by the driver (in MiB).",
        lambda g: _mib(g.memory_reserved_bytes),
    ),
}


class TelemetryCollector(Collector):
    """Reads host and GPUs whenever the registry that it is registered in is scraped.

    Args:
        disk: a path on the file system whose free space is a metric.
    """

    def __init__(self, disk: str | Path = "/") -> None:
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        now = readings(self._disk)
        yield GaugeMetricFamily(
            "nv_cpu_utilization", "CPU utilization (0 to 1).", now.host.cpu_percent / 100
        )
        yield GaugeMetricFamily(
            "nv_cpu_memory_total_bytes", "Host memory.", now.host.memory_total_bytes
        )
        yield GaugeMetricFamily(
            "nv_cpu_memory_used_bytes", "Host memory in use.", now.host.memory_used_bytes
        )
        yield GaugeMetricFamily(
            "tessella_disk_free_bytes", "Free space for data and runs.", now.host.disk_free_bytes
        )
        for name, (text, read) in GPU_GAUGES.items():
            yield _family(GaugeMetricFamily(name, text, labels=LABELS), now.gpus, read)
        # A counter, but Prometheus' client would append `_total` to the name that dashboards know.
        energy = UnknownMetricFamily(
            "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
            "Energy since the driver was loaded (in mJ).",
            labels=LABELS,
        )
        yield _family(energy, now.gpus, lambda g: g.energy_mj)


def _family(
    family: GaugeMetricFamily | UnknownMetricFamily,
    gpus: tuple[Gpu, ...],
    read: Callable[[Gpu], float | None],
) -> Metric:
    for gpu in gpus:
        value = read(gpu)
        if value is not None:  # a missing reading is a missing sample, never a zero
            family.add_metric(_labels(gpu), value)
    return family


def _labels(gpu: Gpu) -> tuple[str, ...]:
    return (
        str(gpu.index),
        gpu.uuid or "",
        gpu.pci_bus_id or "",
        f"nvidia{gpu.index}",
        gpu.name or "",
        socket.gethostname(),
        driver_version() or "",
    )
