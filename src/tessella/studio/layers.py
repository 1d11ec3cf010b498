"""The layers of a network, one at a time: pictures, statistics and histograms of weights and
outputs.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from nicegui import ui

from tessella.studio import charts, parts
from tessella.studio.theme import text


class Layers:
    """A list of layers and the chosen one beside it.

    Args:
        layers: what ``tessella show layers`` wrote into ``layers.json``.
        pictures: the URL under which its PNG files are.
    """

    def __init__(self, layers: list[dict[str, Any]], pictures: str) -> None:
        self._layers, self._pictures = layers, pictures
        total = sum(layer.get("parameters") or 0 for layer in layers)
        text("p", f"{len(layers)} layers, {total:,} parameters").classes("muted small num")
        with parts.box("layer-split"):
            with parts.box("list layer-list"):
                self._items = [self._item(i, layer) for i, layer in enumerate(layers)]
            self._detail = ui.element("div").classes("stack")
        self._choose(0)

    def _item(self, index: int, layer: dict[str, Any]) -> ui.element:
        with ui.element("button").classes("item") as item:
            item.props["type"] = "button"
            text("span", layer["name"]).classes("name cut")
            text("span", _count(layer)).classes("detail num")
            text("span", f"{layer['type']} · {_shape(layer)}").classes("detail cut")
        item.on("click", lambda: self._choose(index))
        return item

    def _choose(self, index: int) -> None:
        for i, item in enumerate(self._items):
            item.classes(**({"add": "here"} if i == index else {"remove": "here"}))
        layer = self._layers[index]
        self._detail.clear()
        with self._detail:
            with parts.box("row-line"):
                text("h2", layer["name"]).classes("cut")
                text("span", f"{layer['type']}, output {_shape(layer)}, {_count(layer) or 'no'} "
                     "parameters").classes("hint cut")  # fmt: skip
            with parts.box("layer"):
                self._figure("Activations", layer, "activations", charts.COLORS[0])
                self._figure("Weights", layer, "weights", charts.COLORS[1])

    def _figure(self, title: str, layer: dict[str, Any], what: str, color: str) -> None:
        values, file = layer.get(what), layer.get(f"{what}_picture")
        with ui.element("figure"):
            text("b", title)
            if not values:
                text("figcaption", "This layer has none.")
                return
            numbers = ("mean", "std", "min", "max")
            line = " · ".join(f"{n} {values[n]:.4g}" for n in numbers if values.get(n) is not None)
            text("figcaption", line)
            if file:
                parts.picture(f"{self._pictures}/{quote(file)}", f"{title} of {layer['name']}")
            if histogram := values.get("histogram"):
                options = charts.histogram(histogram["counts"], histogram["edges"], color)
                ui.echart(options).style("height:120px")


def _shape(layer: dict[str, Any]) -> str:
    return " × ".join(str(n) for n in layer.get("output_shape") or [])


def _count(layer: dict[str, Any]) -> str:
    count = layer.get("parameters") or 0
    return f"{count:,}" if count else ""
