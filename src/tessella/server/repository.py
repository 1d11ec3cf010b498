"""The repository: versions of models by name, which of them are loaded, and why others are not.

A version stands for one plan, and loading it again replaces the plan. ``plan_hash`` in the model's
configuration identifies the plan. Requests that name no version go to the newest one that is ready,
or as a rule of ``traffic`` says.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns as now_ns
from typing import Any, Literal

import torch

from tessella.core.architectures import is_gpu
from tessella.core.errors import ServeError, UsageError
from tessella.core.jpeg import Frame
from tessella.core.record import digest, from_plain, to_plain
from tessella.runtime import Engine, load_tried
from tessella.runtime.overlapped import Overlapped, can_overlap
from tessella.server.batcher import Batcher
from tessella.server.instance_process import Instances
from tessella.server.instances import Placement, SharedBatcher
from tessella.server.joining import PageLocked
from tessella.server.jpegs import Decode, Decoded, Files, JpegQueue, host_decodes
from tessella.server.limits import DEFAULT_LIMITS, Limits
from tessella.server.listening import give_back
from tessella.server.overlapping import OverlappingBatcher
from tessella.server.protocol import Signature, signature
from tessella.server.statistics import Stages, Statistics
from tessella.server.tensors import on_numpy
from tessella.server.traffic import Route, Traffic, settled, takes_same
from tessella.server.versions import (
    check_name,
    check_version,
    names_in,
    newest,
    plans_in,
    plans_of,
    split_key,
    unknown_model,
    unknown_version,
)
from tessella.server.waiting import InfersFiles, Waiter

log = logging.getLogger(__name__)

State = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]


class Model(InfersFiles):
    """A loaded engine with its batcher. ``with model:`` keeps the engine open for the block.

    Attributes:
        route: where requests go that name no version, if a rule says so.
        overlaps: the GPU copies the requests' arrays from where they lie.
    """

    route: Route[Model] | None = None

    def __init__(
        self,
        name: str,
        version: str,
        engine: Engine | Instances,
        *,
        statistics: Statistics,
        max_delay_us: int,
        limits: Limits,
        has_thread: bool,
        decode: Decode | None = None,
    ) -> None:
        self.name = name
        self.version = version
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
        on_gpu = is_gpu(engine.manifest.fingerprint.target)
        self.overlaps = False
        of_both: dict[str, Any] = {
            "max_batch": self.max_batch,
            "max_delay_us": max_delay_us,
            "max_waiting": limits.waiting,
            "statistics": statistics,
        }
        self.batcher: Batcher
        if isinstance(engine, Instances):
            self.batcher = SharedBatcher(engine.each, shares=not on_gpu, **of_both)
        elif on_gpu and not has_thread and can_overlap(engine):
            self.overlaps = True
            overlapped = Overlapped(engine, self.max_batch)
            self.batcher = OverlappingBatcher(overlapped, engine, **of_both)
        else:
            self.batcher = Batcher(
                on_numpy(engine),
                # A GPU works without Python's lock, under which requests are read meanwhile; and an
                # execution on the CPU would hold up those of a GPU beside it.
                has_thread=has_thread or on_gpu or torch.cuda.is_available(),
                in_loop="alone" if on_gpu else engine.manifest.fingerprint.target == "cpu",
                join=PageLocked(self.max_batch) if on_gpu else None,
                **of_both,
            )
        self.jpegs = None
        if decode is not None and len(self.signature.inputs) == 1:
            self.jpegs = JpegQueue(decode, most_waiting=limits.waiting)
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    def __enter__(self) -> Model:
        """Keep the engine open for the length of the block."""
        if not self._users:
            self._unused.clear()
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0:
            self._unused.set()

    @property
    def decodes(self) -> bool:
        """Whether the engine's GPU decodes JPEG files."""
        return self.jpegs is not None

    def begin_files(
        self,
        files: Sequence[bytes],
        frames: Sequence[Frame],
        answer: Waiter,
        *,
        timeout_us: int | None,
        priority: int,
        client: int,
        stages: Stages,
    ) -> None:
        """As ``InfersFiles.begin_files``."""
        assert self.jpegs is not None
        assert self.signature.image_input is not None
        name, loop, began_ns = self.signature.image_input, asyncio.get_running_loop(), now_ns()

        def go_on(decoded: Decoded) -> None:
            if answer.done():
                return
            try:
                spent_ns, pixels = now_ns() - began_ns, decoded.made()
                stages.decoded(spent_ns)
                left_us = None if timeout_us is None else max(0, timeout_us - spent_ns // 1000)
                self.batcher.begin(
                    {name: pixels},
                    answer,
                    timeout_us=left_us,
                    priority=priority,
                    client=client,
                    stages=stages,
                )
            except Exception as error:
                answer.set_exception(error)

        def deliver(decoded: Decoded) -> None:
            with suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(go_on, decoded)

        self.jpegs.submit(
            Files(
                contents=files,
                frames=frames,
                deliver=deliver,
                priority=priority,
                deadline_ns=None if timeout_us is None else began_ns + 1000 * timeout_us,
                client=client,
            )
        )

    @property
    def is_used(self) -> bool:
        """Whether a block keeps the engine open."""
        return self._users > 0

    async def retire(self) -> None:
        """Close the engine once the requests that use it have their answers; 503, if an instance
        does not come to an end (``instances.CLOSE_S``).
        """
        await self.batcher.drain(self._unused)
        if self.jpegs is not None:
            await asyncio.to_thread(self.jpegs.close)
        await self.batcher.close(self.engine.close)


@dataclass(eq=False)
class _Entry:
    """A version of a model; ``statistics`` go on when another engine is loaded.

    Attributes:
        was_found: on disk, and so is there as long as its file is; else it was given by name.
    """

    path: Path
    was_found: bool = False
    model: Model | None = None
    state: State = "UNAVAILABLE"
    reason: str = "not loaded"
    statistics: Statistics = field(default_factory=Statistics)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Repository:
    """Versions of models by name.

    Args:
        models: the plans that may be served, by ``NAME`` (its version 1) or ``NAME@VERSION``; by
            ``NAME`` also a folder of ``VERSION/model.plan``.
        folder: a folder of models that may be loaded too, while the server runs; see ``versions``.
        traffic: rules by name, from the start on.
        traffic_file: keeps the rules that were set since, if the process ends and starts again.
        max_delay_us: see ``Batcher``.
        open_engine: opens a plan's path as an engine; by default, plans with operators of torch run
            first in a child process.
        decoder_for: the function that decodes JPEG files on the GPU of an engine, or None.
        instances: where the instances of models run, by name; of all others by the empty name.
        open_instances: opens a plan's path on the devices of its instances.
        threads: each model has a thread that runs it; see ``Batcher``.

    Attributes:
        on_change: called when other models are loaded than before, or traffic goes elsewhere.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        *,
        folder: Path | None = None,
        traffic: Mapping[str, Traffic] | None = None,
        traffic_file: Path | None = None,
        max_delay_us: int = 0,
        limits: Limits = DEFAULT_LIMITS,
        open_engine: Callable[[Path], Engine] = load_tried,
        decoder_for: Callable[[Engine], Decode | None] = host_decodes,
        instances: Mapping[str, Placement] | None = None,
        open_instances: Callable[[Path, Sequence[str | None]], Instances] = Instances,
        threads: bool = True,
    ) -> None:
        if max_delay_us < 0:
            raise UsageError("max_delay_us cannot be negative", seen=max_delay_us)
        self._homes: dict[str, Path] = {}  # folders of versions, which may get more
        self._entries: dict[str, dict[str, _Entry]] = {}
        for key, path in models.items():
            self._add(key, Path(path))
        self._defaults: dict[str, Model] = {}
        self._traffic = dict(traffic or {})
        self._traffic_file = traffic_file
        if traffic_file is not None and traffic_file.is_file():
            kept = json.loads(traffic_file.read_text())
            self._traffic = {n: from_plain(Traffic, rule, where=n) for n, rule in kept.items()}
        for name in self._traffic.keys() - self._entries.keys():
            raise UsageError(
                "a rule of traffic is for a model that is not served",
                seen=name,
                fix=f"name one of {', '.join(self._entries) or 'the models given'}",
            )
        self._folder = None if folder is None else folder.resolve()
        self._max_delay_us = max_delay_us
        self._limits = limits
        self._open_engine = open_engine
        self._decoder_for = decoder_for
        self._instances = dict(instances or {})
        self._open_instances = open_instances
        self._threads = threads
        self.on_change: Callable[[], None] = lambda: None

    def _add(self, key: str, path: Path) -> None:
        """Let the plan, or the plans of a folder, be served."""
        name, version = split_key(key)
        plans = {version: path}
        if path.is_dir():
            if key != name:
                raise UsageError(
                    "a folder of versions has the versions of its own",
                    seen=f"{key}={path}",
                    fix=f"write {name}={path}, or name one plan",
                )
            self._homes[name] = path
            plans = plans_of(path)
        entries = self._entries.setdefault(name, {})
        for version, plan in plans.items():
            if version in entries:
                raise UsageError(
                    "a version of a model is given twice",
                    seen=f"{name}@{version}",
                    fix="give each a number of its own: NAME@2=FILE",
                )
            entries[version] = _Entry(path=plan)

    def load_all(self) -> None:
        """Load every version that was given; called before the server starts.

        Raises:
            TessellaError: the first that cannot be loaded.
        """
        for name, version, entry in self._all():
            entry.model = self._open(name, version, entry)
            entry.state, entry.reason = "READY", ""
        for name in self._entries:
            self._settle(name)

    async def load(self, name: str, version: str | None = None) -> None:
        """Load a version, or load it again from its file; requests go to the old one until then.

        Args:
            version: None is the newest that there is, on disk too.

        Raises:
            UsageError: not a name or version. ServeError: 404, no such model.
            TessellaError: the plan cannot be used; a model loaded before goes on serving.
        """
        version, entry = self._find(name, version)
        async with entry.changing:
            before = entry.model
            entry.state = "READY" if before else "LOADING"
            try:
                model = await asyncio.to_thread(self._open, name, version, entry)
            except Exception as error:
                if before is not None:
                    entry.reason = f"loading it again failed, the earlier one serves: {error}"
                else:
                    entry.state, entry.reason = "UNAVAILABLE", str(error)
                raise
            entry.model, entry.state, entry.reason = model, "READY", ""
            self._changed(name)
            if before is not None:
                await before.retire()
                before = None
                await asyncio.to_thread(give_back)

    async def unload(self, name: str, version: str | None = None) -> None:
        """Take a version, or all, out of service; returns when the last request has its answer.

        Raises:
            ServeError: 404, no such model or version.
        """
        entries = self._entries.get(name)
        if entries is None:
            raise unknown_model(name)
        if version is not None and version not in entries:
            raise unknown_version(name, version)
        chosen = entries.values() if version is None else [entries[version]]
        await asyncio.gather(*(self._unload(name, entry) for entry in list(chosen)))

    async def _unload(self, name: str, entry: _Entry) -> None:
        async with entry.changing:
            model, entry.model = entry.model, None
            if model is not None:
                entry.state = "UNLOADING"
                self._changed(name)
                await model.retire()
                del model
                await asyncio.to_thread(give_back)
            entry.state, entry.reason = "UNAVAILABLE", "unloaded"

    def require_ready(self) -> None:
        """Nothing to do: whoever asks is answered by the process that has the models."""

    async def open(self) -> None:
        """Nothing to do: ``load_all`` came before the server."""

    async def close(self) -> None:
        """Unload all models."""
        await asyncio.gather(*(self.unload(name) for name in self._entries))

    def get(self, name: str, version: str | None = None) -> Model:
        """The loaded model; without a version the default, whose ``route`` may say another.

        Raises:
            ServeError: 404 no such model or version, 503 not loaded.
        """
        if not version and (model := self._defaults.get(name)) is not None:
            return model
        entries = self._entries.get(name)
        if entries is None:
            raise unknown_model(name)
        if version and version not in entries:
            raise unknown_version(name, version)
        entry = entries[version or max(entries, key=int)]
        if entry.model is None:
            told = f"/versions/{version}" if version else ""
            raise ServeError(
                f"model {name!r} is not ready",
                status=503,
                seen=f"{entry.state}: {entry.reason}",
                fix=f"load it: POST /v2/repository/models/{name}{told}/load",
            )
        return entry.model

    # --- traffic ----------------------------------------------------------------------------------

    def traffic(self, name: str) -> dict[str, Any]:
        """The rule of a name and what is in force, as JSON.

        Raises:
            ServeError: 404 no such model, 503 not loaded.
        """
        model = self.get(name)
        route = model.route or Route(Traffic(), {model.version: model})
        return {"rule": to_plain(self._traffic.get(name)), "in_force": route.to_json()}

    def direct(self, name: str, traffic: Traffic | None) -> None:
        """Let requests that name no version go as the rule says, from the next one on.

        Args:
            traffic: None is the newest version.

        Raises:
            ServeError: 404 no such model or version, 503 one that is not loaded, 409 one with other
                tensors than the rest.
        """
        model = self.get(name)
        if traffic is not None:
            named = [v for v, weight in traffic.split.items() if weight]
            first = self.get(name, named[0] if named else None)
            for version in [*traffic.split, *([traffic.shadow] if traffic.shadow else [])]:
                if not takes_same(self.get(name, version), first):
                    raise ServeError(
                        f"version {version} of model {name!r} takes or gives other tensors",
                        status=409,
                        seen=f"those of version {first.version} are others",
                        fix="let clients name that version, and share traffic among the rest",
                    )
            self._traffic[name] = traffic
        else:
            self._traffic.pop(name, None)
        if self._traffic_file is not None:
            self._traffic_file.write_text(json.dumps(self.rules()))
        log.info("traffic of %s: %s", model.name, traffic)
        self._changed(name)

    def rules(self) -> dict[str, Any]:
        """The rules of traffic by name, as JSON."""
        return {name: to_plain(traffic) for name, traffic in self._traffic.items()}

    def _changed(self, name: str) -> None:
        self._settle(name)
        self.on_change()

    def _settle(self, name: str) -> None:
        """Say anew which model of the name answers requests without a version."""
        entries = self._entries[name]
        ready = {v: entry.model for v, entry in entries.items() if entry.model is not None}
        if ready:
            default, route = settled(self._traffic.get(name), ready)
            for model in ready.values():
                model.route = route if model is default else None
            self._defaults[name] = default
        else:
            self._defaults.pop(name, None)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def models(self) -> list[Model]:
        """All loaded models."""
        return [entry.model for *_, entry in self._all() if entry.model is not None]

    @property
    def defaults(self) -> list[Model]:
        """The models that answer requests without a version."""
        return [self._defaults[name] for name in self._entries if name in self._defaults]

    def versions(self, name: str) -> list[Model]:
        """The loaded versions of a name, the oldest first.

        Raises:
            ServeError: as ``get``.
        """
        self.get(name)
        entries = self._entries[name]
        models = (entries[version].model for version in sorted(entries, key=int))
        return [model for model in models if model is not None]

    @property
    def statistics(self) -> dict[tuple[str, str], Statistics]:
        """Statistics by name and version, of all models that were ever loaded."""
        return {(name, version): entry.statistics for name, version, entry in self._all()}

    def index(self, *, ready: bool = False) -> list[dict[str, Any]]:
        """Name, version, state and reason of all models, or of the ready models only."""
        known = {
            (name, int(version)): {
                "name": name, "version": version, "state": e.state, "reason": e.reason
            }
            for name, version, e in self._all()
        }  # fmt: skip
        if not ready:
            names = [] if self._folder is None else names_in(self._folder)
            for name in {*names, *self._homes}:
                for version in self._on_disk(name):
                    unloaded = {"state": "UNAVAILABLE", "reason": "not loaded"}
                    place = name, int(version)
                    known.setdefault(place, {"name": name, "version": version, **unloaded})
        return [m for _, m in sorted(known.items()) if not ready or m["state"] == "READY"]

    def _all(self) -> Iterator[tuple[str, str, _Entry]]:
        for name, entries in self._entries.items():
            for version, entry in entries.items():
                yield name, version, entry

    def _on_disk(self, name: str) -> dict[str, Path]:
        """The plans of a name that may be loaded beside those that were given."""
        if name in self._homes:
            home = self._homes[name]
            return plans_of(home) if home.is_dir() else {}
        return {} if self._folder is None else plans_in(self._folder, name)

    def _find(self, name: str, version: str | None) -> tuple[str, _Entry]:
        """The entry that is to be loaded; it is made where there is a plan for it only."""
        entries = self._entries.get(check_name(name), {})
        if version is not None:
            check_version(version)
        here = {v: e.path for v, e in entries.items() if not e.was_found or e.model is not None}
        paths = self._on_disk(name) | here
        if not paths:
            raise unknown_model(name)
        if version is not None and version not in paths:
            raise unknown_version(name, version)
        version = version or newest(paths)
        entries = self._entries.setdefault(name, {})
        if version not in entries:
            entries[version] = _Entry(path=paths[version], was_found=True)
        return version, entries[version]

    def _open(self, name: str, version: str, entry: _Entry) -> Model:
        engine = self._opened(name, entry.path)
        log.info("loaded version %s of %s from %s", version, name, entry.path)
        return Model(
            name,
            version,
            engine,
            statistics=entry.statistics,
            max_delay_us=self._max_delay_us,
            limits=self._limits,
            has_thread=self._threads,
            decode=None if isinstance(engine, Instances) else self._decoder_for(engine),
        )

    def _opened(self, name: str, path: Path) -> Engine | Instances:
        placed = self._instances.get(name) or self._instances.get("")
        if placed is None or placed.each == (None,):
            return self._open_engine(path)
        return self._open_instances(path, placed.each)
