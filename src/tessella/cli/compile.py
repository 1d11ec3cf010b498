"""``tessella compile``: a checkpoint, a run or an ONNX file becomes a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.files import write_atomic
from tessella.artifacts.plan import Plan
from tessella.cli.output import Events, Json, output
from tessella.cli.parsing import parse_batch
from tessella.compiler import Front
from tessella.compiler.budget import svg
from tessella.compiler.samples import CalibrationSet
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
    calibrate_split: Annotated[
        str | None, Option(help="calibrate: of this split, not of train.")
    ] = None,
    calibrate_samples: Annotated[
        int | None, Option(help="calibrate: about so many images, not 512.")
    ] = None,
    calibrate_method: Annotated[
        str | None, Option(help="calibrate: min-max, percentile, entropy or mse (the default).")
    ] = None,
    layer: Annotated[
        list[str] | None,
        Option(help="NAME=PRECISION of a single layer, as show --passes names it; repeatable."),
    ] = None,
    budget: Annotated[
        float | None,
        Option(help="Points of accuracy that the plan may lose: each layer's precision is chosen."),
    ] = None,
    data: Annotated[Path | None, Option(help="budget: the dataset that judges.")] = None,
    chart: Annotated[Path | None, Option(help="budget: draw accuracy, time, bytes as SVG.")] = None,
    front_folder: Annotated[
        Path | None, Option("--front", help="budget: write all plans of the table here, too.")
    ] = None,
    point: Annotated[
        int | None, Option(help="budget: write this plan of the table, not the chosen one.")
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
    · tessella compile runs/flowers --out flowers.plan --budget 0.3 --data datasets/flowers
    """
    with output(json_only=json, events=events) as out_:
        if out.is_dir():
            raise UsageError("a plan is a file", seen=f"the folder {out}", fix=f"{out}/net.plan")
        given: dict[str, Any] = {
            "batch": parse_batch(batch),
            "target": target,
            "precision": precision,
            "precisions": _precisions(layer or []),
            "calibration": _calibration(
                calibrate, calibrate_split, calibrate_samples, calibrate_method
            ),
            "input": "uint8" if uint8 else "float32",
            "cache": cache,
            "time_limit_s": time_limit,
            "trust_code": trust_code,
            "emit": out_.emit,
        }
        if budget is None:
            if data or chart or front_folder or point is not None:
                raise UsageError(
                    "--data, --chart, --front and --point belong to --budget", fix="give it"
                )
            plan, front = api.compile(source, lock=lock, **given), None
        else:
            if data is None or lock is not None:
                raise UsageError("a budget needs --data DATASET, and takes no --lock")
            if given.pop("precisions"):
                raise UsageError("a budget chooses each layer's precision", fix="leave out --layer")
            front = api.pareto(source, data=data, budget=budget, **given)
            plan = _point(front, point)
        if front is not None and chart is not None:
            write_atomic(chart, svg(front).encode())
        if front is not None and front_folder is not None:
            front.save(front_folder)
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
        if front is not None:
            plain["front"] = front.to_json()
        table = "" if front is None else f"\n\n{front}"
        out_.result(plain, f"{plan}{table}\nwrote {out} ({out.stat().st_size:,} bytes)")


def _precisions(layers: list[str]) -> dict[str, str]:
    """``NAME=PRECISION``, each, as a mapping."""
    for text in layers:
        if "=" not in text:
            raise UsageError("a layer's precision is NAME=PRECISION", seen=text, fix="fc=fp32")
    return {name: precision for name, _, precision in (t.rpartition("=") for t in layers)}


def _calibration(
    data: Path | None, split: str | None, samples: int | None, method: str | None
) -> Path | CalibrationSet | None:
    """What ``--calibrate`` and the options that belong to it say together."""
    given = {"split": split, "samples": samples, "method": method}
    asked = {name: value for name, value in given.items() if value is not None}
    if not asked:
        return data
    if data is None or data.is_file():
        raise UsageError(
            "--calibrate-split, --calibrate-samples and --calibrate-method belong to a dataset",
            seen="no --calibrate" if data is None else f"the saved calibration {data}",
            fix="give --calibrate DATASET",
        )
    return CalibrationSet(dataset=data, **asked)  # type: ignore[arg-type]


def _point(front: Front, point: int | None) -> Plan:
    """The plan that the budget pays for, or another one of the table."""
    if point is None:
        return front.plan
    if not 0 <= point < len(front):
        raise UsageError(
            "the table has no such point", seen=point, fix=f"use 0 to {len(front) - 1}"
        )
    return front[point].plan
