"""What a confined process that made a part of an import says of it, and where it is at work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessella.artifacts.files import Member
from tessella.artifacts.shards import HASH_BYTES
from tessella.data.moments import Sums


@dataclass(frozen=True, kw_only=True)
class Part:
    """Some files of one split as they were read, and their shard.

    Attributes:
        skipped: why files are left out, by their place in the plan.
        hashes: the SHA-256 of each other file's content in the shard, one behind the other.
        sides: height and width of their pictures, where the headers tell them.
        sums: see ``Moments.sums``; of all their pixels.
        deeper: how many have more bits than are stored.
        enlarged: places of those that are stored much larger than they are.
        shard: hash and size of the file; None if every file is left out.
    """

    skipped: dict[int, str]
    hashes: bytes
    sides: list[tuple[int, int] | None]
    sums: Sums
    deeper: int
    enlarged: list[int]
    shard: Member | None

    def to_json(self) -> dict[str, Any]:
        """What a confined process answers, and the journal of an import keeps."""
        shard = None if self.shard is None else vars(self.shard)
        return {**vars(self), "hashes": self.hashes.hex(), "shard": shard}


def part_in(plain: dict[str, Any]) -> Part:
    """The part that ``Part.to_json`` wrote; a confined process's answer is taken apart here.

    Raises:
        ValueError, KeyError, TypeError: it is none.
    """
    shard, (count, sums, squares) = plain["shard"], plain["sums"]
    hashes = bytes.fromhex(plain["hashes"])
    if len(hashes) != HASH_BYTES * len(plain["sides"]):
        raise ValueError(f"{len(hashes)} bytes of hashes, {len(plain['sides'])} pictures")
    return Part(
        skipped={int(place): str(reason) for place, reason in plain["skipped"].items()},
        hashes=hashes,
        sides=[None if s is None else (int(s[0]), int(s[1])) for s in plain["sides"]],
        sums=(int(count), list(map(int, sums)), list(map(int, squares))),
        deeper=int(plain["deeper"]),
        enlarged=list(map(int, plain["enlarged"])),
        shard=None if shard is None else Member(sha256=shard["sha256"], nbytes=shard["nbytes"]),
    )


def note_place(file: int, place: int) -> None:
    """Say which file of a part comes next, for whoever finds the process ended."""
    os.pwrite(file, b"%8d" % place, 0)


def place_in(at: Path) -> int:
    """The last ``note_place``; -1: there is none."""
    try:
        return int(at.read_bytes())
    except (OSError, ValueError):
        return -1
