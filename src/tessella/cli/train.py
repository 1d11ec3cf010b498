"""``tessella train``: a dataset and a network become a run with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.settings import spelled_out
from tessella.cli.output import Events, Json, output
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.record import parse_json


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    network: Annotated[str, Argument(help="resnet50, timm/NAME, file.py:Class or net.prototxt.")],
    dataset: Annotated[Path, Argument(help="Folder of the dataset.")],
    out: Annotated[Path, Option(help="Folder of the run.")],
    epochs: Annotated[float | None, Option(help="Passes over the training images.")] = None,
    batch_size: Annotated[int | None, Option(help="Images a step.")] = None,
    solver: Annotated[
        str | None,
        Option(help="sgd, nesterov, adagrad, adadelta, adam, adamw or rmsprop."),
    ] = None,
    lr: Annotated[float | None, Option(help="Base learning rate.")] = None,
    policy: Annotated[
        str | None,
        Option(
            help="onecycle, cosine, fixed, step, multistep, exponential, inverse, polynomial or "
            "sigmoid."
        ),
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, tf32, bf16 or fp16.")] = None,
    backend: Annotated[
        str | None, Option(help="torch or tessella: whose convolutions and linear layers run.")
    ] = None,
    gpus: Annotated[int | None, Option(help="Processes, each on a GPU of its own.")] = None,
    seed: Annotated[int | None, Option(help="Decides every random number.")] = None,
    recipe: Annotated[
        str | None,
        Option(help="Any setting of a recipe, as JSON or a file of it; options here win over it."),
    ] = None,
    resume: Annotated[bool, Option(help="Go on with the run in --out, exactly.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Train a network. Ctrl-C stops; --resume goes on with the same loss curve.

    Example: tessella train resnet50 datasets/flowers --out runs/flowers --epochs 30

    A recipe file (--recipe) holds any other setting: {"augment": {"flip": true}, "patience": 5,
    "class_weights": "balanced", "init": "pretrained", "val_interval": 0.5}. To prune a trained
    network and train it again: {"sparsity": "2:4", "init": "runs/a/checkpoints/step-00001000"}
    """
    stopped = "stopped: the same command with --resume goes on where it stopped"
    with output(json_only=json, events=events, stopped=stopped) as out_:
        settings = {} if recipe is None else read_recipe(recipe)
        settings |= {"network": network, "dataset": str(dataset)}
        given = {
            "epochs": epochs,
            "batch_size": batch_size,
            "precision": precision,
            "backend": backend,
            "gpus": gpus,
            "seed": seed,
            "lr": lr,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        for name, value in (("solver", {"name": solver}), ("policy", {"name": policy})):
            if value["name"] is not None:
                settings[name] = {**settings.get(name, {}), **value}
        run = api.train(out=out, resume=resume, emit=out_.emit, **settings)
        best = api.open_checkpoint(run)
        plain = {
            "run": str(run.path),
            "best": str(best.path),
            "step": best.info.position.step,
            "metrics": best.info.metrics,
        }
        metrics = "  ".join(f"{k} {v:.4g}" for k, v in best.info.metrics.items())
        out_.result(plain, f"best checkpoint: {best.path}\n{metrics}")


def read_recipe(given: str) -> dict[str, Any]:
    """The settings in a recipe, a JSON text or a file, checked before the dataset is opened."""
    path, inline = Path(given), given.lstrip().startswith("{")
    if not inline and not path.is_file():
        raise UsageError(
            "there is no recipe here",
            seen=path,
            fix='give the path of a JSON file, or {"epochs": 3}',
        )
    path = Path("--recipe") if inline else path
    try:
        plain = parse_json(given.encode() if inline else path.read_bytes(), where=str(path))
        if not isinstance(plain, dict):
            raise UsageError(
                "a recipe is a JSON object", seen=type(plain).__name__, fix='write {"epochs": 30}'
            )
        plain = spelled_out(plain)
        api.recipe_from({"network": "lenet", "dataset": ".", **plain})
    except UsageError as error:
        raise UsageError(f"{path}: {error.wrong}", seen=error.seen, fix=error.fix) from error
    except ArtifactError as error:  # a person wrote this file: it is an argument, not an artifact
        raise UsageError(error.wrong, seen=error.seen, fix=f"correct {path}") from error
    return plain
