"""What must not leave a machine: names of its user and of itself, paths, and its environment.

Errors that others raise say such things. What we write ourselves (kernels, problems, numbers) says
none of them.
"""

from __future__ import annotations

import os
import platform
import pwd
import re
import socket
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

USER_VARIABLES = ("USER", "LOGNAME", "USERNAME", "LNAME", "SUDO_USER", "MAIL")
HOST_VARIABLES = ("HOSTNAME", "HOST", "COMPUTERNAME")
SHORT = 3  # letters: names up to here are hidden as words only, as they are parts of other words
LEAST_VALUE = 6  # letters of an environment variable's value: shorter ones say nothing
MOST_LETTERS = 400  # of a message
# ~/x, ./x, /x and x/y.z, with whatever stands before the first slash
PATH = re.compile(r"[\w.~+@%$-]*(?:[/\\]+[\w.~+@%$-]+)+[/\\]?")
ADDRESS = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What to hide on this machine, the longest first.

    Attributes:
        folders, users, hosts, values: known folders, names of the user, names of the machine,
            and what environment variables hold.
    """

    folders: tuple[str, ...]
    users: tuple[str, ...]
    hosts: tuple[str, ...]
    values: tuple[str, ...]

    @classmethod
    def of_this_machine(cls) -> Privacy:
        account = _account()
        home = os.path.expanduser("~")
        users = [*account, *(os.environ.get(name) for name in USER_VARIABLES), Path(home).name]
        hosts = [socket.gethostname(), platform.node(), *map(os.environ.get, HOST_VARIABLES)]
        hosts += [name.partition(".")[0] for name in hosts if name]
        folders = [home, os.environ.get("HOME"), os.getcwd(), tempfile.gettempdir()]
        folders += [sys.prefix, sys.base_prefix, *sys.path]
        values = [part for value in os.environ.values() for part in (value, *value.split(":"))]
        return cls(
            folders=_longest_first(f for f in folders if f and len(f) > 1),
            users=_longest_first(users),
            hosts=_longest_first(hosts),
            values=_longest_first(v for v in values if len(v) >= LEAST_VALUE),
        )

    def name(self, text: str) -> str:
        """A fact of the machine, such as a chip's name, without the names of user and machine."""
        for words, shown in ((self.users, "<user>"), (self.hosts, "<host>")):
            for word in words:
                text = _pattern(word).sub(shown, text)
        return text

    def text(self, text: str) -> str:
        """A message without any of it, on one line, and not too long."""
        text = text.encode(errors="replace").decode()  # a path's bytes may be no letters
        for folder in self.folders:
            text = text.replace(folder, "<path>")
        for value in self.values:
            text = text.replace(value, "<environment>")
        text = ADDRESS.sub("<address>", text)
        text = PATH.sub("<path>", self.name(text))
        return " ".join(re.sub(r"(?:<path>[/\\]*)+", "<path>", text).split())[:MOST_LETTERS]


def _account() -> list[str]:
    """The login and the person's name in the system's list of users."""
    try:
        entry = pwd.getpwuid(os.getuid())
    except KeyError:  # a container's user that is in no list
        return []
    person = re.split(r"[\s,]+", entry.pw_gecos)
    return [entry.pw_name, *(part for part in person if len(part) > 1)]


def _longest_first(words: Iterable[str | None]) -> tuple[str, ...]:
    found = {word.strip() for word in words if word and word.strip()}
    return tuple(sorted(found, key=lambda word: (-len(word), word)))


def _pattern(word: str) -> re.Pattern[str]:
    escaped = re.escape(word)
    if len(word) <= SHORT:
        escaped = rf"(?<![^\W_]){escaped}(?![^\W_])"
    return re.compile(escaped, re.IGNORECASE)
