"""The list of a network's layers on the Explore page."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from nicegui import Client
from nicegui.page import page

from tessella.studio.layers import Layers, Look


def look_at(picture: str, index: int) -> Look:
    """What is told of layer number ``index``, under a name of its picture."""
    lines = [
        {"name": f"layer{i}", "type": "ReLU", "output_shape": [1, 2], "parameters": 0}
        for i in range(2)
    ]
    one = lines[index] | {
        "activation": None, "weights": {}, "activation_picture": f"{picture}{index}.png",
        "weight_picture": None,
    }  # fmt: skip
    return cast(Look, {"parameters": 0, "layers": lines, "layer": one})


def test_a_layer_that_is_chosen_while_the_next_picture_is_asked_for_is_shown() -> None:
    shown: list[Any] = []
    asked: list[tuple[str, int]] = []

    class Recorded(Layers):
        def _show(self, layer: Any) -> None:
            shown.append(layer["activation_picture"])

    async def ask_of(picture: str, index: int) -> Look:
        asked.append((picture, index))
        await asyncio.sleep(0)
        return look_at(picture, index)

    async def play() -> None:
        with Client(page("")):
            layers = Recorded(look_at("a", 0), lambda i: ask_of("a", i), "")
        choosing = asyncio.create_task(layers._choose(1))  # its answer comes after the next picture
        await asyncio.sleep(0)
        await layers.again(look_at("b", 0), lambda i: ask_of("b", i), "")
        await choosing

    asyncio.run(play())
    assert asked == [("a", 1), ("b", 1)]
    assert shown == ["a0.png", "b1.png"]
