"""Finds images and their labels: in a folder (class = subfolder) or in a text list (path, label).

Names are data: they are stored as they are and never become a path that is written to.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from pathlib import Path

from tessella.artifacts.dataset import SkippedFile
from tessella.core.count import counted
from tessella.core.errors import DataError, UsageError
from tessella.core.legible import legible
from tessella.tasks import Found, Source

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".tif", ".tiff"),
    *(".webp", ".gif", ".ppm", ".pgm", ".pnm"),
)


def find(
    source: Path, *, labels: tuple[str, ...] | None = None, image_root: Path | None = None
) -> Found:
    """All images of a folder or list.

    Args:
        source: a folder with a subfolder a class, or a text file with lines ``path label``.
        labels: a list's class names: a label is one of them, or a number that counts them from 0.
        image_root: what a list's paths are relative to; the list's own folder if None.

    Raises:
        DataError: nothing there, no images, or a line that cannot be understood.
    """
    if source.is_dir():
        if labels is not None or image_root is not None:
            raise UsageError(
                "labels and image_root belong to a text list",
                seen=f"a folder: {source}",
                fix="leave them out: a folder's classes are its subfolders",
            )
        found = find_in_folder(source)
    elif source.is_file():
        found = find_in_list(source, labels=labels, image_root=image_root or source.parent)
    else:
        raise DataError(
            "there is no such folder or list",
            seen=source,
            fix="give a folder with a subfolder a class, or a text file of 'path label' lines",
        )
    return found


# --- folders ------------------------------------------------------------------------------------


def find_in_folder(root: Path) -> Found:
    """Images below ``root``; the first subfolder on the way to an image is its class.

    Links are followed after everything that lies in the tree itself, and never to a folder or file
    that was already counted: a loop ends, and a linked file keeps the class of its real place.
    """
    walk = _Walk()
    walk.enter(str(root), "")
    walk.follow_links()
    names = sorted({path.split("/", 1)[0] for _, path in walk.files if "/" in path})
    outside = sum("/" not in path for _, path in walk.files)
    if not names:
        raise DataError(
            "the folder holds no images in class folders",
            seen=f"{outside} images directly in {root}, {walk.others} other files below it",
            fix=f"make a subfolder for each class, with images ({', '.join(SUFFIXES)})",
        )
    index = {name: label for label, name in enumerate(names)}
    sources = sorted(
        (
            Source(file, path, index[path.split("/", 1)[0]])
            for file, path in walk.files
            if "/" in path
        ),
        key=lambda s: (s.label, s.path),
    )
    empty = sorted(legible(folder) for folder in walk.top_folders if legible(folder) not in index)
    told = [
        (outside, "image", "left out, in no class folder"),
        (walk.others, "file", "left out, not named like an image"),
        (walk.repeated_links, "link", "to what is already there, not followed"),
    ]
    notes = [f"{counted(count, noun)} {what}" for count, noun, what in told if count]
    notes += [f"folder {name!r} holds no image and is no class" for name in empty[:20]]
    return Found(
        classes=tuple(names),
        sources=tuple(sources),
        skipped=tuple(walk.skipped),
        notes=tuple(notes),
    )


class _Walk:
    """Visits a tree: real folders at once, links later, each folder and each linked file once."""

    def __init__(self) -> None:
        self.files: list[tuple[str, str]] = []  # where it is, and its path below the root
        self.skipped: list[SkippedFile] = []
        self.top_folders: list[str] = []
        self.others = 0
        self.repeated_links = 0
        self._folders: set[tuple[int, int]] = set()  # device and inode
        self._inodes: set[tuple[int, int]] = set()
        self._links: list[tuple[str, str]] = []

    def enter(self, folder: str, below: str) -> None:
        """Collect the images in ``folder`` and its real subfolders; note links for later."""
        pending = [(folder, below)]
        while pending:
            folder, below = pending.pop()
            try:
                status = os.stat(folder)
                entries = sorted(os.scandir(folder), key=lambda e: e.name)
            except OSError as error:
                self.skipped.append(SkippedFile(path=legible(below), reason=str(error.strerror)))
                continue
            if _key(status) in self._folders:
                continue
            self._folders.add(_key(status))
            for entry in entries:
                path = f"{below}/{entry.name}" if below else entry.name
                if entry.name.startswith("."):
                    continue
                if not below and entry.is_dir():
                    self.top_folders.append(entry.name)
                if entry.is_symlink():
                    self._links.append((entry.path, path))
                elif entry.is_dir():
                    pending.append((entry.path, path))
                else:
                    self._take(entry.path, path, entry.stat())

    def follow_links(self) -> None:
        """Follow the links seen so far and those that they lead to: folders first, then files."""
        to_files: list[tuple[str, str]] = []
        while self._links:
            links, self._links = sorted(self._links, key=lambda link: link[1]), []
            for place, path in links:
                if not os.path.isdir(place):
                    to_files.append((place, path))
                elif self._is_new(place, self._folders):
                    self.enter(place, path)
        for place, path in to_files:
            if not os.path.exists(place):
                skipped = SkippedFile(path=legible(path), reason="the link leads nowhere")
                self.skipped += [skipped] if is_image(path) else []
            elif self._is_new(place, self._inodes):
                self._take(place, path, os.stat(place))

    def _is_new(self, place: str, known: set[tuple[int, int]]) -> bool:
        new = _key(os.stat(place)) not in known
        self.repeated_links += not new
        return new

    def _take(self, place: str, path: str, status: os.stat_result) -> None:
        if stat.S_ISREG(status.st_mode) and is_image(path):
            self.files.append((place, legible(path)))
            self._inodes.add(_key(status))
        else:
            self.others += 1


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def is_image(path: str) -> bool:
    """Whether a file's name ends like that of an image."""
    return os.path.splitext(path)[1].lower() in SUFFIXES


