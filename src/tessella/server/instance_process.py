"""A process for each instance of a model, and the engine that all of them are.

    batcher's thread ── samples into shared memory, their shapes over a socket ──▶ instance
                     ◀── outputs in the memory, their shapes over the socket ──

An instance loads the plan itself, and ends when its socket does: with the server, however that
ended. Signals that end a server are not for it, as it still has to answer what was accepted.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import logging
import math
import os
import re
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessella.artifacts.outline import Manifest
from tessella.core.errors import ArtifactError, ServeError, TessellaError
from tessella.core.preprocess import Preprocess
from tessella.core.record import digest, from_plain, to_plain
from tessella.core.spec import DimRange, TensorSpec
from tessella.operations import user_operators
from tessella.runtime import load_tried
from tessella.server import child, tickets
from tessella.server.child import Child, start_python, told_error
from tessella.server.instances import InstanceLost
from tessella.server.lane import Lane, aligned, make_memory, numpy_type, places_of
from tessella.server.listening import keep_what_is_loaded
from tessella.server.tensors import on_numpy
from tessella.server.tickets import Frames

log = logging.getLogger(__name__)

TELL_S = 20.0  # between two words that an instance is still loading
_PR_SET_NAME = 15  # linux/prctl.h
NAME = "tessella-inst"  # for ps and top


class InstanceProcess(Child):
    """An instance, as the process sees it that has the queue; see ``instances.Instance``.

    Args:
        device: None is the server's own.
        threads: of the instance, if it runs on a CPU.
    """

    def __init__(self, path: Path, *, compiled: bool, device: str | None, threads: int) -> None:
        self.device = device or "default"
        self._path, self._compiled, self._device = path, compiled, device
        self._threads = threads
        self._memory: int | None = None
        self._first: str | None = None  # the digest of the manifest that all starts must have
        self._begin()

    def _begin(self) -> None:
        """Start the process; ``ready`` waits for it.

        Raises:
            TessellaError: the system does not let it.
        """
        with _for_start(self._path):
            ours, theirs = socket.socketpair()
            try:
                self._spawn(theirs)
            except BaseException:
                ours.close()
                raise
        self._talk(ours)

    def _spawn(self, theirs: socket.socket) -> None:
        needed = [*user_operators.OPERATORS, *user_operators.CANDIDATES]
        modules = {user_operators.module(name) for name in needed} - {None, "__main__"}
        asked = {
            "path": str(self._path),
            "modules": sorted(m for m in modules if m is not None),
            "compiled": self._compiled,
            "device": self._device,
        }
        with theirs:
            self._process = start_python(__name__, asked, theirs.fileno(), threads=self._threads)

    def ready(self) -> Manifest:
        """Wait until the plan is loaded, and give the instance its memory.

        Raises:
            TessellaError: what the instance says that is wrong; it has another plan than before.
        """
        try:
            self._wait_for_load()
            letter, content = self._next()
        except InstanceLost as error:
            raise ArtifactError(
                "an instance of a model ended while it loaded the plan",
                seen=f"{self._path}: {error}",
                fix="read its messages above; give it fewer instances if memory was short",
            ) from error
        told = json.loads(content)
        if letter == b"e":
            raise told_error(told)
        manifest = from_plain(Manifest, told["manifest"], where="an instance")
        self._first = self._first or digest(manifest)
        if digest(manifest) != self._first:
            self.close()
            raise _changed(self._path)
        self.manifest = manifest
        self.device = told["device"]
        with _for_start(self._path):
            if self._memory is None:
                self._inputs, self._outputs = places(self.manifest.inputs, 0)
                _, nbytes = places(self.manifest.outputs, self._outputs)
                self._memory = make_memory(nbytes)
                self._lane = Lane(os.dup(self._memory))
            socket.send_fds(self._socket, [b"m"], [self._memory])
        return self.manifest

    def _wait_for_load(self) -> None:
        """Return when the instance says something; meanwhile tell that it loads.

        Raises:
            InstanceLost: it has said nothing for too long, and is killed.
        """
        began_s, coming = time.monotonic(), select.poll()
        coming.register(self._socket, select.POLLIN)
        while not coming.poll(1e3 * min(TELL_S, child.HANG_S)):
            waited_s = time.monotonic() - began_s
            if waited_s >= child.HANG_S:
                self.kill()
                raise InstanceLost(f"{self._ended()} after {waited_s:.0f} s of loading")
            log.warning("an instance has been loading %s for %.0f s", self._path, waited_s)

    def restart(self) -> None:
        """As ``instances.Instance.restart``."""
        self.close()
        self._begin()
        self.ready()

    def close(self) -> None:
        """End the process; it has nothing to do."""
        self.dismiss()
        self._wait(child.END_S)

    def release(self, seconds: float = child.END_S) -> None:
        """End the process for good; it is killed if it has not ended in this time."""
        self.dismiss()
        self._wait(seconds)
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def join(self, name: str, parts: list[np.ndarray]) -> np.ndarray:
        """As ``instances.Instance.join``: in the memory that both see."""
        start, most = self._inputs[name]
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        array = self._lane.array(start, shape, parts[0].dtype)
        if array.nbytes > most:
            raise ServeError("inputs are larger than the plan says", status=500, seen=shape)
        np.concatenate(parts, out=array)
        return array

    def __call__(self, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        """As ``instances.Instance``; the arrays are those that ``join`` made."""
        shapes = [arrays[spec.name].shape for spec in self.manifest.inputs]
        asked = tickets.pack_sizes(list(itertools.chain(*shapes)))
        try:
            self._socket.sendall(tickets.frame(b"i", asked))
        except OSError as error:
            raise InstanceLost(self._ended()) from error
        letter, content = self._next()
        if letter == b"e":
            _, failure = tickets.unpack_error(content)
            if failure.status < 500:
                raise failure
            raise RuntimeError(f"an instance failed, as its message says: {failure}")
        sizes = np.frombuffer(content, "<u4").tolist()
        found, _ = places_of(self.manifest.outputs, sizes, self._outputs)
        return {
            spec.name: self._lane.array(offset, shape, numpy_type(spec)).copy()
            for spec, offset, shape in found
        }


class Instances:
    """Several instances of a plan: what a server asks of an engine, but for running it.

    Args:
        devices: of each instance; None is ``device``.
        compiled, device: as for ``load``.

    Raises:
        TessellaError: the plan cannot be loaded, or not on all of these devices alike.
    """

    def __init__(
        self,
        path: Path,
        devices: Sequence[str | None],
        *,
        compiled: bool = True,
        device: str | None = None,
    ) -> None:
        self.each: list[InstanceProcess] = []
        threads = threads_of_each(len(devices))
        try:
            for where in devices:
                self.each.append(
                    InstanceProcess(
                        path, compiled=compiled, device=where or device, threads=threads
                    )
                )
            self.manifest, *others = [instance.ready() for instance in self.each]
            if any(digest(other) != digest(self.manifest) for other in others):
                raise _changed(path)
        except BaseException:
            self.close()
            raise

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.outputs

    @property
    def labels(self) -> tuple[str, ...]:
        return self.manifest.labels

    @property
    def preprocess(self) -> Preprocess | None:
        return self.manifest.preprocess

    def close(self) -> None:
        """End all processes."""
        for instance in self.each:
            instance.dismiss()
        until = time.monotonic() + child.END_S  # for all of them together
        for instance in self.each:
            instance.release(max(0.0, until - time.monotonic()))


def threads_of_each(count: int) -> int:
    """The threads of an instance on a CPU: as many as ``OMP_NUM_THREADS`` says, or its share of
    those that torch takes.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if re.fullmatch("0*[1-9][0-9]{0,4}", given):
        return int(given)
    return max(1, torch.get_num_threads() // count)


def places(specs: Sequence[TensorSpec], start: int) -> tuple[dict[str, tuple[int, int]], int]:
    """Where each tensor begins, one behind the other from ``start`` on, and the bytes of its
    largest size; and where the last one ends.
    """
    found = {}
    for spec in specs:
        sizes = [size.max if isinstance(size, DimRange) else size for size in spec.shape]
        found[spec.name] = start, math.prod(sizes) * numpy_type(spec).itemsize
        start = aligned(start + found[spec.name][1])
    return found, start


@contextmanager
def _for_start(path: Path) -> Iterator[None]:
    """Say what the system's errors mean in here."""
    try:
        yield
    except OSError as error:
        raise ServeError(
            "an instance of a model cannot be started",
            status=503,
            seen=f"{path}: {error}",
            fix="give it fewer instances if memory, processes or open files are short",
        ) from error


def _changed(path: Path) -> ArtifactError:
    return ArtifactError(
        "instances of a model have different programs",
        seen=path,
        fix="load the model again if its file was replaced, and name devices of one kind",
    )


# --- the instance ---------------------------------------------------------------------------------


def main() -> None:
    """Load the plan that the one argument names, and run what comes until nothing will."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    with suppress(ConnectionError):  # the server has ended
        _run(asked)


def _run(asked: dict[str, Any]) -> None:
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode())
    connection = socket.socket(fileno=asked["socket"])
    try:
        for name in asked["modules"]:
            importlib.import_module(name)
        engine = load_tried(Path(asked["path"]), device=asked["device"], compiled=asked["compiled"])
    except TessellaError as error:
        connection.sendall(tickets.frame(b"e", json.dumps(error.to_json()).encode()))
        return
    told = {"manifest": to_plain(engine.manifest), "device": asked["device"] or str(engine.device)}
    connection.sendall(tickets.frame(b"d", json.dumps(told).encode()))
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:  # the server has ended
        return
    lane = Lane(descriptors[0])
    run, inputs, outputs = on_numpy(engine), engine.inputs, engine.outputs
    offsets, nbytes = places(inputs, 0)
    if engine.device.type == "cuda":
        lane.page_lock(0, nbytes)  # the GPU copies from where the samples were joined
    keep_what_is_loaded()

    def computed(sizes: list[int]) -> bytes:
        start, shapes = nbytes, []
        arrays = {
            spec.name: lane.array(offsets[spec.name][0], shape, numpy_type(spec))
            for spec, _, shape in places_of(inputs, sizes, 0)[0]
        }
        made = run(**arrays)
        for spec in outputs:
            array = made[spec.name]
            lane.array(start, array.shape, array.dtype)[...] = array
            start = aligned(start + array.nbytes)
            shapes.append(array.shape)
        return tickets.frame(b"o", tickets.pack_sizes(list(itertools.chain(*shapes))))

    frames = Frames()
    while data := connection.recv(1 << 16):
        for _, content in frames.feed(data):
            try:
                answer = computed(np.frombuffer(content, "<u4").tolist())
            except Exception as error:
                if not isinstance(error, TessellaError):
                    log.exception("an execution failed")
                answer = tickets.pack_error(0, error)
            connection.sendall(answer)
