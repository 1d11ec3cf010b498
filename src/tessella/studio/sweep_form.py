"""The form of a sweep: several values of a few settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from nicegui import ui

from tessella.studio import parts
from tessella.studio.theme import text


class Values(TypedDict):
    """Keyword arguments of ``commands.sweep``."""

    networks: Sequence[str]
    lr: str
    batch_size: str
    seeds: str


class SweepForm:
    """A switch and, when it is on, the lists. ``on_change`` is called after each change."""

    def __init__(self, networks: Sequence[str], on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._switch = ui.switch("Sweep: train with several values", on_change=self._changed)
        self._switch.props("dense")
        with parts.box("stack") as self._box:
            with parts.box("fields"):
                self._networks = parts.field(
                    ui.select(list(networks), multiple=True, value=[], label="Networks",
                              on_change=self._changed).props("use-chips"), "wide",
                )  # fmt: skip
                self._lr = self._list("Learning rates", "0.1, 0.03, 0.01")
                self._batch_size = self._list("Batch sizes", "32, 64, 128")
                self._seeds = self._list("Seeds", "0, 1, 2")
            self._count = text("p", "").classes("muted small")
        self._box.set_visibility(False)

    def _list(self, label: str, example: str) -> ui.input:
        element = parts.field(ui.input(label, on_change=self._changed))
        element.props["placeholder"] = example
        element.props["hint"] = "Empty: as above."
        return element

    @property
    def on(self) -> bool:
        return bool(self._switch.value)

    def values(self) -> Values:
        """The lists as typed; an empty list leaves its setting to the recipe."""
        return Values(
            networks=tuple(self._networks.value or ()),
            lr=self._lr.value or "",
            batch_size=self._batch_size.value or "",
            seeds=self._seeds.value or "",
        )

    def count(self, runs: int) -> None:
        """Say how many trainings these lists make."""
        self._count.text = (
            f"{runs} trainings, queued one after another as there is room; compared on one page."
            if runs > 1
            else "One training: give two values or more of something."
        )

    def offer(self, networks: Mapping[str, str]) -> None:
        """Offer these networks: titles by name."""
        chosen = [name for name in self._networks.value or () if name in networks]
        self._networks.set_options(dict(networks), value=chosen)

    def _changed(self) -> None:
        self._box.set_visibility(self.on)
        self._on_change()
