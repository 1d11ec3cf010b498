"""Preprocessing against Pillow, NumPy in float64, and files written by hand."""

from __future__ import annotations

import io
import itertools
import struct
import subprocess
import sys
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from tessella.core.errors import DataError, UsageError
from tessella.core.preprocess import (
    Pixels,
    Preprocess,
    centre_crop,
    decode,
    encode,
    fit,
    full_scale,
    normalize,
    read_pixels,
)
from tessella.core.record import from_plain, to_plain
from tests.support.pictures.encoded import noise, png, png_of, saved, tiff

RESIZE_MODES = ("squash", "crop", "fill", "half_crop")


# --- decode -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "PPM"])
@pytest.mark.parametrize("channels", [1, 3])
def test_lossless_files_keep_every_pixel(kind: str, channels: int) -> None:
    pixels = noise(9, 7, channels)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    content = saved(image, kind, **({"lossless": True} if kind == "WEBP" else {}))
    record = Preprocess(height=9, width=7, channels=channels)
    assert np.array_equal(decode(content, record), pixels)


def test_jpeg_is_what_pillow_decodes() -> None:
    smooth = np.asarray(Image.fromarray(noise(5, 5, 3)).resize((40, 30), Image.Resampling.BICUBIC))
    content = saved(Image.fromarray(smooth), "JPEG")
    assert np.array_equal(read_pixels(content), np.asarray(Image.open(io.BytesIO(content))))


def test_16_bit_png_keeps_16_bits() -> None:
    rgb, grey = noise(6, 5, 3, dtype=np.uint16), noise(6, 5, 1, dtype=np.uint16)
    assert np.array_equal(read_pixels(png_of(rgb, color=2)), rgb)
    assert np.array_equal(read_pixels(png_of(grey, color=0)), grey)
    rgba = np.concatenate([rgb, grey], axis=2)
    assert np.array_equal(read_pixels(png_of(rgba, color=6)), rgb)  # alpha is dropped
    record = Preprocess(height=6, width=5, channels=1, depth=16)
    grey_alpha = np.concatenate([grey, rgb[:, :, :1]], axis=2)
    assert np.array_equal(decode(png_of(grey_alpha, color=4), record), grey)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 17])
def test_tiff_keeps_every_channel(channels: int, compression: str | None, dtype: type) -> None:
    pixels = noise(4, 6, channels, dtype=dtype)
    planes = np.moveaxis(pixels, -1, 0)
    options = {"compression": compression, "photometric": "minisblack"}
    contents = [] if channels > 1 else [tiff(pixels[:, :, 0], **options)]
    if channels > 1:
        contents.append(tiff(pixels, planarconfig="contig", **options))
        contents.append(tiff(planes, planarconfig="separate", **options))
        contents.append(tiff(planes, **options))  # a page for each channel
    if channels == 3:
        contents.append(tiff(pixels, photometric="rgb", compression=compression))
    for content in contents:
        assert np.array_equal(read_pixels(content), pixels)


def test_tiff_compressed_with_lzw() -> None:
    rgb, grey = noise(20, 30, 3, dtype=np.uint16), noise(20, 30, 1, dtype=np.uint16)
    written = cv2.imencode(".tif", rgb[:, :, ::-1].copy(), [cv2.IMWRITE_TIFF_COMPRESSION, 5])[1]
    assert np.array_equal(read_pixels(written.tobytes()), rgb)
    content = saved(Image.fromarray(grey[:, :, 0]), "TIFF", compression="tiff_lzw")
    assert np.array_equal(read_pixels(content), grey)


def test_alpha_of_a_tiff_is_dropped_but_a_fourth_channel_is_not() -> None:
    for dtype in (np.uint8, np.uint16):
        pixels = noise(5, 6, 4, dtype=dtype)
        alpha = tiff(pixels, photometric="rgb", extrasamples=["unassalpha"])
        infrared = tiff(pixels, photometric="rgb", extrasamples=["unspecified"])
        assert np.array_equal(read_pixels(alpha), pixels[:, :, :3])
        assert np.array_equal(read_pixels(infrared), pixels)


