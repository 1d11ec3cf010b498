"""Readings of NVIDIA GPUs through NVML. Without a driver there are no GPUs.

Nothing here makes a CUDA context, so a process that only watches takes no GPU memory.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from tessella.core.device import no_such_gpu, read_device

nvml = pynvml  # looked up at each call: tests put a simulated driver here

# NVML's clocks event bits in words. Idle and chosen clocks are no throttling and are left out.
THROTTLE_REASONS = {
    0x004: "power limit",
    0x008: "hardware slowdown",
    0x010: "synchronized with a slower GPU",
    0x020: "too hot (software slowdown)",
    0x040: "too hot (hardware slowdown)",
    0x080: "power brake",
}


@dataclass(frozen=True, kw_only=True)
class GpuProcess:
    """A process that computes on a GPU; ``memory_bytes`` is None if the driver does not know it."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU at one moment; a reading that this GPU or driver does not have is None.

    Attributes:
        index: NVML's, in the order of the PCI bus.
        utilization: share of the last sampling period in which some kernel ran, in percent.
        memory_utilization: share in which memory was read or written, in percent.
        memory_reserved_bytes: kept by the driver; total = used + free + reserved.
        energy_mj: since the driver was loaded, in millijoules.
        throttle: why the clocks are lower than they could be, in words; empty if they are not.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: str | None = None
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_mj: int | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: tuple[str, ...] | None = None
    processes: tuple[GpuProcess, ...] | None = None


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the machine; empty without an NVIDIA driver."""
    if driver_version() is None:
        return ()
    count = ask(nvml.nvmlDeviceGetCount) or 0
    return tuple(_read(index) for index in range(count))


def driver_version() -> str | None:
    """The NVIDIA driver's version, or None where there is none."""
    return _start(nvml)


def visible_gpus() -> tuple[int, ...]:
    """Indices of the GPUs that this process may use: all, or those in CUDA_VISIBLE_DEVICES."""
    found = gpus()
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return tuple(gpu.index for gpu in found)
    visible = []
    for entry in (e.strip() for e in mask.split(",")):
        same = [g.index for g in found if entry == str(g.index) or _is_uuid(entry, g.uuid)]
        if not same:  # CUDA too stops at the first entry that it does not know
            break
        visible += same
    return tuple(visible)


def seeing_only(device: str) -> str | None:
    """The value of CUDA_VISIBLE_DEVICES under which a process sees no GPU but this one.

    Args:
        device: ``cpu``, ``cuda`` or a GPU by its number, as CUDA counts them: ``cuda:1``.

    Returns:
        None where all GPUs may stay: for ``cuda``.

    Raises:
        UsageError: it is no device, or not there; the message lists the GPUs that are.
    """
    kind, index = read_device(device)
    if kind == "cpu":
        return ""
    visible, names = visible_gpus(), {gpu.index: gpu.name for gpu in gpus()}
    if (index or 0) >= len(visible):
        raise no_such_gpu(device, [names[found] for found in visible])
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if index is None else str(index) if mask is None else mask.split(",")[index].strip()


def capability(index: int) -> tuple[int, int] | None:
    """A GPU's compute capability, ``(9, 0)`` for Hopper, asked without a CUDA context."""
    handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
    found = None if handle is None else ask(nvml.nvmlDeviceGetCudaComputeCapability, handle)
    return None if found is None else (int(found[0]), int(found[1]))


def _is_uuid(entry: str, uuid: str | None) -> bool:
    """Whether ``entry`` is a beginning of the UUID; CUDA takes any that identifies one GPU."""
    return entry.startswith("GPU-") and uuid is not None and uuid.startswith(entry)


@functools.cache
def _start(library: Any) -> str | None:
    """Open NVML once a process (opening takes longer than reading); the driver's version."""
    try:
        library.nvmlInit()
        return text(library.nvmlSystemGetDriverVersion())
    except library.NVMLError:
        return None


def ask(read: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of a function of NVML, or None if this GPU or driver has none."""
    try:
        return read(*arguments)
    except nvml.NVMLError:
        return None


def _read(index: int) -> Gpu:
    handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu(index=index)
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
    return Gpu(
        index=index,
        uuid=text(ask(nvml.nvmlDeviceGetUUID, handle)),
        name=text(ask(nvml.nvmlDeviceGetName, handle)),
        pci_bus_id=None if pci is None else text(pci.busId),
        utilization=None if rates is None else float(rates.gpu),
        memory_utilization=None if rates is None else float(rates.memory),
        memory_total_bytes=None if memory is None else memory.total,
        memory_used_bytes=None if memory is None else memory.used,
        memory_free_bytes=None if memory is None else memory.free,
        memory_reserved_bytes=None if memory is None else memory.reserved,
        temperature_c=ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=_watts(ask(nvml.nvmlDeviceGetPowerUsage, handle)),
        power_limit_w=_watts(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        energy_mj=ask(nvml.nvmlDeviceGetTotalEnergyConsumption, handle),
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        throttle=_throttle(ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)),
        processes=_processes(ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)),
    )


def text(value: str | bytes | None) -> str | None:
    """The text of an answer: older bindings give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _throttle(bits: int | None) -> tuple[str, ...] | None:
    if bits is None:
        return None
    return tuple(words for bit, words in THROTTLE_REASONS.items() if bits & bit)


def _processes(found: list[Any] | None) -> tuple[GpuProcess, ...] | None:
    if found is None:
        return None
    return tuple(GpuProcess(pid=p.pid, memory_bytes=p.usedGpuMemory) for p in found)
