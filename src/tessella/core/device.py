"""Which device this is: the target that a plan is built for and the fingerprint that it carries.

Torch is imported where a device is asked for: who only reads fingerprints, as the studio does, is
spared its 500 MB.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessella.core.architectures import ARCHITECTURES, GPU_TARGETS, is_gpu, is_own, target_of
from tessella.core.errors import UsageError, WrongDevice
from tessella.core.processor import extensions, widest_allowed
from tessella.core.record import digest

if TYPE_CHECKING:
    import torch

# Queues between here and a GPU, of which CUDA makes 8: streams that share one wait for each other.
# Steps of a ResNet-50 beside nvJPEG, which has 14 streams of its own, ran at 5,177 images/s of
# 6,564, and with 32 queues at 6,139 (H100). It is read when a GPU is first used.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

_on_cpu: ContextVar[bool] = ContextVar("on_cpu", default=False)


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """A device and the libraries on it, as far as they decide which kernel is fastest.

    Attributes:
        target: ``reference``, ``cpu`` or a GPU's (``sm_90``): which kernels may run.
        arch: instruction set, ``x86_64-avx512`` or ``sm_90``. A CPU's plans need this to be equal;
            a GPU that is a relative of its target's compiles a plan's kernels for itself.
        name: the marketing name; of a CPU with the extensions of its vectors that may be used, as
            every generation of a processor may have one name in a virtual machine.
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

    def require_same(self, here: Fingerprint, *, rebuild: str, targets: Sequence[str] = ()) -> None:
        """Raise ``WrongDevice`` unless a plan built there can run here.

        Args:
            here: this machine's fingerprint for the plan's target.
            rebuild: the command that builds the plan for this machine.
            targets: what the plan has programs for, if several.
        """
        if self.target != here.target or (self.arch != here.arch and not is_gpu(self.target)):
            seen = f"{here.target} ({here.name}, {here.arch})"
            raise self._wrong(seen, here.target, rebuild, targets)

    def require_here(self, *, rebuild: str, targets: Sequence[str] = ()) -> None:
        """Raise ``WrongDevice`` unless a plan built there can run on this machine.

        A GPU that is only the nearest to the plan's runs it, and a warning says so.

        Args:
            rebuild: the command that built the plan; the message has it with this machine's target.
            targets: what the plan has programs for, if several.
        """
        self.require_target(rebuild=rebuild, targets=targets)
        here = fingerprint(self.target)
        self.require_same(here, rebuild=rebuild, targets=targets)
        if self.arch != here.arch and not _is_own(self.target):
            warnings.warn(
                f"{here.name} ({here.arch}) runs a plan that was built for {self.arch}, the "
                "nearest older GPU: its kernels are compiled here, some seconds each; to measure "
                "which of them are fast here: tessella tune PLAN",
                stacklevel=3,
            )

    def require_target(self, *, rebuild: str, targets: Sequence[str] = ()) -> None:
        """Raise ``WrongDevice`` unless this machine is one of the plan's target: any CPU is one."""
        if is_gpu(self.target):
            name, target = _gpu_here()
            if target != self.target:
                raise self._wrong(name, target or "cpu", rebuild, targets)

    def lacking(self, seen: str, *, rebuild: str, targets: Sequence[str] = ()) -> WrongDevice:
        """The error for a plan whose kernels need instructions that this machine's processor, of
        the plan's own target, has not.

        Args:
            seen: what is missing.
            rebuild: the command that builds the plan for this machine.
            targets: what the plan has programs for, if several.
        """
        return self._wrong(seen, self.target, rebuild, targets)

    def _wrong(self, seen: str, target: str, rebuild: str, targets: Sequence[str]) -> WrongDevice:
        again = re.sub(r"(--target[ =]|target=['\"])[\w,]+", rf"\g<1>{target}", rebuild)
        tunable = "; or measure its kernels here: tessella tune PLAN" * (self.target == target)
        others = [f" and for {other}" for other in targets if other != self.target]
        return WrongDevice(
            f"the plan was built for {self.target} ({self.name}, {self.arch}){''.join(others)}",
            seen=seen,
            fix=f"rebuild it here: {again}{tunable}",
        )


def read_device(text: str) -> tuple[str, int | None]:
    """``cpu``, ``cuda`` or ``cuda:1`` as the kind of device and the GPU's number, None without.

    Raises:
        UsageError: any other text.
    """
    found = re.fullmatch(r"(cpu)|(cuda)(?::(\d{1,4}))?", text)
    if found is None:
        raise UsageError("this is no device", seen=text[:80], fix="use cpu, cuda, or cuda:1")
    return found[1] or found[2], None if found[3] is None else int(found[3])


