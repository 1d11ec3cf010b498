"""size: how to serve a plan so that most requests are answered in time."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tessella import loadtest
from tessella.artifacts.plan import load_outline
from tessella.core.errors import UsageError
from tessella.core.events import Emit, phase
from tessella.core.reporter import reported

SHARES = (0.05, 0.2)  # of the p99, that a request may wait for others


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """How to serve a plan, and what was tried.

    Attributes:
        words: the command that serves it so, without ``tessella``.
        best: what the best setting answered at its highest rate within the p99.
        trials: all that was tried, in order.
        notes: what a reader has to know of the search, a sentence each.
    """

    words: tuple[str, ...]
    p99_ms: float
    best: loadtest.Trial
    trials: tuple[loadtest.Trial, ...] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line that serves the plan with these settings."""
        return shlex.join(("tessella", *self.words))


def size(
    plan: str | Path,
    *,
    p99_ms: float,
    name: str | None = None,
    seconds: float = 120.0,
    acceptors: Sequence[int] | None = None,
    max_delays_us: Sequence[int] | None = None,
    instances: Sequence[int] | None = None,
    body: Literal["binary", "json", "image"] = "binary",
    batch: int = 1,
    picture: str | Path | None = None,
    device: str | None = None,
    imports: Sequence[str] = (),
    emit: Emit | None = None,
) -> Sizing:
    """Find the settings of ``serve`` with the most goodput: answers a second within a p99.

    Servers are started on this machine as ``tessella serve`` starts them, one after another, and
    requests are sent at random times, at rates that rise until 1 % of them is late or refused. The
    load comes from this machine, too, and takes a part of its cores.

    >>> ts.size("flowers.plan", p99_ms=20).command
    'tessella serve flowers=flowers.plan --acceptors 0 --max-delay-us 0'

    Args:
        plan: its file.
        p99_ms: milliseconds within which 99 % of all requests are to be answered.
        name: of the model; by default the file's, without its ending.
        seconds: how long to try at most, since the first server was ready.
        acceptors: numbers of acceptors to try; by default 0 and the powers of two that are less
            than the cores.
        max_delays_us: delays to try, the first with all numbers of acceptors, the others with the
            best of them; by default none, a twentieth and a fifth of the p99.
        instances: numbers of instances of the model to try, with the best of the above; by default
            1, and for a plan of this machine's processor the powers of two up to its cores.
        body, batch, picture: what is sent, as by ``tessella load``: random tensors of so many
            samples, or the file of a picture.
        device: as for ``serve``.
        imports: modules that define kernels of your own; the servers import them first.
        emit: told what happens; by default it is shown on a terminal and in a notebook.

    Raises:
        UsageError: the p99 cannot be met, or not found out in this time; with what was measured.
        ServeError: a server does not start, or has no good answer.
    """
    path = Path(plan)
    if not path.is_file():
        raise UsageError("there is no plan here", seen=path, fix="give the file of a plan")
    name = path.stem if name is None else name
    asked = loadtest.Asked(
        p99_ms=p99_ms,
        seconds=seconds,
        acceptors=tuple(_acceptors() if acceptors is None else acceptors),
        max_delays_us=tuple(_delays_us(p99_ms) if max_delays_us is None else max_delays_us),
        instances=tuple(_instances(path, device) if instances is None else instances),
    )
    front = () if device is None else ("--device", device)
    front = (*front, *(word for module in imports for word in ("--import", module)))
    served = (*front, "serve", f"{name}={path}")

    @contextmanager
    def opened(setting: loadtest.Setting) -> Iterator[loadtest.Served]:
        with loadtest.started((*served, *setting.words)) as url:
            target = loadtest.Target(url=url, model=name)
            file = None if picture is None else Path(picture)
            content = loadtest.body_for(target, body, batch=batch, picture=file)
            yield loadtest.running(target, content, p99_ms / 1e3)

    with reported(emit) as told:
        found = loadtest.search(opened, asked, tell=lambda trial: told(phase("tried", str(trial))))
    return Sizing(
        words=(*served, *found.best.setting.words),
        p99_ms=p99_ms,
        best=found.best,
        trials=found.trials,
        notes=found.notes,
    )


def _acceptors() -> tuple[int, ...]:
    cores = len(os.sched_getaffinity(0))
    return (0, *(n for n in (1, 2, 4, 8, 16, 32, 64) if n < cores))


def _instances(path: Path, device: str | None) -> tuple[int, ...]:
    on_cpu = device == "cpu" or load_outline(path).targets == ("cpu",)
    cores = len(os.sched_getaffinity(0)) if on_cpu else 1
    return (1, *(n for n in (2, 4, 8, 16, 32, 64) if n <= cores))


def _delays_us(p99_ms: float) -> tuple[int, ...]:
    return (0, *(int(1e3 * p99_ms * share) for share in SHARES))
