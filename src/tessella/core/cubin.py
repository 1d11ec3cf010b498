"""Machine code for a GPU as data: one kernel in an ELF file, checked before a driver sees it.

The CUDA driver is handed an address without a length and believes what it reads there, so every
offset of the file is followed here first.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import NamedTuple

MAX_BYTES = 32 << 20
_HEADER = struct.Struct("<4s12sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RESERVED = 0xFF00  # numbers of sections that stand for something else
_CUDA, _EXECUTABLE = 190, 2  # e_machine, e_type
_NO_BYTES = 8  # SHT_NOBITS: takes no place in the file
_SYMBOLS = 2  # SHT_SYMTAB
_RELOCATIONS = {4: struct.Struct("<QQq"), 9: struct.Struct("<QQ")}  # SHT_RELA, SHT_REL
_SELF = 6  # PT_PHDR: the segment that is the table of segments
_MAX_ALIGNMENT = 128
_BLACKWELL = 100  # from this architecture on, a cubin has sections .nv.merc.* besides
_INFO, _INFO_WITH_BYTES = ".nv.info", 4  # attributes of a kernel, the driver's to read
_WRITTEN = (".debug_", ".nv_debug_")  # what compilers say about sources, for people


class _Header(NamedTuple):
    """The file's first bytes."""

    magic: bytes
    kind: bytes
    type: int
    machine: int
    version: int
    entry: int
    segments: int  # where the table is
    sections: int
    flags: int
    nbytes: int
    segment_bytes: int
    segment_count: int
    section_bytes: int
    section_count: int
    names: int  # the section that holds the sections' names

    @classmethod
    def of(cls, cubin: bytes) -> _Header:
        return cls(*_HEADER.unpack_from(cubin))


@dataclass(frozen=True)
class _Section:
    """A line of the section table; ``fields`` as in the file: name, type, …, offset, size, …"""

    name: str
    fields: tuple[int, ...]

    @property
    def type(self) -> int:
        return self.fields[1]

    @property
    def offset(self) -> int:
        return self.fields[4]

    @property
    def nbytes(self) -> int:
        """The section's size in the file."""
        return 0 if self.type in (0, _NO_BYTES) else self.fields[5]

    @property
    def is_written(self) -> bool:
        """Whether the section only says where the kernel was built, which no GPU needs."""
        name = self.name
        for prefix in (".rela", ".rel"):
            name = name.removeprefix(prefix)
        return name.startswith(_WRITTEN)


def wrong(cubin: bytes, name: str, architecture: int) -> str | None:
    """Why untrusted bytes are not machine code with a kernel ``name``, or None.

    Args:
        architecture: 90 for ``sm_90``.
    """
    if not 64 <= len(cubin) <= MAX_BYTES:
        return f"a cubin of {len(cubin)} bytes"
    header = _Header.of(cubin)
    kind = (header.magic, header.kind[:2], header.type, header.machine)
    if kind != (b"\x7fELF", b"\x02\x01", _EXECUTABLE, _CUDA):
        return "no ELF file of a CUDA kernel"
    if architecture >= _BLACKWELL:
        return "machine code for Blackwell, whose second form of it is not checked yet"
    if (header.kind[2:], header.version, header.flags) not in _known_kinds(architecture):
        return f"machine code for something else than sm_{architecture}"
    try:
        sections = _sections(cubin)
        _segments(cubin)
    except ValueError as error:
        return str(error)
    names = [s.name for s in sections if s.name]
    if len(set(names)) != len(names):
        return "a section is there twice"
    if f".text.{name}" not in names:
        return f"it has no kernel {name!r}"
    return next(filter(None, (_wrong_section(cubin, s, sections) for s in sections)), None)


def _known_kinds(architecture: int) -> set[tuple[bytes, int, int]]:
    """The headers that compilers write: identification from its third byte on, version, flags.

    First those of CUDA 12, then those of CUDA 13, each with and without the features of a single
    architecture; CUDA 13 writes two kinds of both. For what is older than Hopper its ptxas writes
    CUDA 12's, with a version of its own. The list was taken from 3,500 kernels for Hopper, and from
    those that the tests compile for the others; a driver may crash on any other header.
    """
    old, new = (bytes([1, *abi, *bytes(7)]) for abi in ((0x33, 7), (0x41, 8)))
    versions = (0x80, 0x81) if architecture < 90 else (0x80,)
    return {
        *((old, v, architecture << 16 | own << 8 | architecture)
          for own in (0x05, 0x0D) for v in versions),
        *((new, 1, own << 24 | architecture << 8 | 0x04) for own in (0x05, 0x06, 0x09, 0x0A)),
    }  # fmt: skip


def _wrong_section(cubin: bytes, section: _Section, sections: list[_Section]) -> str | None:
    """Why a section's offsets lead out of the file, or None."""
    link, info, entry = section.fields[6], section.fields[7], section.fields[9]
    content = cubin[section.offset :][: section.nbytes]
    if not content:
        return None
    if link >= len(sections):
        return f"{section.name} belongs to section {link}"
    if entry and len(content) % entry:
        return f"{section.name} has {len(content)} bytes in entries of {entry}"
    if section.name.startswith(_INFO):
        return None if _are_attributes(content) else f"{section.name} is cut"
    if section.type == _SYMBOLS:
        texts = cubin[sections[link].offset :][: sections[link].nbytes]
        right = entry == _SYMBOL.size and all(
            texts.find(b"\0", text) >= 0 and _is_inside(sections, home, value, size)
            for text, _, _, home, value, size in _SYMBOL.iter_unpack(content)
        )
        return None if right else "a symbol leads nowhere"
    if section.type in _RELOCATIONS:
        symbols = sections[link].nbytes // _SYMBOL.size
        form = _RELOCATIONS[section.type]
        right = entry == form.size and all(
            what >> 32 < symbols and _is_inside(sections, info, place, 4)
            for place, what, *_ in form.iter_unpack(content)
        )
        return None if right else f"{section.name} leads nowhere"
    return None