def test_other_color_models_become_rgb_or_grey() -> None:
    rgb = noise(8, 9, 3)
    image = Image.fromarray(rgb)
    palette = image.quantize(7)
    want = np.asarray(palette.convert("RGB"))
    assert np.array_equal(read_pixels(saved(palette, "PNG")), want)
    see_through = saved(palette, "PNG", transparency=bytes([0, 128, 255, 3, 4, 5, 6]))
    assert np.array_equal(read_pixels(see_through), want)
    rgba = Image.fromarray(np.concatenate([rgb, noise(8, 9, 1, seed=1)], axis=2))
    assert np.array_equal(read_pixels(saved(rgba, "PNG")), rgb)
    assert np.array_equal(read_pixels(saved(rgba, "TIFF")), rgb)
    cmyk = image.convert("CMYK")
    assert np.array_equal(read_pixels(saved(cmyk, "TIFF")), np.asarray(cmyk.convert("RGB")))
    two_levels = Image.fromarray(rgb[:, :, 0] > 99)
    assert np.array_equal(
        read_pixels(saved(two_levels, "PNG"))[:, :, 0], 255 * (rgb[:, :, 0] > 99).astype(np.uint8)
    )
    grey_alpha = Image.fromarray(rgb[:, :, 0]).convert("LA")
    assert np.array_equal(read_pixels(saved(grey_alpha, "PNG")), rgb[:, :, :1])


@pytest.mark.parametrize("largest", [65535, 1023, 256])
def test_16_bit_ppm_keeps_16_bits(largest: int) -> None:
    """Netpbm's own: the high byte first, and full scale is what the header says."""
    pixels = np.random.default_rng(0).integers(0, largest + 1, (9, 7, 3), np.uint16)
    content = b"P6\n# made here\n7 9\n%d\n" % largest + pixels.astype(">u2").tobytes()
    right = np.rint(pixels.astype(np.float64) * 65535 / largest)
    assert np.array_equal(decode(content, Preprocess(height=9, width=7, depth=16)), right)
    with pytest.raises(DataError, match="cut off"):
        decode(content[:-1], Preprocess(height=9, width=7, depth=16))


def test_16_bit_pgm_keeps_16_bits() -> None:
    grey = noise(5, 4, 1, dtype=np.uint16)
    content = b"P5 4 5 65535\n" + grey.astype(">u2").tobytes()
    assert np.array_equal(read_pixels(content), grey)


# By the EXIF standard: what is at the stored picture's row 0 and column 0.
UPRIGHT: dict[int, Callable[[Pixels], Pixels]] = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: np.rot90(p, -1),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    8: lambda p: np.rot90(p),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    pixels, deep = noise(4, 6, 3), noise(4, 6, 3, dtype=np.uint16)
    upright = UPRIGHT[orientation]
    content = saved(Image.fromarray(pixels), "PNG", exif=exif)
    assert np.array_equal(read_pixels(content), upright(pixels))
    for stored in (pixels, deep, noise(4, 6, 5)):
        options = {"extratags": [(274, "H", 1, orientation, True)]}
        kind = "rgb" if stored.shape[2] == 3 else "minisblack"
        content = tiff(stored, photometric=kind, planarconfig="contig", **options)
        assert np.array_equal(read_pixels(content), upright(stored))


def test_channels_and_depth_follow_the_record() -> None:
    rgb = noise(6, 5, 3)
    content = saved(Image.fromarray(rgb), "PNG")
    grey = decode(content, Preprocess(height=6, width=5, channels=1))
    luma = rgb.astype(np.float64) @ [0.299, 0.587, 0.114]
    assert np.abs(grey[:, :, 0] - luma).max() <= 0.5 + 1e-9
    deep = decode(content, Preprocess(height=6, width=5, depth=16))
    assert np.array_equal(deep, rgb.astype(np.uint16) * 257)
    wide = noise(6, 5, 3, dtype=np.uint16)
    narrow = decode(png_of(wide, 2), Preprocess(height=6, width=5))
    assert np.array_equal(narrow, np.rint(wide / 65535 * 255).astype(np.uint8))
    one = saved(Image.fromarray(rgb[:, :, 0]), "PNG")
    repeated = decode(one, Preprocess(height=6, width=5))
    assert np.array_equal(repeated, np.repeat(rgb[:, :, :1], 3, axis=2))
    with pytest.raises(DataError, match="3 channels, the record wants 5"):
        decode(content, Preprocess(height=6, width=5, channels=5))


# --- files that cannot be used ------------------------------------------------------------------


def test_a_header_of_30000_by_30000_is_refused_unread() -> None:
    huge = png(30_000, 30_000, 8, 2, b"")
    with pytest.raises(DataError, match="more than 268,435,456 pixels"):
        read_pixels(huge, name="huge.png")
    bmp = bytearray(saved(Image.fromarray(noise(4, 4, 3)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 30_000, 30_000)
    with pytest.raises(DataError, match="pixels"):
        read_pixels(bytes(bmp))


@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_just_over_the_limit_is_refused_and_just_under_is_only_incomplete() -> None:
    with pytest.raises(DataError, match="more than 268,435,456 pixels"):
        read_pixels(png(16_385, 16_384, 8, 0, b""))
    with pytest.raises(DataError, match="not an image that can be read"):
        read_pixels(png(16_384, 1_000, 8, 0, b""))


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b"GIF89a", b"<svg/>", b"%!PS-Adobe-3.0 EPSF"]
)
def test_what_is_no_image(content: bytes) -> None:
    with pytest.raises(DataError) as caught:
        read_pixels(content, name="x.png")
    assert "x.png" in caught.value.wrong
    assert caught.value.fix


