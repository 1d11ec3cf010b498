"""JPEG files that a GPU decodes to the pixels of the host: baseline, grey or YCbCr, upright."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tessella.core.headers import EXIF, PLAIN_PIXELS, SCAN, TABLES, jpeg_segments

_BASELINE, _ADOBE = 0xFFC0, 0xFFEE
_IDS = ((1, 2, 3), (0, 1, 2))  # of Y, Cb and Cr; libjpeg takes others for RGB, or guesses
# sampling factors of Y where those of Cb and Cr are 1 × 1; to the right, to below
_SAMPLINGS = ((1, 1), (2, 1), (2, 2))
MOST_HEADS, MOST_LENGTHS, MOST_HEAD_BYTES = 256, 4, 4096  # that are remembered
NARROWEST = 5  # libjpeg interpolates no chroma that is narrower than 3


class Frame(NamedTuple):
    """What the header of a JPEG says of its planes.

    Attributes:
        height, width: of the picture and its luma.
        across, down: the luma's samples for each of the chroma's, 1 or 2; 0 for grey.
    """

    height: int
    width: int
    across: int
    down: int

    @property
    def chroma(self) -> tuple[int, int]:
        """Height and width of each plane of chroma; 0 for grey."""
        if not self.across:
            return 0, 0
        return -(-self.height // self.down), -(-self.width // self.across)


def frame_of(content: bytes | memoryview) -> Frame | None:
    """The frame of a JPEG that a GPU may decode; None of all else, which the host decodes.

    That is: one scan of 8 bits by Huffman's code; grey, 4:4:4, 4:2:2 or 4:2:0, in YCbCr as libjpeg
    reads the markers; no EXIF block, which may turn the picture; at most ``PLAIN_PIXELS``.
    """
    start = bytes(content[:MOST_HEAD_BYTES])  # a view cannot be looked up
    for nbytes in _heads.lengths:
        if (known := _heads.frames.get(start[:nbytes])) is not None:
            return known
    frame, nbytes = _frame_of(bytes(content))
    if frame is not None and nbytes <= MOST_HEAD_BYTES:
        _heads.remember(start[:nbytes], frame)
    return frame


class _Heads:
    """What was read of the last heads. One encoder writes the same for all pictures of a size, and
    to read it takes 6 to 11 µs.
    """

    def __init__(self) -> None:
        self.frames: dict[bytes, Frame] = {}
        self.lengths: tuple[int, ...] = ()

    def remember(self, head: bytes, frame: Frame) -> None:
        """Keep what a head says, up to and with the number of planes in its scan."""
        if len(self.frames) >= MOST_HEADS or len(self.lengths) >= MOST_LENGTHS:
            self.frames.clear()
            self.lengths = ()
        self.frames[bytes(head)] = frame
        self.lengths = tuple({*self.lengths, len(head)})


_heads = _Heads()


def _frame_of(content: bytes) -> tuple[Frame | None, int]:
    """The frame, and how many of the file's first bytes say so."""
    if not content.startswith(b"\xff\xd8"):
        return None, 0
    frame, ids = None, b""
    try:
        for marker, place, nbytes in jpeg_segments(content):
            if marker == SCAN:
                return frame if content[place + 4] == len(ids) else None, place + 5
            if marker == _BASELINE and frame is None:
                frame, ids = _frame(content, place)
                if frame is None:
                    return None, 0
            elif marker == _ADOBE:
                if not _is_ycbcr(content, place, nbytes):
                    return None, 0
            elif marker == EXIF or marker not in TABLES:
                return None, 0
    except (struct.error, IndexError):  # it ends before its header does
        pass
    return None, 0


def _frame(content: bytes, place: int) -> tuple[Frame | None, bytes]:
    nbytes, bits, height, width, components = struct.unpack_from(">HBHHB", content, place + 2)
    ids = content[place + 10 : place + 10 + 3 * components : 3]
    factors = [divmod(f, 16) for f in content[place + 11 : place + 10 + 3 * components : 3]]
    sound = bits == 8 and nbytes == 8 + 3 * components and height > 0 and width >= NARROWEST
    if not sound or height * width > PLAIN_PIXELS:
        return None, ids
    if components == 1:  # nvJPEG makes nothing of 2 × 1, and says nothing
        return (Frame(height, width, 0, 0) if factors == [(1, 1)] else None), ids
    known = components == 3 and tuple(ids) in _IDS and factors[1:] == [(1, 1), (1, 1)]
    if not known or factors[0] not in _SAMPLINGS:
        return None, ids
    return Frame(height, width, *factors[0]), ids


def _is_ycbcr(content: bytes, place: int, nbytes: int) -> bool:
    """Whether an APP14 segment is not Adobe's, or says YCbCr."""
    adobe = content[place + 4 : place + 9] == b"Adobe" and nbytes >= 14
    return not adobe or content[place + 15] == 1
