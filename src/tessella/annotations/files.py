"""Files of annotations and their pictures: what lies in the folder, how large it is."""

from __future__ import annotations

import gc
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from tessella.annotations.check import sides_of
from tessella.core.errors import DataError
from tessella.core.pictures import FORMATS, TURNED, tiff_sides
from tessella.core.record import unique_keys

MAX_NAME, MAX_PATH = 255, 4095  # bytes: to ask for a longer one is an OSError
NOWHERE = "the path leads out of the folder, or is longer than a file's can be"
MAX_JSON_BYTES = 1 << 30
# COCO's largest file (448 MB) has 4 million lists and records and 60 million values. A gigabyte of
# "[]," would be twenty of memory.
MAX_JSON_LISTS, MAX_JSON_VALUES = 1 << 25, 200_000_000
MAX_TEXT_BYTES = 16 << 20
ORIENTATION = 0x0112  # EXIF's tag


def inside(path: str, root: Path) -> str | None:
    """The path below ``root`` that a file names; None where it leads out of it, or nowhere, as one
    that is longer than a file's can be."""
    path = path.strip().replace("\\", "/")
    if not path or "\0" in path or len(path) > 4096:
        return None
    if os.path.isabs(path):
        path = os.path.relpath(path, os.path.abspath(root))
    path = os.path.normpath(path)
    whole = f"{root}/{path}".encode("utf-8", "surrogatepass")
    if len(whole) > MAX_PATH or any(len(part) > MAX_NAME for part in whole.split(b"/")):
        return None
    return None if path == "." or path.split("/", 1)[0] == ".." else path


def read_json(path: Path) -> Any:
    """The content of a JSON file. A number may be infinite, or NaN: whoever uses it checks it.

    ``core.record.parse_json`` looks at every number: 3.0 s for 5,000 pictures of COCO's size, and
    this 0.4 s.

    Raises:
        DataError: too large, or no JSON: with a key twice, with absurd nesting.
    """
    content = read_bytes(path, MAX_JSON_BYTES)
    lists, values = content.count(b"[") + content.count(b"{"), content.count(b",")
    if lists > MAX_JSON_LISTS or values > MAX_JSON_VALUES:
        raise DataError(
            "the annotation file holds too much",
            seen=f"{lists:,} lists and records, {values:,} values in {path}",
            fix="split it",
        )
    try:
        return json.loads(content, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "the annotation file is not JSON that can be read",
            seen=f"{str(error)[:200]} in {path}",
            fix="export it again",
        ) from error


@contextmanager
def no_collection() -> Iterator[None]:
    """Let Python look for no garbage: a million new objects and none to free took half the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def read_text(path: Path) -> str:
    """The content of a small text file; bytes that are not UTF-8 become ``\\xNN``."""
    return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8-sig", "backslashreplace")


def read_bytes(path: Path, most: int) -> bytes:
    """The content of a file.

    Raises:
        DataError: it cannot be opened, is no plain file, or has more than ``most`` bytes.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: a pipe would wait
            raise OSError("it is no plain file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        raise DataError(
            "the annotation file cannot be opened", seen=f"{path}: {error}", fix="check its path"
        ) from error
    if len(content) > most:
        raise DataError(
            "the annotation file is too large",
            seen=f"more than {most:,} bytes in {path}",
            fix="split it",
        )
    return content


def size_of(file: str) -> tuple[int, int] | str:
    """Height and width of a picture as it is shown, from its header; or why there are none."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):  # before it is opened: a pipe would wait
            return "the picture is no plain file"
        height, width = _sides(file)
    except Exception as error:  # readers of headers raise SyntaxError, struct.error and others
        return f"the picture cannot be read: {type(error).__name__}: {str(error)[:80]}"
    return sides_of(height, width) or (height, width)


def _sides(file: str) -> tuple[int, int]:
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            turned = image.getexif().get(ORIENTATION, 1) in TURNED
    except UnidentifiedImageError:
        if not file.lower().endswith((".tif", ".tiff")):
            raise
        return tiff_sides(file)  # of as many channels as Pillow does not know
    return (width, height) if turned else (height, width)
