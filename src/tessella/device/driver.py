"""The CUDA driver, as far as machine code needs it: load a kernel, describe tiles, launch.

Through ctypes: a launch costs 20 µs more than from C++, which a captured graph pays once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tessella.core.compiled import Tiles
from tessella.core.errors import KernelError

LARGE_SHARED_BYTES = 48 << 10  # more dynamic shared memory has to be asked for
MAP_BYTES, MAP_ALIGNMENT = 128, 128  # a CUtensorMap
# numbers of cuda.h
_MAX_DYNAMIC_SHARED_BYTES, _PREFER_SHARED = 8, 1
_COOPERATIVE, _PROGRAMMATIC_SERIALIZATION = 2, 6
_L2_PROMOTION_128B = 2
_NON_BLOCKING = 1
_INVALID_VALUE, _REGISTERED_ALREADY = 1, 712
_PORTABLE = 1


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of those whose value is an integer."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@dataclass
class Function:
    """A loaded kernel.

    Attributes:
        parameter_bytes: the size of each parameter, as the machine code has them.
        shared_bytes: dynamic shared memory of a block that it may ask for.
    """

    name: str
    handle: ctypes.c_void_p
    parameter_bytes: tuple[int, ...]
    shared_bytes: int = LARGE_SHARED_BYTES


class Driver:
    """The installed CUDA driver; every call is for the calling thread's current device.

    Args:
        library: ``ctypes.PyDLL`` keeps Python's lock while a call lasts.
    """

    def __init__(self, library: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._cuda = library("libcuda.so.1")
        self._copy_in = self._cuda.cuMemcpyHtoDAsync_v2
        self._copy_in.argtypes = [
            ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p
        ]  # fmt: skip
        self._functions: dict[tuple[int, str, bytes], Function] = {}

    def function(self, name: str, cubin: bytes, device: int) -> Function:
        """A kernel of machine code, which must be trusted or checked by ``core.cubin``.

        It is loaded once and stays until the process ends, as captured graphs may hold it; that
        takes about its own size.

        Raises:
            KernelError: the driver refuses it, or has no such kernel in it.
        """
        place = device, name, cubin
        if place not in self._functions:
            self.require_context(device)
            module, handle = ctypes.c_void_p(), ctypes.c_void_p()
            self.call("cuModuleLoadData", ctypes.byref(module), cubin)
            self.call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
            self._functions[place] = Function(name, handle, self._parameter_bytes(handle))
        return self._functions[place]

    def handles(self) -> set[int]:
        """Those of the kernels that ``function`` has loaded."""
        return {made.handle.value or 0 for made in list(self._functions.values())}

    def _parameter_bytes(self, handle: ctypes.c_void_p) -> tuple[int, ...]:
        """The sizes of the parameters that a launch reads from the host's memory, as the cubin
        lists them.
        """
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        self._require("cuFuncGetParamInfo")
        found = ctypes.byref(offset), ctypes.byref(size)
        while self.answers("cuFuncGetParamInfo", handle, ctypes.c_size_t(len(sizes)), *found):
            sizes.append(size.value)
        return tuple(sizes)

    def launch(
        self,
        function: Function,
        grid: Sequence[int],
        block: Sequence[int],
        parameters: Sequence[Any],
        stream: int,
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
        dependent: bool = False,
    ) -> None:
        """Start a kernel on a stream.

        Args:
            grid, block: blocks and threads along x, y and z.
            parameters: ctypes values, whose sizes must be ``function.parameter_bytes``.
            shared_bytes: dynamic shared memory of a block.
            cooperative: all blocks are resident at once.
            dependent: it may start before the kernel before it has ended.
        """
        sizes = tuple(map(ctypes.sizeof, parameters))
        if sizes != function.parameter_bytes:  # the driver would read on behind them
            raise KernelError(
                f"kernel {function.name} takes other parameters than it is given",
                seen=f"{len(function.parameter_bytes)} of {sum(function.parameter_bytes)} bytes, "
                f"given {len(sizes)} of {sum(sizes)}",
            )
        self.allow(function, shared_bytes)
        wanted = {_COOPERATIVE: cooperative, _PROGRAMMATIC_SERIALIZATION: dependent}
        attributes = [_Attribute(id=name, value=1) for name, on in wanted.items() if on]
        config = _Config(
            grid=tuple(grid),
            block=tuple(block),
            shared_bytes=shared_bytes,
            stream=stream,
            attributes=(_Attribute * len(attributes))(*attributes),
            count=len(attributes),
        )
        places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, parameters))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function.handle, places, None)

    def allow(self, function: Function, shared_bytes: int) -> None:
        """Let a kernel's blocks have so much dynamic shared memory."""
        if shared_bytes > function.shared_bytes:
            self.call("cuFuncSetCacheConfig", function.handle, _PREFER_SHARED)
            asked = ctypes.c_int(shared_bytes)
            self.call("cuFuncSetAttribute", function.handle, _MAX_DYNAMIC_SHARED_BYTES, asked)
            function.shared_bytes = shared_bytes

    def tensor_map(
        self,
        address: int,
        tiles: Tiles,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        nan_outside: bool = False,
    ) -> Any:
        """TMA's description of a tensor, a ctypes value of ``MAP_BYTES``.

        Args:
            address: of its first element.
            strides: in elements; the last is 1.
            nan_outside: what is read beyond the edges is NaN, not zero.
        """
        rank = len(shape)
        if not rank == len(strides) == len(tiles.box):
            raise KernelError("a tensor has other axes than its tiles", seen=f"{rank}, {tiles}")
        memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        start = -ctypes.addressof(memory) % MAP_ALIGNMENT
        made = (ctypes.c_char * MAP_BYTES).from_buffer(memory, start)
        outer = [tiles.element_bytes * n for n in strides[:-1]]
        self.call(
            "cuTensorMapEncodeTiled",
            ctypes.byref(made), tiles.element, ctypes.c_uint32(rank), ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * rank)(*reversed(outer)),
            (ctypes.c_uint32 * rank)(*reversed(tiles.box)),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            0, tiles.swizzle, _L2_PROMOTION_128B, int(nan_outside),
        )  # fmt: skip
        return made

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> bool:
        """Copy from the host's memory to a GPU's, in a stream; False where the source lies partly
        in memory that was locked, and partly not.
        """
        code = self._copy_in(target, source, nbytes, stream)
        if code == _INVALID_VALUE:
            return False
        self._require_success("cuMemcpyHtoDAsync", code)
        return True

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from a GPU's memory to locked memory of the host, in a stream."""
        self.call(
            "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(target), ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes), ctypes.c_void_p(stream),
        )  # fmt: skip

    def launch_graph(self, executable: int, stream: int) -> None:
        """Launch a graph that was instantiated, in a stream; under ``GRAPH_LOCK``."""
        self.call("cuGraphLaunch", ctypes.c_void_p(executable), ctypes.c_void_p(stream))

    def wait(self, stream: int) -> None:
        """Return when all that was begun in a stream has ended."""
        self.call("cuStreamSynchronize", ctypes.c_void_p(stream))

    def lock_pages(self, address: int, nbytes: int) -> bool:
        """Lock memory of the host, for all GPUs; False where the driver does not.

        Raises:
            KernelError: it is locked already.
        """
        where = ctypes.c_void_p(address)
        code = self._cuda.cuMemHostRegister_v2(where, ctypes.c_size_t(nbytes), _PORTABLE)
        if code == _REGISTERED_ALREADY:
            self._require_success("cuMemHostRegister", code)
        return bool(code == 0)

    def unlock_pages(self, address: int) -> None:
        """Undo ``lock_pages`` of this address."""
        self.call("cuMemHostUnregister", ctypes.c_void_p(address))

    def context(self) -> int:
        """The calling thread's context."""
        found = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(found))
        return found.value or 0

    @contextmanager
    def within(self, context: int) -> Iterator[None]:
        """Have this context in the calling thread for a block."""
        self.call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def new_stream(self, device: int) -> int:
        """A stream of a device that does not wait for its default one."""
        context, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxPushCurrent_v2", context)
        try:
            self.call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(context))
        return stream.value or 0

    def require_context(self, device: int) -> None:
        """See that the calling thread has a context: one that has not met the device yet has none,
        and torch makes it when it allocates.
        """
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if not context:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.call("cuCtxSetCurrent", context)

    def _require(self, name: str) -> None:
        if not hasattr(self._cuda, name):
            raise KernelError(
                f"the CUDA driver is too old: it has no {name}", fix="update it to 12.4 or later"
            )

    def answers(self, name: str, *args: Any) -> bool:
        """Make a call that may find nothing: False where its arguments are invalid."""
        code = getattr(self._cuda, name)(*args)
        if code == _INVALID_VALUE:
            return False
        self._require_success(name, code)
        return True

    def call(self, name: str, *args: Any) -> None:
        """A function of the driver.

        Raises:
            KernelError: it fails, with its name and the driver's words.
        """
        self._require_success(name, getattr(self._cuda, name)(*args))

    def _require_success(self, name: str, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(text))
            said = (text.value or b"").decode() or f"error {code}"
            raise KernelError("the CUDA driver refuses", seen=f"{name}: {said}")


@functools.cache
def cuda_driver() -> Driver:
    """The process's one driver."""
    return Driver()


@functools.cache
def brief_driver() -> Driver:
    """A driver whose calls keep Python's lock, for calls that return at once: a thread that gives
    the lock away waits to get it back while another one reads requests.
    """
    return Driver(ctypes.PyDLL)
