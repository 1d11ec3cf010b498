"""The tasks that there are: the folders beside this file, each imported when it is asked for."""

from __future__ import annotations

import functools
import importlib
import pkgutil

import tessella.tasks
from tessella.core.count import counted
from tessella.core.errors import UsageError
from tessella.core.task import TaskRecord
from tessella.tasks.task import Task


def names() -> tuple[str, ...]:
    """The tasks by name, in the order of the alphabet."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(tessella.tasks.__path__) if m.ispkg))


@functools.cache
def named(name: str) -> Task:
    """The task of a name. A file of a stranger can name nothing but a folder that is there.

    Raises:
        UsageError: there is no such task.
    """
    if name not in names():
        raise UsageError("there is no such task", seen=name, fix=f"use {', '.join(names())}")
    package = f"tessella.tasks.{name}"
    folder = importlib.import_module(package)
    volumes = getattr(folder, "VOLUMES", False)
    return Task(name=name, title=folder.TITLE, score=folder.SCORE, package=package, volumes=volumes)


@functools.cache
def verbs() -> frozenset[str]:
    """What a server may be asked to do with pictures: the verbs of all tasks."""
    return frozenset(named(name).answers.VERB for name in names())


def of(record: TaskRecord) -> Task:
    """The task of a record."""
    return named(record.name)


def counted_examples(task: str, count: int) -> str:
    """How many examples there are: ``10 images``, ``1 volume``."""
    return counted(count, "volume" if named(task).volumes else "image")


def counted_names(task: str, count: int) -> str:
    """How many names a dataset of a task has: ``10 classes``, ``2 numbers``."""
    plural = named(task).examples.NAMES
    return counted(count, {"classes": "class"}.get(plural, plural.removesuffix("s")), plural)
