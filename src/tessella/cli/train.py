"""``tessella train``: a dataset and a network become a run with checkpoints."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from typer import Argument, Option

from tessella import api
from tessella.artifacts.run import Run
from tessella.artifacts.settings import spelled_out
from tessella.cli.output import Events, Json, Output, grid, output
from tessella.core.device import default_target
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.record import parse_json, to_plain
from tessella.search.limits import Limits, limits
from tessella.search.tuning import CACHE_FOLDER
from tessella.training.forecast import Forecast
from tessella.training.machines import settings_of, started
from tessella.training.race import described, fastest, lasting
from tessella.training.ways import NAMES, Way

SHOWN = 12  # layers
NETWORK = "resnet50 (tessella show networks: all), timm/NAME, file.py:Class or net.prototxt."
POLICIES = "onecycle, cosine, fixed, step, multistep, exponential, inverse, polynomial or sigmoid."


def _batch(text: str) -> int | str:
    if text == "auto" or text.isdigit():
        return text if text == "auto" else int(text)
    raise typer.BadParameter("a number of images, or auto")


def register(app: typer.Typer) -> None:
    app.command("train")(train)


BatchSize = Annotated[
    str | None,
    Option(
        help="Images a step (64, of few pictures less); auto: the most that fit.", parser=_batch
    ),
]
Solver = Annotated[
    str | None, Option(help="sgd, nesterov, adagrad, adadelta, adam, adamw or rmsprop.")
]
Quantize = Annotated[
    str | None,
    Option(help="int8: train --init on with the roundings of its INT8 plan."),
]
Init = Annotated[
    str | None, Option(help="random, pretrained, or a checkpoint; for --quantize a run, too.")
]
Backend = Annotated[
    str | None, Option(help="torch or tessella: whose convolutions and linear layers run.")
]
Gpus = Annotated[int | None, Option(help="Processes on this machine, each on a GPU of its own.")]
NodeRank = Annotated[int | None, Option(min=0, help="--nodes: which this is; 0 keeps the run.")]
Rendezvous = Annotated[
    str | None, Option(help="--nodes: HOST:PORT of the first machine, in a trusted network.")
]
Shard = Annotated[
    bool | None,
    Option("--shard", help="Cut the weights over the processes (FSDP), if they do not fit."),
]
Recipe = Annotated[
    str | None,
    Option(help="Any setting of a recipe, as JSON or a file of it; options here win over it."),
]
Explain = Annotated[
    bool, Option("--explain", help="Do not train: tell memory, time and every setting.")
]
Race = Annotated[
    float | None, Option(min=0, help="--explain: seconds for all ways; 300 on a GPU, else 0.")
]


def train(
    network: Annotated[str, Argument(help=NETWORK)],
    dataset: Annotated[Path, Argument(help="Folder of the dataset.")],
    out: Annotated[Path | None, Option(help="Folder of the run.")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the training images (30).")] = None,
    batch_size: BatchSize = None,
    solver: Solver = None,
    lr: Annotated[float | None, Option(help="Base learning rate; else by network.")] = None,
    policy: Annotated[str | None, Option(help=POLICIES)] = None,
    quantize: Quantize = None,
    init: Init = None,
    precision: Annotated[
        str | None, Option(help="fp32 (without it), tf32, bf16, fp16, fp8.")
    ] = None,
    backend: Backend = None,
    gpus: Gpus = None,
    nodes: Annotated[int | None, Option(help="Machines: start this on each.")] = None,
    node_rank: NodeRank = None,
    rendezvous: Rendezvous = None,
    shard: Shard = None,
    seed: Annotated[int | None, Option(help="Decides every random number.")] = None,
    recipe: Recipe = None,
    resume: Annotated[bool, Option(help="Go on with the run in --out, exactly.")] = False,
    explain: Explain = False,
    race: Race = None,
    json: Json = False,
    events: Events = None,
) -> None:
    """Train a network. Ctrl-C stops; --resume goes on with the same loss curve.

    Example: tessella train resnet50 datasets/flowers --out runs/flowers --epochs 30

    A recipe file (--recipe) holds any other setting: {"augment": {"flip": true}, "patience": 5,
    "class_weights": "balanced", "init": "pretrained", "val_interval": 0.5}. To fine-tune: {"init":
    "pretrained", "probe_epochs": 2, "layer_decay": 0.8, "ema": 0.99}. To prune a trained network
    and train it again: {"sparsity": "2:4", "init": "runs/a/checkpoints/step-00001000"}

    On two machines, on each: tessella train resnet50 datasets/flowers --out runs/flowers --gpus 4
    --nodes 2 --node-rank 0 --rendezvous 10.0.0.1:29500 (the second with --node-rank 1); or by
    torchrun --nnodes 2 --nproc-per-node 4 … -m tessella train resnet50 … without these options.

    For an INT8 plan that loses nothing by rounding: tessella train resnet50 datasets/flowers --out
    runs/int8 --quantize int8 --init runs/flowers --epochs 3
    """
    stopped = "stopped: the same command with --resume goes on where it stopped"
    options = {
        "epochs": epochs, "batch_size": batch_size, "precision": precision, "quantize": quantize,
        "init": init, "backend": backend, "gpus": gpus, "nodes": nodes, "shard": shard,
        "seed": seed,
    }  # fmt: skip
    with output(json_only=json, events=events, stopped=stopped) as out_:
        settings = _settings(
            {} if recipe is None else read_recipe(recipe, **options),
            {"solver": solver, "policy": policy},
            network=network, dataset=str(dataset), lr=lr, **options,
        )  # fmt: skip
        if explain:
            _explain(out_, api.forecast(race_s=race, emit=out_.emit, **settings))
            return
        if race is not None:
            raise UsageError("a race is a part of --explain", fix="add --explain, or leave it out")
        if out is None:
            raise UsageError("a run needs a folder", fix="say where: --out runs/NAME")
        run = api.train(
            out=out,
            resume=resume,
            node_rank=node_rank,
            rendezvous=rendezvous,
            emit=out_.emit,
            **settings,
        )
        if node_rank:
            out_.result({"run": str(run.path)}, f"trained; the run is on machine 0, in {run.path}")
        elif (process := started()) is None or process.rank == 0:
            _tell(out_, run)


def _settings(
    settings: dict[str, Any], records: dict[str, str | None], **given: Any
) -> dict[str, Any]:
    """The settings of a recipe's file with the options that were given in their place.

    Args:
        records: names of a solver and a policy, whose other settings stay.
    """
    settings = settings | {name: value for name, value in given.items() if value is not None}
    for group, name in records.items():
        if name is not None:
            settings[group] = {**settings.get(group, {}), "name": name}
    return settings


def _tell(out: Output, run: Run) -> None:
    """Tell the best checkpoint of a run that has ended."""
    best = api.open_checkpoint(run)
    plain = {
        "run": str(run.path),
        "best": str(best.path),
        "step": best.info.position.step,
        "metrics": best.info.metrics,
    }
    metrics = "  ".join(f"{k} {v:.4g}" for k, v in best.info.metrics.items())
    out.result(plain, f"best checkpoint: {best.path}\n{metrics}")


def _explain(out_: Output, found: Forecast) -> None:
    memory, recipe = found.memory, found.recipe
    plain = {k: to_plain(v) for k, v in vars(found).items()}
    plain["memory"] = {**plain["memory"], "total": memory.total}
    plain["total_s"] = found.total_s
    plain["data_wait"] = found.data_wait
    machine = limits(default_target(), CACHE_FOLDER)
    plain["limits"] = to_plain(machine)
    best = fastest(found.ways, found.way)
    plain["fastest"] = best
    frozen = found.parameters - found.trained
    total = "not known before it runs" if memory.total is None else _bytes(memory.total)
    kept = "?" if memory.kept is None else _bytes(memory.kept)
    rows = [
        ("images, and steps an epoch", f"{found.images:,}, {found.steps_per_epoch:,}"),
        ("parameters", f"{found.parameters:,} in {found.stages} stages, {frozen:,} frozen"),
        ("memory of a step", f"{total}; {_bytes(found.free)} free on {found.device}"),
        ("  weights, gradients, solver", ", ".join(
            _bytes(n) for n in (memory.weights + memory.average, memory.gradients, memory.solver)
        )),
        ("  kept for the backward pass", kept),
        ("a step", f"{lasting(found.step_s)}, loading its images {lasting(found.load_s)}"),
        ("way of a step", f"{NAMES[found.way]}: {found.why}"),
        *((f"  {NAMES[raced.way]}", described(raced)) for raced in found.ways),
        *([("  shortest step", f"{NAMES[best]}: {_asked_for(best)}")] if best != found.way else []),
        *([("  exchange of gradients", _exchanged(found))] if recipe.processes > 1 else []),
        ("waits for images", f"{found.data_wait:.0%} of the time"),
        ("an epoch", f"{_duration(found.epoch_s)}, {recipe.epochs:g} of them "
                     f"{_duration(found.total_s)}, without validation"),
        *((name, str(value)) for name, value in _flat(to_plain(recipe)).items()),
    ]  # fmt: skip
    table = grid(("", ""), rows, title=f"{recipe.network} on {recipe.dataset}")
    out_.result(plain, Group(table, _layers(found, machine)))


def _exchanged(found: Forecast) -> str:
    """How many bytes processes exchange in a step, and its share of the step's time."""
    amount = _bytes(found.exchange_bytes)
    if found.exchange_s is None:
        return f"{amount}; how long the network takes, the training measures as it begins"
    share = found.exchange_s / found.step_s if found.step_s else 0.0
    return f"{amount}, at least {lasting(found.exchange_s)}: {share:.1%} of a step, most beside it"


