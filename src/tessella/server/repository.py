"""The repository: models by name, which of them are loaded, and why the others are not.

A model's version is always "1": a name stands for one plan, and loading it again replaces the plan.
``plan_hash`` in the model's configuration identifies the plan.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tessella.core.dtype import dtype
from tessella.core.errors import ServeError, UsageError
from tessella.core.record import digest
from tessella.runtime import Engine, load_tried
from tessella.server.batcher import Batcher
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.protocol import Signature, signature
from tessella.server.statistics import Statistics
from tessella.server.tensors import narrow, widen

log = logging.getLogger(__name__)

MODEL_VERSION = "1"
SUFFIX = ".plan"
State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RESERVED = (".", "..", "stats")  # /v2/models/stats is a route


def check_name(name: str) -> str:
    """The name, checked: the only part of a request that may name a file.

    Raises:
        UsageError: no model can have this name.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(
            "this cannot be the name of a model",
            seen=repr(name)[:140],
            fix="use 1 to 128 letters, digits, dots, dashes and underscores",
        )
    return name


def on_numpy(engine: Engine) -> Callable[..., Mapping[str, np.ndarray]]:
    """The engine as a function of NumPy arrays, also with element types that NumPy lacks."""
    if all(dtype(s.dtype).numpy is not None for s in (*engine.inputs, *engine.outputs)):
        return engine
    types = {s.name: dtype(s.dtype) for s in engine.inputs}

    def run(**arrays: np.ndarray) -> dict[str, np.ndarray]:
        tensors = {name: narrow(array, types[name]) for name, array in arrays.items()}
        return {name: widen(tensor) for name, tensor in engine(**tensors).items()}

    return run


