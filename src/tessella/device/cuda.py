"""CUDA C++ as a kernel: compiled by nvrtc through torch, launched by the CUDA driver.

What was compiled is kept in Triton's cache, and a plan carries it like every other kernel's code.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.cuda import _utils as compiler

from tessella.core.architectures import ARCHITECTURES
from tessella.core.errors import KernelError, UsageError
from tessella.core.record import digest
from tessella.device.ahead_of_time import collected, kernels_in_use
from tessella.device.driver import cuda_driver
from tessella.device.launch import Launched, resource_usage

# what a cubin's count of shared memory holds for the system
SYSTEM_SHARED_BYTES = {name: m.reserved_shared_bytes for name, m in ARCHITECTURES.items()}

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
    "CUtensorMap": lambda tensor_map: tensor_map,  # ``Driver.tensor_map`` made it
}
# what a pointer points to → the element type of its tensor; any where it is not listed (void)
_POINTERS: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "__half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "bool": torch.bool,
    "char": torch.int8,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "short": torch.int16,
    "int": torch.int32,
    "long long": torch.int64,
}


def cuda(
    source: str, name: str, *, options: Sequence[str] = (), one_architecture: bool = False
) -> CudaKernel:
    """A kernel from CUDA C++; it is compiled when it is first launched.

    Args:
        source: the code. Parameters are pointers, which take tensors, and numbers: ``float``,
            ``double``, ``bool``, ``int``, ``unsigned``, ``long long``, ``size_t``. Python's numbers
            become what the parameter list says. A ``struct NAME``, whose fields are ints, takes a
            tuple of them. A ``CUtensorMap`` comes from ``Driver.tensor_map``.
        name: the ``__global__`` function, declared ``extern "C"``.
        options: of nvrtc, such as ``--use_fast_math``.
        one_architecture: it uses what only this GPU's architecture has (``sm_90a``).

    Raises:
        UsageError: there is no such function in the source, or one of its parameters is of
            another type.
    """
    return CudaKernel(source, name, tuple(options), "a" if one_architecture else "")


class CudaKernel:
    """A kernel from CUDA C++; ``cuda`` makes it."""

    def __init__(self, source: str, name: str, options: tuple[str, ...], own: str = "") -> None:
        self.source, self.name, self.options, self._own = source, name, options, own
        self._parameters = _parameters(source, name)
        self.cubin = functools.cache(self._cubin)

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
        values, runs = self._values(args), target is None
        if target is None:
            target = "sm_{}{}".format(*torch.cuda.get_device_capability())
        cubin = self.cubin(target)
        if runs:
            cuda_driver().launch(
                cuda_driver().function(self.name, cubin, torch.cuda.current_device()),
                grid,
                block,
                values,
                torch.cuda.current_stream().cuda_stream,
                shared_bytes=shared_bytes,
            )
        if (asking := collected()) is not None:
            asking.add_cuda(self.key(target), self.name, cubin)
        return self.compiled(grid, block, shared_bytes=shared_bytes, target=target)

    def compiled(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        *,
        shared_bytes: int = 0,
        target: str,
    ) -> Launched:
        """The launch with its resources, without running it; needs no GPU."""
        cubin = self.cubin(target)
        of_system = SYSTEM_SHARED_BYTES.get(target, 0)
        static = resource_usage(cubin, self.name)["SHARED"] - of_system
        threads = math.prod(block)
        metadata = SimpleNamespace(
            name=self.name, num_warps=-(-threads // 32), shared=static + shared_bytes
        )
        asm = {"cubin": cubin, "ptx": f".maxntid {threads}"}
        return Launched(grid=grid, compiled=SimpleNamespace(metadata=metadata, asm=asm))

    def key(self, target: str) -> str:
        """The key of the machine code: equal keys, equal code."""
        return digest(["CUDA C++", self.source, self.name, self.options, target + self._own])

    def _cubin(self, target: str) -> bytes:
        store = kernels_in_use()
        found = store.find(self.key(target), self.name) if store is not None else None
        if store is not None and found is not None:
            return store.cubin(found)
        from triton.runtime.cache import get_cache_manager  # a torch without CUDA has no Triton

        kept = get_cache_manager(digest([self.key(target), torch.version.cuda]))
        if (path := kept.get_file(file := f"{self.name}.cubin")) is not None:
            return Path(path).read_bytes()
        try:
            architecture = target.removeprefix("sm_") + self._own
            cubin, _ = compiler._nvrtc_compile(
                self.source, self.name, architecture, nvcc_options=list(self.options)
            )
        except RuntimeError as error:
            raise KernelError(
                f"the CUDA C++ of {self.name} does not compile",
                seen=str(error).strip()[:1500],
                fix="correct the source",
            ) from error
        kept.put(cubin, file)
        return cubin

    def _values(self, args: Sequence[Any]) -> list[Any]:
        if len(args) != len(self._parameters):
            raise UsageError(
                f"{self.name} takes {len(self._parameters)} arguments", seen=f"{len(args)} of them"
            )
        return [p.value(self.name, a) for p, a in zip(self._parameters, args, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Parameter:
    """One parameter of a kernel: a number, or a pointer to elements of a type (None: of any)."""

    text: str
    number: Any = None
    dtype: torch.dtype | None = None

    def value(self, kernel: str, arg: Any) -> Any:
        """The argument as the driver takes it."""
        is_tensor = isinstance(arg, torch.Tensor)
        if is_tensor == (self.number is None) and (
            not is_tensor or self.dtype in (None, arg.dtype)
        ):
            return ctypes.c_void_p(arg.data_ptr()) if is_tensor else self.number(arg)
        raise UsageError(
            f"an argument of {kernel} is not what its parameter list says",
            seen=f"{arg.dtype if is_tensor else type(arg).__name__} for {self.text!r}",
            fix="give a tensor of its element type for each pointer, and numbers",
        )


def _parameters(source: str, name: str) -> list[_Parameter]:
    """The kernel's parameters, read from its source."""
    code = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    found = re.search(rf"__global__[^;{{]*?\b{re.escape(name)}\s*\(([^)]*)\)", code)
    if found is None or 'extern "C"' not in code:
        raise UsageError(
            "the CUDA C++ has no such kernel",
            seen=name,
            fix=f'declare it as extern "C" __global__ void {name}(…)',
        )
    structs = re.findall(r"\b(struct \w+)\s*{\s*int [\w,\s]*;\s*}", code)
    numbers = _NUMBERS | dict.fromkeys(structs, lambda ints: (ctypes.c_int * len(ints))(*ints))
    parameters = [" ".join(p.split()) for p in found[1].split(",") if p.strip()]
    return [_parameter(name, p, numbers) for p in parameters]


def _parameter(kernel: str, text: str, numbers: Mapping[str, Any]) -> _Parameter:
    words = re.sub(r"\b(const|__restrict__|volatile|__grid_constant__)\b", " ", text)
    if "*" in words:
        kind = " ".join(words.split("*")[0].split())
        pointers_to_pointers = words.count("*") > 1
        return _Parameter(text=text, dtype=None if pointers_to_pointers else _POINTERS.get(kind))
    kind = " ".join(words.split()[:-1])
    if kind not in numbers:
        raise UsageError(
            f"a parameter of {kernel} is of a type that Python cannot hand over",
            seen=text,
            fix=f"use a pointer, or one of {', '.join(_NUMBERS)}",
        )
    return _Parameter(text=text, number=numbers[kind])
