"""What a killed import leaves: shards as far as they came, and a journal of their parts.

Who goes on trusts neither blindly: every image that the journal names is read again and compared
with its hash; from the first difference on the import begins anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from tessella.artifacts.dataset import SkippedFile, unfinished_of
from tessella.artifacts.shards import SplitWriter
from tessella.core.errors import ArtifactError, UsageError
from tessella.data.listing import SPLIT_NAMES
from tessella.data.parts import Part
from tessella.data.reading import Facts, facts_in

JOURNAL = "journal.jsonl"
Outcomes = list[Facts | SkippedFile]
Rows = list[tuple[bytes, Any]]  # SHA-256 of the content, and target


def left_of(out: Path) -> int | None:
    """Bytes that a stopped import into a folder left beside it; None: there is nothing."""
    folder = unfinished_of(out)
    if not folder.is_dir():
        return None
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def discard(out: str | Path) -> int:
    """Remove what a stopped import into a folder left beside it; a dataset stays as it is.

    Returns:
        How many bytes it had.

    Raises:
        UsageError: there is nothing, or the import still runs.
    """
    out = Path(out)
    nbytes = left_of(out)
    if nbytes is None:
        raise UsageError(
            "no stopped import left anything here",
            seen=f"no {unfinished_of(out)}",
            fix="give the folder that the import was to make",
        )
    with Unfinished(unfinished_of(out), ""):
        shutil.rmtree(unfinished_of(out))
    return nbytes


class Unfinished:
    """The journal of an import in its folder; one process at a time.

    Args:
        fingerprint: of the import's settings and files. A journal of others is thrown away.

    Raises:
        UsageError: another process imports into the folder.
        ArtifactError: nothing can be written there.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder, self._heading = folder, {"fingerprint": fingerprint}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = (folder / JOURNAL).open("a+", encoding="utf-8")
        except OSError as error:
            raise ArtifactError(
                "nothing can be written where the dataset is to be",
                seen=f"{error.strerror}: {folder}",
                fix="free some disk space or import elsewhere",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UsageError(
                "another process imports into this folder",
                seen=folder,
                fix="wait for it, or choose another folder",
            ) from error

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def is_of_another(self) -> bool:
        """Whether an import of other files or settings left what is there."""
        self._file.seek(0)
        first = self._file.readline()
        return first.endswith("\n") and first.strip() != json.dumps(self._heading)

    def go_on(self, writers: Mapping[int, SplitWriter], splits: Sequence[int]) -> list[Outcomes]:
        """Set the writers behind the parts that are there, and give what was found in these."""
        parts = self._read()
        found, rows = [[_outcome(o) for o in part["outcomes"]] for part in parts], None
        if parts:
            rows = self._checked(writers, found, parts[-1]["places"], splits)
        if rows is None:
            self._begin()
            return []
        for split, writer in writers.items():
            shards, offset = parts[-1]["places"][str(split)]
            writer.go_on(shards, offset, rows[split])
        return found

    def append(self, part: Part, writers: Mapping[int, SplitWriter], splits: Sequence[int]) -> None:
        """Join a part to the shards, and note that it is there."""
        for split, file in part.files.items():
            chosen = zip(splits, part.outcomes, part.labels, strict=True)
            rows = [(o.sha256, v) for s, o, v in chosen if s == split and isinstance(o, Facts)]
            writers[split].append(file, rows)
            file.unlink()
        places = {split: writer.place() for split, writer in writers.items()}
        outcomes = [
            {"path": o.path, "reason": o.reason} if isinstance(o, SkippedFile) else o.to_json()
            for o in part.outcomes
        ]
        self._file.write(json.dumps({"outcomes": outcomes, "places": places}) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """The import is complete."""
        (self.folder / JOURNAL).unlink()

    def _begin(self) -> None:
        for path in self.folder.iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(self._heading) + "\n")
        self._file.flush()

    def _read(self) -> list[dict[str, Any]]:
        """The lines of the journal; none of another import's."""
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind("\n") + 1  # a kill may cut the last line
        if end < len(content):
            os.ftruncate(self._file.fileno(), len(content[:end].encode()))
            self._file.seek(0, os.SEEK_END)
        try:
            lines = [json.loads(line) for line in content[:end].splitlines()]
        except ValueError:
            return []
        if not lines or lines[0] != self._heading:
            return []
        return lines[1:]

    def _checked(
        self, writers: Mapping[int, SplitWriter], found: list[Outcomes],
        places: Mapping[str, Sequence[int]], splits: Sequence[int],
    ) -> dict[int, Rows] | None:  # fmt: skip
        """Hash and target of the images in the shards; None where they are not the journal's."""
        wanted: dict[int, list[bytes]] = {split: [] for split in writers}
        outcomes = [outcome for part in found for outcome in part]
        for split, outcome in zip(splits, outcomes, strict=False):
            if isinstance(outcome, Facts):
                wanted[split].append(outcome.sha256)
        rows: dict[int, Rows] = {}
        try:
            for split in writers:
                rows[split] = list(self._rows(SPLIT_NAMES[split], *places[str(split)]))
        except (OSError, KeyError, pa.ArrowException):
            return None
        same = all([h for h, _ in rows[split]] == wanted[split] for split in writers)
        return rows if same else None

    def _rows(self, name: str, shards: int, offset: int) -> Iterator[tuple[bytes, Any]]:
        for number in range(shards):
            path = self.folder / f"{name}-{number:05d}.arrow"
            is_last = offset and number == shards - 1
            with path.open("rb+" if is_last else "rb") as file:
                if is_last:
                    file.truncate(offset)
                stream = pa.ipc.open_stream(pa.memory_map(str(path)))
                for batch in stream:
                    contents, labels = batch.column(0).field("bytes"), batch.column(1)
                    for content, label in zip(contents, labels, strict=True):
                        yield hashlib.sha256(content.as_buffer()).digest(), label.as_py()


def _outcome(plain: dict[str, Any]) -> Facts | SkippedFile:
    return SkippedFile(**plain) if "reason" in plain else facts_in(plain)
