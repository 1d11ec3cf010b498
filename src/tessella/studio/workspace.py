"""The workspace: the folder in which the studio finds datasets, runs and plans and puts new ones.

Artifacts are named by their path relative to the workspace, their *ref*. Whatever wrote them, the
studio or the command line, they are found by what they are, not by a list that could go stale.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Generic, Literal, TypeVar

from tessella.artifacts import front
from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.outline import Outline
from tessella.artifacts.plan import load_outline
from tessella.artifacts.run import Run
from tessella.artifacts.sweep import (
    IMPORTANCE,
    INFO,
    TRIALS,
    Sweep,
    SweepInfo,
    TrialList,
    open_sweep,
)
from tessella.core.errors import ArtifactError, TessellaError, UsageError
from tessella.studio.usual_target import usual_target

Kind = Literal["dataset", "run", "sweep", "plan"]
T = TypeVar("T")
_SWEEPS = Lock()  # pages that ask for a large sweep at once wait for one of them to read it

# The trials of a sweep are shown with it, not as runs beside others.
MARKERS: dict[Kind, str] = {"dataset": "dataset.json", "run": "run.json", "sweep": INFO}
MAX_DEPTH = 5
OWN_FOLDER = ".studio"  # token, uploads, pictures, evaluations, what people wrote, the trash


@dataclass(frozen=True, kw_only=True)
class Found(Generic[T]):
    """An artifact; ``item`` is None where it cannot be read, and ``problem`` says why."""

    ref: str
    path: Path
    modified: float
    item: T | None
    problem: str | None = None


class Workspace:
    """Finds and opens what lies under ``root``; never leaves it."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        if self.root.exists() and not self.root.is_dir():
            raise UsageError("a workspace is a folder", seen=f"the file {root}")
        self.root.mkdir(parents=True, exist_ok=True)

    # --- names --------------------------------------------------------------------------

    def own(self, *parts: str) -> Path:
        """A folder for the studio's own files; created if missing."""
        path = self.root.joinpath(OWN_FOLDER, *parts)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ref(self, path: str | Path) -> str:
        """The name of an artifact of this workspace: its relative path, with forward slashes."""
        path = Path(path)
        return (
            path.relative_to(self.root).as_posix() if path.is_relative_to(self.root) else str(path)
        )

    def path(self, ref: str) -> Path:
        """Where ``ref`` lies.

        Raises:
            UsageError: the ref leads out of the workspace.
        """
        path = (self.root / ref).resolve() if "\0" not in ref else self.root.parent
        if path == self.root or not path.is_relative_to(self.root):
            raise UsageError(
                "this path leads out of the workspace", seen=ref, fix=f"use one under {self.root}"
            )
        return path

    def new_path(self, kind: Kind, name: str) -> Path:
        """Where a new artifact goes: ``datasets/NAME``, ``runs/NAME``, ``plans/NAME.plan``.

        Raises:
            UsageError: the name is taken, or has characters that a name may not have.
        """
        if not re.fullmatch(r"[\w][\w.-]{0,80}", name):
            raise UsageError(
                f"a {kind}'s name has letters, digits, dots, dashes and underscores",
                seen=name or "no name",
                fix="choose another name",
            )
        path = self.root / f"{kind}s" / (f"{name}.plan" if kind == "plan" else name)
        if path.exists():
            raise UsageError(f"this {kind} exists already", seen=name, fix="choose another name")
        return path

    def free_name(self, kind: Kind, name: str) -> str:
        """A name that a new artifact may have, made of any text; empty where it has no letters."""
        plain = plain_name(name)
        path = self.root / f"{kind}s" / plain
        return self.free_path(path).name if plain and path.exists() else plain

    def free_path(self, path: Path) -> Path:
        """A path beside ``path`` that is free: ``runs/flowers-2``."""
        ends = (f"-{number}" for number in count(2))
        free = (path.with_name(f"{path.stem}{end}{path.suffix}") for end in ends)
        return next(p for p in free if not p.exists())

    # --- lists --------------------------------------------------------------------------

    def datasets(self) -> list[Found[Dataset]]:
        return _newest_first(
            self._found(p, Dataset, p / "dataset.json") for k, p in self._walk() if k == "dataset"
        )

    def runs(self) -> list[Found[Run]]:
        return _newest_first(
            self._found(p, Run, p / "run.json") for k, p in self._walk() if k == "run"
        )

    def sweeps(self) -> list[Found[tuple[SweepInfo, Sweep]]]:
        return _newest_first(
            self._found(p, read_sweep, p / INFO) for k, p in self._walk() if k == "sweep"
        )

    def plans(self) -> list[Found[Outline]]:
        return _newest_first(self._found(p, open_plan, p) for k, p in self._walk() if k == "plan")

    def _walk(self) -> Iterator[tuple[Kind, Path]]:
        """Artifacts under the root; does not look inside them, nor into hidden folders."""
        for folder, folders, files in os.walk(self.root):
            here = Path(folder)
            depth = len(here.relative_to(self.root).parts)
            for kind, marker in MARKERS.items():
                if marker in files and not (kind == "dataset" and _is_source(here)):
                    yield kind, here
                    folders.clear()
            if front.FILE in files:  # its plans are shown with the plan that was chosen of them
                folders.clear()
                continue
            for file in files:
                if file.endswith(".plan") and not file.startswith("."):
                    yield "plan", here / file
            folders[:] = sorted(f for f in folders if not f.startswith(".")) * (depth < MAX_DEPTH)

    def _found(self, path: Path, opener: Callable[[Path], T], marker: Path) -> Found[T]:
        ref = self.ref(path)
        try:
            modified = marker.stat().st_mtime
            return Found(ref=ref, path=path, modified=modified, item=opener(path))
        except (TessellaError, OSError) as error:
            return Found(ref=ref, path=path, modified=0.0, item=None, problem=str(error))

    # --- one ----------------------------------------------------------------------------

    def dataset(self, ref: str) -> Dataset:
        return open_dataset(self.path(ref))

    def run(self, ref: str) -> Run:
        return Run(self.path(ref))

    def checkpoint(self, ref: str) -> Checkpoint:
        return Checkpoint(self.path(ref))

    def sweep(self, ref: str) -> tuple[SweepInfo, Sweep]:
        return read_sweep(self.path(ref))

    def plan(self, ref: str) -> Outline:
        return open_plan(self.path(ref))

    def find_dataset(self, content_hash: str) -> Path | None:
        """The dataset with this content, wherever it lies: how a checkpoint finds its images."""
        for found in self.datasets():
            if found.item is not None and found.item.info.content_hash == content_hash:
                return found.path
        return None

    def dataset_of(self, run: Run) -> str:
        """The dataset of a run as its recipe names it or, where that was moved, its ref by now.

        Raises:
            UsageError: no dataset of the workspace has the content that the run learns from.
        """
        named, content = run.recipe.dataset, run.info.dataset_hash
        try:
            if open_dataset(self.root / named).info.content_hash == content:
                return named
        except TessellaError:
            pass  # it was moved, or what lies there now cannot be read
        path = self.find_dataset(content)
        if path is None:
            raise UsageError(
                "the dataset of this run is not where it was, nor is it in this workspace",
                seen=named,
                fix="put its folder anywhere into the workspace: it is known by its content",
            )
        return self.ref(path)


