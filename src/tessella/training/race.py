"""A race of the ways of a step: each is timed by a process of its own, within a budget of seconds.

A process can be ended when the time is over, and what it did to torch, to its compilers and to the
GPU's memory ends with it. ``python -m tessella.training.race ORDER WAY`` is such a process.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

import torch

from tessella.artifacts.run import RunInfo
from tessella.artifacts.shards import SplitInfo
from tessella.core.errors import CorruptArtifact, first_line
from tessella.core.memory import is_out_of_memory
from tessella.core.record import from_plain, parse_json, to_plain
from tessella.training import captured
from tessella.training.memory import give_back
from tessella.training.parallel import World, alone, end_with_parent
from tessella.training.precision import arithmetic
from tessella.training.trainer import Trainer
from tessella.training.ways import WAYS, Choice, Way, refusal, usual_way

CLEARLY = 0.97  # of the usual way's time: with more, it stays
ENOUGH_S = 10.0  # of steps that are timed: where one takes seconds, two tell
LATE = 1 << 40  # so many steps are done: all that will ever learn does
# In errors of what others on the machine do, not of a way: libraries have no types for them
OF_A_MOMENT = ("out of memory", "ALLOC_FAILED", "busy or unavailable", "No space left")
MOST_ANSWER = 1 << 16  # bytes at the end of what a process prints: libraries print there, too


@dataclass(frozen=True, kw_only=True)
class Raced:
    """A way and its time.

    Attributes:
        step_s: seconds of a step on blank images of full size, the median; None: not known.
        setup_s: seconds until the first step had run, compilers included.
        problem: why there is no time.
        failed: it was tried and cannot run, rather than that its time was too short.
        passing: it failed for a reason of the moment, such as memory that others had.
        late_s: seconds of a race in which it was not ready.
    """

    way: Way
    step_s: float | None = None
    setup_s: float | None = None
    problem: str | None = None
    failed: bool = False
    passing: bool = False
    late_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a process of the race is told: a run, and the training split's counts."""

    info: RunInfo
    trained: SplitInfo


def race(
    info: RunInfo,
    trained: SplitInfo,
    device: torch.device,
    *,
    budget_s: float,
    known: Sequence[Raced] = (),
) -> tuple[Raced, ...]:
    """Every way with its time, or the reason that it has none.

    The usual way is the first to run. Torch's own calls are the last: where another way ran, they
    were never the fastest.

    Args:
        budget_s: seconds for all together; what takes longer is ended.
        known: ways that were tried already; one that was late is tried again in more time.
    """
    began = time.monotonic()
    found = {r.way: r for r in known if r.late_s is None or r.late_s >= budget_s}
    usual = usual_way(info.recipe, device).way
    give_back()  # the processes want the memory that trials of this one have left
    for way in sorted(WAYS, key=lambda way: (way != usual, way == "eager")):
        why_not = refusal(way, info.recipe, device)
        if why_not is not None:
            found.setdefault(way, Raced(way=way, problem=why_not))
        elif budget_s <= 0:
            found.setdefault(way, Raced(way=way, problem="not timed: --race gives it seconds"))
        elif way not in found:
            left_s = budget_s - (time.monotonic() - began)
            timed = _timed(Order(info=info, trained=trained), way, left_s)
            late_s = None if timed.late_s is None else budget_s
            found[way] = replace(timed, late_s=late_s)
    return tuple(found[way] for way in WAYS)


def seconds_of(raced: Raced, steps: int) -> float:
    """The seconds that a way takes for ``steps`` steps, set-up included."""
    return (raced.setup_s or 0.0) + steps * (raced.step_s or 0.0)


def fastest(raced: Sequence[Raced], usual: Way, steps: int | None = None) -> Way:
    """The way that takes least for so many steps, without ``steps`` the one with the shortest step;
    the usual one, where none is clearly faster.

    A usual way without a time stays, unless it failed: it may only have needed longer to begin.
    """
    times = {
        r.way: r.step_s if steps is None else seconds_of(r, steps)
        for r in raced
        if r.step_s is not None
    }
    failed = any(r.failed for r in raced if r.way == usual)
    if not times or not (failed or usual in times):
        return usual
    best = min(times, key=lambda way: times[way])
    return best if failed or times[best] < CLEARLY * times[usual] else usual


