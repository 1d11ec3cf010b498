"""The layers of a network: pictures, statistics and histograms of weights and outputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypedDict
from urllib.parse import quote

from nicegui import ui

from tessella.studio import charts, parts
from tessella.studio.theme import text


class Statistics(TypedDict):
    """Statistics of a tensor's finite values; ``histogram`` counts equal parts of min to max."""

    min: float
    max: float
    mean: float
    std: float
    histogram: list[int]
    not_finite: int


class Line(TypedDict):
    """A layer in the list."""

    name: str
    type: str
    output_shape: list[int]
    parameters: int


class Layer(Line):
    """The layer that is looked at; its pictures are names of PNG files."""

    activation: Statistics | None
    weights: dict[str, Statistics]
    activation_picture: str | None
    weight_picture: str | None


class Look(TypedDict):
    """What ``tessella ask`` says of the layers, as far as it is shown."""

    parameters: int
    layers: list[Line]
    layer: Layer | None


Ask = Callable[[int], Awaitable[Look]]


class Layers:
    """A list of layers and the chosen one beside it; the next picture leaves both in place.

    Args:
        look: the list, and the first layer.
        ask: gives a layer of the present picture by its place in the list.
        pictures: the URL under which the present picture's PNG files are.
    """

    def __init__(self, look: Look, ask: Ask, pictures: str) -> None:
        self._layers, self._ask, self._pictures = look["layers"], ask, pictures
        count = f"{len(self._layers)} layers, {look['parameters']:,} parameters"
        text("p", count).classes("muted small num")
        with parts.box("layer-split"):
            with parts.box("list layer-list"):
                self._items = [self._item(i, layer) for i, layer in enumerate(self._layers)]
            self._detail = ui.element("div").classes("stack")
        self.here = 0  # the place of the chosen one
        if look["layer"] is not None:
            self._items[0].classes("here")
            self._show(look["layer"])

    async def again(self, look: Look, ask: Ask, pictures: str) -> None:
        """Show what the chosen layer makes of another picture; ``look`` may have the one that was
        chosen when it was asked for."""
        self._ask, self._pictures = ask, pictures
        if look["layer"] is not None and look["layer"]["name"] == self._layers[self.here]["name"]:
            self._show(look["layer"])
        else:
            await self._choose(self.here)

    def _item(self, index: int, layer: Line) -> ui.element:
        with ui.element("button").classes("item") as item:
            item.props["type"] = "button"
            text("span", layer["name"]).classes("name cut")
            text("span", f"{layer['parameters']:,}" if layer["parameters"] else "").classes(
                "detail num"
            )
            text("span", f"{layer['type']} · {_shape(layer)}").classes("detail cut")
        item.on("click", lambda: self._choose(index))
        return item

    async def _choose(self, index: int) -> None:
        self._items[self.here].classes(remove="here")
        self._items[index].classes("here")
        self.here, ask = index, self._ask
        with parts.errors_shown():
            layer = (await ask(index))["layer"]
            if (
                layer is not None
                and (index, ask) == (self.here, self._ask)
                and not self._detail.is_deleted
            ):
                self._show(layer)

    def _show(self, layer: Layer) -> None:
        self._detail.clear()
        with self._detail:
            with parts.box("row-line"):
                text("h2", layer["name"]).classes("cut")
                line = f"{layer['type']}, output {_shape(layer)}"
                text("span", f"{line}, {layer['parameters']:,} parameters").classes("hint cut")
            with parts.box("layer"):
                with ui.element("figure"):
                    text("b", "Activations")
                    self._picture(layer["activation_picture"], f"Activations of {layer['name']}")
                    if layer["activation"] is None:
                        text("figcaption", "This layer gives no tensor.")
                    else:
                        _statistics(layer["activation"], charts.COLORS[0])
                with ui.element("figure"):
                    text("b", "Weights")
                    self._picture(layer["weight_picture"], f"Weights of {layer['name']}")
                    if not layer["weights"]:
                        text("figcaption", "This layer learns nothing.")
                    for name, numbers in layer["weights"].items():
                        text("span", name).classes("mono small")
                        _statistics(numbers, charts.COLORS[1])

    def _picture(self, name: str | None, title: str) -> None:
        if name:
            parts.picture(f"{self._pictures}/{quote(name)}", title)


def _statistics(numbers: Statistics, color: str) -> None:
    """Mean, deviation, range and histogram of one tensor."""
    line = (
        f"mean {numbers['mean']:.4g} · std {numbers['std']:.4g}"
        f" · min {numbers['min']:.4g} · max {numbers['max']:.4g}"
    )
    if numbers["not_finite"]:
        line += f" · {numbers['not_finite']:,} not finite"
    text("figcaption", line)
    counts, low, high = numbers["histogram"], numbers["min"], numbers["max"]
    edges = [low + (high - low) * i / len(counts) for i in range(len(counts) + 1)]
    ui.echart(charts.histogram(counts, edges, color)).style("height:116px")


def _shape(layer: Line) -> str:
    """The output's shape without the batch."""
    return " × ".join(str(n) for n in layer["output_shape"][1:]) or "1"
