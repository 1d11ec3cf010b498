"""One file to a stored picture: decode, fit, encode; and what an import notes of it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessella.artifacts.dataset import SkippedFile
from tessella.core.confined import Budget
from tessella.core.errors import DataError
from tessella.core.headers import bits_of, digest, keeps_original, sides_of
from tessella.core.pictures import MAX_PIXELS, Pixels
from tessella.core.preprocess import Preprocess, Storing, Volume, encode
from tessella.core.volumes import encoded, read_values, scaled
from tessella.data.moments import Sums, sums_of

MAX_FILE_BYTES = 1 << 30
ENLARGED = 2.0  # a picture that is stored so many times larger than it is, is told
FEW = 64  # files for each process: a start costs as much as reading 50 JPEGs of 500 × 375
# Scientific pictures are larger than what a server takes: 2²⁸ pixels of 16-bit RGB, some copies.
BUDGET = Budget(pixels=MAX_PIXELS, nbytes=8 << 30, seconds=120.0)
Decode = Callable[[bytes], Pixels]
Stored = Callable[[Any, str, Preprocess], Any]  # ``stored`` of a task's examples


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an import notes of a picture.

    Attributes:
        sha256: ``digest`` of the stored content: equal where the pixels are, if both are stored
            alike.
        sums: see ``moments.sums_of``; None where nobody asked.
        bits: of a sample in the file, as far as its header tells.
        enlarged: by what factor, at most of both sides; 1 where the header does not tell.
        sides: height and width of the picture in the file, where the header tells them.
    """

    sha256: bytes
    sums: Sums | None
    bits: int = 8
    enlarged: float = 1.0
    sides: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A file as the dataset stores it.

    Attributes:
        content: lossless file bytes in the record's size, or the file itself.
        path: its name in the dataset.
        label: the target as the dataset holds it; None until it is known.
    """

    content: bytes
    path: str
    facts: Facts
    label: Any = None


Read = Picture | SkippedFile


@dataclass(frozen=True, kw_only=True)
class Way:
    """How files become stored pictures.

    Attributes:
        decode: the pixels of a file's bytes, fitted to the record.
        is_sound: whether a JPEG can be decoded, where there is a quicker way to know than that.
    """

    record: Preprocess
    store: Storing
    decode: Decode
    is_sound: Callable[[bytes], bool] = lambda _: False


def read(
    file: str | os.PathLike[str], path: str, way: Way, *, measured: bool = True
) -> Picture | SkippedFile:
    """One file decoded, fitted and encoded, or a ``SkippedFile`` with the reason.

    Args:
        measured: whether the sums of its pixels are wanted. Without them a file that is stored as
            it is need not be decoded.
    """
    try:
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):  # before it is opened: a pipe would wait, a device
            raise DataError("it is no plain file")  # would never end
        if found.st_size > MAX_FILE_BYTES:
            raise DataError("the file is too large", seen=f"{found.st_size:,} bytes")
        with open(file, "rb") as opened:
            content = opened.read(found.st_size)  # 0 of a file of the system, which could wait, too
        kept = keeps_original(content, way.record, way.store)
        known = kept and not measured and way.is_sound(content)
        pixels = None if known else way.decode(content)
    except DataError as error:
        return skipped(path, error)
    except (OSError, ValueError) as error:  # ValueError: a NUL in a listed path
        reason = getattr(error, "strerror", None) or str(error)
        return SkippedFile(path=path, reason=f"the file cannot be opened: {reason}")
    stored = content if kept or pixels is None else encode(pixels, way.store)
    sides = sides_of(content)
    return Picture(
        content=stored,
        path=path,
        facts=Facts(
            sha256=digest(stored),
            sums=None if pixels is None or not measured else sums_of(pixels),
            bits=bits_of(content),
            enlarged=_enlarged(sides, way.record),
            sides=sides,
        ),
    )


def read_volume(file: str, path: str, about: Volume) -> Picture | SkippedFile:
    """One file of a volume as the dataset stores it, [D, H, W, 1] of 16 bits, or why not."""
    try:
        values, header = read_values(file)
        pixels = scaled(values, about.window)[..., None]
        content = encoded(pixels)
    except DataError as error:
        return skipped(path, error)
    except MemoryError:
        return SkippedFile(path=path, reason="there is not enough memory for it")
    facts = Facts(
        sha256=hashlib.sha256(content).digest(),
        sums=sums_of(pixels.reshape(-1, pixels.shape[2], 1)),
        bits=min(16, 8 * header.dtype.itemsize),
    )
    return Picture(content=content, path=path, facts=facts)


def _enlarged(sides: tuple[int, int] | None, record: Preprocess) -> float:
    if sides is None or min(sides) < 1:
        return 1.0
    # either may be the height: EXIF may turn a picture
    stored = record.height, record.width
    return min(max(stored) / max(sides), min(stored) / min(sides))


def skipped(path: str, error: DataError) -> SkippedFile:
    """A file that an error leaves out, with what to do about it."""
    seen = "" if error.seen is None else f" ({error.seen})"
    fix = "" if error.fix is None else f"; {error.fix}"
    return SkippedFile(path=path, reason=f"{error.wrong}{seen}{fix}")
