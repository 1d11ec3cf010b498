"""``tessella export``: a checkpoint or a run becomes an ONNX file, for other people's engines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.files import require_place
from tessella.cli.output import Events, Json, output
from tessella.core.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    source: Annotated[Path, Argument(help="A checkpoint, a run (its best), or model.onnx.")],
    out: Annotated[Path, Argument(help="The ONNX file to write.")],
    opset: Annotated[int, Option(help="The version of ONNX's operators, 17 to 21.")] = 17,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Write a network as ONNX: FP32, any batch, checked by onnx.

    Example: tessella export runs/flowers flowers.onnx
    """
    with output(json_only=json, events=events) as out_:
        if out.suffix != ".onnx":
            raise UsageError("an ONNX file ends in .onnx", seen=out, fix=f"{out.stem}.onnx")
        require_place(out)
        network = api.export(source, out, opset=opset, trust_code=trust_code)
        inputs = [str(v) for v in network.inputs]
        outputs = [str(v) for v in network.outputs]
        nbytes = out.stat().st_size
        plain = {
            "onnx": str(out),
            "nbytes": nbytes,
            "opset": opset,
            "inputs": inputs,
            "outputs": outputs,
        }
        edges = f"{', '.join(inputs)} → {', '.join(outputs)}"
        out_.result(plain, f"{edges}\nwrote {out} ({nbytes:,} bytes, opset {opset})")
