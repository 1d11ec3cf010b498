"""Files of pictures to their pixels: PNG, JPEG, BMP, TIFF, WebP, GIF and PPM.

A header says what a file would unfold to, and anybody can write a header. So the sides of a picture
are checked before memory is taken, and a reader that cannot tell them refuses. How long a decoder
works and what it takes beside the pixels is bounded by ``decoding``.
"""

from __future__ import annotations

import io
import logging
import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, PpmImagePlugin, TiffImagePlugin, UnidentifiedImageError

from tessella.core.errors import DataError

if TYPE_CHECKING:
    import tifffile

# OpenCV and tifffile are imported where they read or write a file: an engine that loads a plan has
# the record from here, and does not wait for them (40 ms).
Pixels = npt.NDArray[Any]  # uint8 or uint16

MAX_PIXELS = 1 << 28  # 16,384 × 16,384: a larger header is refused before a pixel is decoded
MAX_SAMPLES = 4 * MAX_PIXELS  # pixels × channels, of a picture and of a preprocessing record
# Resizing has a weight for every pixel of a side: at 2 × 10⁹ of them they would take 34 GB.
MAX_SIDE = 1 << 18
Image.MAX_IMAGE_PIXELS = MAX_PIXELS  # Pillow checks before we can, at a third of this by default
# Only these decoders see foreign bytes: some of Pillow's others start programs (EPS).
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM")
# What Pillow cannot decode is raised, or read by tifffile: its log must not fill a user's terminal.
logging.getLogger("PIL").addHandler(logging.NullHandler())
TURNED = (5, 6, 7, 8)  # EXIF's orientations that swap height and width
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def read_pixels(content: bytes, *, name: str = "image", most_pixels: int = MAX_PIXELS) -> Pixels:
    """File bytes as HWC uint8 or uint16 with the channels that the file has, turned upright.

    Raises:
        DataError: empty, not an image, truncated, more than ``most_pixels``, or more than fits
            into memory.
    """
    read = read_picture(content, name=name, most_pixels=most_pixels)
    try:
        return _pixels_of(read, name) if isinstance(read, Image.Image) else read
    except MemoryError as error:
        raise out_of_memory(name, content) from error


def read_picture(
    content: bytes, *, name: str = "image", most_pixels: int = MAX_PIXELS
) -> Pixels | Image.Image:
    """As ``read_pixels``; but what is upright, grey or RGB of 8 bits is left in Pillow's memory.

    Who goes on with Pillow saves two copies, under Python's lock: 0.5 ms of a JPEG of 500 × 375.
    """
    if not content:
        raise DataError(f"{name} is empty (0 bytes)", fix="remove it or copy it again")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return _read_opened(image, content, name, most_pixels)
    except DataError:
        raise
    except MemoryError as error:
        raise out_of_memory(name, content) from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise too_large(name, error, most_pixels) from error
    except Exception as error:  # decoders raise SyntaxError, struct.error, zlib.error and others
        if content[:4] in _TIFF_MAGIC:
            return _read_tiff(content, name, most_pixels)
        unknown = isinstance(error, UnidentifiedImageError)  # its text holds a memory address
        why = f"first {content[:8]!r}" if unknown else f"{type(error).__name__}: {str(error)[:100]}"
        raise DataError(
            f"{name} is not an image that can be read",
            seen=f"{len(content)} bytes, {why}",
            fix="use PNG, JPEG, BMP, TIFF or WebP, and check that the file is complete",
        ) from error


def too_large(name: str, seen: object, most_pixels: int = MAX_PIXELS) -> DataError:
    return DataError(
        f"{name} has more than {most_pixels:,} pixels", seen=seen, fix="cut or shrink it first"
    )


def out_of_memory(name: str, content: bytes) -> DataError:
    return DataError(
        f"{name} takes more memory to decode than there is",
        seen=f"a file of {len(content):,} bytes",
        fix="cut or shrink it first, or save it in another format",
    )


def orientation_of(content: bytes) -> int:
    """The EXIF orientation, 1 to 8, of a file that Pillow opens; of any other an error."""
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        return int(image.getexif().get(_ORIENTATION, 1))


