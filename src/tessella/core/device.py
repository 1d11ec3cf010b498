"""Which device this is: the target that a plan is built for and the fingerprint that it carries.

Torch is imported where a device is asked for: who only reads fingerprints, as the studio does, is
spared its 500 MB.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessella.core.errors import UsageError, WrongDevice
from tessella.core.record import digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A device and the libraries on it, as far as they decide which kernel is fastest.

    Attributes:
        target: ``reference``, ``cpu`` or ``sm_90``: which kernels may run.
        arch: instruction set, ``x86_64-avx512`` or ``sm_90``. Plans need this to be equal.
        name: the marketing name.
        units: cores that may be used, or streaming multiprocessors.
        memory_bytes: device memory (0 on a CPU, where it does not decide).
        libraries: versions of the libraries that kernels come from.
    """

    target: str
    arch: str
    name: str
    units: int
    memory_bytes: int
    libraries: dict[str, str]

    @property
    def hash(self) -> str:
        """Key of the timing cache: equal hashes, comparable times."""
        return digest(self)

    def require_same(self, here: Fingerprint, *, rebuild: str) -> None:
        """Raise ``WrongDevice`` unless a plan built there can run here.

        Args:
            here: this machine's fingerprint for the plan's target.
            rebuild: the command that builds the plan for this machine.
        """
        if (self.target, self.arch) != (here.target, here.arch):
            raise WrongDevice(
                f"the plan was built for {self.target} ({self.name}, {self.arch})",
                seen=f"{here.target} ({here.name}, {here.arch})",
                fix=f"rebuild it here: {rebuild}",
            )


def default_target() -> str:
    """``sm_90`` where a Hopper GPU is present, ``cpu`` otherwise."""
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return "sm_90"
    return "cpu"


def torch_device(target: str) -> torch.device:
    """The torch device that holds a target's tensors."""
    import torch

    if target in ("reference", "cpu"):
        return torch.device("cpu")
    if target == "sm_90":
        if not torch.cuda.is_available():
            raise WrongDevice(
                "target sm_90 needs a GPU",
                seen="no CUDA device",
                fix="use target='cpu', or run on a machine with an H100 or H200",
            )
        return torch.device("cuda")
    raise UsageError("unknown target", seen=target, fix="use cpu, sm_90 or reference")


def fingerprint(target: str) -> Fingerprint:
    """This machine's fingerprint for ``target``."""
    import torch

    device = torch_device(target)
    libraries = {"torch": torch.__version__.split("+")[0]}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        libraries["cuda"] = str(torch.version.cuda)
        libraries["cudnn"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        return Fingerprint(
            target=target,
            arch=f"sm_{properties.major}{properties.minor}",
            name=properties.name,
            units=properties.multi_processor_count,
            memory_bytes=properties.total_memory,
            libraries=libraries,
        )
    isa = torch.backends.cpu.get_cpu_capability().lower().replace(" ", "")
    return Fingerprint(
        target=target,
        arch=platform.machine() if target == "reference" else f"{platform.machine()}-{isa}",
        name=_cpu_name(),
        units=len(os.sched_getaffinity(0)),
        memory_bytes=0,
        libraries=libraries,
    )


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
