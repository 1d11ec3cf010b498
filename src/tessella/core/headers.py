"""Pictures whose header bounds what decoding costs: those that may be decoded in any thread.

Decoding is bounded by the pixels alone where every byte of a file is looked at once: a JPEG of one
scan or a few, a PNG without chunks that unfold, a BMP without compression. The walk here is strict
and short: whatever it does not know is not plain, and ``decoding`` gives it to a process with a
budget. It costs 2 to 5 µs a file.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tessella.core.preprocess import Preprocess, Storing

# 4 million pixels are decoded and resized in 60 ms (JPEG) to 180 ms (PNG): a thread can bear that.
PLAIN_PIXELS = 1 << 22
PLAIN_SCANS = 8 * PLAIN_PIXELS  # pixels × scans: each scan of a JPEG walks all of them again
PLAIN_BYTES = 16 << 20
HEAD_BYTES = 256 << 10  # Pillow joins a JPEG's Exif segments one by one: quadratic in the head
PNG_CHUNKS = 4096
TIFF_TAGS = 256
# Of a JPEG that is stored as it is, the pixels for each that its record has. Three times as high
# and wide it decodes in the time of nine; of up to 1.3 times it takes a host 0.3 to 0.9 of a PNG's.
KEPT_TIMES: dict[Storing, float] = {"auto": 1.3, "decoders": 9.0, "original": 9.0}

_BITS_PER_SAMPLE = 258
_PNG = b"\x89PNG\r\n\x1a\n"
# What neither unfolds nor is parsed further; text and profiles are compressed, eXIf is a TIFF.
_PNG_KINDS = frozenset(
    (b"PLTE", b"tRNS", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tIME", b"sBIT", b"bKGD", b"IDAT")
)
_SEQUENTIAL, _PROGRESSIVE = (0xFFC0, 0xFFC1), 0xFFC2
SCAN, EXIF = 0xFFDA, 0xFFE1
TABLES = (0xFFC4, 0xFFDB, 0xFFDD, 0xFFFE, *range(0xFFE0, 0xFFF0))
METADATA = (0xFFFE, *range(0xFFE1, 0xFFEE), 0xFFEF)  # not 0 and 14, which say what colours are
_EXIF_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8)  # of a value of each type


def is_plain(content: bytes, record: Preprocess | None = None) -> bool:
    """Whether decoding and fitting to ``record`` costs little, whatever the file's bytes are."""
    sides = None if len(content) > PLAIN_BYTES else sides_of(content)
    # Resizing first brings the rows to the record's width: see ``preprocess.fit``.
    between = 0 if record is None or sides is None else sides[0] * record.width
    return sides is not None and max(math.prod(sides), between) <= PLAIN_PIXELS and min(sides) > 0


def keeps_original(content: bytes, record: Preprocess, store: Storing) -> bool:
    """Whether a file may be stored as it is: a JPEG whose decoding for ``record`` costs little.

    It is upright, grey or RGB as the record, and has at most ``KEPT_TIMES`` its pixels. Only
    ``original`` keeps a progressive one: a host takes up to 1.4 times as long as for a PNG (291²
    for 256²), and a GPU's decoders leave it to the host.
    """
    if store not in KEPT_TIMES:
        return False
    frame = jpeg_frame(content)
    if frame is None or record.depth != 8 or frame.turned:
        return False
    if store != "original" and frame.progressive:
        return False
    most = min(KEPT_TIMES[store] * record.height * record.width, PLAIN_PIXELS)
    alike = frame.components == record.channels or (frame.components, record.channels) == (1, 3)
    return alike and 0 < frame.height * frame.width <= most


