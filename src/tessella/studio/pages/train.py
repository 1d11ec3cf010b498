"""The Train page: choose a network, see its drawing, shape the learning rate, start."""

from __future__ import annotations

import asyncio
import datetime
import math
from typing import Any

from nicegui import ui

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment, Recipe, Run
from tessella.core.errors import TessellaError, UsageError
from tessella.core.record import digest
from tessella.jobs import commands
from tessella.jobs.job import JobSpec
from tessella.studio import charts, parts, pictures
from tessella.studio.context import Context
from tessella.studio.networks import STANDARD, every_network, first_networks
from tessella.studio.path_field import PathField
from tessella.studio.quick import ask
from tessella.studio.recipe_form import RecipeForm, flat
from tessella.studio.sweep_form import SweepForm
from tessella.studio.theme import RESPONSE_S, frame, text
from tessella.studio.workspace import plain_name, readable
from tessella.tasks import counted_names, for_defaults

SOURCES = {"standard": "Standard", "timm": "timm", "run": "Previous", "file": "Own file"}
SEEN = 8  # training images of the preview
DRAW_AFTER_S = 0.5  # of no typing
MISSING = "Choose another on the Data page, or open Train from the steps above."


def register(context: Context) -> None:
    @ui.page("/train", response_timeout=RESPONSE_S)
    async def train(dataset: str = "", run: str = "", epochs: float = 0.0) -> None:
        datasets = readable(await asyncio.to_thread(context.workspace.datasets))
        runs = readable(await asyncio.to_thread(context.workspace.runs))
        with frame("Train", "A network, a recipe, a run.", context.workspace.root):
            if not datasets:
                with parts.empty("There is no dataset yet", "A network learns from a dataset."):
                    parts.button("Import images", lambda: ui.navigate.to("/data"))
                return
            try:  # what is asked for and missing is an error: no other takes its place
                if not 0 <= epochs < math.inf:  # 0: as many as the run
                    raise UsageError("epochs are a number, and not below 0", seen=epochs)
                if dataset and dataset not in datasets:
                    context.workspace.dataset(dataset)
                if run and run not in runs:  # a trial of a sweep is not among them
                    runs[run] = context.workspace.run(run)
            except TessellaError as error:
                parts.refused(error, MISSING)
                return
            if not dataset and run:  # the run's, which may have been moved
                info = runs[run].info
                same = (r for r, d in datasets.items() if d.info.content_hash == info.dataset_hash)
                named = info.recipe.dataset
                dataset = named if named in datasets else next(same, "")
            _Train(context, datasets, runs, dataset or next(iter(datasets)), run, epochs)


