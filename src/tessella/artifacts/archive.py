"""archive: a ZIP of stored, aligned members that has one form only, as a plan's file is one."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping

from tessella.artifacts.program import ALIGNMENT
from tessella.core.errors import CorruptArtifact

MAX_JSON_BYTES = 64 << 20


def archive_of(members: Mapping[str, bytes]) -> bytes:
    """The bytes of a ZIP with these members, in their order."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            _add_aligned(archive, out, name, content)
    return out.getvalue()


def _add_aligned(archive: zipfile.ZipFile, out: io.BytesIO, name: str, content: bytes) -> None:
    """Add a member whose content starts at a multiple of ``ALIGNMENT``, with a fixed date."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    header = 30 + len(name.encode())
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
        members = {name: archive.read(name) for name in names}
    except (  # RuntimeError: encrypted, odd flags
        zipfile.BadZipFile, ValueError, EOFError, OSError, struct.error, RuntimeError, KeyError,
    ) as error:  # fmt: skip
        raise not_a_plan(where, str(error)[:120]) from error
    if archive_of(members) != content:
        raise not_a_plan(where, "bytes beside the members, or headers that were changed")
    return members


def not_a_plan(where: str, seen: object) -> CorruptArtifact:
    """The error that says that a file, or a member of it, is not what a plan has there."""
    return CorruptArtifact(
        f"{where} is not a plan, or it was truncated or changed",
        seen=seen,
        fix="copy or build the plan again",
    )
