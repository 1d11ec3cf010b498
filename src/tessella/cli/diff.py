"""``tessella diff``: what differs between two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella.artifacts.comparison import BucketPair, Comparison, StepPair, compare
from tessella.artifacts.outline import Outline
from tessella.artifacts.plan import load_outline
from tessella.cli.output import Json, grid, output
from tessella.core.errors import UsageError
from tessella.core.record import canonical_json, to_plain

MAX_CELL = 48  # characters of a manifest's value; --json has all of it


def register(app: typer.Typer) -> None:
    app.command("diff")(diff)


def diff(
    a: Annotated[Path, Argument(help="A plan file.")],
    b: Annotated[Path, Argument(help="Another plan file.")],
    batch: Annotated[
        int | None, Option(help="Steps of this batch size; the largest that both have if not.")
    ] = None,
    target: Annotated[
        str | None, Option(help="Programs for this target; the first that both have if not.")
    ] = None,
    all_steps: Annotated[bool, Option("--all", help="Show steps that are the same, too.")] = False,
    json: Json = False,
) -> None:
    """Compare two plans: device, precision, labels, steps, measured times, memory.

    Example: tessella diff flowers-fp32.plan flowers-fp16.plan
    """
    with output(json_only=json) as out:
        found = compare(*_programs(load_outline(a), load_outline(b), target))
        shown = _bucket(found, batch)
        plain = {"a": str(a), "b": str(b), "same": found.same, **to_plain(found)}
        parts: list[Text | Group] = [_manifests(found)]
        if found.buckets:
            parts.append(_totals(found))
        if shown is not None:
            parts.append(_steps(shown, all_steps))
        out.result(plain, Group(*parts))


def _programs(a: Outline, b: Outline, target: str | None) -> tuple[Outline, Outline]:
    """The two plans with their programs for a target, or for the first that both have."""
    target = target or next((t for t in a.targets if t in b.targets), None)
    return (a, b) if target is None else (a.at(target), b.at(target))


def _bucket(found: Comparison, batch: int | None) -> BucketPair | None:
    both = {bucket.batch: bucket for bucket in found.buckets}
    if batch is None:
        return both[max(both)] if both else None
    if batch not in both:
        raise UsageError(
            "not a batch size of both plans",
            seen=batch,
            fix=f"use one of {', '.join(map(str, both))}" if both else "the plans share none",
        )
    return both[batch]


def _manifests(found: Comparison) -> Group:
    rows = [(d.name, _cell(d.a), _cell(d.b)) for d in found.differences]
    for name, batches in (("batches only in a", found.only_a), ("batches only in b", found.only_b)):
        if batches:
            listed = ", ".join(map(str, batches))
            rows.append((name, *((listed, "") if name.endswith("a") else ("", listed))))
    bytes_a, bytes_b = found.weight_bytes
    rows.append(("weight bytes", f"{bytes_a:,}", f"{bytes_b:,}"))
    counts = found.weights
    title = (
        f"weights: {counts['equal']} equal, {counts['changed']} changed,"
        f" {counts['only_a']} only in a, {counts['only_b']} only in b"
        + ("; the plans differ in measured times at most" if found.same else "")
    )
    return grid(("manifest", "a", "b"), rows, title=title)


def _totals(found: Comparison) -> Group:
    rows = [
        (
            p.batch, p.count("same"), p.count("changed"), p.count("added"), p.count("removed"),
            *p.total_us, p.ratio, *p.arena_bytes, *p.peak_bytes,
        )
        for p in found.buckets
    ]  # fmt: skip
    head = (
        "batch", "same", "changed", "added", "removed", "a_us", "b_us", "b/a",
        "arena a", "arena b", "peak a", "peak b",
    )  # fmt: skip
    return grid(head, rows, title="steps, their summed times, and bytes, by batch size")


def _steps(pair: BucketPair, all_steps: bool) -> Group:
    steps = [s for s in pair.steps if all_steps or s.change != "same"]
    rows = [
        (
            s.change, s.name, s.layer, s.a and s.a.kernel, s.b and s.b.kernel,
            s.a and s.a.time_us, s.b and s.b.time_us, s.ratio, _what(s),
        )
        for s in steps
    ]  # fmt: skip
    head = ("change", "step", "layer", "kernel a", "kernel b", "a_us", "b_us", "b/a", "differs")
    same = pair.count("same")
    hidden = "" if all_steps or not same else f"; {same} that are the same: --all"
    return grid(head, rows, title=f"batch {pair.batch}, step by step{hidden}")


def _what(step: StepPair) -> str:
    """The fields in which a step differs; of outputs and configuration both values."""
    if step.a is None or step.b is None:
        return ", ".join(side.outputs[0] for side in (step.a, step.b) if side is not None)
    words = []
    for name in step.differs:
        if name == "outputs":
            words.append(f"{', '.join(step.a.outputs)} → {', '.join(step.b.outputs)}")
        elif name == "config":
            words.append(
                f"config {canonical_json(step.a.config)} → {canonical_json(step.b.config)}"
            )
        else:
            words.append(name)
    return "; ".join(words)


def _cell(value: Any) -> str:
    text = "" if value is None else value if isinstance(value, str) else canonical_json(value)
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}… ({len(text):,} characters)"