# --- lists --------------------------------------------------------------------------------------


def find_in_list(path: Path, *, labels: tuple[str, ...] | None, image_root: Path) -> Found:
    """Images of a text list, ``path label`` a line; the label follows the line's last tab or space.

    Without ``labels`` the classes are the labels that occur: numbers in order, or else by alphabet.
    """
    rows = list(_read_rows(path))
    if not rows:
        raise DataError("the list is empty", seen=path, fix="write a line 'path label' an image")
    if labels is None:
        names = {label for _, _, label in rows}
        numbers = all(_is_number(name) for name in names)
        classes = tuple(sorted(names, key=int) if numbers else sorted(names))
        index = {name: label for label, name in enumerate(classes)}
    else:
        classes = labels
        twice = [name for name, count in Counter(labels).items() if count > 1]
        if twice:
            raise DataError(
                "a label is named twice", seen=repr(twice[0]), fix="name each class once"
            )
        index = {str(number): number for number in range(len(labels))}
        index |= {name: number for number, name in enumerate(labels)}
    sources = []
    for line, name, label in rows:
        if label not in index:
            raise DataError(
                f"line {line} of the list has an unknown label",
                seen=f"{label!r}; {len(classes)} labels are known",
                fix="use a label's name, or its number counted from 0",
            )
        file = os.path.join(image_root, name)
        shown = os.path.relpath(name, image_root) if os.path.isabs(name) else name
        sources.append(Source(file, legible(shown), index[label]))
    return Found(classes=tuple(legible(name) for name in classes), sources=tuple(sources))


def read_labels(path: Path) -> tuple[str, ...]:
    """Class names from a text file, one a line."""
    if not path.is_file():
        raise DataError("there is no such labels file", seen=path, fix="give a text file of names")
    names = path.read_text("utf-8-sig", errors="backslashreplace").splitlines()
    return tuple(name.strip() for name in names if name.strip())


def _read_rows(path: Path) -> list[tuple[int, str, str]]:
    """Line number, image path and label."""
    content = path.read_bytes()
    if b"\0" in content:
        raise DataError(
            "this is not a text list",
            seen=path,
            fix="give a folder, or a text file with a line 'path label' for each image",
        )
    text = content.decode("utf-8-sig", "surrogateescape")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        parts = line.strip().rsplit("\t" if "\t" in line.strip() else None, 1)
        if len(parts) != 2:
            raise DataError(
                f"line {number} of the list is not 'path label'",
                seen=line.strip()[:120],
                fix="write the image's path, a space or tab, and its label",
            )
        rows.append((number, parts[0].strip(), parts[1].strip()))
    return rows


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
