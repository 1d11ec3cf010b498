"""What people draw on pictures in the studio: versions beside a dataset, which stays as it is.

A version is one saved picture, a line of a file; nothing is overwritten, so every earlier state can
be looked at and exported. Places are in pixels of the stored pictures.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_folder
from tessella.core.decoding import Decoder
from tessella.core.errors import ArtifactError, TessellaError, UsageError
from tessella.core.preprocess import encode
from tessella.studio import drawn_boxes, drawn_masks


class Form(Protocol):
    """What is drawn on the pictures of a task: a module."""

    @property
    def NAME(self) -> str: ...

    def checked(self, content: Any, classes: int, size: tuple[int, int], /) -> Sequence[Any]: ...

    def stored(self, dataset: Dataset, split: str, index: int) -> Sequence[Any]: ...

    def folder_of(self, split: str) -> str: ...

    def write(
        self, folder: Path, split: str, dataset: Dataset, drawn: Sequence[tuple[str, Any]]
    ) -> str: ...


FORMS: dict[str, Form] = {"detection": drawn_boxes, "segmentation": drawn_masks}


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


class Drawn:
    """The versions of all datasets of a workspace, a file for each content hash."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()

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
        with self._lock:
            lines = self._read(dataset)
            if since is not None:
                same = [(each["split"], each["index"]) == (split, index) for each in lines]
                if any(same[since:]):
                    raise Overtaken(max(n for n, is_same in enumerate(same, 1) if is_same))
            path = self._path(dataset)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        return len(lines) + 1

    def count(self, dataset: Dataset) -> int:
        """How many versions there are."""
        return len(self._read(dataset))

    def of(
        self, dataset: Dataset, split: str, index: int, *, version: int | None = None
    ) -> Sequence[Any]:
        """What an image has at a version; None: the newest, 0: the dataset's own."""
        return self._newest(dataset, version)(split, index)

    def _newest(self, dataset: Dataset, version: int | None) -> Callable[[str, int], Sequence[Any]]:
        """What any image has at a version, by its split and number; the file is read once."""
        lines = {(line["split"], line["index"]): line for line in self._read(dataset)[:version]}
        size = (dataset.preprocess.height, dataset.preprocess.width)
        form = FORMS[dataset.info.task.name]

        def of(split: str, index: int) -> Sequence[Any]:
            line = lines.get((split, index))
            if line is None:
                return form.stored(dataset, split, index)
            return form.checked(line[form.NAME], len(dataset.classes), size)

        return of

    def export(self, dataset: Dataset, out: Path) -> dict[str, Path]:
        """Write the newest version into a new folder, pictures included; for each split, what an
        import takes.

        Raises:
            UsageError: the folder is there already.
        """
        if out.exists():
            raise UsageError("this version is exported already", seen=out)
        names = [name for name in dataset.info.splits if len(dataset.split(name))]
        form, newest = FORMS[dataset.info.task.name], self._newest(dataset, None)
        written = {}

        def fill(folder: Path) -> None:
            decoder = Decoder(processes=1)
            try:
                for name in names:
                    paths = _write_pictures(dataset, name, folder, form.folder_of(name), decoder)
                    drawn = [(path, newest(name, index)) for index, path in enumerate(paths)]
                    written[name] = out / form.write(folder, name, dataset, drawn)
            finally:
                decoder.close()

        write_folder(out, fill)
        return written

    def _path(self, dataset: Dataset) -> Path:
        return self._folder / f"{dataset.info.content_hash[:24]}.jsonl"

    def _read(self, dataset: Dataset) -> list[dict[str, Any]]:
        """The versions; a last line that a crash has cut is none."""
        path, name = self._path(dataset), FORMS[dataset.info.task.name].NAME
        try:
            text = path.read_text()
        except FileNotFoundError:
            return []
        try:
            lines = [json.loads(line) for line in text.split("\n")[:-1]]
            if not all({"split", "index", name} <= set(line) for line in lines):
                raise ValueError(f"a line without {name}")
        except (ValueError, TypeError) as error:
            raise ArtifactError(
                f"the drawn {name} cannot be read", seen=f"{error} in {path}", fix="remove the file"
            ) from error
        return lines


def _write_pictures(
    dataset: Dataset, name: str, folder: Path, under: str, decoder: Decoder
) -> list[str]:
    """The pictures of a split as PNG files; their paths below the folder."""
    (folder / under).mkdir(parents=True)
    paths = []
    for index, example in enumerate(dataset.split(name)):
        paths.append(f"{under}/{index:06d}.png")
        content = encode(decoder(example.content, None, name=example.path))
        (folder / paths[-1]).write_bytes(content)
    return paths
