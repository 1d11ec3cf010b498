"""A race of the ways of a step: each is timed by a process of its own, within a budget of seconds.

A process can be ended when the time is over, and what it did to torch, to its compilers and to the
GPU's memory ends with it. ``python -m tessella.training.race RECIPE WAY`` is such a process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.files import write_atomic
from tessella.artifacts.run import Recipe, Run
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.events import Emit, phase
from tessella.core.record import from_plain, parse_json, to_plain
from tessella.training import captured
from tessella.training.parallel import World, alone, end_with_parent
from tessella.training.precision import arithmetic
from tessella.training.prepare import describe_run
from tessella.training.trainer import Trainer
from tessella.training.ways import WAYS, Choice, Way, refusal, usual_way

RACE_S = 60.0  # for all ways together
CLEARLY = 0.97  # of the usual way's time: with more, it stays
LEAST_STEPS = 20_000  # of a training that a race of a minute may pay for
RACED_ON = ("cuda",)  # kinds of devices whose trainings begin with a race
FILE = "way.json"  # in a run's folder: a run that goes on takes the way that it was begun with
LATE = 1 << 40  # so many steps are done: all that will ever learn does


@dataclass(frozen=True, kw_only=True)
class Raced:
    """A way and its time.

    Attributes:
        step_s: seconds of a step on blank images of full size, the median; None: not known.
        setup_s: seconds until the first step had run, compilers included.
        problem: why there is no time.
    """

    way: Way
    step_s: float | None = None
    setup_s: float | None = None
    problem: str | None = None


def race(
    recipe: Recipe,
    device: torch.device,
    *,
    budget_s: float = RACE_S,
    known: Sequence[Raced] = (),
) -> tuple[Raced, ...]:
    """Every way with its time, or the reason that it has none.

    Args:
        budget_s: seconds for all together; what takes longer is ended.
        known: ways that were timed already.
    """
    until, found = time.monotonic() + budget_s, {raced.way: raced for raced in known}
    for way in WAYS:
        why_not = refusal(way, recipe, device)
        if why_not is not None:
            found.setdefault(way, Raced(way=way, problem=why_not))
        elif way not in found:
            found[way] = _timed(recipe, way, until - time.monotonic())
    return tuple(found[way] for way in WAYS)


def fastest(raced: Sequence[Raced], usual: Way) -> Way:
    """The way with the shortest step; the usual one, where none is clearly faster."""
    times = {r.way: r.step_s for r in raced if r.step_s is not None}
    if not times:
        return usual
    best = min(times, key=lambda way: times[way])
    clearly = usual not in times or times[best] < CLEARLY * times[usual]
    return best if clearly else usual


def described(raced: Raced) -> str:
    """A way's time for people, or why there is none."""
    if raced.step_s is None:
        return raced.problem or "not tried"
    setup = "" if raced.setup_s is None else f", the first after {raced.setup_s:.3g} s"
    return f"{1e3 * raced.step_s:.3g} ms a step{setup}"


def way_of(run: Run, world: World, steps: int, emit: Emit) -> Choice:
    """The way of a run's steps: raced at the start of a long training on one GPU.

    What was chosen is kept in the run's folder, so that a run that goes on computes as before.
    """
    usual, path = usual_way(run.recipe, world.device), run.path / FILE
    if path.exists():
        return _read(path)
    decided = run.recipe.compile or run.recipe.fuse is not None or run.recipe.quantize != "none"
    raced_here = world.size == 1 and world.device.type in RACED_ON and steps >= LEAST_STEPS
    if decided or not raced_here or run.checkpoints():
        return usual
    emit(phase("race", f"the ways of a step are tried, for {RACE_S:.0f} s at most"))
    raced = race(run.recipe, world.device, budget_s=RACE_S)
    times = "; ".join(f"{r.way} {described(r)}" for r in raced)
    chosen = Choice(way=fastest(raced, usual.way), why=times)
    write_atomic(path, (json.dumps(to_plain(chosen)) + "\n").encode())
    return chosen


def _read(path: Path) -> Choice:
    plain = parse_json(path.read_bytes(), where=str(path))
    if not isinstance(plain, dict):
        raise ArtifactError("this is no way of a step", seen=path, fix=f"remove {path}")
    return from_plain(Choice, plain, where=str(path))


def step_times(trainer: Trainer, images: int, world: World) -> Raced:
    """A trainer's time on blank images; the way's name is left to the caller."""
    fed, times = trainer.blank(images), []
    on_gpu = world.device.type == "cuda"
    warm, timed = (captured.WARM + 2, 20) if on_gpu else (2, 5)
    for number in range(warm + timed):
        began = time.perf_counter()
        trainer.step(
            fed.images, fed.labels, done=LATE + number, rate=0.0, momentum=0.9
        ).tolist()  # waits for the step
        times.append(time.perf_counter() - began)
    return Raced(way="eager", step_s=statistics.median(times[warm:]), setup_s=times[0])


def measured(recipe: Recipe, way: Way) -> Raced:
    """The time of a recipe's steps in one way, here."""
    world, dataset = alone(), Dataset(recipe.dataset)
    with arithmetic(recipe.precision):
        chosen = Choice(way=way, why="it is raced")
        trainer = Trainer(describe_run(recipe), dataset.train.info, world, way=chosen)
        found = step_times(trainer, recipe.batch_size // recipe.gpus, world)
    return replace(found, way=way)


def command_of(recipe: Recipe, way: Way) -> list[str]:
    """The program that measures a way and prints it as JSON."""
    worker = ["-m", "tessella.training.race", json.dumps(to_plain(recipe)), way]
    return [sys.executable, "-P", *worker]


def _timed(recipe: Recipe, way: Way, budget_s: float) -> Raced:
    if budget_s <= 0:
        return Raced(way=way, problem="no time was left for it")
    with tempfile.TemporaryFile() as answer, tempfile.TemporaryFile() as told:
        process = subprocess.Popen(
            command_of(recipe, way),
            stdin=subprocess.PIPE,  # when it closes, however this process ends, so does the other
            stdout=answer,
            stderr=told,
        )
        try:
            process.wait(budget_s)
        except subprocess.TimeoutExpired:
            return Raced(way=way, problem=f"not ready after {budget_s:.3g} s")
        finally:
            process.kill()
            process.communicate()
        if process.returncode:
            return Raced(way=way, problem=f"it failed: {_last_line(told)}"[:200])
        plain = parse_json(_last_line(answer).encode(), where="the race's answer")
    assert isinstance(plain, dict)
    return from_plain(Raced, plain, where="the race's answer")


def _last_line(file: IO[bytes]) -> str:
    file.seek(0)
    lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def main() -> int:
    threading.Thread(target=end_with_parent, daemon=True).start()
    plain = parse_json(sys.argv[1].encode(), where="recipe")
    assert isinstance(plain, dict)
    recipe, way = from_plain(Recipe, plain, where="recipe"), sys.argv[2]
    try:
        found = measured(recipe, next(w for w in WAYS if w == way))
    except (TessellaError, RuntimeError, MemoryError) as error:
        print(str(error).splitlines()[0], file=sys.stderr)
        return 1
    print(json.dumps(to_plain(found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
