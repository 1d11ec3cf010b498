"""Launching Triton and Gluon kernels, and seeing what was launched.

Every kernel of ours goes through ``launch``. Around it, ``watching`` collects what ran (registers,
shared memory, spills), ``compiling`` turns launches into compilations for a GPU that need not be
there, and ``listing.listing`` only lists them. Inside ``ahead_of_time.using_kernels`` a launch
starts what was compiled before, in a plan or by this process, and Triton launches nothing. Triton
is imported only where it is used: a torch without CUDA comes without it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tessella.core.architectures import capability
from tessella.core.errors import KernelError
from tessella.device import ahead_of_time, identity, listing
from tessella.device.machine import aimed_at
from tessella.device.occupancy import Occupancy, occupancy

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one kernel takes from a multiprocessor.

    Attributes:
        threads: in a block.
        registers: a thread's.
        spilled_bytes: registers that went to memory, a thread's.
        shared_bytes: a block's.
    """

    kernel: str
    threads: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    def occupancy(self, target: str = "sm_90") -> Occupancy:
        """How many of its blocks a multiprocessor holds at a time."""
        return occupancy(
            threads=self.threads,
            registers=self.registers,
            shared_bytes=self.shared_bytes,
            target=target,
        )


@dataclass(frozen=True, kw_only=True)
class Launched:
    """One launch: its grid and the compiled kernel."""

    grid: tuple[int, ...]
    compiled: Any

    def resources(self) -> Resources:
        """Read from the cubin: the same with and without a GPU."""
        threads = 32 * self.compiled.metadata.num_warps
        name = self.compiled.metadata.name
        usage = resource_usage(self.compiled.asm["cubin"], name)
        total = re.search(r"\.maxntid\s+(\d+)", self.compiled.asm["ptx"])
        return Resources(
            kernel=name,
            threads=int(total[1]) if total else threads,  # specialized warps counted too
            registers=usage["REG"],
            spilled_bytes=usage["STACK"],
            shared_bytes=self.compiled.metadata.shared,
        )

    def sass(self) -> str:
        """The machine code, disassembled."""
        return _cuobjdump(self.compiled.asm["cubin"], "--dump-sass")


_launches: ContextVar[list[Launched] | None] = ContextVar("launches", default=None)
_only_compile: ContextVar[bool] = ContextVar("only_compile", default=False)


def launch(
    kernel: Any,
    grid: Sequence[int],
    *args: Any,
    num_warps: int = 4,
    fuse: bool = True,
    **constants: Any,
) -> None:
    """Run a Triton or Gluon kernel.

    Args:
        kernel: the decorated function.
        grid: blocks, one to three numbers.
        args: tensors, descriptors and numbers, or tuples of tensors and numbers. Triton specializes
            for every number in a tuple, unless ``grouped_numbers.unspecialized`` decorates the
            kernel, and version 3.6 cannot launch a descriptor that is in one.
        num_warps: warps of 32 threads a block.
        fuse: let the compiler turn a product and a sum into one operation, which rounds once.
        constants: constexpr parameters, also named tuples, and options such as ``num_stages`` or
            ``maxnreg``. Where a field of a named tuple is no number, or is handed on to another
            function, Triton 3.6 wants it declared: ``LAYOUT: gl.constexpr = FORM.LAYOUT``.
    """
    shape = (*grid, 1, 1)[:3]
    if 0 in shape:
        return
    named = {**constants, "num_warps": num_warps, "enable_fp_fusion": fuse}
    if (listed := listing.open_list()) is not None:
        listed.add(kernel, shape, args, named)
        return
    compiled = _launch_stored(kernel, shape, args, named) or _launch(kernel, shape, args, named)
    record(Launched(grid=tuple(grid), compiled=compiled))