class Model:
    """A loaded engine with its batcher. ``with model:`` keeps the engine open for the block."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        statistics: Statistics,
        max_delay_us: int,
        limits: Limits,
        has_thread: bool,
    ) -> None:
        self.name = name
        self.engine = engine
        self.statistics = statistics
        self.max_batch = min(s.batch.max for s in engine.inputs)
        self.max_delay_us = max_delay_us
        self.plan_hash = digest(engine.manifest)
        self.signature: Signature = signature(
            engine.inputs,
            engine.outputs,
            engine.labels,
            engine.preprocess,
            engine.manifest.task,
        )
        self.batcher = Batcher(
            on_numpy(engine),
            max_batch=self.max_batch,
            max_delay_us=max_delay_us,
            max_waiting=limits.waiting,
            statistics=statistics,
            has_thread=has_thread,
            in_loop=engine.manifest.fingerprint.target == "cpu",
        )
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> Model:
        """Keep the engine open for the length of the block."""
        self._users += 1
        self._unused.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0:
            self._unused.set()

    async def retire(self) -> None:
        """Close the engine once the requests that use it have their answers."""
        await self._unused.wait()
        await self.batcher.close(self.engine.close)


@dataclass(eq=False)
class _Entry:
    """A name of the repository; ``statistics`` go on when another engine is loaded."""

    path: Path
    model: Model | None = None
    state: State = "UNAVAILABLE"
    reason: str = "not loaded"
    statistics: Statistics = field(default_factory=Statistics)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Repository:
    """Models by name.

    Args:
        models: the plans that may be served, by name.
        folder: a folder whose ``NAME.plan`` may be loaded too, while the server runs.
        max_delay_us: see ``Batcher``.
        open_engine: opens a plan's path as an engine; by default, plans with operators of torch run
            first in a child process.
        threads: each model has a thread that runs it; see ``Batcher``.

    Attributes:
        on_change: called when other models are loaded than before.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        *,
        folder: Path | None = None,
        max_delay_us: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        open_engine: Callable[[Path], Engine] = load_tried,
        threads: bool = True,
    ) -> None:
        if max_delay_us < 0:
            raise UsageError("max_delay_us cannot be negative", seen=max_delay_us)
        self._entries = {check_name(n): _Entry(path=Path(p)) for n, p in models.items()}
        self._folder = None if folder is None else folder.resolve()
        self._max_delay_us = max_delay_us
        self._limits = limits
        self._open_engine = open_engine
        self._threads = threads
        self.on_change: Callable[[], None] = lambda: None

    def load_all(self) -> None:
        """Load every model that was given; called before the server starts.

        Raises:
            TessellaError: the first that cannot be loaded.
        """
        for name, entry in self._entries.items():
            entry.model = self._open(name, entry)
            entry.state, entry.reason = "READY", ""

    async def load(self, name: str) -> None:
        """Load a model, or load it again from its file; requests go to the old one until then.

        Raises:
            UsageError: not a name. ServeError: 404, no such model.
            TessellaError: the plan cannot be used; a model loaded before goes on serving.
        """
        entry = self._find(name)
        async with entry.changing:
            before = entry.model
            entry.state = "READY" if before else "LOADING"
            try:
                model = await asyncio.to_thread(self._open, name, entry)
            except Exception as error:
                if before is not None:
                    entry.reason = f"loading it again failed, the earlier one serves: {error}"
                else:
                    entry.state, entry.reason = "UNAVAILABLE", str(error)
                raise
            entry.model, entry.state, entry.reason = model, "READY", ""
            self.on_change()
            if before is not None:
                await before.retire()

    async def unload(self, name: str) -> None:
        """Take a model out of service; returns when its last request has its answer.

        Raises:
            ServeError: 404, no such model.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_model(name)
        async with entry.changing:
            model, entry.model = entry.model, None
            if model is not None:
                entry.state = "UNLOADING"
                self.on_change()
                await model.retire()
            entry.state, entry.reason = "UNAVAILABLE", "unloaded"

    def require_ready(self) -> None:
        """Nothing to do: whoever asks is answered by the process that has the models."""

    async def open(self) -> None:
        """Nothing to do: ``load_all`` came before the server."""

    async def close(self) -> None:
        """Unload all models."""
        await asyncio.gather(*(self.unload(name) for name in self._entries))

    def get(self, name: str, version: str | None = None) -> Model:
        """The loaded model.

        Raises:
            ServeError: 404 no such model or version, 503 not loaded.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_model(name)
        if version not in (None, "", MODEL_VERSION):
            raise unknown_version(name, version)
        if entry.model is None:
            raise ServeError(
                f"model {name!r} is not ready",
                status=503,
                seen=f"{entry.state}: {entry.reason}",
                fix=f"load it: POST /v2/repository/models/{name}/load",
            )
        return entry.model

    @property
    def models(self) -> list[Model]:
        """The loaded models."""
        return [e.model for e in self._entries.values() if e.model is not None]

    @property
    def statistics(self) -> dict[str, Statistics]:
        """Statistics by name, of all models that were ever loaded."""
        return {name: e.statistics for name, e in self._entries.items()}

    def index(self, *, ready: bool = False) -> list[dict[str, Any]]:
        """Name, version, state and reason of all models, or of the ready models only."""
        known = {
            name: {"name": name, "version": MODEL_VERSION, "state": e.state, "reason": e.reason}
            for name, e in self._entries.items()
        }
        for name in self._in_folder():
            unloaded = {"version": MODEL_VERSION, "state": "UNAVAILABLE", "reason": "not loaded"}
            known.setdefault(name, {"name": name, **unloaded})
        return [m for _, m in sorted(known.items()) if not ready or m["state"] == "READY"]

    def _in_folder(self) -> list[str]:
        if self._folder is None:
            return []
        names = [p.name.removesuffix(SUFFIX) for p in self._folder.glob(f"*{SUFFIX}")]
        return [n for n in names if self._path_in_folder(n) is not None]

    def _path_in_folder(self, name: str) -> Path | None:
        """The plan of that name in the folder itself; a link that leads out of it is none."""
        if self._folder is None or not _NAME.fullmatch(name) or name in _RESERVED:
            return None
        path = (self._folder / f"{name}{SUFFIX}").resolve()
        return path if path.is_file() and path.is_relative_to(self._folder) else None

    def _find(self, name: str) -> _Entry:
        if check_name(name) not in self._entries:
            path = self._path_in_folder(name)
            if path is None:
                raise unknown_model(name)
            self._entries[name] = _Entry(path=path)
        return self._entries[name]

    def _open(self, name: str, entry: _Entry) -> Model:
        engine = self._open_engine(entry.path)
        log.info("loaded %s from %s", name, entry.path)
        return Model(
            name,
            engine,
            statistics=entry.statistics,
            max_delay_us=self._max_delay_us,
            limits=self._limits,
            has_thread=self._threads,
        )


def unknown_model(name: str) -> ServeError:
    return ServeError(
        "there is no such model",
        status=404,
        seen=repr(name)[:140],
        fix="GET /v2/models lists the loaded models, POST /v2/repository/index all",
    )


def unknown_version(name: str, version: str | None) -> ServeError:
    return ServeError(
        f"model {name!r} has no such version",
        status=404,
        seen=repr(version)[:40],
        fix=f"use version {MODEL_VERSION} or leave it out",
    )