class _Train:
    def __init__(
        self,
        context: Context,
        datasets: dict[str, Dataset],
        runs: dict[str, Run],
        dataset: str,
        like: str,
        epochs: float,
    ) -> None:
        self._context, self._datasets, self._runs = context, datasets, runs
        start = runs[like].recipe if like in runs else None
        begun = flat(start) | ({"epochs": epochs} if epochs > 0 else {}) if start else None
        self._drawing: asyncio.Task[None] | None = None
        self._ready = False
        self._known: list[dict[str, Any]] = []  # all networks, once the command line has told them
        self._shown: tuple[str, Augment] | None = None
        with parts.box("split"):
            with parts.box("stack"):
                with parts.card("Network and data"):
                    self._choosers(dataset, start)
                with parts.card("Recipe"):
                    self._form = RecipeForm(self._changed, begun)
                    self._sweep = SweepForm(STANDARD, self._changed)
                    with parts.link("/search", "small", dataset=dataset):
                        text("span", "Or search for the best settings")
                    self._problem = text("div", "").classes("note bad")
                    self._start_button = parts.button(
                        "Start training", self._start, icon="play_arrow"
                    )
            with parts.box("stack"):
                with parts.box("wide-duo"):
                    with parts.card("Learning rate", "over the epochs"):
                        empty = charts.lines([("learning rate", [])])
                        self._curve = ui.echart(empty).classes("chart low")
                    with parts.card("Network"):
                        self._summary = text("p", "").classes("muted small")
                        self._drawn = ui.element("div").classes("stack")
                with parts.card("What the network will see", "training images, changed at random"):
                    self._seen = parts.box("thumbs")
                with parts.card("How to do the same"):
                    self._command = parts.Command()
                    with ui.expansion("All commands") as self._all_box:
                        self._all = text("pre", "").classes("log")
        self._ready = True
        self._changed()
        self._redraw()
        ui.context.client.on_delete(self._stop_drawing)  # nobody is there to see it
        ui.timer(0.1, self._load_names, once=True)

    def _choosers(self, dataset: str, start: Recipe | None) -> None:
        names = self._context.dataset_names(self._datasets)
        self._dataset = parts.field(
            ui.select(names, value=dataset, label="Dataset", on_change=self._dataset_changed)
        )
        of_timm = start is not None and start.network.startswith("timm/")
        source = "timm" if of_timm else "standard"
        self._source = ui.toggle(SOURCES, value=source, on_change=self._source_changed).props(
            "unelevated dense no-caps spread toggle-color=teal-9 size=13px"
        )
        self._wanted = start.network if start else ""
        first = first_networks(self._datasets[dataset].info.task.name)
        value = self._wanted if self._wanted in first else first[0]
        self._standard = parts.field(
            ui.select(list(first), value=value, label="Network", on_change=self._network_changed)
        )
        self._timm = parts.field(ui.input("Model of timm", on_change=self._network_changed))
        self._timm.props('placeholder="efficientnet_b0"')
        if start is not None and of_timm:
            self._timm.value = start.network.removeprefix("timm/")
        previous = self._context.run_names(self._runs)
        self._previous = parts.field(
            ui.select(previous, label="Continue from the best checkpoint of",
                      on_change=self._network_changed)
        )  # fmt: skip
        self._own = PathField(
            "File",
            root=self._context.workspace.root,
            placeholder="net.py:Net or net.prototxt",
            suffixes=(".py", ".prototxt"),
            on_change=lambda _: self._network_changed(),
        )
        self._name = parts.field(ui.input("Name of the run", value=self._free_name()))
        self._name.on_value_change(self._changed)
        self._show_source()

    # --- the form's values -------------------------------------------------------------

    def _network(self) -> str:
        source = self._source.value
        if source == "timm":
            return f"timm/{(self._timm.value or '').strip().removeprefix('timm/')}"
        if source == "file":
            return (self._own.value or "").strip()
        if source == "run" and self._previous.value:
            return self._runs[self._previous.value].recipe.network
        return str(self._standard.value)

    def _recipe(self) -> Recipe:
        network = self._network()
        if not network or network == "timm/":
            raise UsageError("no network is chosen", fix="choose or name one")
        continued = self._source.value == "run" and self._previous.value
        init = self._best(self._previous.value) if continued else "random"
        dataset = self._dataset.value
        asked = for_defaults(self._datasets[dataset])
        return self._form.recipe(network=network, dataset=dataset, init=init, **asked)

    def _best(self, ref: str) -> str:
        return self._context.workspace.ref(self._runs[ref].best().path)

    def _run_name(self) -> str:
        """The name of the run's folder; one that is taken, or none, is a ``UsageError``."""
        name = plain_name(self._name.value or "")
        self._context.workspace.new_path("run", name)
        return name

    def _free_name(self) -> str:
        return datetime.datetime.now().strftime("run-%Y%m%d-%H%M%S")

    # --- what happens -------------------------------------------------------------------

    def _changed(self) -> None:
        """Check the recipe; show its command and its learning rate, or what is wrong."""
        if not self._ready:
            return
        try:
            recipe = self._recipe()
            specs = self._specs(recipe, self._run_name())
        except TessellaError as error:
            self._problem.text = str(error)
            self._problem.set_visibility(True)
            self._command.show("")
            return
        self._problem.set_visibility(False)
        self._form.show(recipe)
        lines = [commands.shown(spec) for spec in specs]
        self._command.show(lines[0])
        self._all.text = "\n".join(lines)
        self._all_box.set_visibility(len(lines) > 1)
        self._sweep.count(len(specs))
        several = len(specs) > 1
        self._start_button.text = f"Start {len(specs)} trainings" if several else "Start training"
        points = [
            (round(t * recipe.epochs, 4), float(f"{rate:.5g}"))
            for t, rate in recipe.policy.curve(recipe.solver.lr)
        ]
        self._curve.options["series"][0]["data"] = points
        self._curve.update()
        self._show_seen(recipe)

    def _show_seen(self, recipe: Recipe) -> None:
        """Some training images as the first epoch would show them, with boxes and masks."""
        dataset = self._datasets[recipe.dataset]
        now = recipe.dataset, recipe.augment
        if now == self._shown:
            return
        self._shown = now
        count = len(dataset.train)
        picks = {n * count // SEEN for n in range(SEEN)} if count else set[int]()
        self._seen.clear()
        with self._seen:
            for index in sorted(picks):
                source = pictures.trained_address(dataset, recipe.dataset, index, recipe.augment)
                with parts.box("thumb"):
                    parts.picture(source, f"Training image {index + 1}, changed")

    def _source_changed(self) -> None:
        self._show_source()
        self._network_changed()

    def _show_source(self) -> None:
        for name, element in (
            ("standard", self._standard), ("timm", self._timm), ("run", self._previous),
            ("file", self._own.box),
        ):  # fmt: skip
            element.set_visibility(self._source.value == name)

    def _dataset_changed(self) -> None:
        self._offer()
        self._changed()
        self._redraw()

    def _network_changed(self) -> None:
        self._changed()
        self._redraw()

    def _stop_drawing(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()

    def _redraw(self) -> None:
        if not self._ready:
            return
        self._stop_drawing()
        self._drawing = asyncio.create_task(self._draw())

    async def _draw(self) -> None:
        """Let the command line draw the network, once for each network and size."""
        await asyncio.sleep(DRAW_AFTER_S)
        network, dataset = self._network(), self._datasets[self._dataset.value]
        channels, *sides = dataset.preprocess.input_shape
        shape = " × ".join(map(str, (channels, *sides)))
        told = counted_names(dataset.info.task.name, len(dataset.classes))
        self._summary.text = f"{network} for {told}, input {shape}"
        if not network or network == "timm/":
            self._show_drawing(None, "Name a network to see it drawn.")
            return
        key = digest([network, len(dataset.classes), channels, *sides])[:24]
        target = self._context.workspace.own("networks", key) / "network.svg"
        own = self._source.value == "file"
        if not target.exists() or own:
            self._show_drawing(None, "Drawing …")
            try:
                spec = commands.show_network(
                    network,
                    classes=len(dataset.classes),
                    channels=channels,
                    size=tuple(sides),
                    svg=target,
                )
                await ask(spec.argv, folder=self._context.workspace.root)
            except TessellaError as error:
                self._show_drawing(None, str(error))
                return
        self._show_drawing(f"/pictures/own/networks/{key}/network.svg", "")

    def _show_drawing(self, source: str | None, line: str) -> None:
        self._drawn.clear()
        with self._drawn:
            if source is None:
                text("p", line).classes("muted small")
            else:
                with parts.box("network-box"):
                    parts.picture(source, "The network's layers, drawn")

    async def _load_names(self) -> None:
        """Replace the short list of networks by all of the zoo."""
        try:
            self._known = await every_network(self._context.workspace.root)
        except TessellaError as error:
            ui.notify(str(error), type="warning")
            return
        self._offer()

    def _offer(self) -> None:
        """Offer the networks that learn the dataset's task."""
        task = self._datasets[self._dataset.value].info.task.name
        names = {n["name"]: n["title"] or n["name"] for n in self._known if task in n["tasks"]}
        names = names or {name: name for name in first_networks(task)}
        if names:
            wanted, self._wanted = self._wanted or self._standard.value, ""
            value = wanted if wanted in names else next(iter(names))
            self._standard.set_options(names, value=value)
            self._sweep.offer(names)

    def _specs(self, recipe: Recipe, name: str) -> tuple[JobSpec, ...]:
        """The trainings: one, or those of the sweep."""
        ref = f"runs/{name}"
        if not self._sweep.on:
            return (commands.train(recipe, ref, name=name),)
        return commands.sweep(recipe, ref, group=name, **self._sweep.values())

    def _start(self) -> None:
        with parts.errors_shown():
            name = self._run_name()
            specs = self._specs(self._recipe(), name)
            for spec in specs:  # all names are free, or nothing starts
                self._context.workspace.new_path("run", spec.name)
            for spec in specs:
                self._context.store.submit(spec)
            if self._sweep.on:
                ui.navigate.to(parts.address("/compare", group=name))
            else:
                ui.navigate.to(parts.address("/monitor", run=f"runs/{name}"))