def _launch_stored(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any]
) -> Any:
    """Start what was compiled before for this launch; None where there is nothing."""
    store = ahead_of_time.kernels_in_use()
    if store is None or _only_compile.get():
        return None
    key, name = identity.key(kernel, args, named, store.target), identity.name(kernel)
    found = store.find(key, name)
    if found is None and key is not None and isinstance(store, ahead_of_time.KernelCache):
        with preparing(), ahead_of_time.collecting(store.target) as made:
            _launch(kernel, grid, args, named)
        store.add(made.compiled)
        found = store.find(key, name)
    if found is None:
        return None
    store.launch(found, grid, identity.arguments(kernel, args, named))
    if (asking := ahead_of_time.collected()) is not None:
        asking.add(found, store.cubin(found))
    # as much of a compiled kernel as who watches reads
    metadata = SimpleNamespace(
        name=found.name, num_warps=found.threads // 32, shared=found.shared_bytes
    )
    asm = {"cubin": store.cubin(found), "ptx": f".maxntid {found.threads}"}
    return SimpleNamespace(metadata=metadata, asm=asm)


def _launch(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any]) -> Any:
    """Start a kernel through Triton, which compiles it first if it has not before."""
    from triton.errors import TritonError

    try:
        if _only_compile.get():
            compiled = kernel.warmup(*args, **named, grid=grid)
        else:
            compiled = kernel[grid](*args, **named)
    except TritonError as error:  # does not compile, or does not fit the GPU
        raise KernelError(
            "a kernel could not be launched",
            seen=str(error).splitlines()[-1][:200],
            fix="choose another configuration",
        ) from error
    asking = ahead_of_time.collected()
    if asking is not None and compiled is not None:
        key = identity.key(kernel, args, named, asking.target)
        asking.add_triton(key, identity.name(kernel), compiled, kernel.arg_names)
    return compiled


# where gcc, libcuda, or what the loader wants of it is missing
_NOT_MADE = (AssertionError, ImportError, OSError, RuntimeError, subprocess.SubprocessError)


def compile_launch(listed: bytes, target: str) -> None:
    """Compile a listed launch into Triton's cache on the disk, with what starts it there."""
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    with compiling(target):
        compiled = _launch(*listing.read(listed))
    if not hasattr(nvidia, "make_launcher"):
        return
    try:  # Triton 3.6 compiles C for each list of arguments
        nvidia.CudaLauncher(compiled.src, compiled.metadata)
    except _NOT_MADE as error:
        log.info("what starts %s is compiled later: %s", compiled.metadata.name, error)


def record(launched: Launched) -> None:
    """Show a launch to whoever is watching."""
    launches = _launches.get()
    if launches is not None:
        launches.append(launched)


def only_compiles() -> bool:
    """Whether launches now compile and run nothing."""
    return _only_compile.get()


@contextmanager
def watching() -> Iterator[list[Launched]]:
    """Collects what is launched inside."""
    launches: list[Launched] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


@contextmanager
def preparing() -> Iterator[None]:
    """Inside, launches compile for this machine's GPU and run nothing."""
    token = _only_compile.set(True)
    try:
        yield
    finally:
        _only_compile.reset(token)


@contextmanager
def compiling(target: str = "sm_90") -> Iterator[list[Launched]]:
    """Inside, launches compile for ``target`` and run nothing: no GPU, tensors on the CPU."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_AbsentGpu(GPUTarget("cuda", capability(target), 32)))
    try:
        with aimed_at(target), preparing(), watching() as launches:
            yield launches
    finally:
        driver._active = before


class _AbsentGpu:
    """A stand-in for Triton's driver, with the parts that compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        """A number of its own for each target: by it, a function keeps what was compiled."""
        return -int(self._target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@functools.lru_cache(maxsize=256)
def resource_usage(cubin: bytes, function: str) -> dict[str, int]:
    """The resources of one function of a cubin: ``REG``, ``STACK``, ``SHARED`` (the system's
    included).
    """
    text = _cuobjdump(cubin, "--dump-resource-usage")
    line = re.search(rf"Function {re.escape(function)}:\s*(.*)", text)
    assert line is not None, f"cuobjdump says nothing of {function}"
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", line[1])}


def _cuobjdump(cubin: bytes, *options: str) -> str:
    """The output of the disassembler that comes with Triton."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None
    assert triton.origin is not None
    folder = Path(triton.origin).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(folder / "cuobjdump"), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
