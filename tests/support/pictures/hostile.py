"""Small files that ask for much, written by hand, and a mutator of good ones."""

from __future__ import annotations

import random
import re
import struct
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from tests.support.pictures.encoded import noise, png, png_of, saved, tiff


def tiff_of(width: int, height: int, *, planes: int = 1, compression: int = 1) -> bytes:
    """A TIFF's header with one strip of a few bytes."""
    entries = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, compression),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
        (277, 3, 1, planes),
        (278, 4, 1, height),
        (279, 4, 1, 1),
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(
        struct.pack("<HHII", *e) for e in entries
    )
    return b"II*\0" + struct.pack("<I", 8) + directory + bytes(4)


def gif_of(width: int, height: int) -> bytes:
    """A GIF of one colour that says nothing after its first pixels."""
    screen = struct.pack("<HH", width, height)
    return (
        b"GIF89a" + screen + b"\x80\0\0" + bytes(6)
        + b"\x2c" + bytes(4) + screen + b"\0\x02\x02\x4c\x01\0;"
    )  # fmt: skip


def bmp_of(width: int, height: int) -> bytes:
    """A BMP's header and nothing else."""
    shape = struct.pack("<iiHH", width, height, 1, 24)
    return b"BM" + struct.pack("<IIII", 54, 0, 54, 40) + shape + bytes(24)


def scans_of(side: int, count: int) -> bytes:
    """A progressive JPEG whose last scan comes ``count`` times more: 16 bytes each."""
    content = saved(Image.new("L", (side, side), 99), "JPEG", progressive=True)
    last = content.rindex(b"\xff\xda")
    return content[:-2] + content[last:-2] * count + content[-2:]


def exif_of(tags: int, nbytes: int) -> bytes:
    """A JPEG with many Exif tags that all have the same bytes."""
    entries = b"".join(struct.pack("<HHII", 1000 + i, 1, nbytes, 8) for i in range(tags))
    block = b"Exif\0\0II*\0" + struct.pack("<IH", 8, tags) + entries + bytes(4)
    block = block.ljust(nbytes + 14, b"\0")
    content = saved(Image.new("L", (8, 8)), "JPEG")
    return content[:2] + struct.pack(">HH", 0xFFE1, len(block) + 2) + block + content[2:]


# 32 × 24 pixels, so that a JPEG has whole blocks.
_RGB = np.asarray(Image.fromarray(noise(5, 7, 3)).resize((32, 24), Image.Resampling.BICUBIC))
_WIDE = noise(12, 10, 3, dtype=np.uint16)


def good_pictures() -> dict[str, bytes]:
    """Every format and every reader once."""
    image = Image.fromarray(_RGB)
    turned = Image.Exif()
    turned[274] = 6
    turned[0x010F] = "a maker of cameras"
    more = {"save_all": True, "append_images": [image.rotate(9)]}
    lzw = cv2.imencode(".tif", _WIDE[:, :, ::-1].copy(), [cv2.IMWRITE_TIFF_COMPRESSION, 5])[1]
    return {
        "jpeg": saved(image, "JPEG"),
        "turned jpeg": saved(image, "JPEG", exif=turned),
        "progressive": saved(image, "JPEG", progressive=True),
        "cmyk": saved(image.convert("CMYK"), "JPEG"),
        "png": saved(image, "PNG"),
        "palette": saved(image.quantize(16), "PNG", transparency=3),
        "turned png": saved(image, "PNG", exif=turned),
        "16-bit png": png_of(_WIDE, 2),
        "bmp": saved(image, "BMP"),
        "gif": saved(image, "GIF"),
        "frames of a gif": saved(image, "GIF", **more),
        "webp": saved(image, "WEBP"),
        "lossless webp": saved(image, "WEBP", lossless=True),
        "frames of a webp": saved(image, "WEBP", **more),
        "ppm": saved(image, "PPM"),
        "ppm in digits": b"P3 3 2 255 " + b"1 2 3 " * 6,
        "tiff": saved(image, "TIFF"),
        "turned tiff": saved(image, "TIFF", exif=turned),
        "tiff with lzw": saved(image, "TIFF", compression="tiff_lzw"),
        "tiff with jpeg": saved(image, "TIFF", compression="jpeg"),
        "16-bit tiff": tiff(_WIDE, photometric="rgb", compression="zlib"),
        "16-bit tiff with lzw": lzw.tobytes(),
        "pages": tiff(np.moveaxis(_WIDE, -1, 0), photometric="minisblack"),
        "tiles": tiff(noise(64, 64), tile=(16, 16)),
    }


# Small files that promise much: what, the file, what the refusal says.
PROMISES: tuple[tuple[str, bytes, str], ...] = (
    ("the attack of 122 bytes", tiff_of(0, 2_000_000_000), "no pixels"),
    ("a TIFF without height", tiff_of(2_000_000_000, 0), "no pixels"),
    ("a TIFF of one column", tiff_of(1, 2_000_000_000), "pixels"),
    ("a TIFF of many planes", tiff_of(4096, 4096, planes=60_000), "pixels"),
    ("a TIFF with LZW", tiff_of(1_000_000, 1, compression=5), "pixels"),
    ("a PNG without width", png(0, 2_000_000_000, 8, 2, b""), "read"),
    ("a PNG of one row", png(2_000_000_000, 1, 8, 0, bytes(9)), "pixels"),
    ("a PNG with a long side", png(1_000_000, 1, 8, 0, bytes(9)), "side of more than 262,144"),
    ("a PNG of 16 bits", png(60_000, 60_000, 16, 2, bytes(9)), "pixels"),
    ("a PPM", b"P6 2000000000 2000000000 255 ", "pixels"),
    ("a PPM without width", b"P6 0 2000000000 255 ", "read"),
    ("a GIF", gif_of(65_535, 65_535), "pixels"),
    ("a BMP without width", bmp_of(0, (1 << 31) - 1), "read"),
)


def mutated(content: bytes, seed: int) -> bytes:
    """A file with a few bytes changed, cut, doubled or replaced by extreme numbers."""
    draw = random.Random(seed)
    out = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4, 12))):
        place = draw.randrange(min(len(out), draw.choice((24, 64, 200, 1 << 20))))
        match draw.randrange(6):
            case 0:
                out[place] = draw.randrange(256)
            case 1:
                numbers = (b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", bytes(4), b"\xff" * 4)
                out[place : place + 4] = draw.choice(numbers)
            case 2:
                del out[place : place + draw.randrange(1, 9)]
            case 3:
                out[place:place] = draw.randbytes(draw.randrange(1, 9))
            case 4:
                out[place:place] = out[place : place + draw.randrange(1, 60)]
            case _:
                del out[max(place, 4) :]
        if not out:
            break
    return bytes(out)


def peak_bytes(process: str = "self") -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024
