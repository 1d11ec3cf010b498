"""archive: a ZIP of stored, aligned members that has one form only, as a plan's file is one."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

from tessella.artifacts.program import ALIGNMENT
from tessella.core.errors import CorruptArtifact

MAX_JSON_BYTES = 64 << 20
HEADER = 30  # bytes before a member's name
SMALL = 1 << 12  # bytes, of headers and short members


def archive_of(members: Mapping[str, bytes]) -> bytes:
    """The bytes of a ZIP with these members, in their order."""
    out = io.BytesIO()
    _write(out, members)
    return out.getvalue()


def _write(out: io.BytesIO, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            _add_aligned(archive, out, name, content)


class _Same(io.BytesIO):
    """A file that compares what is written with what it should be; it keeps headers alone, as
    these are written twice.
    """

    def __init__(self, right: bytes) -> None:
        super().__init__()
        self._right, self._place, self._end, self._large_is_same = right, 0, 0, True
        self._small: dict[int, bytes] = {}  # by their place

    def write(self, data: Any) -> int:
        size = len(data)
        if size < SMALL:
            self._small[self._place] = bytes(data)
        else:
            self._large_is_same &= self._right.startswith(data, self._place)
        self._place += size
        self._end = max(self._end, self._place)
        return size

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = io.SEEK_SET) -> int:
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._end}[whence]
        self._place = begin + place
        return self._place

    @property
    def is_same(self) -> bool:
        small = (self._right[at : at + len(data)] == data for at, data in self._small.items())
        return self._large_is_same and self._end == len(self._right) and all(small)


def _content(archive: bytes, info: zipfile.ZipInfo) -> bytes:
    """What a member holds, behind its own header; whether that is so, is compared later."""
    header = archive[info.header_offset : info.header_offset + HEADER]
    names, extra = struct.unpack("<HH", header[-4:])
    start = info.header_offset + HEADER + names + extra
    return archive[start : start + info.file_size]


def _add_aligned(archive: zipfile.ZipFile, out: io.BytesIO, name: str, content: bytes) -> None:
    """Add a member whose content starts at a multiple of ``ALIGNMENT``, with a fixed date."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    header = HEADER + len(name.encode())
    padding = -(out.tell() + header + 4) % ALIGNMENT
    info.extra = struct.pack("<HH", 0x5450, padding) + b"\0" * padding
    archive.writestr(info, content)


def members_of(content: bytes, first: str, where: str) -> dict[str, bytes]:
    """The members by name, of a ZIP that is byte for byte what ``archive_of`` makes of them.

    So nothing can hide or change in the headers, the directory, or between the members.

    Args:
        first: the name of the first member.

    Raises:
        CorruptArtifact: it is none.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        infos = archive.infolist()
        names = [i.filename for i in infos]
        if names[:1] != [first] or len(set(names)) != len(names):
            raise not_a_plan(where, f"{len(names)} members: {str(names[:9])[:120]}")
        for info in infos:  # before anything is read: nothing may unpack to more than it is
            stored = info.compress_type == zipfile.ZIP_STORED
            if not stored or info.compress_size != info.file_size:
                raise not_a_plan(where, f"member {info.filename[:80]!r} is not stored as it is")
            if info.filename.endswith((".json", ".jsonl")) and info.file_size > MAX_JSON_BYTES:
                raise not_a_plan(where, f"{info.filename[:80]} has {info.file_size:,} bytes")
        if sum(info.file_size for info in infos) > len(content):
            raise not_a_plan(where, "members that overlap")
        members = {info.filename: _content(content, info) for info in infos}
    except (  # RuntimeError: encrypted, odd flags
        zipfile.BadZipFile, ValueError, EOFError, OSError, struct.error, RuntimeError, KeyError,
    ) as error:  # fmt: skip
        raise not_a_plan(where, str(error)[:120]) from error
    again = _Same(content)
    _write(again, members)
    if not again.is_same:
        raise not_a_plan(where, "bytes beside the members, or headers that were changed")
    return members


def not_a_plan(where: str, seen: object) -> CorruptArtifact:
    """The error that says that a file, or a member of it, is not what a plan has there."""
    return CorruptArtifact(
        f"{where} is not a plan, or it was truncated or changed",
        seen=seen,
        fix="copy or build the plan again",
    )
