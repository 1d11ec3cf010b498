"""``tessella compile``: a checkpoint, a run or an ONNX file becomes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Events, Json, output
from tessella.cli.parsing import parse_batch
from tessella.core.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command("compile")(compile_)


def compile_(
    source: Annotated[Path, Argument(help="A checkpoint, a run (its best), or model.onnx.")],
    out: Annotated[Path, Option(help="The plan file to write.")],
    target: Annotated[str | None, Option(help="cpu, sm_90 or reference.")] = None,
    precision: Annotated[
        str, Option(help="fp32, tf32, bf16, fp16, or with --calibrate int8, fp8.")
    ] = "fp32",
    calibrate: Annotated[
        Path | None, Option(help="A dataset, or a saved calibration, for int8 and fp8.")
    ] = None,
    uint8: Annotated[
        bool, Option("--uint8", help="Take images as bytes; the plan scales them itself.")
    ] = False,
    batch: Annotated[str, Option(help="One size, or smallest,usual,largest.")] = "1,8,32",
    cache: Annotated[Path | None, Option(help="Timing cache, read and added to.")] = None,
    lock: Annotated[
        Path | None, Option(help="A plan: decide as it did, measure nothing, same bytes.")
    ] = None,
    time_limit: Annotated[
        float | None, Option(help="Seconds to measure; the next build with this cache goes on.")
    ] = None,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Compile a network into a plan: one file, fused and tuned for this machine.

    Example: tessella compile runs/flowers --out flowers.plan --precision fp16 --batch 1,8,128
    """
    with output(json_only=json, events=events) as out_:
        if out.is_dir():
            raise UsageError("a plan is a file", seen=f"the folder {out}", fix=f"{out}/net.plan")
        plan = api.compile(
            source,
            batch=parse_batch(batch),
            target=target,
            precision=precision,
            calibration=calibrate,
            input="uint8" if uint8 else "float32",
            cache=cache,
            lock=lock,
            time_limit_s=time_limit,
            trust_code=trust_code,
            emit=out_.emit,
        )
        plan.save(out)
        largest = plan.program.buckets[-1]
        plain = {
            "plan": str(out),
            "nbytes": out.stat().st_size,
            "steps": len(largest.steps),
            "fallback_steps": sum(s.op == "fallback" for s in largest.steps),
            "batches": [b.batch for b in plan.program.buckets],
            "target": plan.manifest.fingerprint.target,
            "precision": plan.manifest.precision,
        }
        out_.result(plain, f"{plan}\nwrote {out} ({out.stat().st_size:,} bytes)")
