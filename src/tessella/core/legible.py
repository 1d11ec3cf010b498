"""Names of files and texts of strangers, as they can be written."""

from __future__ import annotations

import os


def legible(text: str | os.PathLike[str]) -> str:
    """A file's name, or a stranger's text, as it can be written: bytes that are not UTF-8 become
    ``\\xNN``, and halves of characters ``\\udNNN``."""
    try:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # half of a character, which JSON can say and no file name is
        return os.fspath(text).encode("utf-8", "backslashreplace").decode()
