"""The preprocessing record, and the one implementation that training and serving both call.

An image goes through four stages, each a function of the record::

    decode  file bytes      → HWC uint8 or uint16, the record's channels and depth
    fit     any size        → the record's height × width        (what a dataset stores)
    crop    height × width  → the centre crop, if the record has one
    normalize  HWC integers → CHW float32, (x / full scale − mean) / std

The first three are the host's. The last may also be a plan's first step, which then takes HWC
uint8 and makes the same bits. Because there is one implementation and the record's hash travels
from dataset to checkpoint to plan, training and serving cannot differ.
"""

from __future__ import annotations

import functools
import io
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from tessella.core.errors import DataError, InputError, UsageError
from tessella.core.pictures import (
    MAX_PIXELS,
    MAX_SAMPLES,
    Pixels,
    out_of_memory,
    read_picture,
    read_pixels,
    too_large,
)
from tessella.core.record import LATE, digest

ResizeMode = Literal["squash", "crop", "fill", "half_crop"]

MAX_CHANNELS = 1 << 12
BAND_SAMPLES = 1 << 18
_BILINEAR = Image.Resampling.BILINEAR


@dataclass(frozen=True, kw_only=True)
class Volume:
    """What a record says where examples are volumes and not pictures.

    A volume keeps its own size; the network sees parts of ``slices`` × height × width of it.

    Attributes:
        slices: of the network's input.
        window: the values that become 0 and full scale; None: for each volume its own 0.5th and
            99.5th percentiles.
    """

    slices: int
    window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise UsageError("a volume needs slices", seen=self.slices)
        if self.window is not None:
            low, high = self.window
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise UsageError("a window is two numbers, the smaller one first", seen=self.window)


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How a file becomes a network's input. All sizes in pixels.

    Attributes:
        height, width: the size that every image is brought to.
        channels: 1 (grey), 3 (RGB), or as many as the files have.
        depth: bits per sample, 8 or 16; full scale is 2**depth − 1.
        resize: ``squash`` ignores the aspect ratio; ``crop`` covers and cuts the centre; ``fill``
            fits inside and pads with the middle grey; ``half_crop`` goes half way between the two.
        crop: height and width of the network's input if it is smaller than the stored image: the
            centre of it when evaluating and serving, a random part when training.
        mean, std: per channel, in units of full scale (0 to 1).
        volume: of volumes, with one channel of 16 bits; None: examples are pictures.
    """

    height: int
    width: int
    channels: int = 3
    depth: int = 8
    resize: ResizeMode = "squash"
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    volume: Volume | None = field(default=None, metadata=LATE)

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.volume is not None and (self.channels, self.depth, self.crop) != (1, 16, None):
            raise UsageError(
                "volumes have one channel of 16 bits, and no crop but their size",
                seen=f"{self.channels} channels, depth {self.depth}, crop {self.crop}",
            )
        for name in ("mean", "std"):
            # Floats always: 0 and 0.0 are equal but would be hashed differently.
            values = tuple(float(v) for v in getattr(self, name))
            values = values * self.channels if len(values) == 1 else values
            object.__setattr__(self, name, values)
            if len(values) != self.channels or not all(map(math.isfinite, values)):
                raise UsageError(f"{name} needs one finite value a channel", seen=values)
        if min(self.std) <= 0:
            raise UsageError("std must be positive", seen=self.std)
        if self.crop is not None:
            object.__setattr__(self, "crop", tuple(self.crop))
        if self.crop and not (0 < self.crop[0] <= self.height and 0 < self.crop[1] <= self.width):
            raise UsageError(
                "the crop is empty or larger than the image",
                seen=f"crop {self.crop}, image {(self.height, self.width)}",
                fix="make the crop smaller or the image larger",
            )

    def _check_sizes(self) -> None:
        shape = f"{self.height}×{self.width}×{self.channels}"
        if min(self.height, self.width, self.channels) < 1 or self.depth not in (8, 16):
            raise UsageError(
                "a preprocessing record needs positive sizes and a depth of 8 or 16",
                seen=f"{shape}, depth {self.depth}",
            )
        pixels = self.height * self.width * (1 if self.volume is None else self.volume.slices)
        if (
            self.channels > MAX_CHANNELS
            or pixels > MAX_PIXELS
            or pixels * self.channels > MAX_SAMPLES
        ):
            raise UsageError(
                "the image size is too large",
                seen=shape,
                fix=f"at most {MAX_PIXELS:,} pixels, {MAX_CHANNELS:,} channels"
                f" and {MAX_SAMPLES:,} samples",
            )

    @property
    def hash(self) -> str:
        """SHA-256 of the record: equal hashes, equal inputs to the network."""
        return digest(self)

    @property
    def sides(self) -> tuple[int, ...]:
        """Height and width of the network's input; of volumes slices, height and width."""
        if self.volume is not None:
            return (self.volume.slices, self.height, self.width)
        return self.crop or (self.height, self.width)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Channels and sides of the network's input."""
        return (self.channels, *self.sides)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Sides and channels of the array that ``pixels`` returns."""
        return (*self.sides, self.channels)

    def __call__(self, content: bytes, *, name: str = "image") -> npt.NDArray[np.float32]:
        """File bytes to the network's input, CHW float32: decode, fit, crop, normalize.

        Raises:
            DataError: the bytes are not an image that can be decoded.
        """
        return normalize(self.pixels(content, name=name), self)

    def pixels(self, content: bytes, *, name: str = "image") -> Pixels:
        """File bytes to HWC integers of the network's size: decode, fit, crop.

        Raises:
            DataError: the bytes are not an image that can be decoded.
        """
        return centre_crop(fitted(content, self, name=name), self)


def full_scale(depth: int) -> int:
    return (1 << depth) - 1


# --- decode -------------------------------------------------------------------------------------


def fitted(
    content: bytes,
    record: Preprocess,
    *,
    name: str = "image",
    most_pixels: int = MAX_PIXELS,
    pixels: Pixels | None = None,
) -> Pixels:
    """File bytes to the HWC integers that a dataset stores: decode, fit.

    Args:
        pixels: what ``read_pixels`` makes of the bytes, where somebody knows it already.

    Raises:
        DataError: the bytes are not an image of at most ``most_pixels`` that can be decoded.
    """
    if record.volume is not None:
        raise _of_volumes(name)
    if pixels is None:
        return fitted_and_size(content, record, name=name, most_pixels=most_pixels)[0]
    try:
        return fit(to_depth(to_channels(pixels, record, name=name), record.depth), record)
    except MemoryError as error:
        raise out_of_memory(name, content) from error


def fitted_and_size(
    content: bytes, record: Preprocess, *, name: str = "image", most_pixels: int = MAX_PIXELS
) -> tuple[Pixels, tuple[int, int]]:
    """As ``fitted``; and the picture's own height and width, upright as its EXIF tag says."""
    if record.volume is not None:
        raise _of_volumes(name)
    try:
        read = read_picture(content, name=name, most_pixels=most_pixels)
        if isinstance(read, Image.Image):
            size = read.height, read.width
            if record.depth == 8 and len(read.getbands()) == record.channels:
                return _fit_image(read, record), size
            read = _array_of(read)
        else:
            size = read.shape[0], read.shape[1]
        return fit(to_depth(to_channels(read, record, name=name), record.depth), record), size
    except MemoryError as error:
        raise out_of_memory(name, content) from error


