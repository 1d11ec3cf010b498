"""``tessella bench``: a plan's latency and throughput, beside its checkpoint where one is given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Json, grid, output
from tessella.cli.parsing import parse_sizes
from tessella.core.count import with_spread
from tessella.core.device import torch_device
from tessella.nn import zoo
from tessella.runtime.engine import Engine
from tessella.runtime.profiler import sample
from tessella.search.timing import Timing, latency


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    plan: Annotated[Path, Argument(help="The plan file.")],
    against: Annotated[
        Path | None, Option(help="Its checkpoint (or run), measured in the same rounds.")
    ] = None,
    batch: Annotated[str | None, Option(help="Batch sizes, 1,8,32; the plan's if not.")] = None,
    seconds: Annotated[float, Option(help="How long to measure each batch size.", min=0.01)] = 2.0,
    trust_code: Annotated[bool, Option(help="Run the Python that a checkpoint brings.")] = False,
    json: Json = False,
) -> None:
    """Measure latency and throughput, in interleaved rounds; medians.

    Example: tessella bench flowers.plan --against runs/flowers --batch 1,8
    """
    with output(json_only=json) as out:
        engine = api.load(plan)
        device = torch_device(engine.manifest.fingerprint.target)
        sizes = engine.buckets if batch is None else parse_sizes(batch)
        module = None
        if against is not None:
            checkpoint = api.open_checkpoint(against)
            module = zoo.load(checkpoint, trust_code=trust_code).to(device)
        measured: list[tuple[int, dict[str, Timing]]] = []
        for size in sizes:
            given = [sample(spec, size, device) for spec in engine.inputs]
            runs = {"plan": lambda given=given: engine(*given)}
            if module is not None:
                plain = [_as_trained(tensor) for tensor in given]
                runs["torch"] = lambda plain=plain: module(*plain)
            with torch.inference_mode():
                timings = latency(runs, device=device, seconds=seconds)
            measured.append((size, timings))
        report = {
            "target": engine.manifest.fingerprint.target,
            "rows": [
                {"batch": size, **{name: _row(timing, size) for name, timing in timings.items()}}
                for size, timings in measured
            ],
        }
        head = ["batch", "plan ms", "images/s"]
        if module is not None:
            head += ["torch ms", "ratio"]
        rows = [_cells(size, **timings) for size, timings in measured]
        out.result(report, grid(head, rows, title=f"{plan.name} on {_machine(engine)}"))
        if any(timing.noisy for _, timings in measured for timing in timings.values()):
            out.note("warning: other work disturbed the times with a ~: measure again without it")


def _as_trained(given: torch.Tensor) -> torch.Tensor:
    """What a checkpoint gets for an input: pictures as floats, their channels in front."""
    is_picture = given.dtype == torch.uint8 and given.dim() == 4
    return given.permute(0, 3, 1, 2).float() if is_picture else given


def _machine(engine: Engine) -> str:
    """The target of the program that runs, and the machine that it was built on."""
    built = engine.manifest.fingerprint
    return f"{built.target} ({built.name})"


def _cells(size: int, plan: Timing, torch: Timing | None = None) -> tuple[str | float, ...]:
    own = size, _shown(plan), size / (plan.time_us * 1e-6)
    return own if torch is None else (*own, _shown(torch), torch.time_us / plan.time_us)


def _shown(timing: Timing) -> str:
    spread = None if timing.spread_us is None else timing.spread_us / 1e3
    return f"{with_spread(timing.time_us / 1e3, spread)}{' ~' * timing.noisy}"


def _row(timing: Timing, batch: int) -> dict[str, float | None]:
    return {
        "median_ms": timing.time_us / 1e3,
        "spread_ms": None if timing.spread_us is None else timing.spread_us / 1e3,
        "noisy": timing.noisy,
        "images_per_s": batch / (timing.time_us * 1e-6),
    }