def described(raced: Raced) -> str:
    """A way's time for people, or why there is none."""
    if raced.step_s is None:
        return raced.problem or "not tried"
    setup = "" if raced.setup_s is None else f", the first after {raced.setup_s:.3g} s"
    return f"{lasting(raced.step_s)} a step{setup}"


def lasting(seconds: float) -> str:
    """A time for people, in milliseconds where it is shorter than a second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def step_times(trainer: Trainer, images: int, world: World, *, advises: bool = True) -> Raced:
    """A trainer's time on blank images; the way's name is left to the caller.

    Args:
        advises: where the memory does not do, look for a smaller batch that fits.
    """
    fed, times = trainer.blank(images), []
    step = trainer.step if advises else trainer.plain_step
    on_gpu = world.device.type == "cuda"
    warm, timed = (captured.WARM + 2, 20) if on_gpu else (2, 5)
    since = time.perf_counter()
    for number in range(warm + timed):
        began = time.perf_counter()
        if number > 1 and began - since > ENOUGH_S:
            break
        step(
            fed.images, fed.labels, done=LATE + number, rate=0.0, momentum=0.9
        ).tolist()  # waits for the step
        times.append(time.perf_counter() - began)
    return Raced(way="eager", step_s=statistics.median(times[warm:] or times[1:]), setup_s=times[0])


def measured(order: Order, way: Way) -> Raced:
    """The time of a run's steps in one way, here. No image of the dataset is read.

    What torch raises comes out as it is, out of memory too.
    """
    world, recipe = alone(), order.info.recipe
    with arithmetic(recipe.precision, deterministic=recipe.deterministic):
        chosen = Choice(way=way, why="it is raced")
        trainer = Trainer(order.info, order.trained, world, way=chosen)
        found = step_times(trainer, recipe.batch_size // recipe.processes, world, advises=False)
    return replace(found, way=way)


def command_of(order: int, way: Way) -> list[str]:
    """The program that measures a way, with an order in an open file, and prints a ``Raced``."""
    return [sys.executable, "-P", "-m", "tessella.training.race", str(order), way]


def _timed(order: Order, way: Way, budget_s: float) -> Raced:
    if budget_s <= 0:
        return Raced(way=way, problem="no time was left for it")
    try:
        with tempfile.TemporaryFile() as asked:
            asked.write(json.dumps(to_plain(order)).encode())
            asked.seek(0)
            return _answered(asked, way, budget_s)
    except OSError as error:
        problem = f"it cannot be started: {error}"[:200]
        return Raced(way=way, failed=True, passing=True, problem=problem)


def _answered(asked: IO[bytes], way: Way, budget_s: float) -> Raced:
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            command_of(asked.fileno(), way),
            stdin=subprocess.PIPE,  # when it closes, however this process ends, so does the other
            stdout=answer,
            stderr=told,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(asked.fileno(),),
        )
        try:
            process.wait(budget_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
        finally:
            process.kill()
            process.communicate()
        for line in reversed(_last_lines(answer)):
            with suppress(CorruptArtifact):  # another's line
                found = from_plain(Raced, parse_json(line, where="a line"), where="a line")
                if found.way == way:
                    return found
        if late:
            return Raced(way=way, problem=f"not ready after {budget_s:.3g} s", late_s=budget_s)
        said = (_last_lines(told) or [f"exit code {process.returncode}, and it said nothing"])[-1]
        killed = process.returncode == -signal.SIGKILL  # as one is that the host has no memory for
        return _failed(way, said, passing=killed)


def _failed(way: Way, said: str, *, passing: bool = False) -> Raced:
    passing |= any(words in said for words in OF_A_MOMENT)
    return Raced(way=way, failed=True, passing=passing, problem=f"it failed: {said}"[:200])


def _last_lines(file: IO[bytes]) -> list[str]:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_ANSWER))
    return file.read().decode("utf-8", "replace").strip().splitlines()


def main() -> int:
    threading.Thread(target=end_with_parent, daemon=True).start()
    way = next(w for w in WAYS if w == sys.argv[2])
    try:
        with open(int(sys.argv[1]), "rb") as asked:
            plain = parse_json(asked.read(), where="the order")
        found = measured(from_plain(Order, plain, where="the order"), way)
    except Exception as error:  # whatever it is, the way cannot run
        found = _failed(way, first_line(error), passing=is_out_of_memory(error))
    print(f"\n{json.dumps(to_plain(found))}", flush=True)  # a line of its own
    return 0


if __name__ == "__main__":
    sys.exit(main())
