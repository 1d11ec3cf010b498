"""Datasets, runs and checkpoints as tables; reads artifacts only."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.cli.output import grid
from tessella.core.count import counted
from tessella.core.preprocess import Preprocess
from tessella.tasks import counted_names

MAX_CLASSES = 50


def dataset_table(dataset: Dataset, *, with_notes: bool = True) -> Group:
    """Classes and their counts in each split, then notes, skipped files and duplicates.

    Args:
        with_notes: not where they have been told already, as by an import.
    """
    info = dataset.info
    record = info.preprocess
    splits = list(info.splits)
    rows = [
        (label, *(info.splits[s].class_counts[index] for s in splits))
        for index, label in enumerate(info.classes[:MAX_CLASSES])
    ]
    if len(info.classes) > MAX_CLASSES:
        rows.append((f"… {len(info.classes) - MAX_CLASSES} more", *(None for _ in splits)))
    rows.append(("all", *(info.splits[s].count for s in splits)))
    title = (
        f"{info.name}: {info.task.name}, {counted_names(info.task.name, len(info.classes))}, "
        f"{'×'.join(map(str, record.pixel_shape))}, {record.depth} bit, {_fitted(record)}"
    )
    notes = [Text(f"note: {note}") for note in info.notes if with_notes]
    if info.skipped_count:
        notes.append(Text(f"{counted(info.skipped_count, 'file')} skipped:"))
        notes += [Text(f"  {s.path}: {s.reason}") for s in info.skipped[:10]]
    if info.duplicate_count:
        notes.append(Text(f"{counted(info.duplicate_count, 'image')} in two splits:"))
        notes += [Text(f"  {a} = {b}") for a, b in info.duplicates[:10]]
    return Group(grid(("class", *splits), rows, title=title), *notes)


def _fitted(record: Preprocess) -> str:
    """How a file comes to the size that the network sees."""
    if record.volume is None:
        return f"{record.resize} to {record.height}×{record.width}"
    window = record.volume.window
    return "blocks of whole volumes" + (
        "" if window is None else f", window {window[0]:g} to {window[1]:g}"
    )


def run_table(run: Run) -> Group:
    """A run's checkpoints with their metrics."""
    checkpoints = run.checkpoints()
    names = sorted({name for c in checkpoints for name in c.info.metrics})
    rows = [
        (c.path.name, c.info.position.epoch, *(c.info.metrics.get(n) for n in names))
        for c in checkpoints
    ]
    title = f"{run.recipe.network} on {run.recipe.dataset}, {len(run.metrics()):,} steps"
    return grid(("checkpoint", "epoch", *names), rows, title=title)


def checkpoint_table(checkpoint: Checkpoint) -> Group:
    """A checkpoint's network, preprocessing, position and metrics."""
    info = checkpoint.info
    record = info.preprocess
    rows = [
        ("network", f"{info.network.name}, {counted_names(info.task.name, info.network.classes)}"),
        ("task", info.task.name),
        ("input", "×".join(str(n) for n in record.input_shape)),
        ("resize", f"{_fitted(record)}, {record.depth} bit"),
        ("mean", ", ".join(f"{v:.4f}" for v in record.mean)),
        ("std", ", ".join(f"{v:.4f}" for v in record.std)),
        ("preprocessing hash", record.hash[:16]),
        ("position", f"step {info.position.step:,}, epoch {info.position.epoch:g}"),
        ("precision", info.precision),
        *((name, f"{value:.6g}") for name, value in info.metrics.items()),
        ("labels", ", ".join(info.labels[:10]) + (" …" if len(info.labels) > 10 else "")),
    ]
    return grid(("", ""), rows, title=str(checkpoint.path))
