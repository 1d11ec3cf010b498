"""What a killed import leaves: the shards of its parts, and a journal of them.

Who goes on trusts neither blindly: every image that the journal names is read again and compared
with its hash; where one differs, the import begins anew.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from tessella.artifacts.dataset import unfinished_of
from tessella.artifacts.files import check_member, sync_file
from tessella.artifacts.shards import read_shard, shard_name
from tessella.core.errors import ArtifactError, TessellaError, UsageError
from tessella.core.headers import digest
from tessella.data.listing import SPLIT_NAMES
from tessella.data.part import Part, part_in
from tessella.data.parts import Plan

JOURNAL = "journal.jsonl"
SYNCING = 4  # threads that wait for the disk
FORMAT = 2  # of the journal: a line holds a ``Part``
Made = tuple[Part, list[Any]]  # a part, and the targets of the images in its shard


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
        self.folder = folder
        self._heading = {"fingerprint": fingerprint, "format": FORMAT}
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

        self._syncing = ThreadPoolExecutor(SYNCING, thread_name_prefix="sync")
        self._synced: list[Future[None]] = []

    def __enter__(self) -> Unfinished:
        return self

    def __exit__(self, *_: object) -> None:
        self._syncing.shutdown(cancel_futures=True)
        self._file.close()

    @property
    def is_of_another(self) -> bool:
        """Whether an import of other files or settings left what is there."""
        self._file.seek(0)
        first = self._file.readline()
        return first.endswith("\n") and first.strip() != json.dumps(self._heading)

    def go_on(self, plans: Sequence[Plan]) -> list[Made]:
        """The parts that are there already: the first of the plans."""
        made = self._checked(plans, self._read())
        if not made:
            self._begin()
        return made

    def append(self, part: Part, file: Path, plan: Plan) -> None:
        """Give a part's file the name of its shard, and note that it is there."""
        if part.shard is not None:
            shard = file.replace(self.folder / shard_of(plan))
            # now, while others are made: at the end all would wait for the disk at once
            self._synced.append(self._syncing.submit(sync_file, shard))
        self._file.write(json.dumps(part.to_json()) + "\n")
        self._file.flush()

    def remove(self) -> None:
        """The import is complete: only shards are left, and they are on the disk."""
        for synced in self._synced:
            synced.result()
        (self.folder / JOURNAL).unlink()
        for path in self.folder.glob("part-*"):  # of a process that outlived a killed import
            path.unlink(missing_ok=True)

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

    def _checked(self, plans: Sequence[Plan], lines: list[dict[str, Any]]) -> list[Made]:
        """The journal's parts with their targets; none where the shards are not the journal's."""
        made = []
        try:
            for plan, line in zip(plans, lines, strict=False):
                part = part_in(line)
                if len(part.sides) + len(part.skipped) != len(plan.files):
                    return []
                labels = self._labels(part, self.folder / shard_of(plan))
                if labels is None:
                    return []
                made.append((part, labels))
        except (OSError, KeyError, TypeError, ValueError, TessellaError):
            return []
        return made

    def _labels(self, part: Part, path: Path) -> list[Any] | None:
        """The targets in a part's shard; None where that is another one."""
        if part.shard is None:
            return []
        check_member(path, part.shard)
        table, _ = read_shard(path)
        contents = table.column("image").combine_chunks().field("bytes")
        hashes = [digest(content.as_py()) for content in contents]
        labels: list[Any] = table.column("label").to_pylist()
        return labels if b"".join(hashes) == part.hashes else None


def shard_of(plan: Plan) -> str:
    """The name of a part's shard."""
    return shard_name(SPLIT_NAMES[plan.split], plan.number)
