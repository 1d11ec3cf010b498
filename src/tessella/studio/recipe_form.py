"""A form generated from ``Recipe``: a field for each setting, of the kind that its type needs.

A new setting of the recipe appears under *More* by itself, with the description in its docstring.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from nicegui import ui
from nicegui.elements.mixins.value_element import ValueElement

from tessella.artifacts.defaults import completed
from tessella.artifacts.run import Recipe
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.record import from_plain, to_plain
from tessella.studio import parts

# Shown first, in this order, with the words that people use; the rest is under "More".
VISIBLE = {
    "epochs": "Epochs",
    "batch_size": "Batch size",
    "solver.name": "Solver",
    "solver.lr": "Learning rate",
    "policy.name": "Rate policy",
    "precision": "Precision",
    "gpus": "GPUs",
}
ELSEWHERE = ("network", "dataset", "network_options")  # the page has its own choosers for them

# Which settings a learning-rate policy reads: the others stay out of the way.
_POLICY_READS = {
    "fixed": (),
    "step": ("gamma", "steps"),
    "multistep": ("gamma", "at"),
    "exponential": ("gamma",),
    "inverse": ("gamma", "power"),
    "polynomial": ("power", "floor"),
    "sigmoid": ("gamma",),
    "cosine": ("floor",),
    "onecycle": (),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of the recipe, flattened: ``solver.lr`` of type float."""

    path: str
    hint: Any
    default: Any
    help: str


def settings() -> list[Setting]:
    """All settings of a recipe, in its order."""
    placeholder = Recipe(network="-", dataset="-")
    return list(_settings_of(Recipe, placeholder, ""))


def _settings_of(cls: type, default: Any, prefix: str) -> typing.Iterator[Setting]:
    hints, described = typing.get_type_hints(cls), descriptions(cls.__doc__ or "")
    for entry in dataclasses.fields(cls):
        hint, value = hints[entry.name], getattr(default, entry.name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _settings_of(hint, value, f"{entry.name}.")
        elif prefix + entry.name not in ELSEWHERE:
            yield Setting(
                path=prefix + entry.name,
                hint=hint,
                default=value,
                help=described.get(entry.name, ""),
            )


def descriptions(docstring: str) -> dict[str, str]:
    """The description of each field in the ``Attributes`` of a docstring."""
    _, _, block = docstring.partition("Attributes:")
    out: dict[str, str] = {}
    names: list[str] = []
    for line in block.splitlines():
        begun = re.match(r" {8}(\w+(?:, \w+)*): (.+)", line)
        if begun:
            names = begun[1].split(", ")
            out |= dict.fromkeys(names, begun[2].strip())
        elif line.startswith(" " * 12) and names:
            out |= {name: f"{out[name]} {line.strip()}" for name in names}
    return out


class RecipeForm:
    """Fields for every setting. ``on_change`` is called after each change by a person.

    A field that nobody has touched follows the defaults of the network (``artifacts.defaults``).

    Args:
        start: settings to begin with, by path, which count as touched.
    """

    def __init__(self, on_change: Callable[[], None], start: dict[str, Any] | None = None) -> None:
        self._on_change = on_change
        self._fields: dict[str, ValueElement[Any]] = {}
        self._settings = {s.path: s for s in settings()}
        start = start or {}
        self._touched, self._filling = set(start), False
        with parts.box("fields"):
            for path, label in VISIBLE.items():
                self._add(self._settings[path], label, start)
        with ui.expansion("More"), parts.box("fields"):
            for path, setting in self._settings.items():
                if path not in VISIBLE:
                    label = path.replace("_", " ").replace(".", ": ")
                    self._add(setting, label[0].upper() + label[1:], start)
        self._show_policy()

    def recipe(self, *, network: str, dataset: str, init: str = "random", **asked: Any) -> Recipe:
        """The recipe that the form describes, checked; untouched fields have their defaults.

        Args:
            init: as in ``Recipe``, unless the form has another than ``random``.
            asked: of the dataset: see ``artifacts.defaults.completed``.

        Raises:
            UsageError: a value is missing or out of range.
        """
        plain: dict[str, Any] = {"network": network, "dataset": dataset}
        for path, element in self._fields.items():
            if path not in self._touched or element.value in (None, ""):
                continue
            *group, name = path.split(".")
            target = plain.setdefault(group[0], {}) if group else plain
            target[name] = self._value(self._settings[path], element.value)
        if plain.get("init", "random") == "random":
            plain["init"] = init
        try:
            recipe = from_plain(Recipe, plain, where="recipe")
            return completed(recipe, plain, **asked)
        except ArtifactError as error:
            raise UsageError(error.wrong, seen=error.seen, fix="correct the setting") from error

    def show(self, recipe: Recipe) -> None:
        """Show ``recipe`` in the fields that nobody has touched."""
        self._filling = True
        for path, value in flat(recipe).items():
            if path in self._fields and path not in self._touched and path != "init":
                field = self._fields[path]
                if self._value(self._settings[path], field.value) != value:
                    field.value = value
        self._filling = False
        self._show_policy()

    def _add(self, setting: Setting, label: str, start: dict[str, Any]) -> None:
        value = start.get(setting.path, setting.default)
        element = _element(setting.hint, value, label)
        element.on_value_change(lambda: self._changed(setting.path))
        if setting.help:
            element.tooltip(setting.help)
        self._fields[setting.path] = element

    def _changed(self, path: str) -> None:
        if self._filling:
            return
        self._touched.add(path)
        self._show_policy()
        self._on_change()

    def _show_policy(self) -> None:
        reads = _POLICY_READS[self._fields["policy.name"].value]
        for name in ("gamma", "power", "steps", "at", "floor"):
            self._fields[f"policy.{name}"].set_visibility(name in reads)

    @staticmethod
    def _value(setting: Setting, value: Any) -> Any:
        """A field's value as the recipe's JSON has it."""
        hint = _without_none(setting.hint)
        if value is None or value == "":
            return None if hint is not setting.hint else setting.default
        if hint is int:
            return int(value)
        if hint is float:
            return float(value)
        if get_origin(hint) is tuple:
            return _numbers(str(value), setting.path)
        return value


def _element(hint: Any, value: Any, label: str) -> ValueElement[Any]:
    hint_ = _without_none(hint)
    if get_origin(hint_) is Literal:
        element: ValueElement[Any] = ui.select(list(get_args(hint_)), value=value, label=label)
    elif hint_ is bool:
        return ui.switch(label, value=value)
    elif hint_ is int:
        element = ui.number(label, value=value, precision=0, step=1)
    elif hint_ is float:
        element = ui.number(label, value=value).props("step=any")
    elif get_origin(hint_) is tuple:
        element = ui.input(label, value=", ".join(str(v) for v in value))
    else:
        element = ui.input(label, value=value or "")
    return element.props("outlined dense stack-label hide-bottom-space")


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (typing.Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


def _numbers(written: str, name: str) -> list[float]:
    try:
        return [float(n) for n in written.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(f"{name} is a list of numbers", seen=written, fix="0.5, 0.75") from error


def flat(recipe: Recipe) -> dict[str, Any]:
    """A recipe's settings by path, to start a form with."""
    out: dict[str, Any] = {}
    for name, value in to_plain(recipe).items():
        if isinstance(value, dict) and name in ("solver", "policy", "augment"):
            out |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            out[name] = value
    return out
