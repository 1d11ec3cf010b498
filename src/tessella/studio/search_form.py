"""The form of a search: which settings vary, in which values, and how many trials it may cost."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from nicegui import ui
from nicegui.elements.mixins.value_element import ValueElement

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.settings import path_of, recipe_from
from tessella.artifacts.sweep import (
    MOST_TRIALS,
    NEVER_VARIED,
    Pruner,
    Sampler,
    SweepInfo,
    axis_of,
)
from tessella.core.errors import ArtifactError, TessellaError, UsageError
from tessella.core.record import parse_json
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.networks import usual_network
from tessella.studio.recipe_form import settings
from tessella.studio.theme import text
from tessella.studio.workspace import plain_name

USUAL = {"solver.lr": "1e-4..1e-2 log", "batch_size": "32, 64"}
SAMPLERS = {"tpe": "near those that did well", "random": "at random", "grid": "all combinations"}
PRUNERS = {"asha": "those behind end early", "hyperband": "in several rounds", "none": "none"}


class SearchForm:
    """Fields, the command that does the same, and the button that starts it.

    Args:
        like: a sweep whose settings the form begins with.
        on_start: called with the folder's ref and the job when the button is pressed.
    """

    def __init__(
        self,
        context: Context,
        datasets: Mapping[str, Dataset],
        dataset: str,
        like: SweepInfo | None,
        on_start: Callable[[str, JobSpec], None],
    ) -> None:
        self._context, self._datasets, self._on_start = context, datasets, on_start
        self._names = ["network", *(s.path for s in settings() if s.path not in NEVER_VARIED)]
        self._axes: dict[ui.element, tuple[ui.select, ui.input]] = {}
        written, left_out = (USUAL, []) if like is None else _written(like)
        self._names += [path for path in written if path not in self._names]
        given = {} if like is None else _given(like)
        self._rest = {k: v for k, v in given.items() if k not in ("network", "dataset", "epochs")}
        if str(given.get("dataset")) in datasets:
            dataset = str(given["dataset"])
        names = context.dataset_names(datasets)
        self._dataset = self._field(ui.select(names, value=dataset, label="Dataset"))
        self._usual = usual_network(datasets[dataset].info.task.name)
        network = str(given.get("network", self._usual))
        self._network = self._field(ui.input("Network", value=network))
        self._dataset.on_value_change(self._dataset_chosen)
        self._network.props["placeholder"] = "resnet18, timm/NAME or net.py:Net"
        self._rows = parts.box("stack").style("gap:10px")
        for path, values in written.items():
            self._add(path, values)
        if left_out:
            parts.note(f"Left out, as a recipe has no such setting: {', '.join(left_out)}.", "warn")
        parts.plain_button("Vary another setting", self._add_unused, "add")
        with parts.box("fields"):
            epochs = given.get("epochs")
            epochs = epochs if isinstance(epochs, int | float) else 10
            self._trials = self._field(
                ui.number("Trials", value=like.trials if like else 30, min=1, max=MOST_TRIALS,
                          precision=0)
            )  # fmt: skip
            self._epochs = self._field(ui.number("Epochs of each", value=epochs).props("step=any"))
            self._sampler = self._field(
                ui.select(_words(Sampler, SAMPLERS), value=like.sampler if like else "tpe",
                          label="Next values")
            )  # fmt: skip
            self._pruner = self._field(
                ui.select(_words(Pruner, PRUNERS), value=like.pruner if like else "asha",
                          label="Early ends")
            )  # fmt: skip
            self._gpus = self._field(
                ui.number("GPUs, a trial on each", value=1, min=0, precision=0)
            )
            name = datetime.datetime.now().strftime("sweep-%Y%m%d-%H%M%S")
            self._name = self._field(ui.input("Name", value=name))
        self._problem = text("div", "").classes("note bad")
        self._command = parts.Command()
        self._button = parts.button("Start the search", self._start, icon="play_arrow")
        self._button.style("margin-top:4px")  # its sticky ground covers 16 px above it
        self._changed()

    def _dataset_chosen(self) -> None:
        """Name the usual network of another task, where nobody has named one."""
        before = self._usual
        self._usual = usual_network(self._datasets[self._dataset.value].info.task.name)
        if self._network.value == before:
            self._network.set_value(self._usual)

    def _field(self, element: Any) -> Any:
        element.on_value_change(lambda: self._changed())
        return parts.field(element)

    def _add(self, path: str, values: str) -> None:
        with self._rows, parts.box("axis-row") as row:
            setting = self._field(
                ui.select(self._names, value=path, label="Setting", with_input=True)
            )
            written: ui.input = self._field(ui.input("Values", value=values))
            written.props["placeholder"] = "1e-4..1e-2 log, or 16, 32"
            remove = ui.button(icon="close", on_click=lambda: self._remove(row), color=None)
            remove.props('flat round dense size=sm aria-label="Leave this setting as it is"')
        self._axes[row] = setting, written

    def _add_unused(self) -> None:
        used = {setting.value for setting, _ in self._axes.values()}
        order = ("solver.weight_decay", "augment.rotation", "label_smoothing", *self._names)
        values = {"solver.weight_decay": "1e-3..0.3 log", "augment.rotation": "0..20"}
        path = next(name for name in order if name not in used)
        self._add(path, values.get(path, ""))
        self._changed()

    def _remove(self, row: ui.element) -> None:
        del self._axes[row]
        row.delete()
        self._changed()

    def _spec(self) -> tuple[str, JobSpec]:
        """The sweep's ref and its job, after the checks that the command makes of settings."""
        vary = {s.value: (v.value or "").strip() for s, v in self._axes.values()}
        if len(vary) < len(self._axes):
            raise UsageError("a setting varies twice", fix="name each setting once")
        axes = tuple(axis_of(name, values) for name, values in vary.items())
        network = (self._network.value or "").strip()
        grid = self._sampler.value == "grid"  # which tries each combination once
        trials = None if grid else int(_number(self._trials, "trials"))
        epochs = _number(self._epochs, "epochs")
        recipe_from({"network": network or "-", "dataset": self._dataset.value, "epochs": epochs})
        SweepInfo(
            settings="", axes=axes, trials=trials or 1, sampler=self._sampler.value,
            pruner=self._pruner.value, seed=0, score="", dataset_hash="", created="",
        )  # fmt: skip
        name = plain_name(self._name.value or "")
        self._context.workspace.new_path("sweep", name)
        ref = f"sweeps/{name}"
        return ref, commands.search(
            network, self._dataset.value, ref, vary=vary, trials=trials, epochs=epochs,
            sampler=self._sampler.value, pruner=self._pruner.value,
            gpus=int(self._gpus.value or 0),
            settings=self._rest,
        )  # fmt: skip

    def _changed(self) -> None:
        if not hasattr(self, "_command"):
            return  # the form is being made
        self._trials.set_visibility(self._sampler.value != "grid")
        try:
            _, spec = self._spec()
        except TessellaError as error:
            self._problem.text, line = str(error), ""
        else:
            self._problem.text, line = "", commands.shown(spec)
        self._problem.set_visibility(not line)
        self._button.set_enabled(bool(line))
        self._command.show(line)

    def _start(self) -> None:
        with parts.errors_shown():
            self._on_start(*self._spec())


