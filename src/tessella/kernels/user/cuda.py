"""CUDA C++ as a kernel: compiled by nvrtc through torch, launched by the CUDA driver."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _utils as driver

from tessella.core.errors import KernelError, UsageError
from tessella.kernels.launch import Launched, resource_usage

SYSTEM_SHARED_BYTES = 1024  # what the cubin counts in for the system, on every block of sm_90
LARGE_SHARED_BYTES = 48 << 10  # from here on dynamic shared memory has to be asked for

# parameter types of a kernel, as they stand in its source → what the driver is handed
_NUMBERS: dict[str, Any] = {
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "unsigned": ctypes.c_uint,
    "unsigned int": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
}


def cuda(source: str, name: str, *, options: Sequence[str] = ()) -> CudaKernel:
    """A kernel from CUDA C++; it is compiled when it is first launched.

    Args:
        source: the code. Parameters are pointers, which take tensors, and numbers: ``float``,
            ``double``, ``bool``, ``int``, ``unsigned``, ``long long``, ``size_t``. Python's numbers
            become what the parameter list says.
        name: the ``__global__`` function, declared ``extern "C"``.
        options: of nvrtc, such as ``--use_fast_math``.

    Raises:
        UsageError: there is no such function in the source, or one of its parameters is of
            another type.
    """
    return CudaKernel(source, name, tuple(options))


class CudaKernel:
    """See ``cuda``."""

    def __init__(self, source: str, name: str, options: tuple[str, ...]) -> None:
        self.source, self.name, self.options = source, name, options
        self._types = _parameter_types(source, name)
        self.cubin = functools.cache(self._cubin)
        self._loaded: dict[int, Any] = {}  # device index → the function on that device

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Any],
        *,
        shared_bytes: int = 0,
        target: str | None = None,
    ) -> Launched:
        """Run it on the current stream; with a ``target`` only compile it for that one.

        Args:
            grid, block: blocks and threads, x first.
            args: tensors on the current device, and numbers, as many as there are parameters.
            shared_bytes: dynamic shared memory of a block.
        """
        values = self._values(args)
        capability = torch.cuda.get_device_capability() if target is None else None
        architecture = target or "sm_{}{}".format(*capability)
        cubin = self.cubin(architecture)
        static = resource_usage(cubin, self.name)["SHARED"] - SYSTEM_SHARED_BYTES
        if target is None:
            self._start(grid, block, values, cubin, shared_bytes)
        threads = block[0] * block[1] * block[2]
        metadata = SimpleNamespace(
            name=self.name, num_warps=-(-threads // 32), shared=max(static, 0) + shared_bytes
        )
        compiled = SimpleNamespace(
            metadata=metadata, asm={"cubin": cubin, "ptx": f".maxntid {threads}"}
        )
        return Launched(grid=grid, compiled=compiled)

    def function(self, cubin: bytes) -> Any:
        """The loaded function on the current device, for the CUDA driver."""
        index = torch.cuda.current_device()
        if index not in self._loaded:
            self._loaded[index] = driver._cuda_load_module(cubin, [self.name])[self.name]
        return self._loaded[index]

    def _cubin(self, target: str) -> bytes:
        try:
            cubin, _ = driver._nvrtc_compile(
                self.source, self.name, target.removeprefix("sm_"), nvcc_options=list(self.options)
            )
        except RuntimeError as error:
            raise KernelError(
                f"the CUDA C++ of {self.name} does not compile",
                seen=str(error).strip()[:1500],
                fix="correct the source",
            ) from error
        return cubin

    def _values(self, args: Sequence[Any]) -> list[Any]:
        if len(args) != len(self._types):
            raise UsageError(
                f"{self.name} takes {len(self._types)} arguments", seen=f"{len(args)} of them"
            )
        values = []
        for arg, kind in zip(args, self._types, strict=True):
            if isinstance(arg, torch.Tensor) != (kind is ctypes.c_void_p):
                raise UsageError(
                    f"an argument of {self.name} is not what its parameter list says",
                    seen=f"{type(arg).__name__} for {kind.__name__.removeprefix('c_')}",
                    fix="give a tensor for each pointer and a number for each number",
                )
            values.append(kind(arg.data_ptr() if isinstance(arg, torch.Tensor) else arg))
        return values

    def _start(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        values: list[Any],
        cubin: bytes,
        shared_bytes: int,
    ) -> None:
        loaded = self.function(cubin)
        if shared_bytes >= LARGE_SHARED_BYTES:
            loaded.set_shared_memory_config(shared_bytes)
        addresses = [ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values]
        driver._check_cuda(
            driver._get_gpu_runtime_library().cuLaunchKernel(
                loaded.func, *grid, *block, shared_bytes,
                torch.cuda.current_stream()._as_parameter_,
                (ctypes.c_void_p * len(values))(*addresses), None,
            )
        )  # fmt: skip


def _parameter_types(source: str, name: str) -> list[Any]:
    """The ctypes of the kernel's parameters, read from its source."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name)}\s*\(([^)]*)\)", code)
    if found is None or 'extern "C"' not in code:
        raise UsageError(
            "the CUDA C++ has no such kernel",
            seen=name,
            fix=f'declare it as extern "C" __global__ void {name}(…)',
        )
    parameters = [p for p in found[1].split(",") if p.strip()]
    return [_type(name, " ".join(p.split())) for p in parameters]


def _type(kernel: str, parameter: str) -> Any:
    if "*" in parameter:
        return ctypes.c_void_p
    words = [w for w in parameter.split() if w not in ("const", "__restrict__")][:-1]
    if " ".join(words) not in _NUMBERS:
        raise UsageError(
            f"a parameter of {kernel} is of a type that Python cannot hand over",
            seen=parameter,
            fix=f"use a pointer, or one of {', '.join(_NUMBERS)}",
        )
    return _NUMBERS[" ".join(words)]
