"""Reading and writing artifacts: atomic and durable writes, checked reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tessella.core.errors import ArtifactError, CorruptArtifact, UnknownVersion
from tessella.core.record import from_plain, parse_json, to_plain

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Member:
    """Hash and size of a file, as a manifest lists them."""

    sha256: str
    nbytes: int


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def member(path: Path) -> Member:
    return Member(sha256=sha256(path), nbytes=path.stat().st_size)


def check_member(path: Path, expected: Member, *, deep: bool = True) -> None:
    """Raise ``CorruptArtifact`` unless a file has the listed size and, if ``deep``, the hash."""
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        raise CorruptArtifact("a file is missing", seen=path, fix="restore it or make it again")
    if size != expected.nbytes:
        raise CorruptArtifact(
            f"{path.name} was truncated or changed",
            seen=f"{size} bytes instead of {expected.nbytes} in {path}",
            fix="restore it or make it again",
        )
    if deep and sha256(path) != expected.sha256:
        raise CorruptArtifact(
            f"{path.name} does not match its hash: some bytes changed",
            seen=path,
            fix="restore it or make it again",
        )


def read_file(path: Path, kind: str) -> bytes:
    """The content of a plain file, whatever a path from elsewhere may name.

    Args:
        kind: what the file should be, in words.

    Raises:
        ArtifactError: there is none; it is a folder, a device, a pipe or a file of the system, that
            does not say how long it is; it is larger than memory; or it cannot be read.
    """
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError("neither folders nor devices are read")
            if found.st_size > memory:
                raise MemoryError(f"{found.st_size:,} bytes, with {memory:,} of memory")
            return file.read(found.st_size) if found.st_size else b""
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ArtifactError(
            f"there is no {kind} here", seen=str(path)[:200], fix=f"give the path of a {kind}"
        ) from error
    except (OSError, ValueError, MemoryError) as error:
        shown = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ArtifactError(
            f"the {kind} cannot be read",
            seen=f"{shown}: {str(path)[:200]}",
            fix="check that it is whole, and that you may read it",
        ) from error


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; of a pipe nobody is waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_place(path: Path) -> None:
    """Check that a file or folder can be made here, before work is done that it shall hold.

    Raises:
        ArtifactError: a file is in the way, or nothing may be written there.
    """
    nearest = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
    with _write_errors(path), tempfile.TemporaryFile(dir=nearest):
        pass


def write_atomic(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it: a crash leaves the old file or the new one, whole."""
    temporary = _beside(path, "tmp")
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_folder(
    path: Path, fill: Callable[[Path], None], *, unfinished: Path | None = None
) -> None:
    """Make a folder: ``fill`` writes a temporary one, which is synced to disk, then renamed.

    An existing folder of that name is replaced only when the new one is complete, and put back if
    that fails.

    Args:
        unfinished: use this folder, which may be there already, and leave it when interrupted:
            ``fill`` goes on in it the next time.
    """
    temporary, retired = unfinished or _beside(path, "tmp"), _beside(path, "old")
    with _write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if unfinished is None:
            shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(exist_ok=unfinished is not None)
        try:
            fill(temporary)
            _sync_tree(temporary)
            _swap(temporary, path, retired)
        except BaseException as error:
            if unfinished is None or not isinstance(error, KeyboardInterrupt):
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        _sync_folder(path.parent)
        shutil.rmtree(retired, ignore_errors=True)


def _swap(new: Path, path: Path, retired: Path) -> None:
    if not path.exists():
        os.replace(new, path)
        return
    os.replace(path, retired)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(retired, path)
        raise


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    for entry in sorted(folder.rglob("*")):
        if entry.is_dir():
            _sync_folder(entry)
        else:
            sync_file(entry)
    _sync_folder(folder)


def _beside(path: Path, ending: str) -> Path:
    """A hidden path in the same folder that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.{ending}")


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn an ``OSError`` into an ``ArtifactError`` that names ``path``."""
    try:
        yield
    except OSError as error:
        is_folder = isinstance(error, IsADirectoryError)
        raise ArtifactError(
            f"{path.name} could not be written",
            seen=f"{error.strerror or error}: {path if is_folder else path.parent}",
            fix="give a file's name" if is_folder else "free some disk space or write elsewhere",
        ) from error


def to_document(kind: str, version: int, record: Any) -> bytes:
    """The JSON text of a record under its kind and version."""
    plain = {"kind": f"tessella.{kind}", "version": version, **to_plain(record)}
    return (json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def from_document(content: bytes, cls: type[R], *, kind: str, version: int, where: str) -> R:
    """The record in a document; refuses another kind and unknown versions."""
    data = parse_json(content, where=where)
    if not isinstance(data, dict) or data.get("kind") != f"tessella.{kind}":
        raise CorruptArtifact(
            f"{where} is not a Tessella {kind}",
            seen=data.get("kind") if isinstance(data, dict) else type(data).__name__,
            fix=f"give the path of a {kind}",
        )
    if type(data.get("version")) is not int or data["version"] != version:
        command = data.get("rebuild")
        again = f": {command}" if isinstance(command, str) and command.isprintable() else ""
        raise UnknownVersion(
            f"{where} has a version that this Tessella does not read",
            seen=f"version {data.get('version')!r}, read here: {version}",
            fix=f"use the Tessella that wrote it, or make the {kind} again{again}",
        )
    plain = {k: v for k, v in data.items() if k not in ("kind", "version")}
    return from_plain(cls, plain, where=where)


def read_document(path: Path, cls: type[R], *, kind: str, version: int) -> R:
    """The record in a file; a missing file is an ``ArtifactError`` that names the path."""
    return from_document(read_file(path, kind), cls, kind=kind, version=version, where=str(path))
