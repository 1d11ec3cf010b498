"""The machines of a training: their places, and what the commands that start them tell each other.

Each machine runs ``tessella train`` with the same settings, and its own place. The commands meet at
a store (torch's ``TCPStore``) that the first machine's keeps open from before the first process is
started until the last has ended; so a failure is told with its cause, whichever machine it is on.
The exchange of gradients has ports of its own.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

from tessella.artifacts.run import Recipe
from tessella.core import errors
from tessella.core.errors import TessellaError, TrainError, UsageError, first_line
from tessella.core.events import Emit, Event, phase
from tessella.core.record import from_plain, parse_json, to_plain

WAIT_S = 600.0  # for the other machines to come
SILENT_S = 60.0  # a machine that says nothing for so long is gone
# or for so long, if nothing goes on meanwhile: NCCL waits for a GPU that is gone without a word
STILL_S = 12.0
CAUSE_S = 15.0  # so long the cause of a lost connection is waited for
END_S = 60.0  # so long the first machine waits until all others have heard the end
LOST = "the exchange with another process ended"
MOST_RECIPE = 1 << 20  # bytes; one has some thousands
_STARTER = "start it with torchrun, which sets all of them; or unset RANK to train alone"
_BEAT_S = 1.0
_SILENT_BEATS = 6.0  # of a machine whose connections are lost, too
_ANSWER_S = 20.0
_AT_ONCE_S = 0.1  # an answer that takes longer is not waited for when others are looked at
T = TypeVar("T")
_ENDS = _ENDED, _STOPPED, _FAILED = b"ended", b"stopped", b"failed"  # as the last beats


@dataclass(frozen=True, kw_only=True)
class Place:
    """A machine's place among those that train together, and where they meet.

    Attributes:
        nodes: how many machines there are.
        rank: this one, from 0; the first one keeps the run's folder.
        host, port: the first machine's address, and a free port there.
    """

    nodes: int
    rank: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Started:
    """This process among those that another program (torchrun, Slurm) has started."""

    rank: int
    size: int
    local_size: int


def place_of(nodes: int, node_rank: int | None, rendezvous: str | None) -> Place | None:
    """The place that options describe; None for a training on one machine.

    Raises:
        UsageError: an option is missing or wrong.
    """
    if nodes == 1:
        if node_rank or rendezvous is not None:
            raise UsageError(
                "a training on one machine has no rendezvous",
                seen=f"nodes=1, node_rank={node_rank}, rendezvous={rendezvous}",
                fix="say on how many machines it runs: nodes=2 (--nodes 2)",
            )
        return None
    usage = (
        f"start this on each machine with --nodes {nodes}, its own --node-rank 0 to {nodes - 1}, "
        "and --rendezvous HOST:PORT, the first machine's address and a free port there; or to go "
        "on with this machine alone, with --nodes 1 and as many --gpus as there were processes"
    )
    if node_rank is None or rendezvous is None:
        raise UsageError(
            "a training on several machines needs to know which one this is, and where they meet",
            seen=f"nodes={nodes}, node_rank={node_rank}, rendezvous={rendezvous}",
            fix=usage,
        )
    if not 0 <= node_rank < nodes:
        raise UsageError("there is no such machine", seen=f"node_rank={node_rank}", fix=usage)
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError("a rendezvous is HOST:PORT", seen=rendezvous, fix=usage)
    return Place(nodes=nodes, rank=node_rank, host=host.strip("[]"), port=int(port))


def started(environment: Mapping[str, str] = os.environ) -> Started | None:
    """This process's place by torchrun's variables; None where it trains alone.

    Raises:
        UsageError: a variable is missing or no number, or there is no such place.
    """
    if not ("RANK" in environment and environment.get("WORLD_SIZE", "1") != "1"):
        return None
    needed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    numbers = {n: environment.get(n, "") for n in needed}
    wrong = [n for n, v in numbers.items() if not (v if n == "MASTER_ADDR" else v.isdecimal())]
    if wrong:
        raise UsageError(
            "RANK and WORLD_SIZE say that this process trains with others, but not how",
            seen=f"without a usable {', '.join(wrong)}",
            fix=_STARTER,
        )
    rank, local = int(numbers["RANK"]), int(numbers["LOCAL_RANK"])
    size, local_size = int(numbers["WORLD_SIZE"]), int(numbers["LOCAL_WORLD_SIZE"])
    if not (0 < local_size <= size and rank < size and local < local_size):
        raise UsageError(
            "there is no such process among those that train together",
            seen=f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local}, "
            f"LOCAL_WORLD_SIZE={local_size}",
            fix=_STARTER,
        )
    found = Started(rank=rank, size=size, local_size=local_size)
    if found.size % found.local_size:
        raise UsageError(
            "each machine trains with the same number of processes",
            seen=f"WORLD_SIZE={found.size}, LOCAL_WORLD_SIZE={found.local_size}",
        )
    return found


def settings_of(found: Started, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe with the processes that were started.

    Raises:
        UsageError: the settings ask for another number of them.
    """
    here = {"gpus": found.local_size, "nodes": found.size // found.local_size}
    for name, count in here.items():
        if settings.get(name, count) != count:
            raise UsageError(
                "the processes that were started are not those that the settings ask for",
                seen=f"{name}={settings[name]}, WORLD_SIZE={found.size}, "
                f"LOCAL_WORLD_SIZE={found.local_size}",
                fix="leave gpus and nodes out: what started this process has said them",
            )
    return {**settings, **here}


def error_of(plain: Mapping[str, Any], *, seen: str | None = None) -> TessellaError:
    """The error that another process told with ``to_json``; of an unknown kind it is a TrainError.

    Args:
        seen: instead of what that process saw.
    """
    kind = getattr(errors, str(plain.get("error")), None)
    told = {"seen": plain.get("seen") if seen is None else seen, "fix": plain.get("fix")}
    if isinstance(kind, type) and issubclass(kind, TessellaError):
        with suppress(TypeError):  # one that needs more than every error has
            return kind(str(plain.get("wrong")), **told)
    return TrainError(str(plain.get("wrong")), **told)


class _Calls:
    """Calls one after another in a thread of their own, since one to a machine that has gone silent
    waits without a limit, and neither time nor Ctrl-C ends it.
    """

    def __init__(self) -> None:
        self._coming: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=self._work, daemon=True).start()

    def begin(self, call: Callable[..., T], *given: Any) -> Future[T]:
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(call(*given))
            except Exception as error:
                answer.set_exception(error)

        self._coming.put(run)
        return answer

    def end(self) -> None:
        """End the thread behind the calls that were begun."""
        self._coming.put(None)

    def _work(self) -> None:
        while (run := self._coming.get()) is not None:
            run()
            del run  # and with it what it holds, before the next one comes


