"""What people add to datasets, runs and plans: a title, tags and notes, by the artifact's ref.

Folders keep their names: commands, jobs and other artifacts go on finding them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from tessella.artifacts.files import from_document, to_document, write_atomic
from tessella.core.errors import UsageError

VERSION = 1
MOST_TITLE, MOST_NOTES, MOST_TAGS, MOST_TAG = 200, 20_000, 20, 40  # characters, and tags


@dataclass(frozen=True, kw_only=True)
class Label:
    """What people added to one artifact; an empty title leaves its own name."""

    title: str = ""
    notes: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """The content of ``labels.json``."""

    by_ref: dict[str, Label]


class Labels:
    """The labels of a workspace, in one small file."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "labels.json"
        self._lock = threading.Lock()
        self._stamp = -1
        self._known: dict[str, Label] = {}

    def of(self, ref: str) -> Label:
        return self._read().get(ref, Label())

    def title(self, ref: str, name: str) -> str:
        """The title of an artifact, its own name where it has none."""
        return self.of(ref).title or name

    def tags(self) -> list[str]:
        """Every tag that something has, in order."""
        return sorted({tag for label in self._read().values() for tag in label.tags})

    def put(self, ref: str, label: Label) -> None:
        """Replace what people added to an artifact.

        Raises:
            UsageError: it is too long.
        """
        tags = tuple(dict.fromkeys(" ".join(t.split()) for t in label.tags if t.strip()))
        label = Label(title=label.title.strip(), notes=label.notes.strip(), tags=tags)
        for what, length, most in (
            ("a title's characters", len(label.title), MOST_TITLE),
            ("a note's characters", len(label.notes), MOST_NOTES),
            ("tags", len(tags), MOST_TAGS),
            ("a tag's characters", max(map(len, tags), default=0), MOST_TAG),
        ):
            if length > most:
                raise UsageError(
                    f"{what} are at most {most:,}", seen=f"{length:,}", fix="use fewer"
                )
        with self._lock:
            known = {k: v for k, v in self._read().items() if k != ref}
            if label != Label():
                known[ref] = label
            write_atomic(self._path, to_document("labels", VERSION, _Labels(by_ref=known)))
            self._stamp = -1

    def _read(self) -> dict[str, Label]:
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return {}
        if stamp != self._stamp:
            read = from_document(
                self._path.read_bytes(),
                _Labels,
                kind="labels",
                version=VERSION,
                where=str(self._path),
            )
            self._known, self._stamp = read.by_ref, stamp
        return self._known
