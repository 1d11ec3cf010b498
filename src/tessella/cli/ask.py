"""``tessella ask``: a model that stays open and answers a line of JSON for each line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import output
from tessella.core.errors import TessellaError, UsageError

FIX = '{"image": "photo.jpg", "top": 5}, or with "layers": "FOLDER", "layer": 0 for "top"'


def register(app: typer.Typer) -> None:
    app.command("ask")(ask)


def ask(
    model: Annotated[Path, Argument(help="A checkpoint, a run (its best), or a plan.")],
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
) -> None:
    """Answer pictures one by one, without opening the model again: JSON lines in, JSON lines out.

    Example: tessella ask runs/flowers < questions.jsonl

    A question is {"image": "photo.jpg", "top": 3}. With "layers": "FOLDER", "layer": 0 it asks for
    a list of the layers, and draws into the folder what one of them makes of the picture.
    """
    with output(json_only=True):
        opened = api.Answering(api.open_model(model), trust_code=trust_code)
        _say({"ready": str(model)})
        for line in sys.stdin:
            try:
                _say(_answer(opened, line))
            except TessellaError as error:
                _say(error.to_json())


def _answer(model: api.Answering, line: str) -> dict[str, Any]:
    """The answer to one request; a request that is none raises ``UsageError``."""
    try:
        asked = json.loads(line)
        image, top = asked["image"], asked.get("top")
        folder, layer = asked.get("layers"), asked.get("layer", 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError("this is not a request", seen=line.strip()[:80], fix=FIX) from None
    fits = top is None or (isinstance(top, int) and 1 <= top <= 1000)
    if not isinstance(image, str) or not fits or type(layer) is not int or layer < 0:
        raise UsageError("this is not a request", seen=line.strip()[:80], fix=FIX)
    if folder is None:
        return {"image": image, **model.answer(Path(image), top=top)}
    return {"image": image, **model.layers(Path(image), Path(str(folder)), layer)}


def _say(plain: dict[str, Any]) -> None:
    print(json.dumps(plain, ensure_ascii=False), flush=True)