def no_such_gpu(device: str, names: Sequence[str | None]) -> UsageError:
    """The error for a GPU that is not there. ``names``: of those that are, by their number."""
    here = ", ".join(f"cuda:{index} ({name})" for index, name in enumerate(names))
    return UsageError(
        f"this machine has no GPU {device}",
        seen=here or "no GPU",
        fix="use one of these, or cpu" if here else "use cpu",
    )


@contextmanager
def using(device: str | None) -> Iterator[None]:
    """Inside, this is the device of the calling thread: what is built or loaded is for it.

    Args:
        device: ``cpu``, ``cuda``, or a GPU by its number, as torch counts them: ``cuda:1``. None
            and ``cuda``: the thread's current GPU.

    Raises:
        UsageError: it is no device, or not there; the message lists those that are.
    """
    import torch

    if device is None:
        yield
        return
    kind, index = read_device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and (index or 0) >= count:
        raise no_such_gpu(device, [torch.cuda.get_device_name(i) for i in range(count)])
    token = _on_cpu.set(kind == "cpu")
    try:
        with nullcontext() if index is None else torch.cuda.device(index):
            yield
    finally:
        _on_cpu.reset(token)


def default_target() -> str:
    """The target of the current GPU, ``cpu`` where there is none, or inside ``using("cpu")``.

    A GPU that is in no table is told by a warning, with what is taken in its place.
    """
    import torch

    if _on_cpu.get() or not torch.cuda.is_available():
        return "cpu"
    target = gpu_target()
    if target is None or not _is_own(target):
        taken = f"plans are built for {target}, the nearest" if target else "plans run on the CPU"
        warnings.warn(f"{_gpu_here()[0]} is no target of its own: {taken}", stacklevel=2)
    return target or "cpu"


def is_here(target: str) -> bool:
    """Whether this machine is one of a target: any is one of a CPU's."""
    return not is_gpu(target) or _gpu_here()[1] == target


def suiting(targets: Collection[str]) -> str | None:
    """The one of a plan's targets whose program this machine should run; None if it can run none.

    That is the target of the current GPU, its own or the nearest older one, else ``cpu``: machine
    code for another GPU does not run, so a GPU without a program stands idle, and a warning says
    so.
    """
    here = default_target()
    if here in targets:
        return here
    if "cpu" not in targets:
        return None
    warnings.warn(
        f"{_gpu_here()[0]} is not used: the plan has programs for {', '.join(targets)}, and none "
        f"for {here}. Compile it again with --target {','.join((*targets, here))}",
        stacklevel=4,
    )
    return "cpu"


def gpu_target(device: torch.device | None = None) -> str | None:
    """The target of a GPU of this machine, by default the current one; None where it has none."""
    import torch

    return target_of(*torch.cuda.get_device_capability(device))


def _is_own(target: str) -> bool:
    """Whether a GPU's target is the current GPU's own, not the nearest to it."""
    import torch

    return is_own(target, *torch.cuda.get_device_capability())


def _gpu_here() -> tuple[str, str | None]:
    """What people call the current GPU, and its target."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device", None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor})", gpu_target()


def torch_device(target: str) -> torch.device:
    """The torch device that holds a target's tensors: of a GPU's the current one, by its number."""
    import torch

    if target in ("reference", "cpu"):
        return torch.device("cpu")
    if is_gpu(target):
        name, here = _gpu_here()
        if here != target:
            chips = ARCHITECTURES[target].chips
            raise WrongDevice(
                f"target {target} needs its GPU ({chips})",
                seen=name,
                fix=f"use target='{here or 'cpu'}', or a machine with such a GPU; without one, "
                "compile --untuned (untuned=True) measures nothing",
            )
        return torch.device("cuda", torch.cuda.current_device())
    raise UsageError(
        "unknown target", seen=target, fix=f"use cpu, {', '.join(GPU_TARGETS)} or reference"
    )


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
        name=_cpu_described(),
        units=len(os.sched_getaffinity(0)),
        memory_bytes=0,
        libraries=libraries,
    )


def described(target: str) -> Fingerprint:
    """What a plan says of a GPU that is not here: its kind, and nothing that was read from one."""
    import torch

    kind = ARCHITECTURES[target]
    return Fingerprint(
        target=target,
        arch=target,
        name=f"any {kind.chips}",
        units=kind.multiprocessors,
        memory_bytes=0,
        libraries={"torch": torch.__version__.split("+")[0]},
    )


def _cpu_described() -> str:
    """The CPU's name and what of it may be used: times are others with anything else."""
    name = " as ".join(filter(None, (_cpu_name(), widest_allowed())))
    return " with ".join(filter(None, (name, ", ".join(extensions()))))


@functools.cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