def plain_name(name: str) -> str:
    """A name for an artifact made of any text: letters, digits, dashes."""
    kept = "".join(c if c.isalnum() or c in "_-" else " " for c in name)
    return "-".join(kept.split()).strip("-")[:60]


def readable(found: Iterable[Found[T]]) -> dict[str, T]:
    """The artifacts that can be read, by ref."""
    return {f.ref: f.item for f in found if f.item is not None}


def best_checkpoint(run: Run) -> Checkpoint:
    """The best checkpoint of a run by its task's score, or the newest where none has one."""
    scored = any(run.info.task.metric in c.info.metrics for c in run.checkpoints())
    return run.best() if scored else run.latest()


def _newest_first(found: Iterator[Found[T]]) -> list[Found[T]]:
    return sorted(found, key=lambda f: (-f.modified, f.ref))


def _is_source(folder: Path) -> bool:
    """Whether a ``dataset.json`` is that of volumes by MSD or nnU-Net, which an import reads."""
    return (folder / "imagesTr").is_dir() and (folder / "labelsTr").is_dir()


def open_dataset(path: Path) -> Dataset:
    """A dataset, kept open while it does not change: thumbnails come one by one."""
    return _dataset_at(path, _stamp(path / "dataset.json"))


def read_sweep(path: Path) -> tuple[SweepInfo, Sweep]:
    """A sweep, kept while its files do not change."""
    with _SWEEPS:
        return _sweep_at(path, sweep_stamp(path))


def sweep_stamp(path: Path) -> tuple[tuple[int, int] | None, ...]:
    """What changes when a file of a sweep does."""
    files = (path / TRIALS, path / IMPORTANCE)
    return (_stamp(path / INFO), *(_stamp(f) if f.exists() else None for f in files))


def open_plan(path: Path) -> Outline:
    """A plan, kept while its file does not change; reading one means hashing all of it."""
    return _plan_at(path, _stamp(path))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ArtifactError("there is no such file", seen=path) from error
    return stat.st_mtime_ns, stat.st_size


@lru_cache(maxsize=16)
def _dataset_at(path: Path, stamp: tuple[int, int]) -> Dataset:
    return Dataset(path, deep=False)  # a page looks at a few examples


@lru_cache(maxsize=16)
def _sweep_at(path: Path, stamp: tuple[tuple[int, int] | None, ...]) -> tuple[SweepInfo, Sweep]:
    return open_sweep(path, _trials_at(path))


@lru_cache(maxsize=16)
def _trials_at(path: Path) -> TrialList:
    return TrialList(path)


@lru_cache(maxsize=16)
def _plan_at(path: Path, stamp: tuple[int, int]) -> Outline:
    plan, here = load_outline(path), usual_target()
    return plan.at(here) if here in plan.targets else plan
