"""A field for a path on this machine, with the names that continue what is typed under it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from nicegui import ui

from tessella.studio import parts
from tessella.studio.theme import text

MOST_SHOWN = 12
MOST_SCANNED = 5_000  # entries of one folder


class PathField:
    """An input and its completions; Tab leads into them, a click or Enter takes one.

    Args:
        root: where relative paths start.
        suffixes: of the files that are offered beside folders.
    """

    def __init__(
        self,
        label: str,
        *,
        root: Path,
        value: str = "",
        placeholder: str = "",
        suffixes: Sequence[str] = (),
        on_change: Callable[[str], object],
    ) -> None:
        self._root, self._suffixes, self._on_change = root, tuple(suffixes), on_change
        with parts.box("completed") as self.box:
            self.input = parts.field(ui.input(label, value=value, on_change=self._changed))
            self.input.props["placeholder"] = placeholder
            self.input.props["autocomplete"] = "off"
            self._list = parts.box("completions")
        self._list.set_visibility(False)
        self._put = value
        self.box.on(
            "focusout",
            lambda: self._list.set_visibility(False),
            js_handler="(e) => { if (!e.currentTarget.contains(e.relatedTarget)) emit() }",
        )

    @property
    def value(self) -> str:
        return self.input.value or ""

    def put(self, path: str) -> None:
        """Fill the field from elsewhere; nothing continues what nobody typed."""
        self._put = path
        self.input.set_value(path)

    async def _changed(self) -> None:
        typed = self.value
        self._on_change(typed)
        if typed == self._put:
            self._list.set_visibility(False)
            return
        found = await asyncio.to_thread(completions, typed, self._root, self._suffixes)
        if typed != self.value:
            return  # typed on: another call shows what continues that
        self._list.clear()
        with self._list:
            for path in found:
                item = ui.element("button").classes("item").props('type="button"')
                with item:
                    text("span", path).classes("name cut mono small")
                item.on("click", partial(self.input.set_value, path))
        self._list.set_visibility(bool(found) and found != [typed])


def completions(typed: str, root: Path, suffixes: Sequence[str] = ()) -> list[str]:
    """Paths that continue ``typed``, folders first and with a slash at the end.

    Relative ones start at ``root``; hidden names are offered once their dot is typed.
    """
    if not typed or "\0" in typed:
        return []
    head, _, start = typed.rpartition("/")
    head = f"{head}/" if "/" in typed else ""
    try:
        with os.scandir((root / head).expanduser() if head else root) as entries:
            found = [
                (not entry.is_dir(), entry.name)
                for entry in itertools.islice(entries, MOST_SCANNED)
                if entry.name.startswith(start)
                and (start or not entry.name.startswith("."))
                and (entry.is_dir() or entry.name.endswith(tuple(suffixes) or ("\0",)))
            ]
    except (OSError, RuntimeError):  # no such folder, or nobody's home: nothing to offer
        return []
    ordered = sorted(found)[:MOST_SHOWN]
    return [f"{head}{name}" + ("" if is_file else "/") for is_file, name in ordered]
