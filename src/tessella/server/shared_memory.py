"""System shared memory of clients on this host: tensors that are named instead of sent.

A client registers an object of POSIX shared memory under a name, and requests then say where in it
a tensor lies. The objects are read and written with calls that report what is not there, never
mapped: a mapping of an object that its owner makes shorter would kill the server (SIGBUS), and a
copy cannot change while it is checked. Registrations are files in a folder of the server, so that
all its processes know them.

Everything is checked where requests are parsed, in the event loop; what is large is copied in a
thread, from a descriptor of its own, so that others do not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import re
import stat
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from tessella.core.errors import InputError, ServeError
from tessella.server.limits import Limits

OBJECTS = "/dev/shm"  # where Linux shows the objects of POSIX shared memory
PREFIX = "tessella"  # only objects that are named like this may be registered
MOST_REGIONS = 256
# What requests may have copied in the event loop: it takes as long (0.1 ms) as to wake a thread.
BRIEF_BYTES = 1 << 20
_KEY = re.compile(rf"/?({PREFIX}[A-Za-z0-9._-]{{0,200}})")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a request says that a tensor lies: in a region, from a byte on, so many bytes."""

    region: str
    offset: int
    byte_size: int


@dataclass(frozen=True, kw_only=True)
class Region:
    """A registration; ``device`` and ``inode`` say which object the key meant then."""

    name: str
    key: str
    offset: int
    byte_size: int
    device: int
    inode: int


