"""The trash of a workspace: deleting moves an artifact there, emptying it frees the disk."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from tessella.artifacts.files import read_document, to_document, write_atomic
from tessella.core.errors import TessellaError, UsageError
from tessella.jobs.store import Store
from tessella.studio.workspace import Kind, Workspace

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Deleted:
    """An artifact in the trash; ``refs`` are the places that it had: a plan may bring its front."""

    key: str
    what: Kind
    refs: tuple[str, ...]
    nbytes: int
    time: float


class Trash:
    """Deletes, restores, and frees.

    Args:
        store: jobs that have not ended protect what they read and write.
    """

    def __init__(self, workspace: Workspace, store: Store) -> None:
        self._workspace, self._store = workspace, store
        self._folder = workspace.own("trash")

    def delete(self, kind: Kind, ref: str) -> Deleted:
        """Move an artifact into the trash.

        Raises:
            UsageError: there is none, or a job that has not ended names it.
        """
        path = self._workspace.path(ref)
        if not path.exists():
            raise UsageError(f"there is no such {kind}", seen=ref, fix="reload the page")
        for job in self._store.jobs(status=("waiting", "running")):
            if any(_names(word, ref, path) for word in job.argv):
                raise UsageError(
                    f"a job that has not ended uses this {kind}",
                    seen=f"{job.name}: {job.command}",
                    fix="stop that job first",
                )
        paths = [path]
        front = path.with_suffix(".front")
        if kind == "plan" and front.is_dir():
            paths.append(front)
        key = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
        deleted = Deleted(
            key=key,
            what=kind,
            refs=tuple(self._workspace.ref(p) for p in paths),
            nbytes=sum(map(size_of, paths)),
            time=time.time(),
        )
        folder = self._folder / key
        folder.mkdir()
        write_atomic(folder / "about.json", to_document("deleted", VERSION, deleted))
        for number, each in enumerate(paths):
            os.rename(each, folder / str(number))
        return deleted

    def content(self) -> list[Deleted]:
        """What is in the trash, the last first."""
        found = []
        for folder in sorted(self._folder.iterdir(), reverse=True):
            try:
                found.append(self._about(folder.name))
            except TessellaError:  # half deleted by a crash: nothing that could be restored
                continue
        return found

    def restore(self, key: str) -> Deleted:
        """Put an artifact back where it was.

        Raises:
            UsageError: something else lies there by now.
        """
        deleted = self._about(key)
        places = [self._workspace.path(ref) for ref in deleted.refs]
        for place in places:
            if place.exists():
                raise UsageError(
                    "something else has this name by now",
                    seen=self._workspace.ref(place),
                    fix="delete or move that first",
                )
        for number, place in enumerate(places):
            place.parent.mkdir(parents=True, exist_ok=True)
            if (self._folder / key / str(number)).exists():
                os.rename(self._folder / key / str(number), place)
        shutil.rmtree(self._folder / key)
        return deleted

    def empty(self) -> int:
        """Free the disk; returns how many bytes."""
        freed = sum(d.nbytes for d in self.content())
        for folder in self._folder.iterdir():
            shutil.rmtree(folder)
        for job in self._store.jobs(trashed=True):
            self._store.purge(job.id)
        return freed

    def _about(self, key: str) -> Deleted:
        if not re.fullmatch(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}", key):
            raise UsageError("there is no such thing in the trash", seen=key[:40])
        path = self._folder / key / "about.json"
        return read_document(path, Deleted, kind="deleted", version=VERSION)


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(
        entry.lstat().st_size
        for folder, _, files in os.walk(path)
        for entry in (Path(folder) / f for f in files)
    )


def _names(word: str, ref: str, path: Path) -> bool:
    """Whether a word of a command names an artifact, or something in it."""
    for start in (ref, str(path)):
        named = word.rpartition("=")[2].removeprefix("./")
        if named == start or named.startswith(f"{start}/"):
            return True
    return False