def _number(element: ValueElement[Any], what: str) -> float:
    if element.value is None:
        raise UsageError(f"the number of {what} is missing", fix="give one")
    return float(element.value)


def _words(kind: Any, words: Mapping[str, str]) -> dict[str, str]:
    """The choices of a Literal, with what each does."""
    return {name: f"{name}: {words[name]}" for name in get_args(kind)}


def _given(like: SweepInfo) -> dict[str, Any]:
    try:
        plain = parse_json(like.settings, where="sweep.json")
    except ArtifactError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _written(like: SweepInfo) -> tuple[dict[str, str], list[str]]:
    """The axes of a sweep as people write them, by path; and those that are of no recipe."""
    written, unknown = {}, []
    for axis in like.axes:
        if not _is_setting(axis.path):
            unknown.append(axis.path[:80])
        elif axis.choices:
            written[axis.path] = _listed(axis.choices)
        else:
            written[axis.path] = f"{axis.low!r}..{axis.high!r}{' log' * axis.log}"
    return written, unknown


def _is_setting(path: str) -> bool:
    """Whether a path is one of a recipe, and can stand before the = of an option."""
    try:
        return path_of(path) == path and all(map(str.isidentifier, path.split(".")))
    except UsageError:
        return False


def _listed(choices: Sequence[object]) -> str:
    return ", ".join(c if isinstance(c, str) else json.dumps(c) for c in choices)