class Meeting:
    """This machine's command among those of all machines, between their coming and their end.

    Args:
        emit: told who is waited for.
        recipe: the first machine's, of the run; None on the others.

    Attributes:
        place: this machine's.
        torchrun: options with which torchrun's processes meet.

    Raises:
        UsageError: the port cannot be opened; or another command has this place.
        TrainError: a machine has not come within ``WAIT_S``.
    """

    def __init__(self, place: Place, emit: Emit, recipe: Recipe | None = None) -> None:
        self.place = place
        where = f"{place.host}:{place.port}"
        emit(phase("machines", f"{place.rank + 1} of {place.nodes}; they meet at {where}"))
        self._calls = _Calls()
        self._heard = {rank: (b"", time.monotonic()) for rank in range(place.nodes)}
        self._asked: Future[TessellaError | None] | None = None
        self._beats, self._beat_at, self._closed, self._lost = 0, 0.0, False, False
        self._advanced_at = math.inf  # what has not gone on yet does not stand still
        self._store: Any = None
        try:
            self._store = self._ask(_store, place, limit=WAIT_S + SILENT_S)
            self._agree_on_nodes()
            self._take_place(where)
            self._wait_for_all()
            if place.rank == 0:
                self._ask(self._store.set, "settings", json.dumps(to_plain(recipe)))
            port = self._agreed_port()
        except RuntimeError as error:
            self.close()
            raise self._gone(0, first_line(error)) from None
        except BaseException as error:
            if place.rank == 0 and not isinstance(error, TessellaError):
                self.fail(TrainError("the first machine did not wait for the others"))
            self.close()
            raise
        self.torchrun = [
            f"--nnodes={place.nodes}",
            f"--node-rank={place.rank}",
            f"--master-addr={place.host}",
            f"--master-port={port}",
        ]

    def _agree_on_nodes(self) -> None:
        place = self.place
        if place.rank == 0:
            self._ask(self._store.set, "nodes", str(place.nodes))
        elif (nodes := int(self._ask(self._store.get, "nodes"))) != place.nodes:
            raise self.fail(
                UsageError(
                    "the machines do not agree on how many they are",
                    seen=f"{nodes} on the first, {place.nodes} here",
                    fix="give each the same --nodes",
                )
            )

    def _take_place(self, where: str) -> None:
        """Be the machine of this place, also behind a command that ended before all had come."""
        mine = f"beat/{self.place.rank}"
        if self._ask(self._store.add, f"came/{self.place.rank}", 1) > 1:
            until, first = time.monotonic() + _SILENT_BEATS, self._last(mine)
            while first not in _ENDS and time.monotonic() < until:
                if self._last(mine) != first:
                    break
                time.sleep(_AT_ONCE_S)
            begun = self._ask(self._store.check, ["port"])
            if begun or (self._last(mine) != first):
                self._closed = True  # that command's beat goes on
                self._calls.end()
                raise UsageError(
                    "another command is this machine already",
                    seen=f"node_rank={self.place.rank} at {where}",
                    fix="give each machine a --node-rank of its own"
                    + ("; where one has ended, start all machines again" if begun else ""),
                )
        self._ask(self._store.set, mine, "here")

    def _last(self, beat: str) -> bytes:
        if not self._ask(self._store.check, [beat]):
            return b""
        return bytes(self._ask(self._store.get, beat))

    def _ask(self, call: Callable[..., T], *given: Any, limit: float = _ANSWER_S) -> T:
        """The answer to a call of the store.

        Raises:
            RuntimeError: none has come, or the machine that keeps the store is known to be gone.
        """
        if self._lost:
            raise RuntimeError("the first machine is gone")
        try:
            return self._calls.begin(call, *given).result(limit)
        except TimeoutError:
            self._lost = True
            raise RuntimeError(f"no answer for {limit:g} s") from None

    def _wait_for_all(self) -> None:
        until = time.monotonic() + WAIT_S
        missing = set(range(self.place.nodes))
        while missing:
            missing -= {n for n in missing if self._ask(self._store.check, [f"came/{n}"])}
            self.look()
            if missing and time.monotonic() > until:
                raise self.fail(
                    TrainError(
                        f"not all machines have come within {WAIT_S:g} s",
                        seen=f"without node_rank {', '.join(map(str, sorted(missing)))}",
                        fix="start the same command there, with its own --node-rank; a firewall "
                        f"must let them reach {self.place.host}",
                    )
                )
            time.sleep(0.1 if missing else 0)

    def recipe(self) -> Recipe:
        """The first machine's, of the run.

        Raises:
            TrainError: it cannot be read, or nobody answers.
        """
        try:
            told = bytes(self._ask(self._store.get, "settings"))
        except RuntimeError as error:
            raise self._gone(0, first_line(error)) from None
        where, seen = "the first machine's recipe", f"{len(told):,} bytes"
        try:
            if len(told) <= MOST_RECIPE:
                return from_plain(Recipe, parse_json(told, where=where), where=where)
        except TessellaError as error:
            seen = f"{error.wrong}: {error.seen}"[:300]
        raise TrainError(
            "what the first machine says of the run cannot be read",
            seen=seen,
            fix="start the same version of Tessella on all machines, and nothing else at that port",
        )

    def _agreed_port(self) -> int:
        """A port of the first machine's where the processes will meet."""
        if self.place.rank == 0:
            with socket.socket() as free:
                free.bind(("", 0))
                self._ask(self._store.set, "port", str(free.getsockname()[1]))
        return int(self._ask(self._store.get, "port"))

    def look(self, happened: Iterable[Event] = ()) -> None:
        """Tell the others that this machine is here, at most once a second, and hear of them.

        Args:
            happened: events of its processes; steps go on with all machines alone.

        Raises:
            TessellaError: another machine has failed; or says nothing for ``SILENT_S``, or for
                ``STILL_S`` in which no step went on, either.
        """
        now = time.monotonic()
        if any(event.kind in ("progress", "metric") for event in happened):
            self._advanced_at = now
        if self._asked is None:
            if now < self._beat_at + _BEAT_S:
                return
            self._beat_at, self._beats = now, self._beats + 1
            self._asked = self._calls.begin(self._exchange, str(self._beats))
        wait([self._asked], _AT_ONCE_S)
        if not self._asked.done():
            if now < self._beat_at + SILENT_S:
                return
            self._lost = True
            raise self._gone(0, f"nothing for {SILENT_S:g} s")
        answer, self._asked = self._asked, None
        try:
            failed = answer.result()
        except RuntimeError as error:
            raise self._gone(0, first_line(error)) from None
        if failed is not None:
            raise failed
        still = self.place.rank == 0 and now > self._advanced_at + STILL_S
        patience = STILL_S if still else SILENT_S
        if (silent := self._silent(patience)) is not None:
            raise self.fail(self._gone(silent, f"nothing for {patience:g} s"))

    def _exchange(self, beat: str) -> TessellaError | None:
        self._store.set(f"beat/{self.place.rank}", beat)
        self._listen()
        return self._failure()

    def _listen(self) -> None:
        for rank in range(self.place.nodes):
            if self._store.check([f"beat/{rank}"]):
                beat = self._store.get(f"beat/{rank}")
                if beat != self._heard[rank][0]:
                    self._heard[rank] = beat, time.monotonic()

    def _silent(self, seconds: float) -> int | None:
        """A machine that has come and not ended, and of which nothing was heard for so long."""
        for rank, (beat, since) in self._heard.items():
            quiet = time.monotonic() - since > seconds
            if rank != self.place.rank and beat and beat not in _ENDS and quiet:
                return rank
        return None

    def _failure(self) -> TessellaError | None:
        if not self._store.check(["failed"]):
            return None
        plain = json.loads(self._store.get("failed"))
        where = f"on machine {plain.get('machine')}"
        return error_of(plain, seen=f"{where}: {plain.get('seen') or plain.get('wrong')}")

    def _gone(self, rank: int, seen: str) -> TrainError:
        return TrainError(
            f"machine {rank} has ended, or cannot be reached",
            seen=seen,
            fix="look at its terminal, and at its power and cables; then start all machines again "
            "with --resume",
        )

    def fail(self, error: TessellaError) -> TessellaError:
        """Tell the others of a failure here, and get the one to raise: the cause, if that is known.

        A lost connection has its cause elsewhere, which that machine tells, or its silence does.
        """
        try:
            until = time.monotonic() + CAUSE_S
            while error.wrong == LOST and time.monotonic() < until:
                self.look()
                if (silent := self._silent(_SILENT_BEATS)) is not None:
                    error = self._gone(silent, error.seen or error.wrong)
                time.sleep(0.1)
            plain = {**error.to_json(), "machine": self.place.rank}
            self._ask(self._store.compare_set, "failed", "", json.dumps(plain))
        except TessellaError as cause:
            return cause
        except RuntimeError:
            return error  # the store is gone with the first machine
        return error

    def close(self, how: bytes = _FAILED) -> None:
        """Say how this machine ended; the first waits for the others, which hear by its store."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._store is not None:
                self._ask(self._store.set, f"beat/{self.place.rank}", how)
            if self._store is not None and self.place.rank == 0:
                self._until_all_ended()
        except (RuntimeError, TessellaError):
            pass  # there is nobody to tell
        finally:
            self._calls.end()

    def _until_all_ended(self) -> None:
        until = time.monotonic() + END_S
        while time.monotonic() < until and self._silent(_SILENT_BEATS) is None:
            self._ask(self._listen)
            if all(beat in _ENDS or not beat for beat, _ in self._heard.values()):
                return
            time.sleep(0.1)

    def ends(self, stopped: bool | None) -> bool:
        """Say that this machine's processes have ended, and hear whether they were stopped early.

        Args:
            stopped: as the first machine knows; None on the others.
        """
        if stopped is not None:
            self.close(_STOPPED if stopped else _ENDED)
            return stopped
        until = time.monotonic() + END_S
        how = b""
        while how not in (_ENDED, _STOPPED) and time.monotonic() < until:
            self.look()
            how = self._heard[0][0]
            time.sleep(0.1)
        self.close(_ENDED)
        return how == _STOPPED


def _store(place: Place) -> Any:
    where = f"{place.host}:{place.port}"
    if place.rank > 0:
        _wait_for_first(place)
    limit = timedelta(seconds=_ANSWER_S)
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            place.host, place.port, None, place.rank == 0, limit, wait_for_workers=False
        )
    except RuntimeError as error:
        first = place.rank == 0
        raise UsageError(
            "the machines cannot meet here",
            seen=f"{where}: {first_line(error)}",
            fix="choose a free port, and this machine's address as the others reach it"
            if first
            else "look at the first machine's terminal",
        ) from None


def _wait_for_first(place: Place) -> None:
    until = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection((place.host, place.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until or isinstance(error, socket.gaierror):
                raise TrainError(
                    "the first machine does not answer",
                    seen=f"{place.host}:{place.port}: {error}",
                    fix="start the same command with --node-rank 0 there; a firewall must let this "
                    "machine reach it",
                ) from None
            time.sleep(0.3)