def _check_sides(sides: tuple[int, ...], name: str, most: int, most_pixels: int) -> None:
    """Refuse sides whose product is 0 or above ``most``, and a side that is too long."""
    shape = "×".join(map(str, sides))
    if not sides or min(sides) < 1:  # the product is 0, however long the other side is
        raise DataError(f"{name} has no pixels", seen=shape, fix="copy the file again")
    if math.prod(sides) > most:
        raise too_large(name, shape, most_pixels)
    if max(sides) > MAX_SIDE:
        raise DataError(
            f"{name} has a side of more than {MAX_SIDE:,} pixels", seen=shape, fix="cut it first"
        )


def _not_integers(name: str, seen: object) -> DataError:
    return DataError(
        f"{name} is not an 8- or 16-bit picture",
        seen=seen,
        fix="convert it to 8- or 16-bit unsigned samples, grey or RGB, one page",
    )


def _read_opened(
    image: Image.Image, content: bytes, name: str, most_pixels: int
) -> Pixels | Image.Image:
    _check_sides(image.size, name, most_pixels, most_pixels)
    if isinstance(image, TiffImagePlugin.TiffImageFile) and not _pillow_keeps_all(image):
        return _read_tiff(content, name, most_pixels)
    if isinstance(image, PpmImagePlugin.PpmImageFile):
        wide = _read_ppm16(image, content)
        if wide is not None:
            return wide
    image.load()  # raises where the file is incomplete; OpenCV may only print it
    # Not Pillow's exif_transpose: it copies a picture that is upright, and writes all tags again.
    orientation = image.getexif().get(_ORIENTATION, 1)
    if image.format == "PNG" and content[24:25] == b"\x10":  # IHDR: 16 bits a sample
        return upright(_read_png16(content, name), orientation)
    if image.mode in ("L", "RGB") and orientation not in range(2, 9):
        return image
    return upright(_pixels_of(image, name), orientation)


