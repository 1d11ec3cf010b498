"""A simulated driver: the functions of NVML that telemetry calls, answering from plain data."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml

H200 = {
    "nvmlDeviceGetUUID": "GPU-1111-aaaa",
    "nvmlDeviceGetName": "NVIDIA H200",
    "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:0A:00.0"),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(
        total=144 << 30, used=10 << 30, free=133 << 30, reserved=1 << 30
    ),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=41),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetPowerUsage": 512_300,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 123_456_789,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1 | 0x4 | 0x40,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=77, usedGpuMemory=9 << 30)],
}


class FakeNvml:
    """One dict of answers a GPU; a function that is not in it is not supported by that GPU."""

    def __init__(self, *gpus, driver="580.1"):
        self._gpus, self._driver, self.inits = gpus, driver, 0

    def nvmlInit(self):
        self.inits += 1
        if self._driver is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlSystemGetDriverVersion(self):
        return self._driver

    def nvmlDeviceGetCount(self):
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self._gpus[index] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self._gpus[index]

    def nvmlDeviceGetClockInfo(self, gpu, clock):
        if "clocks" not in gpu:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return gpu["clocks"][clock]

    def __getattr__(self, name):
        if not name.startswith("nvmlDevice"):
            return getattr(pynvml, name)  # constants and errors are the real ones
        getattr(pynvml, name)  # the real binding has it

        def answer(gpu, *arguments):
            if name not in gpu:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu[name]

        return answer
