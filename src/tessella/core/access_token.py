"""The token that clients of a server send, in a file: a command line can be read by others."""

from __future__ import annotations

from pathlib import Path

from tessella.core.errors import UsageError


def read_token(path: Path) -> str:
    """The token in a file, which only its owner should be able to read.

    Raises:
        UsageError: there is none.
    """
    if not path.is_file() or not (token := path.read_text().strip()):
        raise UsageError("there is no token here", seen=path, fix="write one line into the file")
    return token
