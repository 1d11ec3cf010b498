"""``tessella compile``: a checkpoint, a run, an ONNX file or a user's module becomes a plan.

The options are the fields of ``BuildRequest``, which is checked before the compiler is loaded.
"""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.build import PARSERS, BuildRequest, option_name, read_options
from tessella.cli.output import Events, Json, output

REPEATED = ("precisions", "inputs")


def register(app: typer.Typer) -> None:
    app.command("compile")(compile_)


def compile_(
    context: typer.Context,
    uint8: Annotated[bool, Option("--uint8", help="The same as --input uint8.")] = False,
    json: Json = False,
    events: Events = None,
    **options: Any,
) -> None:
    """Compile a network into a plan: one file, fused and tuned for this machine.

    Example: tessella compile runs/flowers --out flowers.plan --precision fp16 --batch 1,8,128
    · tessella compile runs/flowers --out flowers.plan --budget 0.3 --data datasets/flowers
    · tessella compile runs/flowers --out flowers.plan --target cpu,sm_80,sm_90
    · tessella compile net.py:trained --out net.plan --inputs image:float32:1x3x224x224
    """
    with output(json_only=json, events=events) as out_:
        request = requested(context)
        request.require_files()
        plan, front = api.build(request, emit=out_.emit)
        out = Path(request.out or "")
        largest = plan.program.buckets[-1]
        plain = {
            "plan": str(out),
            "nbytes": out.stat().st_size,
            "steps": len(largest.steps),
            "fallback_steps": sum(s.op == "fallback" for s in largest.steps),
            "batches": [b.batch for b in plan.program.buckets],
            "target": plan.target,
            "targets": list(plan.targets),
            "precision": plan.manifest.precision,
        }
        if front is not None:
            plain["front"] = front.to_json()
        table = "" if front is None else f"\n\n{front}"
        out_.result(plain, f"{plan}{table}\nwrote {out} ({out.stat().st_size:,} bytes)")


def requested(context: typer.Context) -> BuildRequest:
    """The request in the words of a command line; ``--import`` stands before the verb."""
    imports = context.find_root().params.get("modules")
    kind = {"input": "uint8"} if context.params["uint8"] else {}
    return read_options({"imports": imports, **context.params, **kind})


def _parameters() -> list[inspect.Parameter]:
    """An argument or option for each field of a request, as Typer reads them."""
    hints = typing.get_type_hints(BuildRequest)
    found = []
    for known in fields(BuildRequest):
        if known.name == "imports":
            continue
        help_, spellings = known.metadata["help"], known.metadata.get("spellings", ())
        kind, usual = hints[known.name], known.default
        if known.name in PARSERS:
            kind = list[str] | None if known.name in REPEATED else str | None
            usual = None
        how = Option(option_name(known.name), *spellings, help=help_)
        if known.name == "source":
            how = Argument(help=help_)
        if typing.get_origin(kind) is typing.Literal:
            kind = str
        if known.name in ("source", "out"):
            kind, usual = str, inspect.Parameter.empty
        found.append(
            inspect.Parameter(
                known.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=usual,
                annotation=Annotated[kind, how],
            )
        )
    return found


_own = inspect.signature(compile_, eval_str=True)
_fixed = [p for p in _own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
compile_.__signature__ = _own.replace(  # type: ignore[attr-defined]
    parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in _fixed] + _parameters()
)
