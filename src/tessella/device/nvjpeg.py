"""nvJPEG, as far as a batch of files goes: their planes of luma and chroma, as libjpeg has them.

Through ctypes, of CUDA's own library: torchvision's way to it, which is deprecated, makes a tensor
a file and repeats each sample of chroma, where every host decoder interpolates (3 of 255 apart on
average at 4:2:0). Luma and chroma themselves are equal to the bit; ``kernels.pictures`` goes on
from there.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tessella.core.errors import KernelError, UsageError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess

# numbers of nvjpeg.h
_DEFAULT, _HYBRID_GPU = 0, 2
_PLANES = 1  # NVJPEG_OUTPUT_YUV
_SUCCESS, _ARCH_MISMATCH = 0, 6
_MOST_PLANES = 4
_PITCH, _ROWS = 64, 16  # planes are padded to whole blocks of 8 × 8, also of two for each of chroma
_IMAGE = np.dtype([("plane", np.uint64, _MOST_PLANES), ("pitch", np.uint64, _MOST_PLANES)])


class Planes(NamedTuple):
    """Decoded files in one block of memory.

    Attributes:
        memory: uint8, one-dimensional, on the GPU.
        starts: int64, [N, 3]: where the planes Y, Cb and Cr of each file begin.
        pitches: int64, [N, 2]: bytes from row to row, of Y and of Cb and Cr.
    """

    memory: Tensor
    starts: np.ndarray[Any, np.dtype[np.int64]]
    pitches: np.ndarray[Any, np.dtype[np.int64]]


class JpegDecoder:
    """Decodes batches of JPEG files on one GPU, in the current stream; for one thread.

    Args:
        hardware: whether the GPU's own decoders are asked, where it has them (A100, H100 and
            later of that class); otherwise, and on all others, kernels decode, whose cosine
            transform rounds otherwise: 4 % of samples differ, by 3 of 255 at most (measured).

    Attributes:
        backend: a number of nvjpeg.h, ``HARDWARE`` where the GPU's own decoders work.

    Raises:
        UsageError: there is no nvJPEG.
        KernelError: it does not run here.
    """

    HARDWARE = 3

    def __init__(self, device: torch.device, *, hardware: bool = True) -> None:
        self._device, self._library = device, _library()
        self._handle, self._state = ctypes.c_void_p(), ctypes.c_void_p()
        self._size = 0
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context is there before the library asks for it
            status = _ARCH_MISMATCH
            for backend in (self.HARDWARE, _HYBRID_GPU, _DEFAULT)[0 if hardware else 1 :]:
                status = self._library.nvjpegCreateEx(
                    backend, None, None, 0, ctypes.byref(self._handle)
                )
                self.backend = backend
                if status == _SUCCESS:
                    break
            _check(status, "nvJPEG does not start")
            status = self._library.nvjpegJpegStateCreate(self._handle, ctypes.byref(self._state))
            _check(status, "nvJPEG does not start")
        # not when the process ends, with which CUDA does
        weakref.finalize(self, _destroy, self._library, self._handle, self._state).atexit = False

    def __call__(self, files: Sequence[bytes | memoryview], frames: Sequence[Frame]) -> Planes:
        """The planes of some files, whose frames ``core.jpeg.frame_of`` read.

        Raises:
            KernelError: one of the files is damaged.
        """
        starts, pitches, nbytes = places(frames)
        with torch.cuda.device(self._device):
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            stream = torch.cuda.current_stream().cuda_stream
            self.decode(files, starts + memory.data_ptr(), pitches, stream)
        return Planes(memory, starts, pitches)

    def decode(
        self,
        files: Sequence[bytes | memoryview],
        addresses: np.ndarray[Any, np.dtype[np.int64]],
        pitches: np.ndarray[Any, np.dtype[np.int64]],
        stream: int,
    ) -> None:
        """Decode files to planes at these addresses, as ``Planes`` has them, in a stream of the
        current device.

        Raises:
            KernelError: one of the files is damaged.
        """
        count = len(files)
        images = np.zeros(count, _IMAGE)
        images["plane"][:, :3] = addresses.astype(np.uint64)
        images["pitch"][:, :3] = pitches[:, [0, 1, 1]]
        if count != self._size:
            status = self._library.nvjpegDecodeBatchedInitialize(
                self._handle, self._state, count, 1, _PLANES
            )
            _check(status, "nvJPEG takes no batch of this size")
            self._size = count
        status = self._library.nvjpegDecodeBatched(
            self._handle,
            self._state,
            (ctypes.c_void_p * count)(*map(_address, files)),
            (ctypes.c_size_t * count)(*map(len, files)),
            images.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_void_p(stream),
        )
        if status != _SUCCESS:
            self._size = 0  # the state may hold half of a batch
        _check(status, "nvJPEG cannot decode a picture of this batch")


def _address(content: bytes | memoryview) -> int:
    """Where the bytes of a file are; a view must be of memory that may be written."""
    if isinstance(content, bytes):
        return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(content))


def _destroy(library: Any, handle: ctypes.c_void_p, state: ctypes.c_void_p) -> None:
    torch.cuda.synchronize()
    library.nvjpegJpegStateDestroy(state)
    library.nvjpegDestroy(handle)


def places(frames: Sequence[Frame]) -> tuple[Any, Any, int]:
    """Where the planes of some files lie: ``Planes``' starts and pitches, and bytes in all."""
    sizes = np.array([(*frame[:2], *frame.chroma) for frame in frames], np.int64)
    rows = -(-sizes[:, 0::2] // _ROWS) * _ROWS
    pitches = -(-sizes[:, 1::2] // _PITCH) * _PITCH
    planes = (rows * pitches)[:, [0, 1, 1]].reshape(-1)
    ends = np.cumsum(planes)
    return (ends - planes).reshape(-1, 3), pitches, int(ends[-1])


def _check(status: int, what: str) -> None:
    if status != _SUCCESS:
        raise KernelError(what, seen=f"status {status} of nvjpeg.h")


def has_nvjpeg() -> bool:
    """Whether the library is there."""
    try:
        _library()
    except UsageError:
        return False
    return True


def why_not(record: Preprocess, device: torch.device) -> str | None:
    """Why a device does not decode JPEG files for a record; None if it does."""
    if record.depth != 8 or record.channels not in (1, 3):
        return "a GPU decodes pictures of 8 bits, grey or RGB"
    # a torch without CUDA comes without Triton, which the kernels' modules import
    has_triton = importlib.util.find_spec("triton") is not None
    if device.type != "cuda" or not has_triton or not has_nvjpeg():
        return "decode='gpu' needs an NVIDIA GPU, Triton and nvJPEG"
    return None


def require_decoding(record: Preprocess, device: torch.device, *, fix: str) -> None:
    """Raise ``UsageError`` unless a device decodes JPEG files for a record."""
    if (wrong := why_not(record, device)) is not None:
        raise UsageError(
            wrong,
            seen=f"{record.channels} channels of {record.depth} bits on {device}",
            fix=f"{fix}; or pip install nvidia-nvjpeg, where only that is missing",
        )


@functools.cache
def has_own_decoders(device: torch.device) -> bool:
    """Whether a GPU has decoders of its own, whose samples are libjpeg's to the bit."""
    if device.type != "cuda":
        return False
    try:
        return JpegDecoder(device).backend == JpegDecoder.HARDWARE
    except KernelError:
        return False


def decodes_as_host(record: Preprocess, device: torch.device) -> bool:
    """Whether a device decodes JPEG files for a record, to the bits of the host."""
    return why_not(record, device) is None and has_own_decoders(device)


@functools.cache
def _library() -> Any:
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        pointer = ctypes.c_void_p
        library.nvjpegCreateEx.argtypes = (ctypes.c_int, pointer, pointer, ctypes.c_uint, pointer)
        library.nvjpegJpegStateCreate.argtypes = pointer, pointer
        library.nvjpegJpegStateDestroy.argtypes = (pointer,)
        library.nvjpegDestroy.argtypes = (pointer,)
        library.nvjpegDecodeBatchedInitialize.argtypes = (
            pointer, pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int,
        )  # fmt: skip
        library.nvjpegDecodeBatched.argtypes = (
            pointer, pointer, pointer, pointer, pointer, pointer,
        )  # fmt: skip
        return library
    raise UsageError(
        "nvJPEG is not installed, which decodes JPEG files on the GPU",
        fix="pip install nvidia-nvjpeg, of the CUDA that torch was built with",
    )


def _candidates() -> Iterator[str]:
    """The package of its own, the system's CUDA, the copy that torchvision brings."""
    for package, pattern in (
        ("nvidia", "*/lib/libnvjpeg.so.*"),
        ("torchvision", "../torchvision.libs/libnvjpeg*.so*"),
    ):
        spec = importlib.util.find_spec(package)
        for folder in () if spec is None else spec.submodule_search_locations or ():
            found = sorted(Path(folder).glob(pattern))
            yield from map(str, found)
        if package == "nvidia":
            yield from ("libnvjpeg.so.13", "libnvjpeg.so.12")