def _of_volumes(name: str) -> DataError:
    return DataError(
        f"{name} is taken for a picture, and the record is of volumes",
        fix="give files of volumes to tessella run or api.segment, or arrays to the engine",
    )


def decode(
    content: bytes, record: Preprocess, *, name: str = "image", most_pixels: int = MAX_PIXELS
) -> Pixels:
    """File bytes (PNG, JPEG, BMP, TIFF, WebP, GIF, PPM) as HWC in the record's channels and depth.

    The picture is turned upright as its EXIF tag says. Grey becomes RGB by repetition, RGB becomes
    grey by the ITU-R 601 luma; an alpha channel is dropped.
    """
    pixels = read_pixels(content, name=name, most_pixels=most_pixels)
    return to_depth(to_channels(pixels, record, name=name), record.depth)


# --- channels and depth ---------------------------------------------------------------------------


def to_channels(pixels: Pixels, record: Preprocess, *, name: str = "image") -> Pixels:
    """The pixels, HWC, with the record's number of channels."""
    have, want = pixels.shape[2], record.channels
    if have == want:
        return pixels
    if want == 3 and have == 1:
        return np.repeat(pixels, 3, axis=2)
    if want == 1 and have in (3, 4):
        return _by_rows(_luma, pixels, np.empty((*pixels.shape[:2], 1), pixels.dtype))
    if want == 3 and have == 4:
        return np.ascontiguousarray(pixels[:, :, :3])
    raise DataError(
        f"{name} has {have} channels, the record wants {want}",
        fix="use images with one number of channels, or set channels to 1 or 3",
    )


