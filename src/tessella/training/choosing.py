"""Which way a training's steps take: what is known from earlier races, or a race if that pays.

A way costs its set-up and its steps: torch.compile's code may be ready after two minutes. So of
known times the smallest sum for this training decides. Where nothing is known, a race is run if
what it may save is more than it costs, by what other networks of its kind have shown.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tessella.artifacts.files import write_atomic
from tessella.artifacts.run import Run, RunInfo
from tessella.artifacts.shards import SplitInfo
from tessella.core.device import default_target, fingerprint
from tessella.core.errors import ArtifactError, TessellaError
from tessella.core.events import Emit, phase
from tessella.core.record import digest, from_plain, parse_json, to_plain
from tessella.core.version import VERSION
from tessella.nn import zoo
from tessella.search.tuning import CACHE_FOLDER
from tessella.training.expected import kept_bytes
from tessella.training.parallel import World
from tessella.training.precision import width_of
from tessella.training.race import Raced, described, fastest, race, seconds_of
from tessella.training.ways import Choice, refusal, usual_way

log = logging.getLogger(__name__)

FILE = "way.json"  # in a run's folder: a run that goes on takes the way that it was begun with
RACED_ON = ("cuda",)  # kinds of devices whose trainings may begin with a race
RACE_COSTS_S = (
    150.0  # two processes that import torch, one of which compiles for one to two minutes
)
MOST_RACE_S = 300.0
# The part of a step's time that torch.compile's code may save beside the usual way, by what a
# network has: what benchmarks.steps and benchmarks.volumes saw, and for convolutions a guess
GAINS = {"volumes": 0.5, "depthwise convolutions": 0.2, "no batch norms": 0.2, "convolutions": 0.03}
# An H100's or H200's: what steps reach of its products, and of its memory, with each byte that a
# forward pass keeps moved six times. Of a ResNet-50, a ViT-B/16 and an EfficientNet-B0 this is
# right within a factor of two, which is all that is asked of it
FLOPS_PER_S = {2: 4e14, 4: 4e13}  # by bytes of an element
BYTES_PER_S, MOVED = 3e12, 6


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a race may save.

    Attributes:
        kind: of ``GAINS``.
        seconds: of all steps, estimated; None: shapes do not tell.
    """

    kind: str
    seconds: float | None

    @property
    def saved_s(self) -> float:
        return GAINS[self.kind] * (self.seconds or 0.0)

    @property
    def pays(self) -> bool:
        return self.saved_s > RACE_COSTS_S

    @property
    def text(self) -> str:
        if self.seconds is None:
            return "how long it takes cannot be estimated"
        return (
            f"about {in_words(self.seconds)} of steps of a network with {self.kind}, of which"
            f" torch.compile may save {in_words(self.saved_s)}"
        )


def way_of(
    run: Run, trained: SplitInfo, world: World, steps: int, *, races: bool = True, emit: Emit
) -> Choice:
    """The way of a run's steps.

    What was chosen by times is kept in the run's folder, so that a run that goes on computes as
    before; but where it cannot run, on another machine, the usual way does.

    Args:
        steps: of the whole training.
        races: times may decide, remembered ones or those of a race.
    """
    usual, path = usual_way(run.recipe, world.device), run.path / FILE
    if path.exists():
        chosen = _read(path)
        if (why_not := refusal(chosen.way, run.recipe, world.device)) is None:
            return chosen
        why = f"{FILE} says {chosen.way}, which cannot run here: {why_not}"
        return Choice(way=usual.way, why=why)
    one = world.size == 1 and world.device.type in RACED_ON
    if not (races and one) or is_decided(run.info) or run.checkpoints():
        return usual
    raced, said = recalled(run.info), "remembered"
    if not _tells(raced, usual):
        prospect = prospect_of(run.info, steps)
        if not prospect.pays:
            why = f"{usual.why}; {prospect.text}: a race would cost {in_words(RACE_COSTS_S)}"
            return Choice(way=usual.way, why=why)
        budget_s = min(MOST_RACE_S, max(prospect.saved_s, RACE_COSTS_S))
        if not _tells(raced, usual, budget_s):
            emit(phase("race", f"for {in_words(budget_s)} at most: {prospect.text}"))
            raced = race(run.info, trained, world.device, budget_s=budget_s, known=raced)
            said = "raced"
            remember(run.info, raced)
    chosen = chosen_of(raced, usual, steps, said=said)
    write_atomic(path, (json.dumps(to_plain(chosen)) + "\n").encode())
    return chosen


def is_decided(info: RunInfo) -> bool:
    """Whether a recipe leaves nothing to choose."""
    recipe = info.recipe
    decided = recipe.compile or recipe.fuse is not None or recipe.quantize != "none"
    return decided or recipe.deterministic


