"""A run that is trained by processes of several machines, of which one keeps its folder.

Rank 0 sends the run's record to all; and, where a machine does not see the folder, the newest
checkpoint, so that nobody needs a disk in common.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tessella.artifacts.files import sha256
from tessella.artifacts.run import Recipe, Run, RunInfo
from tessella.core.errors import TessellaError, UsageError
from tessella.core.record import from_plain, to_plain
from tessella.training.machines import error_of
from tessella.training.parallel import World
from tessella.training.prepare import differences

WAY_FILE = "way.json"
_PIECE = 1 << 26  # bytes that are sent at once


@contextmanager
def shared(
    world: World,
    describes: Callable[[Recipe], RunInfo],
    out: Path,
    begun: Callable[[], tuple[Run, bool]],
) -> Iterator[tuple[Run, bool]]:
    """The run for this process, and whether it is resumed.

    Args:
        describes: the run by this process's own settings and dataset, given rank 0's recipe.
        out: the run's folder, if this process sees it; nothing is written there but by rank 0.
        begun: the run and whether it is resumed, as rank 0 has it; called there alone.

    Raises:
        TessellaError: ``begun`` raised it.
        UsageError: this process has other settings, or another dataset.
    """
    run, resumed, error = None, False, None
    if world.rank == 0:
        try:
            run, resumed = begun()
        except TessellaError as raised:
            error = raised
    files = _files(run) if run is not None and resumed else {}
    told: dict[str, Any] = _agreed(
        world,
        {
            "error": None if error is None else error.to_json(),
            "info": None if run is None else to_plain(run.info),
            "resumed": resumed,
            "files": {name: (path.stat().st_size, sha256(path)) for name, path in files.items()},
        },
    )
    if error is not None:
        raise error
    if (plain := told["error"]) is not None:
        raise error_of(plain)
    info = from_plain(RunInfo, told["info"], where="the first process's run")
    own = describes(info.recipe)
    if changed := differences(info, own):
        raise UsageError(
            "the machines were started with different settings or data",
            seen="; ".join(changed)[:1000],
            fix="give every machine the same options, and the same version of the dataset",
        )
    wanted: dict[str, tuple[int, str]] = told["files"]
    with TemporaryDirectory(prefix="tessella-") as scratch:
        folder = out if world.rank == 0 or _sees(out, wanted) else Path(scratch)
        lacking = torch.tensor(float(folder != out), device=world.device)
        dist.all_reduce(lacking)
        if lacking.item():
            for name, (size, _) in wanted.items():
                into = None if folder == out else folder / name
                _send(world, files.get(name), size, into)
        recipe = replace(info.recipe, dataset=own.recipe.dataset, workers=own.recipe.workers)
        yield Run(folder, info=replace(info, recipe=recipe)), told["resumed"]


def _files(run: Run) -> dict[str, Path]:
    """The files that a resumed training reads, by their place in the run's folder."""
    found = [run.path / WAY_FILE, *(c.path for c in run.checkpoints()[-1:])]
    paths = [p for one in found for p in ([one] if one.is_file() else sorted(one.rglob("*")))]
    return {str(p.relative_to(run.path)): p for p in paths if p.is_file()}


def _sees(out: Path, wanted: dict[str, tuple[int, str]]) -> bool:
    """Whether the files are here, and not those of another run in a folder of the same name."""
    return all(
        (out / name).is_file()
        and (out / name).stat().st_size == size  # quickly known
        and sha256(out / name) == digest
        for name, (size, digest) in wanted.items()
    )


def _agreed(world: World, plain: Any) -> Any:
    """Rank 0's value, in every process."""
    content = json.dumps(plain).encode() if world.rank == 0 else b""
    size = torch.tensor(len(content), device=world.device)
    dist.broadcast(size, 0)
    data = torch.zeros(int(size), dtype=torch.uint8, device=world.device)
    if world.rank == 0:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, 0)
    return json.loads(bytes(data.cpu().numpy()))


def _send(world: World, path: Path | None, size: int, into: Path | None) -> None:
    """Send rank 0's file; ``into`` is where it is written, if it is wanted here."""
    if into is not None:
        into.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(path or os.devnull, "rb") as source,
        open(into or os.devnull, "wb") as target,
    ):
        for start in range(0, size, _PIECE):
            count = min(_PIECE, size - start)
            data = torch.zeros(count, dtype=torch.uint8, device=world.device)
            if path is not None:
                piece = bytearray(source.read(count))
                data.copy_(torch.frombuffer(piece, dtype=torch.uint8))
            dist.broadcast(data, 0)
            if into is not None:
                target.write(data.cpu().numpy().tobytes())