class Regions:
    """The registered regions of a server.

    Args:
        folder: for the registrations; only this user can look into it. None: there is no shared
            memory, and all that asks for it is refused.
        objects: the folder of the system's shared memory.
    """

    def __init__(self, folder: Path | None, limits: Limits, *, objects: str = OBJECTS) -> None:
        self._folder = folder
        self._limits = limits
        self._objects = objects
        self._open: dict[str, _Opened] = {}
        self._held_bytes = 0
        # When a registration changed last, for all processes: so that they look at the files only
        # then. No client has this file, so none can make it shorter.
        self._changed = memoryview(bytes(8)).cast("Q")
        if folder is not None:
            descriptor = os.open(folder / ".changed", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(descriptor, bytes(8), 0)  # a hole would need a page when disks are full
                self._changed = memoryview(mmap.mmap(descriptor, 8)).cast("Q")
            finally:
                os.close(descriptor)
        self._seen = self._changed[0]
        self._looked: set[str] = set()  # regions whose files were looked at since

    # --- registering ------------------------------------------------------------------------------

    def register(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Let requests name a part of an object of shared memory.

        Raises:
            InputError: a name, key, offset or size that cannot be.
            ServeError: 403 an object of another user, 404 none, 409 the name is taken, 429 too many
                regions, 501 the server takes no shared memory.
        """
        folder = self._require_folder()
        if not _NAME.fullmatch(name):
            raise InputError(
                "this cannot be the name of a region",
                seen=repr(name)[:140],
                fix="use 1 to 128 letters, digits, dashes and underscores",
            )
        if not isinstance(key, str) or not (known := _KEY.fullmatch(key)):
            raise InputError(
                "this cannot be the key of a region",
                seen=repr(key)[:140],
                fix=f"name the shared memory /{PREFIX}… of letters, digits, dots and dashes",
            )
        if not _is_size(offset) or not _is_size(byte_size) or not byte_size:
            raise InputError(
                "offset and byte_size of a region are numbers of bytes",
                seen=f"{offset!r:.40}, {byte_size!r:.40}",
                fix="send whole numbers, byte_size above 0",
            )
        if len(_registered(folder)) >= MOST_REGIONS:
            raise ServeError(
                "too many regions are registered",
                status=429,
                seen=MOST_REGIONS,
                fix="unregister some, or use one region for several tensors",
            )
        descriptor = self._open_object(known[1])
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if offset + byte_size > found.st_size:
            raise InputError(
                "the region is larger than its shared memory",
                seen=f"{offset:,} + {byte_size:,} bytes of {found.st_size:,}",
                fix="register what there is",
            )
        region = Region(
            name=name, key=key, offset=offset, byte_size=byte_size,
            device=found.st_dev, inode=found.st_ino,
        )  # fmt: skip
        complete = folder / f".{os.getpid()}"  # of this process, and no region can have the name
        complete.write_text(json.dumps(asdict(region)))
        try:
            (folder / name).hardlink_to(complete)
        except FileExistsError:
            raise ServeError(
                f"region {name!r} is registered already",
                status=409,
                fix="unregister it first, or choose another name",
            ) from None
        finally:
            complete.unlink()
        self._changed[0] = time.time_ns()

    def unregister(self, name: str | None = None) -> None:
        """Forget a region, or all; one that is not there is forgotten already."""
        folder = self._require_folder()
        for path in _registered(folder):
            if name in (None, path.name):
                path.unlink(missing_ok=True)
        self._changed[0] = time.time_ns()
        for known in list(self._open):
            if name in (None, known):
                os.close(self._open.pop(known)[2])

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """The regions as the protocol tells them.

        Raises:
            ServeError: 404, none of this name.
        """
        folder = self._require_folder()
        told: list[Region] = []
        for path in _registered(folder):
            with contextlib.suppress(FileNotFoundError):  # another process forgets it just now
                told += [_read(path)] if name in (None, path.name) else []
        if name is not None and not told:
            raise _unknown(name)
        return [
            {"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size}
            for r in told
        ]

    def close(self) -> None:
        """Close the objects; the registrations go with their folder."""
        for _, _, descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    # --- tensors ----------------------------------------------------------------------------------

    def place(self, parameters: dict[str, Any], what: str) -> Place | None:
        """Where the parameters of a tensor say that it lies, if they do.

        Raises:
            InputError: they cannot say that.
        """
        if "shared_memory_region" not in parameters:
            return None
        self._require_folder()
        region = parameters["shared_memory_region"]
        offset = parameters.get("shared_memory_offset", 0)
        byte_size = parameters.get("shared_memory_byte_size")
        if not isinstance(region, str) or not _is_size(offset) or not _is_size(byte_size):
            raise InputError(
                f"the place in shared memory of {what} is none",
                seen=f"{region!r:.60}, {offset!r:.40}, {byte_size!r:.40}",
                fix="send shared_memory_region, _offset and _byte_size: a name and two numbers",
            )
        return Place(region=region, offset=offset, byte_size=byte_size)

    def read(self, place: Place) -> Copy:
        """A copy of the bytes at a place that is to be made; its content is that of ``Copy.make``.

        Raises:
            InputError: the region has no such bytes. ServeError: 404 no such region, 413 larger
                than a body may be, 503 too many bytes are read at once.
        """
        descriptor, start = self._find(place)
        nbytes = place.byte_size
        if nbytes > self._limits.body_bytes:
            raise ServeError(
                f"a tensor is larger than {self._limits.body_bytes:,} bytes",
                status=413,
                seen=f"{nbytes:,} bytes in shared memory",
                fix="send fewer samples in one request",
            )
        if self._held_bytes + nbytes > self._limits.held_bytes:
            raise ServeError(
                "the server holds as many request bytes as it may",
                status=503,
                seen=f"{self._held_bytes:,} of {self._limits.held_bytes:,} bytes",
                fix="try again in a moment, or send smaller batches",
            )
        content = np.empty(nbytes, np.uint8)
        self._held_bytes += nbytes
        weakref.finalize(content, self._release, nbytes)
        return Copy(region=place.region, descriptor=descriptor, start=start, content=content.data)

    def write(self, place: Place, content: bytes) -> Copy:
        """A copy of an output to where its request wants it, that is to be made.

        Raises:
            InputError: it does not fit. ServeError: 404 no such region.
        """
        descriptor, start = self._find(place)
        if len(content) > place.byte_size:
            raise InputError(
                "an output does not fit its place in shared memory",
                seen=f"{len(content):,} bytes, room for {place.byte_size:,}",
                fix="name a larger place",
            )
        return Copy(
            region=place.region, descriptor=descriptor, start=start, content=memoryview(content),
            is_output=True,
        )  # fmt: skip

    def _release(self, nbytes: int) -> None:
        self._held_bytes -= nbytes

    def _find(self, place: Place) -> tuple[int, int]:
        """The descriptor of the region's object, and the first byte of the place in it."""
        if (changed := self._changed[0]) != self._seen:
            self._seen = changed
            self._looked.clear()
        known = self._open.get(place.region)
        if known is None or place.region not in self._looked:
            known = self._looked_up(place.region, known)
        _, region, descriptor = known
        if place.offset + place.byte_size > region.byte_size:
            raise InputError(
                f"region {place.region!r} has no such bytes",
                seen=f"{place.offset:,} + {place.byte_size:,} bytes of {region.byte_size:,}",
                fix="stay within the region as it was registered",
            )
        return descriptor, region.offset + place.offset

    def _looked_up(self, name: str, known: _Opened | None) -> _Opened:
        """The region as its registration is now."""
        if not _NAME.fullmatch(name):
            raise _unknown(name)
        folder = self._require_folder()
        try:
            found = os.stat(f"{folder}/{name}")
        except FileNotFoundError:
            raise _unknown(name) from None
        registered = found.st_ino, found.st_mtime_ns
        if known is None or known[0] != registered:
            known = self._reopen(folder / name, registered)
        self._looked.add(name)
        return known

    def _reopen(self, path: Path, registered: tuple[int, int]) -> _Opened:
        if earlier := self._open.pop(path.name, None):
            os.close(earlier[2])
        try:
            region = _read(path)
        except FileNotFoundError:
            raise _unknown(path.name) from None
        for name in [n for n in self._open if not (path.parent / n).exists()]:
            os.close(self._open.pop(name)[2])  # unregistered in another process
        descriptor = self._open_object(region.key.removeprefix("/"))
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != (region.device, region.inode):
            os.close(descriptor)
            raise ServeError(
                f"the shared memory of region {path.name!r} was replaced",
                status=409,
                fix="register it again",
            )
        self._open[path.name] = registered, region, descriptor
        return self._open[path.name]

    def _open_object(self, name: str) -> int:
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = os.open(f"{self._objects}/{name}", flags)
        except FileNotFoundError as error:
            raise ServeError(
                "there is no such shared memory",
                status=404,
                seen=name,
                fix="make it on the server's host before it is registered",
            ) from error
        except OSError as error:
            raise _foreign(name) from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            os.close(descriptor)
            raise _foreign(name)
        return descriptor

    def _require_folder(self) -> Path:
        if self._folder is None:
            raise ServeError(
                "this server takes no shared memory",
                status=501,
                fix="start it with --shared-memory, or send and ask for binary data",
            )
        return self._folder


@dataclass(frozen=True, kw_only=True)
class Copy:
    """Bytes to be copied from shared memory, or for an output to it.

    Attributes:
        descriptor: of the object; it is open until the event loop has its next turn.
        start: the first byte in the object.
        content: what is filled, or written.
    """

    region: str
    descriptor: int
    start: int
    content: memoryview
    is_output: bool = False

    def make(self, descriptor: int | None = None) -> memoryview:
        """Copy now; the content.

        Args:
            descriptor: another one of the same object.

        Raises:
            InputError: the object has become shorter. ServeError: 507 no memory is left.
        """
        descriptor = self.descriptor if descriptor is None else descriptor
        content, done = self.content, 0
        if self.is_output and self.start + len(content) > os.fstat(descriptor).st_size:
            raise _shorter(self.region)
        while done < len(content):
            part = [content[done:]]
            if self.is_output:
                done += _written(descriptor, part, self.start + done)
            elif got := os.preadv(descriptor, part, self.start + done):
                done += got
            else:
                raise _shorter(self.region)
        return content


def is_brief(copies: Sequence[Copy]) -> bool:
    """Whether to make these copies holds up the event loop for less than to wake a thread."""
    return sum(len(copy.content) for copy in copies) <= BRIEF_BYTES


async def make(copies: Sequence[Copy]) -> None:
    """Make copies: in the event loop if that is brief, else in a thread.

    Raises:
        InputError, ServeError: as ``Copy.make``.
    """
    if is_brief(copies):
        for copy in copies:
            copy.make()
        return
    # A region may be unregistered meanwhile, and its descriptor be another file's.
    kept = [os.dup(copy.descriptor) for copy in copies]

    def aside() -> None:
        try:
            for copy, descriptor in zip(copies, kept, strict=True):
                copy.make(descriptor)
        finally:
            for descriptor in kept:
                os.close(descriptor)

    await asyncio.shield(asyncio.to_thread(aside))  # it runs, and closes, also if nobody waits


def _written(descriptor: int, part: list[memoryview], start: int) -> int:
    try:
        return os.pwritev(descriptor, part, start)
    except OSError as error:
        raise ServeError(
            "an output cannot be written into shared memory", status=507, seen=error.strerror
        ) from error


_Opened = tuple[tuple[int, int], Region, int]  # its registration's file, the object's descriptor


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 48


def _registered(folder: Path) -> list[Path]:
    """The registrations' files; those that a process is writing begin with a dot."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _read(path: Path) -> Region:
    return Region(**json.loads(path.read_text()))


def _unknown(name: str) -> ServeError:
    return ServeError(
        "there is no such region", status=404, seen=repr(name)[:140], fix="register it first"
    )


def _foreign(name: str) -> ServeError:
    return ServeError(
        "this shared memory is not this server's user's",
        status=403,
        seen=name,
        fix="make it as the user that the server runs as",
    )


def _shorter(region: str) -> InputError:
    return InputError(
        f"the shared memory of region {region!r} has become shorter",
        fix="register it again, as it is now",
    )