FILES = {
    "jpeg": saved(Image.fromarray(noise(40, 50, 3)), "JPEG"),
    "png": saved(Image.fromarray(noise(40, 50, 3)), "PNG"),
    "png16": png_of(noise(40, 50, 3, dtype=np.uint16), 2),
    "bmp": saved(Image.fromarray(noise(40, 50, 3)), "BMP"),
    "webp": saved(Image.fromarray(noise(40, 50, 3)), "WEBP", lossless=True),
    "tiff": saved(Image.fromarray(noise(40, 50, 3)), "TIFF"),
    "tiff lzw": saved(Image.fromarray(noise(40, 50, 3)), "TIFF", compression="tiff_lzw"),
    "tiff16": tiff(noise(40, 50, 3, dtype=np.uint16), photometric="rgb"),
    "tiff16 zlib": tiff(
        noise(40, 50, 5, dtype=np.uint16), photometric="minisblack", compression="zlib"
    ),
    "tiff16 lzw": cv2.imencode(
        ".tif", noise(40, 50, 3, dtype=np.uint16), [cv2.IMWRITE_TIFF_COMPRESSION, 5]
    )[1].tobytes(),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_truncated_file_is_refused_or_whole(kind: str) -> None:
    """Cut anywhere, a file gives an error or, where only a trailer is gone, the same picture."""
    whole = read_pixels(FILES[kind])
    size = len(FILES[kind])
    refused = 0
    for cut in {*range(0, size, size // 40), size - 1}:
        try:
            pixels = read_pixels(FILES[kind][:cut])
        except DataError:
            refused += 1
        else:
            assert np.array_equal(pixels, whole), f"cut at {cut} of {size}"
    assert refused >= 38


@pytest.mark.parametrize("big", [False, True])
def test_a_tiff_that_lost_its_last_pages_is_refused(big: bool) -> None:
    """tifffile would only log it, and read five channels as four."""
    planes = noise(5, 8, 9)
    content = tiff(planes, bigtiff=big, photometric="minisblack", metadata=None)
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        last = file.pages[4].offset
    assert np.array_equal(read_pixels(content), np.moveaxis(planes, 0, -1))
    with pytest.raises(DataError, match="page"):
        read_pixels(content[: last + 4])


@pytest.mark.parametrize("kind", FILES)
def test_changed_bytes_never_raise_anything_else(kind: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(60):
        content = bytearray(FILES[kind])
        for place in rng.integers(0, min(len(content), 400), 3):
            content[place] = rng.integers(256)
        try:
            pixels = read_pixels(bytes(content))
        except DataError:
            continue
        assert pixels.ndim == 3
        assert pixels.dtype in (np.uint8, np.uint16)


# --- fit ----------------------------------------------------------------------------------------


def reference_fit(pixels: Pixels, record: Preprocess) -> np.ndarray:
    """By the definition, in float64: resize every channel as a whole picture, then cut and pad."""
    height, width = pixels.shape[:2]
    ratios = record.height / height, record.width / width
    cover, inside = max(ratios), min(ratios)
    by = {"crop": cover, "fill": inside, "half_crop": (cover + inside) / 2}
    if record.resize == "squash":
        size = record.height, record.width
    else:
        size = tuple(max(1, round(s * by[record.resize])) for s in (height, width))
    planes = [
        np.asarray(
            Image.fromarray(pixels[:, :, c].astype(np.float32)).resize(
                size[::-1], Image.Resampling.BILINEAR
            ),
            np.float64,
        )
        for c in range(pixels.shape[2])
    ]
    out = np.full(
        (record.height, record.width, pixels.shape[2]), (full_scale(record.depth) + 1) / 2
    )
    for c, plane in enumerate(planes):
        top, left = (
            max(0, (have - want) // 2) for have, want in zip(size, out.shape[:2], strict=True)
        )
        cut = plane[top : top + record.height, left : left + record.width]
        y, x = (record.height - cut.shape[0]) // 2, (record.width - cut.shape[1]) // 2
        out[y : y + cut.shape[0], x : x + cut.shape[1], c] = cut
    return out


SIZES = [
    ((17, 23), (8, 8)),
    ((8, 30), (12, 10)),
    ((5, 4), (16, 16)),
    ((40, 7), (9, 21)),
    ((1, 1), (3, 2)),
]


@pytest.mark.parametrize("mode", RESIZE_MODES)
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_fit_in_every_mode(mode: str, depth: int, channels: int) -> None:
    dtype = np.uint8 if depth == 8 else np.uint16
    for (height, width), (want_h, want_w) in SIZES:
        record = Preprocess(
            height=want_h, width=want_w, channels=channels, depth=depth, resize=mode
        )
        pixels = noise(height, width, channels, dtype=dtype)
        fitted = fit(pixels, record)
        assert fitted.shape == (want_h, want_w, channels)
        assert fitted.dtype == dtype
        # Pillow resizes 8-bit pictures in fixed point: one step off the exact value at most.
        assert np.abs(fitted - reference_fit(pixels, record)).max() <= 1.0
        assert fit(fitted, record) is fitted
        again = decode(encode(fitted), record)
        assert np.array_equal(again, fitted)
        assert again.dtype == dtype


def test_fit_of_a_very_long_picture_takes_little_memory() -> None:
    content = saved(Image.fromarray(noise(1, 60_000, 3)), "PNG")
    record = Preprocess(height=224, width=224, resize="crop")
    assert fit(read_pixels(content), record).shape == (224, 224, 3)  # whole: 9 GB


# --- crop, normalize, the record ----------------------------------------------------------------


@pytest.mark.parametrize(("depth", "channels"), list(itertools.product([8, 16], [1, 3, 5])))
def test_normalize_against_float64(depth: int, channels: int) -> None:
    rng = np.random.default_rng(0)
    mean, std = rng.uniform(0.2, 0.8, channels), rng.uniform(0.1, 0.5, channels)
    record = Preprocess(
        height=6, width=5, channels=channels, depth=depth, mean=tuple(mean), std=tuple(std)
    )
    pixels = noise(4, 6, 5, channels, dtype=np.uint8 if depth == 8 else np.uint16)
    exact = np.moveaxis((pixels / full_scale(depth) - mean) / std, -1, 1)
    batch = normalize(pixels, record)
    assert batch.dtype == np.float32
    assert batch.flags.c_contiguous
    assert np.abs(batch - exact).max() < 4e-6
    for i in range(len(pixels)):  # one by one or together: the same bits
        assert np.array_equal(normalize(pixels[i], record), batch[i])


def test_the_whole_way_of_a_file() -> None:
    pixels = noise(20, 30, 3)
    record = Preprocess(height=10, width=10, crop=(8, 6), mean=(0.5,), std=(0.25,))
    got = record(saved(Image.fromarray(pixels), "PNG"))
    small = np.asarray(Image.fromarray(pixels).resize((10, 10), Image.Resampling.BILINEAR))
    exact = (small[1:9, 2:8].transpose(2, 0, 1) / 255 - 0.5) / 0.25
    assert got.shape == record.input_shape == (3, 8, 6)
    assert np.abs(got - exact).max() < 1e-6
    many = np.stack([pixels[:10, :10]] * 2)
    assert np.array_equal(centre_crop(many, record)[1], centre_crop(many[1], record))


def test_hash_tells_records_apart_and_survives_json() -> None:
    record = Preprocess(height=4, width=4, mean=(0,), std=(1,), crop=(2, 2))
    assert record == Preprocess(height=4, width=4, crop=(2, 2))
    assert record.hash == Preprocess(height=4, width=4, crop=(2, 2)).hash
    assert from_plain(Preprocess, to_plain(record), where="p").hash == record.hash
    others = [
        Preprocess(height=4, width=4, crop=(2, 3)),
        Preprocess(height=4, width=4, resize="fill", crop=(2, 2)),
        Preprocess(height=4, width=4, mean=(1e-9,), crop=(2, 2)),
    ]
    assert len({record.hash, *(other.hash for other in others)}) == 4


@pytest.mark.parametrize(
    "bad",
    [
        {"height": 0},
        {"channels": 0},
        {"depth": 12},
        {"height": 1 << 20, "width": 1 << 20},
        {"std": (0.0,)},
        {"std": (float("nan"),)},
        {"mean": (0.1, 0.2)},
        {"crop": (5, 4)},
        {"crop": (0, 4)},
    ],
)
def test_records_that_cannot_work(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Preprocess(**{"height": 4, "width": 4, **bad})


def test_pillow_does_not_write_to_the_terminal() -> None:
    """It logs what it cannot decode; without a handler Python prints that, a line a file."""
    code = (
        "import io, numpy as np, tifffile\n"
        "from tessella.core.preprocess import read_pixels\n"
        "out = io.BytesIO()\n"
        "planes = np.zeros((9, 8, 7), np.uint16)\n"
        "tifffile.imwrite(out, planes, photometric='minisblack', planarconfig='contig')\n"
        "assert read_pixels(out.getvalue()).shape == (9, 8, 7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
