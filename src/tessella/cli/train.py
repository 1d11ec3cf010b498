"""``tessella train``: a dataset and a network become a run with checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from tessella import api
from tessella.artifacts.run import Recipe, Run
from tessella.cli.output import Events, Json, output
from tessella.core.errors import UsageError
from tessella.core.record import from_plain, parse_json, to_plain


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
        Option(help="fixed, step, multistep, exponential, inverse, polynomial, sigmoid or cosine."),
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, tf32, bf16 or fp16.")] = None,
    gpus: Annotated[int | None, Option(help="Processes, each on a GPU of its own.")] = None,
    seed: Annotated[int | None, Option(help="Decides every random number.")] = None,
    recipe: Annotated[
        Path | None, Option(help="JSON with any setting of a recipe; options here win over it.")
    ] = None,
    resume: Annotated[bool, Option(help="Go on with the run in --out, exactly.")] = False,
    json: Json = False,
    events: Events = None,
) -> None:
    """Train a network. Ctrl-C stops; --resume goes on with the same loss curve.

    Example: tessella train resnet50 datasets/flowers --out runs/flowers --epochs 30 --precision
    bf16
    """
    with output(json_only=json, events=events) as out_:
        if resume and (out / "run.json").exists():
            settings = to_plain(Run(out).recipe)
        else:
            settings = {} if recipe is None else read_recipe(recipe)
        settings |= {"network": network, "dataset": str(dataset)}
        given = {
            "epochs": epochs,
            "batch_size": batch_size,
            "precision": precision,
            "gpus": gpus,
            "seed": seed,
        }
        settings |= {name: value for name, value in given.items() if value is not None}
        solver_given = {"name": solver, "lr": lr}
        settings["solver"] = {
            **settings.get("solver", {}),
            **{k: v for k, v in solver_given.items() if v is not None},
        }
        if policy is not None:
            settings["policy"] = {**settings.get("policy", {}), "name": policy}
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


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings in a recipe file, checked as a recipe once network and dataset are known."""
    if not path.is_file():
        raise UsageError("there is no recipe here", seen=path, fix="give the path of a JSON file")
    plain = parse_json(path.read_text(), where=str(path))
    if not isinstance(plain, dict):
        raise UsageError("a recipe is a JSON object", seen=type(plain).__name__)
    placeholder = {"network": "lenet", "dataset": "."}
    from_plain(Recipe, {**placeholder, **plain}, where=str(path))
    return plain
