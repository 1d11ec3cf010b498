"""The pixels of ``HostDecoder`` with an interpreted GPU: memory is the host's, and so are planes.

``tests/gpu/test_pictures.py`` has the real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tessella.core.compiled import CompiledKernel, CompiledKernels, Parameter
from tessella.core.errors import KernelError
from tessella.core.jpeg import Frame
from tessella.core.preprocess import Preprocess, centre_crop, fitted
from tessella.device.launch import launch
from tessella.kernels.pictures import decode, fit, fit_device, to_host
from tests.support.planes import jpeg, planes_of

STREAM = 77


class Nvjpeg:
    """Has each plane where it is asked for."""

    def __init__(self, device: torch.device) -> None: ...

    def __call__(self, files: list[bytes], frames: list[Frame]) -> Any:
        return planes_of(files)[0]

    def decode(self, files: Any, addresses: np.ndarray, pitches: np.ndarray, stream: int) -> None:
        if b"damaged" in files[0]:
            raise KernelError("nvJPEG cannot decode a picture of this batch")
        planes, _ = planes_of(list(files))
        assert stream == STREAM
        assert np.array_equal(pitches, planes.pitches)
        assert np.array_equal(addresses - addresses[0, 0], planes.starts)
        ctypes.memmove(int(addresses[0, 0]), planes.memory.data_ptr(), planes.memory.nbytes)


class Driver:
    """Copies at once, and has the interpreter run the kernels."""

    record: Preprocess
    crop: tuple[int, int]

    def require_context(self, device: int) -> None: ...

    def function(self, name: str, code: bytes, device: int) -> str:
        assert code == b"code"
        return name

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    def launch(
        self, name: str, grid: Any, block: Any, values: list[Any], stream: int, *, shared_bytes: int
    ) -> None:
        *given, scratch, profiler = (value.value for value in values)
        assert (block, stream, shared_bytes, scratch, profiler) == ((64, 1, 1), STREAM, 0, 0, 0)
        kernel = getattr(fit_device, name)
        kinds = {"colour_kernel": "uint8 int64 int32", "fit_kernel": "int32 int64 int32 uint8"}
        spaces = [at(address, kind) for address, kind in zip(given, kinds[name].split())]
        channels = self.record.channels
        if name == "colour_kernel":
            launch(kernel, grid, *spaces, LUMA=channels == 1, BLOCK=fit.BLOCK)
        else:
            assert given[4:] == list(self.crop)
            block_of = fit.fit_block(self.crop[1])
            launch(kernel, grid, *spaces, *given[4:], CHANNELS=channels, GREY=128, BLOCK=block_of)


def at(address: int, kind: str) -> torch.Tensor:
    """All memory from an address on, as far as one of these tests reads."""
    made = (ctypes.c_uint8 * (1 << 12)).from_address(address)
    return torch.frombuffer(made, dtype=torch.uint8).view(getattr(torch, kind))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()

    def none(*_: object) -> AbstractContextManager[None]:
        return nullcontext()

    def collecting(target: str) -> AbstractContextManager[Any]:
        def kernel(name: str, kinds: Sequence[str]) -> CompiledKernel:
            parameters = tuple(Parameter(place=(i,), type=k) for i, k in enumerate(kinds))  # type: ignore[arg-type]
            return CompiledKernel(
                key=name, name=name, cubin="a", parameters=parameters, threads=64, shared_bytes=0
            )

        kernels = (
            kernel("colour_kernel", ["pointer"] * 3),
            kernel("fit_kernel", [*["pointer"] * 4, "i32", "i32"]),
        )
        compiled = CompiledKernels(kernels=kernels, cubins={"a": b"code"})
        return nullcontext(SimpleNamespace(compiled=compiled, left_out={}))

    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "device", none)
    monkeypatch.setattr(torch.cuda, "stream", none)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(to_host, "JpegDecoder", Nvjpeg)
    monkeypatch.setattr(to_host, "collecting", collecting)
    monkeypatch.setattr(to_host, "brief_driver", lambda: made)
    monkeypatch.setattr(decode, "MOST_PIXELS", 72)
    return made


@pytest.mark.parametrize(("channels", "crop"), [(3, None), (1, (3, 2))])
def test_pixels_are_the_hosts(driver: Driver, channels: int, crop: tuple[int, int] | None) -> None:
    """Batches after each other, of which a later one is smaller, and one is cut in two."""
    driver.record = record = Preprocess(
        height=4, width=5, channels=channels, resize="fill", crop=crop
    )
    driver.crop = crop or (4, 5)
    decoder = to_host.HostDecoder(record, torch.device("cpu"))
    every = [jpeg(5, 8, "4:2:0"), jpeg(6, 5, "4:4:4"), jpeg(3, 7, None)]
    kept = []
    for files in (every[:1], every, every[1:2]):
        kept.append((files, decoder(files, planes_of(files)[1])))
        broken = [b"damaged"]
        with pytest.raises(KernelError):
            decoder(broken, planes_of(every[:1])[1])
    for files, made in kept:
        expected = [centre_crop(fitted(content, record), record) for content in files]
        assert np.array_equal(made, np.stack(expected))