def sides_of(content: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG, PNG or BMP whose header is plain, as it tells them; else None."""
    try:
        if (frame := jpeg_frame(content)) is not None:
            return frame.height, frame.width
        if content.startswith(_PNG):
            return _png_sides(content)
        if content.startswith(b"BM"):
            return _bmp_sides(content)
    except struct.error:  # it ends before the walk does
        pass
    return None


def _bmp_sides(content: bytes) -> tuple[int, int] | None:
    nbytes, width, height, _, bits, compression = struct.unpack_from("<IiiHHI", content, 14)
    # A process takes 0.4 ms a file, and an import of 2,000 small BMPs twice as long for it.
    return (abs(height), width) if nbytes >= 40 and bits >= 8 and compression == 0 else None


@dataclass(frozen=True, kw_only=True)
class JpegFrame:
    """What the header of a JPEG says.

    Attributes:
        components: 1 (grey), 3 (RGB, nearly always as YCbCr) or 4 (CMYK).
        progressive: whether its scans refine the whole picture, or one walks it from top to bottom.
        turned: whether its metadata may say that it is to be turned; else it is upright.
    """

    height: int
    width: int
    components: int
    progressive: bool
    turned: bool


def jpeg_frame(content: bytes) -> JpegFrame | None:
    """What a JPEG says whose header is in order and whose scans are few; None of any other file."""
    try:
        return _jpeg_frame(content) if content.startswith(b"\xff\xd8") else None
    except struct.error:  # it ends before the walk does
        return None


def jpeg_segments(content: bytes) -> Iterator[tuple[int, int, int]]:
    """The marker, place and bytes of each segment of a JPEG's head, the first scan's last.

    Raises:
        struct.error: the file ends before.
    """
    place = 2
    while place < HEAD_BYTES:
        marker, nbytes = struct.unpack_from(">HH", content, place)
        yield marker, place, nbytes
        if marker == SCAN or nbytes < 2:
            return
        place += 2 + nbytes


def digest(content: bytes) -> bytes:
    """SHA-256 of a stored picture, of a JPEG without its comments and metadata: copies of one
    picture differ in these where a program has noted something in one.
    """
    hashed = hashlib.sha256()
    rest = 0
    try:
        for marker, place, nbytes in jpeg_segments(content) if content[:2] == b"\xff\xd8" else ():
            if marker in METADATA:
                hashed.update(content[rest:place])
                rest = place + 2 + nbytes
    except struct.error:  # it ends before its first scan does
        pass
    hashed.update(content[rest:])
    return hashed.digest()


def _jpeg_frame(content: bytes) -> JpegFrame | None:
    frame, exif = None, False
    for marker, place, nbytes in jpeg_segments(content):
        if marker == SCAN and frame is not None:
            return _with_scans(content, place, *frame)
        if marker in _SEQUENTIAL or marker == _PROGRESSIVE:
            if frame is not None:
                return None
            frame = (marker, *struct.unpack_from(">HHB", content, place + 5))
        elif marker == EXIF and content.startswith(b"Exif\0\0", place + 4):
            if exif or not _is_sound_exif(content[place + 10 : place + 2 + nbytes]):
                return None
            exif = True
        elif marker not in TABLES:
            return None
    return None


def _with_scans(
    content: bytes, place: int, marker: int, height: int, width: int, components: int
) -> JpegFrame | None:
    """The frame of a picture whose first scan begins at a place, if its scans are few."""
    (first,) = struct.unpack_from("B", content, place + 4)
    single = marker != _PROGRESSIVE and first == components
    # In entropy-coded data a zero follows every 0xFF, so no scan is missed.
    scans = 1 if single else content.count(b"\xff\xda", place)
    if height * width * scans > PLAIN_SCANS:
        return None
    return JpegFrame(
        height=height,
        width=width,
        components=components,
        progressive=not single,
        turned=any(content.find(word, 0, place) >= 0 for word in (b"Exif", b"rientation")),
    )


def _is_sound_exif(block: bytes) -> bool:
    """Whether the data of all EXIF tags lie inside of the block, without overlap.

    Pillow copies every tag's data (before 12, 64 KB for each of 5,000 tags that share them) and
    warns of each that lies outside.
    """
    order = "<" if block.startswith(b"II") else ">"
    (offset,) = struct.unpack_from(order + "I", block, 4)
    (tags,) = struct.unpack_from(order + "H", block, offset)
    entries = block[offset + 2 : offset + 2 + 12 * tags]
    total = 12 * tags
    if len(entries) != total:
        return False
    for _, kind, count, place in struct.iter_unpack(order + "HHII", entries):
        nbytes = count * (_EXIF_BYTES[kind] if kind < len(_EXIF_BYTES) else 1 << 16)
        if nbytes > 4:
            total += nbytes
            if place + nbytes > len(block):
                return False
    return bool(total <= len(block))


def _png_sides(content: bytes) -> tuple[int, int] | None:
    """Height and width of a PNG without chunks that decoders unpack or parse, else None."""
    head, width, height, bits = struct.unpack_from(">8sIIB", content, 8)
    place = 8 + 12 + 13
    if head != b"\0\0\0\x0dIHDR" or bits > 8:  # OpenCV reads 16 bits, and prints
        return None
    for _ in range(PNG_CHUNKS):
        nbytes, kind = struct.unpack_from(">I4s", content, place)
        if kind == b"IEND":
            return (height, width)
        if kind not in _PNG_KINDS or (kind != b"IDAT" and nbytes > HEAD_BYTES):
            return None
        place += 12 + nbytes
    return None


def bits_of(content: bytes) -> int:
    """The bits of a sample of a PNG, a TIFF, or a binary PGM or PPM; 8 of any other file."""
    try:
        if content.startswith(_PNG):
            return content[24]
        if content[:4] in (b"II*\0", b"MM\0*"):
            return _tiff_bits(content, "<" if content.startswith(b"II") else ">")
        if content[:2] in (b"P5", b"P6"):
            lines = (line.split(b"#")[0] for line in content[:512].split(b"\n"))
            largest = [field for line in lines for field in line.split()][3]
            return 16 if int(largest[:9]) > 255 else 8
    except (IndexError, ValueError, struct.error):  # damaged, as decoding will tell
        pass
    return 8


def _tiff_bits(content: bytes, order: str) -> int:
    (start,) = struct.unpack_from(f"{order}I", content, 4)
    (entries,) = struct.unpack_from(f"{order}H", content, start)
    for place in range(start + 2, start + 2 + 12 * min(entries, TIFF_TAGS), 12):
        tag, _, count, value = struct.unpack_from(f"{order}HHII", content, place)
        if tag == _BITS_PER_SAMPLE:  # in the entry itself if they fit its four bytes
            at = place + 8 if count <= 2 else value
            return int(struct.unpack_from(f"{order}H", content, at)[0])
    return 8