def _is_inside(sections: list[_Section], number: int, start: int, nbytes: int) -> bool:
    """Whether bytes lie in a section; true for 0 and from 0xff00 on, which name no section."""
    if number == 0 or number >= _RESERVED:
        return True
    return number < len(sections) and start + nbytes <= sections[number].fields[5]


def _are_attributes(content: bytes) -> bool:
    """Whether a section consists of whole attributes: four bytes each, some followed by a value."""
    at = 0
    while at + 4 <= len(content):
        form, _, size = struct.unpack_from("<BBH", content, at)
        if not 1 <= form <= _INFO_WITH_BYTES:
            return False
        at += 4 + (size if form == _INFO_WITH_BYTES else 0)
    return at == len(content)


def stripped(cubin: bytes) -> bytes:
    """The same kernel without what compilers write for debuggers: lines of sources, their paths.

    So equal kernels are equal bytes wherever they were built, and a third as many. Sections keep
    their numbers; those that are dropped stay as empty ones. What is loaded as one stays together.

    Raises:
        ValueError: not a cubin, or one whose parts overlap.
    """
    sections, segments, header = _sections(cubin), _segments(cubin), _Header.of(cubin)
    made = bytearray(_HEADER.size)
    places: list[tuple[int, int, int]] = []  # of each part: from, to, and where it is now
    for start, stop in _parts(sections, segments, header):
        inside = [s.fields[8] for s in sections if s.nbytes and start <= s.offset < stop]
        made += bytes((start - len(made)) % max(1, *inside))
        places.append((start, stop, len(made)))
        made += cubin[start:stop]
    made += bytes(-len(made) % 8)
    end = len(made)

    def moved(offset: int, nbytes: int) -> int:
        """Nothing lies where the next part begins."""
        for start, stop, now in places:
            if nbytes and start <= offset < stop:
                return now + offset - start
            if start >= offset:
                return now
        return end

    now = header._replace(sections=end, segments=end + _SECTION.size * len(sections))
    for section in sections:
        fields = list(section.fields)
        fields[5] = 0 if section.is_written else fields[5]
        if section.type:  # the first line of the table is none
            fields[4] = moved(section.offset, 0 if section.is_written else section.nbytes)
        made += _SECTION.pack(*fields)
    for segment in segments:
        table = segment[0] == _SELF or segment[2] == header.segments
        place = now.segments if table else moved(segment[2], segment[5])
        made += _SEGMENT.pack(*segment[:2], place, *segment[3:])
    _HEADER.pack_into(made, 0, *now)
    return bytes(made)


def _parts(
    sections: list[_Section], segments: list[tuple[int, ...]], header: _Header
) -> list[tuple[int, int]]:
    """First byte and end of each part to keep: segments, and sections outside of segments."""
    loaded = [
        (s[2], s[2] + s[5]) for s in segments if s[0] != _SELF and s[5] and s[2] != header.segments
    ]
    alone = [(s.offset, s.offset + s.nbytes) for s in sections if s.nbytes and not s.is_written]
    parts = {
        *loaded,
        *((a, b) for a, b in alone if not any(x <= a and b <= y for x, y in loaded)),
    }
    dropped = [(s.offset, s.offset + s.nbytes) for s in sections if s.nbytes and s.is_written]
    places = sorted([*parts, *dropped])
    if any(stop > start for (_, stop), (start, _) in itertools.pairwise(places)):
        raise ValueError("parts of the machine code overlap")
    return sorted(parts)


def _sections(cubin: bytes) -> list[_Section]:
    """The section table; raises ``ValueError`` where it leads out of the file."""
    header = _Header.of(cubin)
    place, count = header.sections, header.section_count
    inside = place + _SECTION.size * count <= len(cubin) and header.names < count
    if header.section_bytes != _SECTION.size or not inside:
        raise ValueError("its section table leads out of the file")
    tables = [_SECTION.unpack_from(cubin, place + _SECTION.size * i) for i in range(count)]
    for fields in tables:
        if fields[1] != _NO_BYTES and fields[4] + fields[5] > len(cubin):
            raise ValueError("a section leads out of the file")
        if fields[8] > _MAX_ALIGNMENT:
            raise ValueError(f"a section aligned to {fields[8]} bytes")
    text = cubin[tables[header.names][4] :][: tables[header.names][5]]
    return [_Section(_name(text, fields[0]), fields) for fields in tables]


def _name(text: bytes, start: int) -> str:
    stop = text.find(b"\0", start)
    if stop < 0:
        raise ValueError("a section's name leads out of the file")
    return text[start:stop].decode("ascii", "replace")


def _segments(cubin: bytes) -> list[tuple[int, ...]]:
    """The segment table; raises ``ValueError`` where it leads out of the file."""
    header = _Header.of(cubin)
    place, count = header.segments, header.segment_count
    inside = place + _SEGMENT.size * count <= len(cubin)
    if count and (header.segment_bytes != _SEGMENT.size or not inside):
        raise ValueError("its segment table leads out of the file")
    segments = [_SEGMENT.unpack_from(cubin, place + _SEGMENT.size * i) for i in range(count)]
    if any(s[2] + s[5] > len(cubin) for s in segments):
        raise ValueError("a segment leads out of the file")
    return segments