def _layers(found: Forecast, machine: Limits) -> Group:
    """The layers that take the most of a step, beside what they need at least."""
    slowest = sorted(found.layers, key=lambda layer: -layer.seconds)[:SHOWN]
    every = sum(layer.seconds for layer in found.layers)

    def ms(seconds: float) -> float:
        return float(f"{1e3 * seconds:.3g}")

    rows = [
        (layer.name, layer.kind, ms(layer.forward_s), ms(layer.backward_s),
         ms(found.least_s(layer, machine)), f"{layer.seconds / every:.0%}")
        for layer in slowest
    ]  # fmt: skip
    head = "layer", "kind", "forward ms", "backward ms", "least ms", "share"
    title = f"the slowest of {len(found.layers)} layers, call by call: {ms(every):g} ms in all"
    return grid(head, rows, title=title)


def _asked_for(way: Way) -> str:
    """The setting of a recipe that takes a way."""
    settings = {"compile": {"compile": True}, "fused": {"fuse": True}, "eager": {"fuse": False}}
    return f"--recipe '{json_module.dumps(settings[way])}'"


def _flat(plain: dict[str, Any]) -> dict[str, Any]:
    """A recipe's settings by path, but for those that are off."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        flat |= {f"{name}.{key}".strip("."): v for key, v in inner}
    return {name: v for name, v in flat.items() if v not in (None, False, 0, "none", {})}


def _bytes(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def read_recipe(given: str, **options: Any) -> dict[str, Any]:
    """The settings in a recipe, a JSON text or a file, checked before the dataset is opened.

    Args:
        options: settings beside it, or None, without which it may be none: several processes, or
            weights that have learned something.
    """
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
        try:
            _recipe_from(plain)
        except UsageError:
            given_too = {name: value for name, value in options.items() if value is not None}
            if not _is_recipe(plain | given_too):
                raise
    except UsageError as error:
        raise UsageError(f"{path}: {error.wrong}", seen=error.seen, fix=error.fix) from error
    except ArtifactError as error:  # a person wrote this file: it is an argument, not an artifact
        raise UsageError(error.wrong, seen=error.seen, fix=f"correct {path}") from error
    return plain


def _recipe_from(plain: dict[str, Any]) -> None:
    known = {k: v for k, v in plain.items() if (k, v) != ("batch_size", "auto")}
    api.recipe_from({"network": "lenet", "dataset": ".", **known})


def _is_recipe(plain: dict[str, Any]) -> bool:
    """Whether settings are a recipe, with the processes that torchrun started."""
    try:
        _recipe_from(plain if (process := started()) is None else settings_of(process, plain))
    except UsageError:
        return False
    return True
