"""``tessella sweep``: many trainings, and the settings that did best."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Group
from rich.text import Text
from typer import Argument, Option

from tessella import api
from tessella.artifacts.sweep import Pruner, Sampler, Sweep
from tessella.cli.output import Events, Json, grid, output
from tessella.cli.train import NETWORK, read_recipe
from tessella.core.errors import UsageError
from tessella.core.record import to_plain

SHOWN = 20


def register(app: typer.Typer) -> None:
    app.command("sweep")(sweep)


def sweep(
    network: Annotated[str, Argument(help=NETWORK)],
    dataset: Annotated[Path, Argument(help="Folder of the dataset.")],
    out: Annotated[Path, Option(help="Folder of the sweep.")],
    vary: Annotated[
        list[str],
        Option(help="A setting with a range or choices: 'lr=1e-4..1e-2 log', batch_size=32,64."),
    ],
    trials: Annotated[int | None, Option(help="How many trainings: 30, or of a grid all.")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the images, of each (30).")] = None,
    sampler: Annotated[str, Option(help="tpe, random or grid.")] = "tpe",
    pruner: Annotated[
        str, Option(help="asha, hyperband or none: what ends trials early.")
    ] = "asha",
    parallel: Annotated[
        int | None, Option(help="Trials at once: as many as there are GPUs for, on a CPU one.")
    ] = None,
    recipe: Annotated[
        str | None, Option(help="The settings that do not vary, as JSON or a file of it.")
    ] = None,
    resume: Annotated[bool, Option(help="Go on with the sweep in --out.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Search for the best settings: trials that fall behind end early. Needs Optuna.

    Example: tessella sweep resnet18 datasets/flowers --out sweeps/a --vary 'lr=1e-4..1e-2 log'
    --vary augment.rotation=0..20 --epochs 10

    Any setting of a recipe may vary. Ctrl-C stops; --resume goes on, also after a crash. The best
    recipe lies in OUT/best.json: tessella train NETWORK DATASET --recipe OUT/best.json
    """
    stopped = "stopped: the same command with --resume goes on where it stopped"
    with output(json_only=json, events=events, stopped=stopped) as out_:
        settings = {} if recipe is None else read_recipe(recipe)
        settings = {k: v for k, v in settings.items() if k not in ("network", "dataset")}
        if epochs is not None:
            settings["epochs"] = epochs
        found = api.sweep(
            network,
            dataset,
            vary=dict(map(_axis, vary)),
            out=out,
            trials=trials,
            sampler=cast(Sampler, sampler),
            pruner=cast(Pruner, pruner),
            parallel=parallel,
            resume=resume,
            emit=out_.emit,
            **settings,
        )
        best = found.best
        chosen = str(best.values.get("network", network))
        words = ("tessella", "train", chosen, str(dataset), "--recipe")
        command = shlex.join((*words, str(found.path / "best.json"), "--out", "runs/best"))
        plain = {
            "sweep": str(found.path),
            "score": found.score,
            "best": to_plain(best),
            "recipe": str(found.path / "best.json"),
            "command": command,
            "trials": to_plain(found.trials),
            "importance": dict(found.importance),
        }
        out_.result(plain, _shown(found, command))


def _axis(text: str) -> tuple[str, str]:
    name, equals, values = text.partition("=")
    if not (name and equals and values):
        raise UsageError(
            "what varies is a name, an equals sign and values",
            seen=text,
            fix="--vary 'lr=1e-4..1e-2 log', --vary batch_size=32,64",
        )
    return name.strip(), values


def _shown(found: Sweep, command: str) -> Group:
    names = tuple(dict.fromkeys(name for trial in found.trials for name in trial.values))
    rows = [
        (
            str(t.number), t.state, t.score, t.validations, round(t.seconds, 1),
            *(str(t.values.get(name, "")) for name in names),
        )
        for t in found.trials[:SHOWN]
    ]  # fmt: skip
    head = ("trial", "", found.score, "validations", "s", *names)
    more = len(found.trials) - SHOWN
    parts: list[Group | Text] = [grid(head, rows, title=f"{found.path}")]
    if more > 0:
        parts.append(Text(f"and {more:,} trials more"))
    if found.importance:
        said = ", ".join(f"{name} {share:.0%}" for name, share in found.importance.items())
        parts.append(Text(f"importance: {said}"))
    parts.append(Text(f"the best one again: {command}"))
    return Group(*parts)
