"""Planes of JPEG files become the host's pixels, to the bit: beside libjpeg and Pillow.

The planes are libjpeg's own: at half size it hands out the chroma of 4:2:0 as it lies in the file.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image

from tessella.core import preprocess
from tessella.core.errors import KernelError
from tessella.core.jpeg import Frame, frame_of
from tessella.core.preprocess import Placement, Preprocess, fitted, placement
from tessella.device.nvjpeg import Planes, places
from tessella.kernels.pictures import decode, fit
from tests.support.kernels.compile_only import compile_all
from tests.support.planes import jpeg, planes_of

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("resize", "channels"), [("squash", 3), ("crop", 1), ("fill", 3), ("half_crop", 3)]
)
def test_pixels_are_the_hosts(resize, channels):
    files = [
        jpeg(13, 21, "4:2:0"),  # odd sides
        jpeg(9, 14, "4:4:4"),
        jpeg(30, 8, "4:2:0"),  # tall: Pillow 13 alone would take its columns first
        jpeg(7, 12, None),
    ]
    record = Preprocess(height=8, width=11, channels=channels, resize=resize)
    for content, pixels in zip(files, fit.fitted(*planes_of(files), record), strict=True):
        assert np.array_equal(pixels.numpy(), fitted(content, record)), frame_of(content)


def test_a_crop_is_made_alone():
    files = [jpeg(13, 21, "4:2:0"), jpeg(9, 14, "4:4:4")]
    record = Preprocess(height=9, width=11, channels=3, crop=(6, 4), resize="fill")
    made = fit.fitted(*planes_of(files), record, cuts=True)
    for content, pixels in zip(files, made, strict=True):
        assert np.array_equal(
            pixels.numpy(), preprocess.centre_crop(fitted(content, record), record)
        )


def test_taps_are_pillows():
    """Pictures of 2,000 shapes, each resized by our weights and by Pillow."""
    for _ in range(2000):
        sides = tuple(int(side) for side in RNG.integers(3, 90, 2))
        wanted = (int(side) for side in RNG.integers(1, 60, 2))
        record = Preprocess(
            height=next(wanted),
            width=next(wanted),
            channels=1,
            resize=str(RNG.choice(["squash", "crop", "fill", "half_crop"])),
        )
        place = placement(*sides, record)
        pixels = RNG.integers(0, 256, sides, np.uint8)
        low, top, right, bottom = place.box
        box = low, top, min(right, sides[1]), min(bottom, sides[0])
        shown = place.width, place.height
        pillows = Image.fromarray(pixels).resize(shown, Image.Resampling.BILINEAR, box)
        along_rows = resized(pixels.T, fit.taps(sides[1], low, right, place.width, 0, place.width))
        taps = fit.taps(sides[0], top, bottom, place.height, 0, place.height)
        made = resized(along_rows.T, taps)
        assert np.array_equal(made, fit_on_the_host(pixels, record)[shown_at(place)])
        # Pillow 13 takes the columns of tall pictures first
        tall = sides[0] - place.height > max(0, 2 * (sides[1] - place.width))
        assert tall or np.array_equal(made, np.asarray(pillows)), (sides, record)


def test_sizes_that_a_stranger_chooses_do_not_stay():
    """Weights of a side of 60,000 pixels take 0.5 MB, and there are 60,000 such sides."""
    record = Preprocess(height=224, width=224)
    tracemalloc.start()
    for width in range(60_000, 60_030):
        starts, pitches, _ = places([frame := Frame(300, width, 2, 2)])
        fit.tables(starts, pitches, [frame], record)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 1e6


def resized(pixels: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """A pass along the columns of [H, W]."""
    places = taps[:, :1] + np.arange(taps.shape[1] - 1)
    total = np.einsum("hkw,hk->hw", pixels[places].astype(np.int64), taps[:, 1:].astype(np.int64))
    return ((total + (1 << 21)) >> 22).clip(0, 255).astype(np.uint8)


def fit_on_the_host(pixels: np.ndarray, record: Preprocess) -> np.ndarray:
    return preprocess.fit(pixels[:, :, None], record)[:, :, 0]


def shown_at(place: Placement) -> tuple[slice, slice]:
    return slice(place.top, place.top + place.height), slice(place.left, place.left + place.width)


def test_what_nvjpeg_refuses_the_host_decodes(monkeypatch):
    """Batch by batch, and it is told."""

    class Refusing:
        def __init__(self, device: torch.device, *, hardware: bool) -> None: ...

        def __call__(self, files: list[bytes], frames: list[Frame]) -> Planes:
            raise KernelError("nvJPEG cannot decode a picture of this batch", seen="status 3")

    monkeypatch.setattr(decode, "JpegDecoder", Refusing)
    monkeypatch.setattr(decode, "MOST_PIXELS", 300)
    record = Preprocess(height=8, width=11)
    files = [jpeg(13, 21, "4:2:0"), jpeg(9, 14, "4:4:4"), jpeg(7, 12, None)]
    decoder = decode.PictureDecoder(record, torch.device("cpu"))
    with pytest.warns(UserWarning, match="the host decodes . JPEG files: nvJPEG cannot") as told:
        made = decoder(files, [frame_of(content) for content in files])
    assert len(told) == 2  # 273 pixels, then 126 and 84
    for content, pixels in zip(files, made, strict=True):
        assert np.array_equal(pixels.numpy(), fitted(content, record))


def launches() -> Iterator[tuple[str, Callable[[], object]]]:
    frames = [Frame(375, 500, 2, 2), Frame(300, 200, 0, 0)]
    starts, pitches, nbytes = places(frames)
    planes = Planes(torch.zeros(nbytes, dtype=torch.uint8), starts, pitches)
    for channels in (1, 3):
        record = Preprocess(height=256, width=256, channels=channels)
        yield str(channels), lambda record=record: fit.fitted(planes, frames, record)


def test_compiles_without_spilling():
    for made in compile_all(f"{__name__}:launches").values():
        assert made
        assert not [launch for launch in made if launch["spilled_bytes"]]
