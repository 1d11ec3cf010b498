"""What people draw on pictures in the studio: versions beside a dataset, which stays as it is.

A version is one saved picture, a line of a file; nothing is overwritten, so every earlier state can
be looked at and exported. Places are in pixels of the stored pictures.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_folder
from tessella.core.decoding import Decoder
from tessella.core.errors import ArtifactError, TessellaError, UsageError
from tessella.core.preprocess import encode
from tessella.studio import drawn_boxes, drawn_instances, drawn_masks
from tessella.studio.drawn_masks import ground_of
from tessella.tasks import View


class Form(Protocol):
    """What is drawn on the pictures of a task: a module."""

    @property
    def NAME(self) -> str: ...

    def checked(self, content: Any, classes: int, size: tuple[int, int], /) -> Sequence[Any]: ...

    def stored(self, dataset: Dataset, split: str, index: int) -> Sequence[Any]: ...

    def proposed(
        self, told: Sequence[dict[str, Any]], classes: Sequence[str], view: View, /
    ) -> Sequence[Any]: ...

    def folder_of(self, split: str) -> str: ...

    def write(
        self, folder: Path, split: str, dataset: Dataset, drawn: Sequence[tuple[str, Any]]
    ) -> str: ...


FORMS: dict[str, Form] = {
    "detection": drawn_boxes,
    "instances": drawn_instances,
    "segmentation": drawn_masks,
}


class Overtaken(TessellaError):
    """A picture was saved elsewhere since it was opened.

    Attributes:
        version: the newest that has this picture.
    """

    def __init__(self, version: int) -> None:
        super().__init__(
            "this picture was saved in another window meanwhile",
            seen=f"version {version}",
            fix="look at that version, or save yours as the newest",
        )
        self.version = version


@dataclass
class _Index:
    """Where the complete lines of a file are, as far as it was read.

    Attributes:
        starts: the first byte of each version.
        end: the byte after the last version.
        last: that version's line; where the file has another there, somebody has changed it.
        versions: the numbers of those that a split's image has, ascending.
    """

    starts: list[int] = field(default_factory=list)
    end: int = 0
    last: bytes = b""
    versions: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add(self, line: bytes, name: str) -> None:
        content = json.loads(line)
        if not {"split", "index", name} <= set(content):
            raise ValueError(f"a line without {name}")
        same = self.versions.setdefault((content["split"], content["index"]), [])
        self.starts.append(self.end)
        same.append(len(self.starts))
        self.end += len(line)
        self.last = line


class Drawn:
    """The versions of all datasets of a workspace, a file for each content hash.

    The first call of a dataset reads its whole file, later ones what was added since: 40 MB take
    seconds. Any thread may call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._indices: dict[Path, _Index] = {}

    def save(
        self, dataset: Dataset, split: str, index: int, content: Any, *, since: int | None = None
    ) -> int:
        """Add a version, checked; its number, from 1 on.

        Args:
            since: how many versions there were when the picture was opened; None: it does not
                matter what was saved meanwhile.

        Raises:
            UsageError: the content cannot be that of the picture.
            Overtaken: a later version than these has the same picture. Nothing is saved.
        """
        record, form = dataset.preprocess, FORMS[dataset.info.task.name]
        if split not in dataset.info.splits or not 0 <= index < len(dataset.split(split)):
            raise UsageError("the dataset has no such image", seen=f"{split} {index}")
        made = form.checked(content, len(dataset.classes), (record.height, record.width))
        line = {"split": split, "index": index, form.NAME: made, "time": time.time()}
        path = self._path(dataset)
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may save, too
            known = self._indexed(dataset, file)
            newest = known.versions.get((split, index), [0])[-1]
            if since is not None and newest > since:
                raise Overtaken(newest)
            file.truncate(known.end)  # the start of a line that a crash has cut
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            return len(known.starts) + 1

    def count(self, dataset: Dataset) -> int:
        """How many versions there are."""
        return len(self._read(dataset).starts)

    def of(
        self, dataset: Dataset, split: str, index: int, *, version: int | None = None
    ) -> Sequence[Any]:
        """What an image has at a version; None: the newest, 0: the dataset's own."""
        return self._newest(dataset, version)(split, index)

    def _newest(self, dataset: Dataset, version: int | None) -> Callable[[str, int], Sequence[Any]]:
        """What any image has at a version, by its split and number."""
        known, path = self._read(dataset), self._path(dataset)
        last = len(known.starts) if version is None else version
        size = (dataset.preprocess.height, dataset.preprocess.width)
        form = FORMS[dataset.info.task.name]

        def of(split: str, index: int) -> Sequence[Any]:
            versions = known.versions.get((split, index), [])
            at = bisect(versions, last)
            if at == 0:
                return form.stored(dataset, split, index)
            number = versions[at - 1]
            try:
                with path.open("rb") as file:
                    file.seek(known.starts[number - 1])
                    content = json.loads(file.readline())[form.NAME]
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise _unreadable(form.NAME, error, number, path) from error
            return form.checked(content, len(dataset.classes), size)

        return of

    def export(self, dataset: Dataset, out: Path) -> dict[str, Path]:
        """Write the newest version into a new folder, pictures included; for each split, what an
        import takes.

        Of a dataset without a thing only pictures are written that somebody has saved: of the
        others nobody has said that there is nothing.

        Raises:
            UsageError: the folder is there already, or no picture for training would be written.
        """
        if out.exists():
            raise UsageError("this version is exported already", seen=out)
        chosen = self._exported(dataset)
        if not chosen.get("train"):
            raise UsageError(
                "nothing is drawn yet on the pictures for training",
                seen=dataset.path,
                fix="draw on some of them, and save each, also where there is nothing to draw",
            )
        form, newest = FORMS[dataset.info.task.name], self._newest(dataset, None)
        written = {}

        def fill(folder: Path) -> None:
            decoder = Decoder(processes=1)
            try:
                for name, indices in chosen.items():
                    paths = _write_pictures(
                        dataset, name, indices, folder, form.folder_of(name), decoder
                    )
                    drawn = [(paths[index], newest(name, index)) for index in indices]
                    written[name] = out / form.write(folder, name, dataset, drawn)
            finally:
                decoder.close()

        write_folder(out, fill)
        return written

    def _exported(self, dataset: Dataset) -> dict[str, Sequence[int]]:
        """The pictures that are written of each split that has any."""
        chosen: dict[str, Sequence[int]] = {
            n: range(len(dataset.split(n))) for n in dataset.info.splits
        }
        ground = ground_of(dataset.classes)
        counts = [split.class_counts for split in dataset.info.splits.values()]
        if not any(n for each in counts for k, n in enumerate(each) if k != ground):
            saved = self._read(dataset).versions
            chosen = {n: [i for i in each if (n, i) in saved] for n, each in chosen.items()}
        return {name: indices for name, indices in chosen.items() if indices}

    def _path(self, dataset: Dataset) -> Path:
        return self._folder / f"{dataset.info.content_hash[:24]}.jsonl"

    def _read(self, dataset: Dataset) -> _Index:
        """Where the versions are; a last line that a crash has cut is none."""
        path = self._path(dataset)
        with self._lock:
            try:
                with path.open("rb") as file:
                    return self._indexed(dataset, file)
            except FileNotFoundError:
                self._indices.pop(path, None)
                return _Index()

    def _indexed(self, dataset: Dataset, file: BinaryIO) -> _Index:
        """The index of a file, with what was added to it since the last call."""
        path, name = self._path(dataset), FORMS[dataset.info.task.name].NAME
        known = self._indices.setdefault(path, _Index())
        file.seek(known.end - len(known.last))
        if file.read(len(known.last)) != known.last:
            known = self._indices[path] = _Index()
            file.seek(0)
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                known.add(line, name)
            except (ValueError, TypeError) as error:
                raise _unreadable(name, error, len(known.starts) + 1, path) from error
        return known


def _unreadable(name: str, error: Exception, line: int, path: Path) -> ArtifactError:
    return ArtifactError(
        f"the drawn {name} cannot be read",
        seen=f"{error} in line {line} of {path}",
        fix="copy the file to another place, then remove that line from it: the others stay",
    )


def _write_pictures(
    dataset: Dataset, name: str, indices: Sequence[int], folder: Path, under: str, decoder: Decoder
) -> dict[int, str]:
    """Pictures of a split as PNG files; their paths below the folder."""
    (folder / under).mkdir(parents=True)
    paths, split = {}, dataset.split(name)
    for index in indices:
        paths[index] = f"{under}/{index:06d}.png"
        content = encode(decoder(split[index].content, None, name=split[index].path))
        (folder / paths[index]).write_bytes(content)
    return paths