def _pixels_of(image: Image.Image, name: str) -> Pixels:
    """The pixels that Pillow has decoded, as HWC."""
    if image.mode.startswith("I;16"):
        return np.asarray(image, dtype=np.uint16)[:, :, None]
    if image.mode in ("I", "F"):
        wide = np.asarray(image)
        if image.mode == "F" or wide.min() < 0 or wide.max() > np.iinfo(np.uint16).max:
            raise _not_integers(name, f"samples of {wide.dtype}, {wide.min()} to {wide.max()}")
        return wide.astype(np.uint16)[:, :, None]
    if image.mode in ("1", "LA", "La"):
        image = image.convert("L")
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA").convert("RGB")  # straight to RGB, Pillow warns
    elif image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _read_ppm16(image: PpmImagePlugin.PpmImageFile, content: bytes) -> Pixels | None:
    """The samples of a binary PPM of 16 bits, whose lower half Pillow drops; None of any other."""
    (tile,) = image.tile
    mode, largest = tile.args if isinstance(tile.args, tuple) else ("", 0)
    if not content.startswith(b"P6") or mode != "RGB" or not 255 < largest < 1 << 16:
        return None
    shape = (image.height, image.width, 3)
    if len(content) - tile.offset < 2 * math.prod(shape):
        raise DataError("the picture is cut off", seen=f"{len(content):,} bytes")
    samples = np.frombuffer(content, ">u2", math.prod(shape), tile.offset).reshape(shape)
    if largest == 65535:
        return samples.astype(np.uint16)
    wide = np.minimum(samples, largest).astype(np.uint32)
    rounded: Pixels = ((wide * 65535 + largest // 2) // largest).astype(np.uint16)
    return rounded


def _read_png16(content: bytes, name: str) -> Pixels:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise DataError(f"{name} is not a complete 16-bit PNG", fix="copy the file again")
    return _from_bgr(pixels)


def _from_bgr(pixels: Pixels) -> Pixels:
    """OpenCV's order (HW, BGR or BGRA) as HWC, RGB, without alpha."""
    return pixels[:, :, None] if pixels.ndim == 2 else pixels[:, :, 2::-1]


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """The pixels turned as an EXIF (or TIFF) orientation, 1 to 8, says."""
    if orientation in (5, 6, 7, 8):  # stored on its side: mirror along the diagonal first
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


# --- TIFF ---------------------------------------------------------------------------------------

_ORIENTATION, _BITS, _PHOTOMETRIC, _EXTRA_SAMPLES, _SAMPLE_FORMAT = 274, 258, 262, 338, 339
_MIN_IS_BLACK, _RGB = 1, 2


def _pillow_keeps_all(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Pillow silently drops a TIFF's further pages and planes, and half the bits of 16-bit RGB."""
    tags = image.tag_v2
    unsigned = set(tags.get(_SAMPLE_FORMAT, (1,))) == {1}
    only_alpha = set(tags.get(_EXTRA_SAMPLES, ())) <= {1, 2}
    grey16 = image.mode.startswith("I;16") and tags.get(_PHOTOMETRIC) == _MIN_IS_BLACK
    narrow = max(tags.get(_BITS, (1,))) <= 8 or grey16
    return unsigned and only_alpha and narrow and getattr(image, "n_frames", 1) == 1


def _read_tiff(content: bytes, name: str, most_pixels: int) -> Pixels:
    """The pixels of a TIFF with any number of planes: interleaved, planar or pages of one size."""
    import tifffile

    try:
        _check_pages(content)
        with tifffile.TiffFile(io.BytesIO(content)) as tiff:
            series, page = tiff.series[0], tiff.pages.first
            shape, axes = series.shape, series.axes
            alpha = 1 in page.extrasamples or 2 in page.extrasamples
            tag = page.tags.get(_ORIENTATION)
            orientation = 1 if tag is None else int(tag.value)
            _check_sides(shape, name, MAX_SAMPLES // MAX_PIXELS * most_pixels, most_pixels)
            if page.photometric not in (_MIN_IS_BLACK, _RGB) or page.dtype not in _INTEGERS:
                raise _not_integers(name, f"{page.dtype}, photometric {page.photometric}")
            pixels = _tiff_planes(series, content)
    except DataError:
        raise
    except MemoryError as error:
        raise out_of_memory(name, content) from error
    except Exception as error:  # a hostile TIFF can fail in any of the decoder's layers
        raise DataError(
            f"{name} is not a TIFF that can be read",
            seen=f"{type(error).__name__}: {str(error)[:100]}",
            fix="save it uncompressed or with deflate",
        ) from error
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    elif pixels.ndim == 3 and axes.endswith("YX"):
        pixels = np.moveaxis(pixels, 0, -1)  # planes or pages first
    if pixels.ndim != 3:
        raise _not_integers(name, f"shape {shape}, axes {axes}")
    return upright(pixels[:, :, :-1] if alpha else pixels, orientation)


def tiff_sides(file: str) -> tuple[int, int]:
    """Height and width of a TIFF as it is shown, of any number of planes, from its header.

    Raises:
        Exception: whatever tifffile's readers of hostile headers raise.
    """
    import tifffile

    with tifffile.TiffFile(file) as tiff:
        series = tiff.series[0]
        height, width = (int(series.shape[series.axes.index(axis)]) for axis in "YX")
        tag = tiff.pages.first.tags.get(_ORIENTATION)
    turned = tag is not None and int(tag.value) in TURNED
    return (width, height) if turned else (height, width)


_INTEGERS = (np.uint8, np.uint16)


def _check_pages(content: bytes) -> None:
    """Raise ``ValueError`` where the chain of pages breaks off: tifffile only logs it."""
    order = "<" if content[:2] == b"II" else ">"
    big = content[2:4] in (b"+\0", b"\0+")  # BigTIFF: wider counts, entries and offsets
    count_format, entry_nbytes, offset_format = ("Q", 20, "Q") if big else ("H", 12, "L")
    place = 8 if big else 4
    seen: set[int] = set()
    while True:
        try:
            (page,) = struct.unpack_from(order + offset_format, content, place)
            if page == 0:
                return
            (entries,) = struct.unpack_from(order + count_format, content, page)
        except struct.error as error:
            raise ValueError(f"page {len(seen)} lies beyond the end of the file") from error
        if page in seen:
            raise ValueError(f"page {len(seen)} leads back to an earlier one")
        seen.add(page)
        place = page + struct.calcsize(order + count_format) + entries * entry_nbytes


def _tiff_planes(series: tifffile.TiffPageSeries, content: bytes) -> Pixels:
    """The samples, in the axes of the series; LZW by OpenCV (tifffile needs a plug-in for it)."""
    import cv2
    import tifffile

    pixels: Pixels | None
    if series.keyframe.compression == tifffile.COMPRESSION.LZW and len(series.pages) == 1:
        pixels = cv2.imdecode(
            np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED | cv2.IMREAD_IGNORE_ORIENTATION
        )
        if pixels is not None and pixels.dtype == series.dtype:
            if pixels.ndim == 3:
                pixels = pixels[:, :, [2, 1, 0, 3][: pixels.shape[2]]]
            if pixels.shape == series.shape:
                return pixels
    pixels = series.asarray()
    return pixels
