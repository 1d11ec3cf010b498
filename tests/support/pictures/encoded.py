"""Pictures of noise, encoded: by Pillow and tifffile, and as PNGs written by hand."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import tifffile
from PIL import Image

from tessella.core.preprocess import Pixels


def noise(*shape: int, dtype: type = np.uint8, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, shape, dtype)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def tiff(pixels: Pixels, **options: object) -> bytes:
    out = io.BytesIO()
    tifffile.imwrite(out, pixels, **options)
    return out.getvalue()


def png(width: int, height: int, bits: int, color: int, rows: bytes) -> bytes:
    """A PNG from its parts, by the specification: independent of every library."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def png_of(pixels: Pixels, color: int) -> bytes:
    height, width, _ = pixels.shape
    rows = pixels.astype(">u2") if pixels.dtype == np.uint16 else pixels
    lines = b"".join(b"\0" + rows[y].tobytes() for y in range(height))
    return png(width, height, 8 * pixels.itemsize, color, lines)