def to_depth(pixels: Pixels, depth: int) -> Pixels:
    """The pixels, HWC, at 8 or 16 bits a sample; full scale maps to full scale."""
    if depth == 8 and pixels.dtype == np.uint16:
        return _by_rows(
            lambda rows: np.rint(rows * np.float32(1 / 257)),
            pixels,
            np.empty(pixels.shape, np.uint8),
        )
    if depth == 16 and pixels.dtype == np.uint8:
        return pixels.astype(np.uint16) * np.uint16(257)
    return pixels


def in_rgb(pixels: Pixels) -> Pixels:
    """The pixels, HWC, in three channels of 8 bits, to be looked at: of many channels the first."""
    pixels = to_depth(pixels, 8)
    return pixels[:, :, :3] if pixels.shape[2] >= 3 else np.repeat(pixels[:, :, :1], 3, axis=2)


def _luma(pixels: Pixels) -> npt.NDArray[np.uint32]:
    red, green, blue = (pixels[:, :, c : c + 1].astype(np.uint32) for c in range(3))
    return (299 * red + 587 * green + 114 * blue + 500) // 1000  # integers: the same everywhere


def _by_rows(change: Callable[[Pixels], npt.NDArray[Any]], pixels: Pixels, out: Pixels) -> Pixels:
    """Apply ``change`` to bands of rows, so that its float intermediates take few megabytes."""
    band = max(1, BAND_SAMPLES // (pixels.shape[1] * pixels.shape[2]))
    for top in range(0, len(pixels), band):
        out[top : top + band] = change(pixels[top : top + band])
    return out


# --- fit ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a picture of some size lies in the record's height × width.

    Attributes:
        box: left, top, right and bottom of what is shown of it, in the picture's own pixels.
        height, width: the size in which that is shown.
        top, left: its corner in the record's pixels; around it lies the padding.
    """

    box: tuple[float, float, float, float]
    height: int
    width: int
    top: int
    left: int


def placement(height: int, width: int, record: Preprocess) -> Placement:
    """How ``fit`` places a picture of this size."""
    want_h, want_w = record.height, record.width
    if record.resize == "squash" or (height, width) == (want_h, want_w):
        whole = (0.0, 0.0, width, height)
        return Placement(box=whole, height=want_h, width=want_w, top=0, left=0)
    cover, inside = (choose(want_h / height, want_w / width) for choose in (max, min))
    scale = {"crop": cover, "fill": inside, "half_crop": (cover + inside) / 2}[record.resize]
    full_h, full_w = max(1, round(height * scale)), max(1, round(width * scale))
    # Only what stays visible is resized: a picture of 1 × 60,000 pixels would grow to gigabytes.
    show_h, show_w = min(full_h, want_h), min(full_w, want_w)
    top, left = (full_h - show_h) // 2, (full_w - show_w) // 2
    y, x = height / full_h, width / full_w
    return Placement(
        box=(left * x, top * y, (left + show_w) * x, (top + show_h) * y),
        height=show_h,
        width=show_w,
        top=(want_h - show_h) // 2,
        left=(want_w - show_w) // 2,
    )


def fit(pixels: Pixels, record: Preprocess) -> Pixels:
    """HWC of any size to the record's height × width in its resize mode; bilinear, antialiased."""
    if pixels.shape[:2] == (record.height, record.width):
        return pixels
    if pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        return _fit_image(image, record)
    place = placement(pixels.shape[0], pixels.shape[1], record)
    planes = [
        _array_of(_shown(Image.fromarray(pixels[:, :, c].astype(np.float32)), place))
        for c in range(pixels.shape[2])
    ]
    stacked: Pixels = np.rint(np.concatenate(planes, axis=2)).astype(pixels.dtype)
    return _pad(stacked, record, place)


def _fit_image(image: Image.Image, record: Preprocess) -> Pixels:
    """As ``fit``, of a grey or RGB picture of 8 bits in Pillow's memory."""
    if (image.height, image.width) == (record.height, record.width):
        return _array_of(image)
    place = placement(image.height, image.width, record)
    return _pad(_array_of(_shown(image, place)), record, place)


def _array_of(image: Image.Image) -> Pixels:
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _shown(image: Image.Image, place: Placement) -> Image.Image:
    """What is shown of a picture, in the size in which it is shown."""
    left, top, right, bottom = place.box
    box = (left, top, min(right, image.width), min(bottom, image.height))  # rounding errors
    between = (image.height, place.width)  # the rows are brought to width first
    if math.prod(between) > MAX_PIXELS:
        raise too_large("a picture between its size and the record's", "{}×{}".format(*between))
    return _rows_first(image, place.height, place.width, box)


def _rows_first(
    image: Image.Image, height: int, width: int, box: tuple[float, float, float, float]
) -> Image.Image:
    """The part of a picture, resized along its rows and then along its columns.

    Each pass rounds. Pillow 13 begins with the columns where the height shrinks by more than twice
    what the width does, so that pixels differ by 1 from those of Pillow 12; here they do not.
    """
    if image.height - height > max(0, 2 * (image.width - width)):
        image = image.resize((width, image.height), _BILINEAR, (box[0], 0, box[2], image.height))
        box = (0, box[1], width, box[3])
    return image.resize((width, height), _BILINEAR, box)


def _pad(pixels: Pixels, record: Preprocess, place: Placement) -> Pixels:
    """The picture at its place in middle grey."""
    if pixels.shape[:2] == (record.height, record.width):
        return pixels
    grey = (full_scale(record.depth) + 1) // 2
    out = np.full((record.height, record.width, pixels.shape[2]), grey, pixels.dtype)
    top, left = place.top, place.left
    out[top : top + place.height, left : left + place.width] = pixels
    return out


# --- crop and normalize -------------------------------------------------------------------------


def centre_crop(pixels: Pixels, record: Preprocess) -> Pixels:
    """The centre of HWC (or NHWC) that the network sees; all of it where the record has no crop."""
    if record.crop is None:
        return pixels
    height, width = record.crop
    top, left = (pixels.shape[-3] - height) // 2, (pixels.shape[-2] - width) // 2
    return pixels[..., top : top + height, left : left + width, :]


def normalize(pixels: Pixels, record: Preprocess) -> npt.NDArray[np.float32]:
    """HWC (or NHWC) integers to CHW (NCHW) float32: ``x · a + b``, one a and b a channel.

    Of volumes DHWC to CDHW.

    ``a = 1 / (full scale · std)``, ``b = −mean / std``, both rounded to float32 once: the same two
    roundings everywhere, so that every caller gets the same bits.
    """
    gain, offset = gain_and_offset(record)
    values = pixels.astype(np.float32)
    values *= gain
    values += offset
    return np.ascontiguousarray(np.moveaxis(values, -1, -len(record.input_shape)))


def gain_and_offset(record: Preprocess) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """The factors ``a`` and the summands ``b`` of ``normalize``, one of each for every channel."""
    std = np.asarray(record.std, np.float64)
    gain = (1.0 / (full_scale(record.depth) * std)).astype(np.float32)
    return gain, (-np.asarray(record.mean, np.float64) / std).astype(np.float32)


def darkest(record: Preprocess) -> float:
    """The pixel 0 of the first channel as a network sees it: what lies outside of a volume."""
    return float(gain_and_offset(record)[1][0])


def denormalize(images: npt.NDArray[np.float32], record: Preprocess) -> Pixels:
    """The integers that ``normalize`` was given: NCHW float32 to NHWC, exactly."""
    gain, offset = (t.astype(np.float64) for t in gain_and_offset(record))
    values = np.rint((np.moveaxis(images, -len(record.input_shape), -1) - offset) / gain)
    return values.astype(np.uint8 if record.depth == 8 else np.uint16)


Store = Literal["auto", "png", "pixels", "original"]
Storing = Store | Literal["decoders"]  # what an import makes of ``auto`` beside a GPU's decoders


def encode(pixels: Pixels, store: Storing = "png") -> bytes:
    """HWC to lossless file bytes: compressed, or with ``pixels`` what reads without decoding.

    What ``headers.keeps_original`` takes is not encoded; of ``auto`` and its like the rest is PNG.

    PNG, or TIFF for channels other than 1 or 3; PGM or PPM, or TIFF where these would not do.
    """
    if store == "pixels" and pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
        height, width, channels = pixels.shape
        head = raw_head(Preprocess(height=height, width=width, channels=channels))
        return (head or b"") + pixels.tobytes()
    if store == "pixels" or pixels.shape[2] not in (1, 3):
        import tifffile

        out = io.BytesIO()
        compression = None if store == "pixels" else "zlib"
        tifffile.imwrite(
            out,
            pixels if pixels.shape[2] > 1 else pixels[:, :, 0],
            photometric="minisblack",
            planarconfig="contig" if pixels.shape[2] > 1 else None,
            compression=compression,
        )
        return out.getvalue()
    import cv2

    bgr = pixels[:, :, ::-1] if pixels.shape[2] == 3 else pixels
    # OpenCV's default is the fastest of its settings to write (1.8 ms at 224 × 224), and to read.
    done, content = cv2.imencode(".png", np.ascontiguousarray(bgr))
    if not done:
        raise InputError("a picture could not be encoded", seen=f"{pixels.dtype} {pixels.shape}")
    return content.tobytes()


def stored_pixels(content: bytes | bytearray, record: Preprocess) -> Pixels | None:
    """What ``fitted`` makes of a file that ``encode`` stored for this record; None of any other.

    Of ``pixels`` it is a view of ``content``. OpenCV decodes a PNG without Python's lock, which
    Pillow takes again and again: 4 threads read 3,256 pictures of 256 × 256 a second and 1,772.
    """
    head = raw_head(record)
    if head is not None and content.startswith(head):
        shape = record.height, record.width, record.channels
        fits = len(content) == len(head) + math.prod(shape)
        return np.frombuffer(content, np.uint8, offset=len(head)).reshape(shape) if fits else None
    return _plain_png(content, record)


@functools.lru_cache(maxsize=16)
def raw_head(record: Preprocess) -> bytes | None:
    """The header of the PPM or PGM files that ``encode`` stores ``pixels`` in, if it does."""
    if record.depth != 8 or record.channels not in (1, 3):
        return None
    return b"P%d\n%d %d\n255\n" % (6 if record.channels == 3 else 5, record.width, record.height)


def _plain_png(content: bytes | bytearray, record: Preprocess) -> Pixels | None:
    kind = {1: 0, 3: 2}.get(record.channels)  # grey or RGB
    if kind is None or len(content) < 57:
        return None
    sides = struct.pack(">II", record.width, record.height)
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + sides + bytes((record.depth, kind, 0, 0, 0))
    # a picture with other chunks may have to be turned, or be transparent
    if not content.startswith(head) or content[37:41] != b"IDAT" or b"eXIf" in content:
        return None
    import cv2

    pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:  # damaged: ``fitted`` says how
        return None
    if record.channels == 3:
        cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB, dst=pixels)
    shaped: Pixels = pixels.reshape(record.height, record.width, record.channels)
    return shaped
