"""JPEG files to pixels in the host's memory, beside threads that want Python's lock.

Each call that lets go of the lock waits to have it again, which takes a thread that reads requests
up to a millisecond. Of torch's calls there were fifteen a batch; of these there are four.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tessella.core.compiled import CompiledKernel
from tessella.core.device import default_target
from tessella.core.errors import KernelError
from tessella.core.integers import ceil_div
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess
from tessella.device.ahead_of_time import collecting
from tessella.device.driver import Function, brief_driver
from tessella.device.nvjpeg import JpegDecoder, places
from tessella.device.page_locked import locked_empty, locked_or
from tessella.kernels.pictures.decode import few
from tessella.kernels.pictures.fit import Tables, fit_block, fitted, tables

COLOUR, FIT = "colour_kernel", "fit_kernel"  # of fit_device
_ADDRESS, _LEFT_ALONE = ctypes.c_uint64, 2  # the launch's scratch memory, and a profiler's
MOST_LAYOUTS, MOST_LAYOUT_BYTES = 64, 1 << 16  # of batches that are remembered, and of one's tables
_Layout = tuple[Any, Any, int, Tables]  # starts, pitches and bytes of ``places``


class HostDecoder:
    """Decodes, fits and cuts batches of JPEG files; for one thread. It keeps the memory of its
    largest batch, 460 MB at most.

    Raises:
        KernelError: nvJPEG does not run here.
    """

    def __init__(self, record: Preprocess, device: torch.device) -> None:
        self._record, self._device, self._driver = record, device, brief_driver()
        self._decoder = JpegDecoder(device)
        self._height, self._width = record.crop or (record.height, record.width)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._layouts: dict[tuple[Frame, ...], _Layout] = {}
        self._rooms: dict[str, torch.Tensor] = {}
        self._kernels: dict[str, tuple[CompiledKernel, Function]] = {}

    def __call__(
        self,
        files: Sequence[bytes | memoryview],
        frames: Sequence[Frame],
        into: np.ndarray | None = None,
    ) -> np.ndarray:
        """Pixels, uint8 [N, H, W, C]; written to an array of that kind, if one is given.

        Raises:
            KernelError: one of the files is damaged.
        """
        shape = len(files), self._height, self._width, self._record.channels
        host = locked_or(into, torch.Size(shape), torch.uint8)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._driver.require_context(torch.cuda.current_device())
            if not self._kernels:
                self._compile(files[:1], frames[:1])
            for some in few(frames):
                self._decode(files[some], frames[some], host, some.start)
        return host.numpy()

    def _compile(self, files: Sequence[bytes | memoryview], frames: Sequence[Frame]) -> None:
        """Have both kernels compiled, by the usual way of a picture."""
        target = default_target()
        with collecting(target) as made:
            fitted(self._decoder(files, frames), frames, self._record, cuts=True)
        if made.left_out:
            raise KernelError("the kernels of pictures have no launch", seen=str(made.left_out))
        index = torch.cuda.current_device()
        for kernel in made.compiled.kernels:
            code = made.compiled.cubins[kernel.cubin]
            loaded = self._driver.function(kernel.name, code, index)
            self._kernels[kernel.name] = kernel, loaded

    def _decode(
        self,
        files: Sequence[bytes | memoryview],
        frames: Sequence[Frame],
        host: torch.Tensor,
        first: int,
    ) -> None:
        starts, pitches, nbytes, made = self._layout(tuple(frames))
        stream = self._stream.cuda_stream
        planes, pixels = self._room("planes", nbytes), self._room("pixels", 4 * made.pixels)
        size = host[0].nbytes
        out = self._room("out", len(files) * size)
        there, taps = self._tables(made, stream)
        self._decoder.decode(files, starts + planes, pitches, stream)
        self._launch(COLOUR, (made.blocks, len(files), 1), (planes, there, pixels), stream)
        grid = self._height * ceil_div(self._width, fit_block(self._width)), len(files), 1
        args = pixels, there, taps, out, self._height, self._width
        self._launch(FIT, grid, args, stream)
        self._driver.copy_out(host.data_ptr() + first * size, out, len(files) * size, stream)
        self._stream.synchronize()

    def _layout(self, frames: tuple[Frame, ...]) -> _Layout:
        """Where a batch's planes lie, and its tables: one camera's pictures have them again."""
        known = self._layouts.get(frames)
        if known is None:
            starts, pitches, nbytes = places(frames)
            made = tables(starts, pitches, frames, self._record, cuts=True)
            known = starts, pitches, nbytes, made
            if made.rows.nbytes + made.taps.nbytes <= MOST_LAYOUT_BYTES:
                if len(self._layouts) >= MOST_LAYOUTS:
                    self._layouts.clear()
                self._layouts[frames] = known
        return known

    def _tables(self, made: Tables, stream: int) -> tuple[int, int]:
        """Copy the tables to the GPU: where its rows and its taps are."""
        nbytes = made.rows.nbytes + made.taps.nbytes
        self._room("tables", nbytes)
        staged = self._rooms["staged"].numpy()
        staged[: made.rows.nbytes] = made.rows.reshape(-1).view(np.uint8)
        staged[made.rows.nbytes : nbytes] = made.taps.view(np.uint8)
        there = self._rooms["tables"].data_ptr()
        self._driver.copy_in(there, self._rooms["staged"].data_ptr(), nbytes, stream)
        return there, there + made.rows.nbytes

    def _room(self, name: str, nbytes: int) -> int:
        """The address of so much memory on the GPU, which the next batch has, too."""
        held = self._rooms.get(name)
        if held is None or held.nbytes < nbytes:
            held = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8, device=self._device)
            self._rooms[name] = held
            if name == "tables":
                self._rooms["staged"] = locked_empty(held.shape, held.dtype)
        return held.data_ptr()

    def _launch(self, name: str, grid: Sequence[int], args: Sequence[int], stream: int) -> None:
        compiled, function = self._kernels[name]
        values = [
            (_ADDRESS if p.type == "pointer" else ctypes.c_int32)(args[p.place[0]])
            for p in compiled.parameters or ()
        ]
        values += [_ADDRESS(0)] * _LEFT_ALONE
        self._driver.launch(
            function, grid, (compiled.threads, 1, 1), values, stream,
            shared_bytes=compiled.shared_bytes,
        )  # fmt: skip