def chosen_of(raced: Sequence[Raced], usual: Choice, steps: int, *, said: str) -> Choice:
    """The way that takes least for so many steps, and in a line why."""
    way = fastest(raced, usual.way, steps)
    times = "; ".join(f"{r.way} {described(r)}" for r in raced)
    total = next((seconds_of(r, steps) for r in raced if r.way == way and r.step_s), None)
    least = "" if total is None else f", {in_words(total)} for {steps:,} steps"
    return Choice(way=way, why=f"{said}: {times}{least}")


def prospect_of(info: RunInfo, steps: int) -> Prospect:
    """What a race of a run's ways may save, by the shapes of its network."""
    try:
        with torch.device("meta"):
            module = zoo.build(info.network)
    # a network of a user's, which wants numbers when it is made, says so in any of these
    except (TessellaError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        log.info("the time of a step is not estimated: %s", error)
        return Prospect(kind="convolutions", seconds=None)
    recipe = info.recipe
    part = max(1, recipe.batch_size // recipe.processes // recipe.accumulate)
    with FlopCounterMode(display=False) as counter:
        kept = kept_bytes(module, (part, *info.preprocess.input_shape), recipe.precision)
    if kept is None:
        return Prospect(kind=kind_of(module), seconds=None)
    products_s = 3 * counter.get_total_flops() / FLOPS_PER_S[width_of(recipe.precision).itemsize]
    step_s = recipe.accumulate * max(products_s, MOVED * kept / BYTES_PER_S)
    return Prospect(kind=kind_of(module), seconds=steps * step_s)


def kind_of(module: nn.Module) -> str:
    """What a network has that tells how much torch.compile's code may save: of ``GAINS``."""
    parts = list(module.modules())
    if any(isinstance(part, nn.Conv3d) for part in parts):
        return "volumes"
    if any(isinstance(part, nn.Conv2d) and part.groups > 1 for part in parts):
        return "depthwise convolutions"
    normed = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
    return "convolutions" if normed else "no batch norms"


def _tells(raced: Sequence[Raced], usual: Choice, budget_s: float = math.inf) -> bool:
    """Whether a race of so many seconds would say no more than is known: of the usual way, and of
    another unless the usual one is late, which then stays."""
    known = {
        r.way: r
        for r in raced
        if r.step_s is not None or r.failed or (r.late_s is not None and r.late_s >= budget_s)
    }
    if usual.way not in known:
        return False
    return known[usual.way].late_s is not None or len(known) > 1


# --- what earlier races have shown ----------------------------------------------------------------


def _place(info: RunInfo) -> Path:
    """The file of a run's times: by what decides them, and the device with its libraries."""
    recipe = info.recipe
    asked = {
        "version": VERSION,
        "device": fingerprint(default_target()).hash,
        "network": {**to_plain(info.network), "source": digest(info.network.source)},
        "input": info.preprocess.input_shape,
        "task": info.task.name,
        "labels": len(info.labels),
        "batch": recipe.batch_size // recipe.processes,
        **{name: getattr(recipe, name) for name in _DECIDE},
        "mixed": bool(recipe.augment.mixup or recipe.augment.cutmix),  # such a step is no graph
        "decayed": recipe.layer_decay < 1,  # groups of parameters, each with launches of its own
        "solver": recipe.solver.name,
    }
    return CACHE_FOLDER / "ways" / f"{digest(asked)}.json"


_DECIDE = (
    "precision", "accumulate", "recompute", "grow_from", "backend", "freeze", "ema", "sparsity"
)  # fmt: skip


def recalled(info: RunInfo) -> tuple[Raced, ...]:
    """Times of a run's ways that were measured here before, or why a way cannot run."""
    path = _place(info)
    try:
        plain = parse_json(path.read_bytes(), where=str(path))
        return tuple(from_plain(Raced, one, where=str(path)) for one in plain)
    except FileNotFoundError:
        return ()
    except (OSError, TypeError, ArtifactError) as error:
        log.warning("earlier times of steps are not read: %s", error)
        return ()


def remember(info: RunInfo, raced: Sequence[Raced]) -> None:
    """Keep times of ways, and which failed or were late, beside those that are known.

    A failure of the moment is not kept, and none replaces a time.
    """
    known = {r.way: r for r in recalled(info)}
    for r in raced:
        timed = r.way in known and known[r.way].step_s is not None
        lasts = (r.failed and not r.passing) or r.late_s is not None
        if r.step_s is not None or (lasts and not timed):
            known[r.way] = r
    plain = [to_plain(one) for one in known.values()]
    try:
        write_atomic(_place(info), (json.dumps(plain) + "\n").encode())
    except (OSError, ArtifactError) as error:
        log.warning("times of steps cannot be remembered: %s", error)


def _read(path: Path) -> Choice:
    plain = parse_json(path.read_bytes(), where=str(path))
    if not isinstance(plain, dict):
        raise ArtifactError("this is no way of a step", seen=path, fix=f"remove {path}")
    return from_plain(Choice, plain, where=str(path))


def in_words(seconds: float) -> str:
    """A time as one says it: 12 s, 3.4 min, 26 h."""
    if seconds < 5400:
        return f"{seconds:.2g} s" if seconds < 90 else f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:,.0f} h"
