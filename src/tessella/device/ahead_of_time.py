"""Ahead-of-time code: compiled kernels of a plan, or of this process, launched by the driver.

``collecting`` takes note of what is compiled inside; ``using_kernels`` lets ``launch`` start these
instead of compiling. Machine code says itself what it wants, so that any Triton may have made it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from hashlib import sha256
from typing import Any

import torch

from tessella.core import cubin
from tessella.core.architectures import capability, is_gpu
from tessella.core.compiled import CompiledKernel, CompiledKernels, Parameter, Tiles
from tessella.core.errors import CorruptArtifact, KernelError
from tessella.device.driver import Driver, cuda_driver
from tessella.device.machine import runs_code_of

log = logging.getLogger(__name__)

# device numbers of element types → the driver's, where they differ: bf16, fp32, fp64
_ELEMENTS = {8: 10, 9: 8, 10: 9}
_FLOAT32_AS_TF32 = 11
_TYPES = {
    "pointer": ctypes.c_uint64,
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class Store:
    """Compiled kernels on the current device.

    Attributes:
        target: what they are compiled for.
    """

    def __init__(
        self, compiled: CompiledKernels, target: str, driver: Driver | None = None
    ) -> None:
        self.target = target
        self._kernels = {k.key: k for k in compiled.kernels}
        self._cubins = dict(compiled.cubins)
        self._driver = driver

    def find(self, key: str | None, name: str) -> CompiledKernel | None:
        """The kernel of a key, or None; ``name`` is for people."""
        return self._kernels.get(key) if key is not None else None

    def cubin(self, kernel: CompiledKernel) -> bytes:
        """The kernel's machine code, a cubin."""
        return self._cubins[kernel.cubin]

    def launch(self, kernel: CompiledKernel, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Start a kernel on the current stream.

        Args:
            args: all arguments of the function, by position.

        Raises:
            KernelError: the driver refuses it.
        """
        driver = self._driver or cuda_driver()
        values = _values(kernel, args, driver)
        scratch = kernel.scratch_bytes * math.prod(grid)
        memory = _scratch(scratch)
        address = memory.data_ptr() if memory is not None else 0
        values += [ctypes.c_uint64(address), ctypes.c_uint64(0)]  # and none for a profiler
        device = torch.cuda.current_device() if torch.cuda.is_available() else 0
        driver.launch(
            driver.function(kernel.name, self.cubin(kernel), device),
            grid,
            (kernel.threads, 1, 1),
            values,
            torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0,
            shared_bytes=kernel.shared_bytes,
            cooperative=kernel.cooperative,
            dependent=kernel.dependent,
        )


class KernelCache(Store):
    """The kernel cache: what this process, and those that compile for it, have compiled.

    Triton's own launcher is C that is compiled on the spot for each list of arguments, by gcc: 17
    of the 109 s that a ResNet-50 took to be tuned. Here nothing but the machine code is needed.
    """

    def __init__(self, target: str, driver: Driver | None = None) -> None:
        super().__init__(CompiledKernels(), target, driver)

    def add(self, compiled: CompiledKernels) -> None:
        """Kernels that may be launched from now on; from any thread."""
        self._cubins.update(compiled.cubins)
        self._kernels.update({kernel.key: kernel for kernel in compiled.kernels})


def kernel_cache(target: str) -> KernelCache | None:
    """The process's own, if the current GPU runs the target's machine code; None for another."""
    return _kernel_cache(target) if is_gpu(target) and runs_code_of(target) else None


@functools.cache
def _kernel_cache(target: str) -> KernelCache:
    return KernelCache(target)


class PlanKernels(Store):
    """The kernels of one plan on the current device.

    Attributes:
        missed: names of kernels that were asked for and are not among them.
        missed_since: when the first one was, on ``perf_counter``'s clock.
    """

    def __init__(
        self, compiled: CompiledKernels, target: str, driver: Driver | None = None
    ) -> None:
        super().__init__(compiled, target, driver)
        self.missed: set[str] = set()
        self.missed_since = 0.0

    def find(self, key: str | None, name: str) -> CompiledKernel | None:
        """The kernel of a key, or None; then its name is ``missed``."""
        found = super().find(key, name)
        if found is None:
            if not self.missed:
                self.missed_since = time.perf_counter()
                log.warning(
                    "a plan does not carry %s as this version of Tessella has it: it is compiled "
                    "now, as are others that differ, some seconds each", name,
                )  # fmt: skip
            self.missed.add(name)
        return found

    def launch(self, kernel: CompiledKernel, grid: Sequence[int], args: Sequence[Any]) -> None:
        """Start a kernel, as ``Store.launch``.

        Raises:
            CorruptArtifact: it cannot run like this; the plan lies, or the driver is too old.
        """
        try:
            super().launch(kernel, grid, args)
        except (
            KernelError,
            struct.error,
            ctypes.ArgumentError,
            AttributeError,
            IndexError,
            TypeError,
        ) as error:
            raise CorruptArtifact(
                f"the plan's compiled kernel {kernel.name} cannot run here",
                seen=(error.seen or error.wrong) if isinstance(error, KernelError) else error,
                fix="load it with compiled=False: its kernels are then compiled from our sources",
            ) from error


def stored(compiled: CompiledKernels, target: str) -> Store | None:
    """What a plan's kernels are launched from: its own machine code, or the process's where it
    carries none; None where the current GPU runs no machine code for the target.
    """
    here = kernel_cache(target)
    return here if here is None or not compiled.kernels else PlanKernels(compiled, target)


def _scratch(nbytes: int) -> torch.Tensor | None:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda") if nbytes else None


def _values(kernel: CompiledKernel, args: Sequence[Any], driver: Driver) -> list[Any]:
    """The arguments as the machine code takes them, in order."""
    values: list[Any] = []
    for parameter in kernel.parameters or ():
        arg: Any = args
        for number in parameter.place:
            arg = arg[number]
        if parameter.tiles is not None:
            values += _tensor(arg, parameter.tiles, driver)
        elif parameter.type == "pointer":
            values.append(ctypes.c_uint64(0 if arg is None else arg.data_ptr()))
        elif parameter.type in ("fp16", "bf16"):
            half = struct.pack("<e" if parameter.type == "fp16" else "<f", arg)
            values.append(ctypes.c_uint16(int.from_bytes(half[-2:], "little")))
        else:
            values.append(_TYPES[parameter.type](arg))
    return values


def _tensor(descriptor: Any, tiles: Tiles, driver: Driver) -> list[Any]:
    """A tensor's map, and then its shape and strides, which machine code may read."""
    shape, strides = list(descriptor.shape), list(descriptor.strides)
    if descriptor.base.element_size() != tiles.element_bytes:
        raise KernelError("tiles of another element type", seen=f"{descriptor.base.dtype}, {tiles}")
    element = _FLOAT32_AS_TF32 if getattr(descriptor, "round_f32_to_tf32", False) else tiles.element
    made = driver.tensor_map(
        descriptor.base.data_ptr(),
        replace(tiles, element=element),
        shape,
        strides,
        nan_outside=descriptor.padding == "nan",
    )
    return [made, *map(ctypes.c_int32, shape), *map(ctypes.c_int64, strides)]


class Collected:
    """The compiled kernels as a plan holds them; ``left_out`` says by name why others are
    missing.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._kernels: dict[str, CompiledKernel] = {}
        self._cubins: dict[str, bytes] = {}
        self.left_out: dict[str, str] = {}

    @property
    def compiled(self) -> CompiledKernels:
        """In an order that does not depend on the order of compiling."""
        return CompiledKernels(
            kernels=tuple(self._kernels[key] for key in sorted(self._kernels)),
            cubins=dict(sorted(self._cubins.items())),
        )

    def add(self, kernel: CompiledKernel, code: bytes) -> None:
        """A kernel that was compiled before, and its machine code."""
        self._cubins[kernel.cubin] = code
        self._kernels[kernel.key] = kernel

    def add_triton(self, key: str | None, name: str, made: Any, arg_names: Sequence[str]) -> None:
        """A kernel that Triton compiled.

        Args:
            key: what ``identity.key`` says of the launch.
            made: Triton's compiled kernel; ``arg_names``: its function's arguments.
        """
        metadata = made.metadata
        if reason := _why_left_out(key, metadata):
            self.left_out[name] = reason
            return
        self._add(
            str(key),
            metadata.name,
            made.asm["cubin"],
            parameters=_parameters(made.src.signature, metadata, arg_names),
            threads=32 * metadata.num_warps,
            shared_bytes=metadata.shared,
            cooperative=bool(metadata.launch_cooperative_grid),
            dependent=bool(metadata.launch_pdl),
            scratch_bytes=metadata.global_scratch_size,
        )

    def _add(self, key: str, name: str, code: bytes, **launch: Any) -> None:
        try:
            code = cubin.stripped(code)
        except ValueError as error:
            self.left_out[name] = str(error)
            return
        if reason := cubin.wrong(code, name, capability(self.target)):
            self.left_out[name] = reason
            return
        hashed = sha256(code).hexdigest()
        self._cubins[hashed] = code
        self._kernels[key] = CompiledKernel(key=key, name=name, cubin=hashed, **launch)

    def add_cuda(self, key: str, name: str, code: bytes) -> None:
        """A kernel that nvrtc compiled; who launches it knows its parameters and its block."""
        self._add(key, name, code, parameters=None, threads=1, shared_bytes=0)


def _why_left_out(key: str | None, metadata: Any) -> str | None:
    """Why a compiled kernel must be compiled again where the plan is loaded, or None."""
    if key is None:
        return "an argument that has no text of its own"
    if metadata.num_ctas != 1:
        return "blocks in clusters"
    if metadata.profile_scratch_size:
        return "it is being profiled"
    if any(t["fp4_padded"] or t.get("is_im2col") for t in metadata.tensordesc_meta or ()):
        return "a tensor map that is not of plain tiles"
    return None


def _parameters(
    signature: Mapping[str, Any], metadata: Any, arg_names: Sequence[str]
) -> tuple[Parameter, ...]:
    """The arguments that the machine code reads at a launch: those that were not compiled in."""
    tensors = iter(metadata.tensordesc_meta or ())
    parameters: list[Parameter] = []

    def add(place: tuple[int, ...], kind: Any) -> None:
        if isinstance(kind, tuple | list):
            for number, inner in enumerate(kind):
                add((*place, number), inner)
        elif kind.startswith("*"):
            parameters.append(Parameter(place=place, type="pointer"))
        elif kind.startswith("tensordesc"):
            parameters.append(Parameter(place=place, type="tensor", tiles=_tiles(next(tensors))))
        elif kind != "constexpr":
            parameters.append(Parameter(place=place, type=kind))

    for name, kind in signature.items():
        add((arg_names.index(name),), kind)
    return tuple(parameters)


def _tiles(tensor: Mapping[str, Any]) -> Tiles:
    return Tiles(
        element=_ELEMENTS.get(tensor["elem_type"], tensor["elem_type"]),
        element_bytes=tensor["elem_size"],
        box=tuple(tensor["block_size"]),
        swizzle=tensor["swizzle"],
    )


_in_use: ContextVar[Store | None] = ContextVar("kernels_in_use", default=None)
_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


def kernels_in_use() -> Store | None:
    """The kernels that launches may take instead of compiling them."""
    return _in_use.get()


def collected() -> Collected | None:
    """Who wants to know what is compiled."""
    return _collected.get()


@contextmanager
def using_kernels(kernels: Store | None) -> Iterator[None]:
    """Within this context ``launch`` starts a kernel from ``kernels``, where it is in there.

    A kernel cache also gets what it lacks. A launch by it takes longer than by Triton's launcher:
    it is for what is captured or timed in graphs.
    """
    token = _in_use.set(kernels)
    try:
        yield
    finally:
        _in_use.reset(token)


@contextmanager
def collecting(target: str) -> Iterator[Collected]:
    """Inside, what launches have compiled for ``target`` is collected."""
    token = _collected.set(made := Collected(target))
    try:
        yield made
    finally:
        _collected.reset(token)
