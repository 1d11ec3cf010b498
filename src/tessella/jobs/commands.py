"""The commands behind the studio's forms: from records to a ``JobSpec`` whose argv is the CLI's.

There is one function for each verb. The scheduler runs the same argv that people see (``shown``),
so whatever a page does can be typed. Paths and names come from people: none can be taken for an
option.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tessella.artifacts.build import BuildRequest, plan_name
from tessella.artifacts.defaults import completed
from tessella.artifacts.run import Recipe, Solver
from tessella.core.errors import UsageError
from tessella.core.policies import Policy
from tessella.core.preprocess import Preprocess, Store
from tessella.core.record import to_plain
from tessella.jobs.job import JOB_FOLDER, JobSpec

PathLike = str | Path
MOST_RUNS = 100  # of a sweep


def shown(spec: JobSpec) -> str:
    """The command that a person would type in the workspace: what the job's own files would hold
    stands in it, and its results go into the current folder.
    """
    argv = (
        spec.files.get(a.removeprefix(JOB_FOLDER), a.removeprefix(JOB_FOLDER)) for a in spec.argv
    )
    return shlex.join(("tessella", *argv))


def import_images(
    source: PathLike,
    out: PathLike,
    preprocess: Preprocess,
    *,
    name: str | None = None,
    holdout: float = 0.1,
    test: float = 0.0,
    seed: int = 0,
    val_folder: PathLike | None = None,
    test_folder: PathLike | None = None,
    workers: int | None = None,
    task: str = "classification",
    store: Store = "auto",
    labels: PathLike | None = None,
) -> JobSpec:
    """``tessella data import``: a folder or list of images becomes a dataset in ``out``.

    ``holdout`` and ``test`` are the fractions that go into the validation and test splits, unless
    folders of their own are given. Of ``preprocess``, size, channels, depth, resize and crop count:
    mean and std are measured. ``labels`` is a file with the names of classes, a line each.
    """
    argv = ["data", "import", _path(source), "--out", _path(out)]
    if task != "classification":
        argv += ["--task", task]
    if name is not None:
        argv += [f"--name={name}"]
    if preprocess.volume is not None:
        argv += ["--size", size_text(*preprocess.sides)]
        if preprocess.volume.window is not None:
            low, high = preprocess.volume.window
            argv += [f"--window={low!r}:{high!r}"]
    else:
        argv += ["--size", size_text(preprocess.height, preprocess.width)]
        argv += ["--channels", str(preprocess.channels), "--depth", str(preprocess.depth)]
        argv += ["--resize", preprocess.resize]
    if preprocess.crop is not None:
        argv += ["--crop", "{}x{}".format(*preprocess.crop)]
    if val_folder is None:
        argv += ["--holdout", str(holdout)]
    else:
        argv += ["--val-folder", _path(val_folder)]
    if test_folder is not None:
        argv += ["--test-folder", _path(test_folder)]
    elif test:
        argv += ["--test", str(test)]
    argv += ["--seed", str(seed)]
    if store != "auto":
        argv += ["--store", store]
    if labels is not None:
        argv += ["--labels", _path(labels)]
    if workers is not None:
        argv += ["--workers", str(workers)]
    return JobSpec(name=name or Path(out).name, kind="import", argv=tuple(argv), resumable=True)


def train(recipe: Recipe, out: PathLike, *, name: str | None = None) -> JobSpec:
    """``tessella train``: settings that have an option are shown, others go in a recipe file."""
    argv = ["train", _word(recipe.network), _path(recipe.dataset), "--out", _path(out)]
    argv += ["--epochs", f"{recipe.epochs:g}", "--batch-size", str(recipe.batch_size)]
    argv += ["--solver", recipe.solver.name, "--lr", repr(recipe.solver.lr)]
    argv += ["--policy", recipe.policy.name, "--precision", recipe.precision]
    argv += ["--gpus", str(recipe.gpus), "--seed", str(recipe.seed)]
    files = {}
    if recipe != _by_options(recipe):
        rest = _beside(to_plain(recipe), to_plain(_by_options(recipe)))
        files["recipe.json"] = json.dumps(rest, ensure_ascii=False)
        argv += ["--recipe", f"{JOB_FOLDER}recipe.json"]
    return JobSpec(
        name=name or Path(out).name,
        kind="train",
        argv=tuple(argv),
        files=files,
        gpus=recipe.gpus,
        resumable=True,
        resume_argv=("--resume",),
    )


def sweep(
    recipe: Recipe,
    out: PathLike,
    *,
    group: str,
    networks: Sequence[str] = (),
    lr: str = "",
    batch_size: str = "",
    seeds: str = "",
) -> tuple[JobSpec, ...]:
    """One training for each combination of the values; other settings are the recipe's.

    Args:
        out: each run's folder lies beside this one, its name ends in the settings that vary.
        lr, batch_size, seeds: comma lists, such as ``"0.1, 0.01"``.

    Raises:
        UsageError: a list is not of numbers, or there are more than ``MOST_RUNS`` combinations.
    """
    axes: tuple[Sequence[Any], ...] = (
        tuple(dict.fromkeys(networks)) or (recipe.network,),
        _numbers(lr, float, "learning rates") if lr.strip() else [recipe.solver.lr],
        _numbers(batch_size, int, "batch sizes") if batch_size.strip() else [recipe.batch_size],
        _numbers(seeds, int, "seeds") if seeds.strip() else [recipe.seed],
    )
    count = math.prod(map(len, axes))
    if count > MOST_RUNS:
        raise UsageError(
            f"a sweep has at most {MOST_RUNS} runs", seen=f"{count:,}", fix="try fewer values"
        )
    varies = [len(axis) > 1 for axis in axes]
    specs: dict[str, JobSpec] = {}
    for network, rate, size, seed in product(*axes):
        solver = replace(recipe.solver, lr=rate)
        one = replace(recipe, network=network, solver=solver, batch_size=size, seed=seed)
        plain = re.sub(r"[^\w.]+", "-", network).strip("-.")
        words = (plain, f"lr{rate:g}", f"b{size}", f"s{seed}")
        name = "-".join((Path(out).name, *(w for w, v in zip(words, varies, strict=True) if v)))
        if name in specs:
            raise UsageError("two runs of the sweep would have the same name", seen=name)
        specs[name] = replace(train(one, Path(out).with_name(name)), group=group)
    return tuple(specs.values())


def search(
    network: str,
    dataset: PathLike,
    out: PathLike,
    *,
    vary: Mapping[str, str],
    epochs: float,
    trials: int | None = None,
    sampler: str = "tpe",
    pruner: str = "asha",
    gpus: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> JobSpec:
    """``tessella sweep``: trials look for the best settings, as many at once as there are GPUs.

    Args:
        vary: a range or choices for each setting, such as ``{"lr": "1e-4..1e-2 log"}``.
        trials: None: 30, or of a grid all combinations.
        settings: other ones of every trial, by their names in a recipe.
    """
    argv = ["sweep", _word(network), _path(dataset), "--out", _path(out)]
    for name, values in vary.items():
        argv += ["--vary", f"{_word(name)}={values}"]
    argv += [] if trials is None else ["--trials", str(trials)]
    argv += ["--epochs", f"{epochs:g}"]
    argv += ["--sampler", sampler, "--pruner", pruner]
    files = {}
    if settings:
        files["recipe.json"] = json.dumps(settings, ensure_ascii=False)
        argv += ["--recipe", f"{JOB_FOLDER}recipe.json"]
    return JobSpec(
        name=Path(out).name,
        kind="sweep",
        argv=tuple(argv),
        files=files,
        gpus=gpus,
        resumable=True,
        resume_argv=("--resume",),
    )


def compile_plan(request: BuildRequest) -> JobSpec:
    """``tessella compile``: a checkpoint, or the best one of a run, becomes a plan."""
    return JobSpec(
        name=Path(request.out or plan_name(request.source)).name,
        kind="compile",
        argv=tuple(request.argv()),
        gpus=_gpus_of(request.target or ""),
        resumable=True,
    )


def profile(
    plan: PathLike,
    *,
    batch: int,
    target: str = "cpu",
    trace: PathLike = f"{JOB_FOLDER}trace.json",
) -> JobSpec:
    """``tessella profile``: the time of each step, as events for Perfetto, into ``trace``."""
    argv = ["profile", _path(plan), "--batch", str(batch), "--trace", _path(trace)]
    return JobSpec(
        name=f"profile {Path(plan).name}",
        kind="profile",
        argv=tuple(argv),
        gpus=_gpus_of(target),
        resumable=True,
    )


def diff(a: PathLike, b: PathLike) -> JobSpec:
    """``tessella diff``: what differs between two plans."""
    argv = ("diff", _path(a), _path(b))
    return JobSpec(name=f"diff {Path(a).name} {Path(b).name}", kind="show", argv=argv)


def verify(
    plan: PathLike,
    against: PathLike,
    dataset: PathLike,
    *,
    split: str = "val",
    target: str = "cpu",
    out: PathLike = f"{JOB_FOLDER}report.json",
) -> JobSpec:
    """``tessella verify``: a plan against its checkpoint. ``target``: what it was built for."""
    argv = ["verify", _path(plan), "--against", _path(against), "--data", _path(dataset)]
    argv += ["--split", split, "--out", _path(out)]
    return JobSpec(
        name=f"verify {Path(plan).name}",
        kind="verify",
        argv=tuple(argv),
        gpus=_gpus_of(target),
        resumable=True,
    )


def classify(
    source: PathLike, images: Sequence[PathLike], *, top: int = 5, trust_code: bool = False
) -> JobSpec:
    """``tessella run`` on image files; ``trust_code`` runs the Python that a checkpoint brings."""
    argv = ["run", _path(source), *(_path(i) for i in images), "--top", str(top)]
    argv += ["--trust-code"] * trust_code
    return JobSpec(name=f"classify with {Path(source).name}", kind="run", argv=tuple(argv))


def segment(
    source: PathLike, dataset: PathLike, *, split: str, index: int, out: PathLike,
    trust_code: bool = False,
) -> JobSpec:  # fmt: skip
    """``tessella run`` on one volume of a dataset; its labels are written into ``out``."""
    argv = ["run", _path(source), "--data", _path(dataset), "--split", split]
    argv += ["--index", str(index), "--out", _path(out), *["--trust-code"] * trust_code]
    name = f"segment {split} {index} with {Path(source).name}"
    return JobSpec(name=name, kind="run", argv=tuple(argv), resumable=True)


def evaluate(
    source: PathLike,
    dataset: PathLike,
    *,
    split: str = "val",
    gpus: int = 0,
    out: PathLike = f"{JOB_FOLDER}evaluation.json",
    rows: PathLike | None = None,
) -> JobSpec:
    """``tessella run`` on a whole split: accuracy and confusion matrix into ``out``; into ``rows``
    what is measured of each image."""
    argv = ["run", _path(source), "--data", _path(dataset), "--split", split, "--out", _path(out)]
    argv += [] if rows is None else ["--rows", _path(rows)]
    return JobSpec(
        name=f"evaluate {Path(source).name}",
        kind="run",
        argv=tuple(argv),
        gpus=gpus,
        resumable=True,
    )


def judge(
    source: PathLike,
    dataset: PathLike,
    *,
    split: str = "test",
    against: PathLike | None = None,
    errors: int = 20,
    trust_code: bool = False,
    out: PathLike = f"{JOB_FOLDER}evaluation.json",
) -> JobSpec:
    """``tessella evaluate``: intervals, calibration, curves and the largest losses into ``out``.

    Args:
        against: a second model, compared on the same images.
    """
    argv = ["evaluate", _path(source), "--data", _path(dataset), "--split", _word(split)]
    argv += [] if against is None else ["--against", _path(against)]
    argv += ["--errors", str(errors), "--out", _path(out), *["--trust-code"] * trust_code]
    name = f"evaluate {Path(source).name}"
    return JobSpec(name=name, kind="run", argv=tuple(argv), resumable=True)


def show_layers(
    checkpoint: PathLike,
    image: PathLike,
    *,
    out: PathLike = f"{JOB_FOLDER}layers",
    trust_code: bool = False,
) -> JobSpec:
    """``tessella show layers``: activations and weights of every layer as pictures into ``out``."""
    argv = ["show", "layers", _path(checkpoint), "--image", _path(image), "--out", _path(out)]
    argv += ["--trust-code"] * trust_code
    return JobSpec(name=f"layers of {Path(checkpoint).name}", kind="show", argv=tuple(argv))


def show_networks() -> JobSpec:
    """``tessella show networks``: the networks that can be trained, as JSON."""
    return JobSpec(name="networks", kind="show", argv=("show", "networks", "--json"))


def show_network(
    network: str,
    *,
    classes: int,
    channels: int,
    size: tuple[int, ...],
    svg: PathLike = f"{JOB_FOLDER}network.svg",
) -> JobSpec:
    """``tessella show network``: a drawing of a network for inputs of ``size``: height and width,
    of volumes slices before them."""
    argv = ["show", "network", _word(network), "--classes", str(classes)]
    argv += ["--channels", str(channels), "--size", size_text(*size), "--svg", _path(svg)]
    return JobSpec(name=f"draw {network}", kind="show", argv=tuple(argv))


def serve(plans: Mapping[str, PathLike], *, port: int = 8000, gpus: int = 0) -> JobSpec:
    """``tessella serve``: plans by name over HTTP, until aborted; started again after a crash."""
    models = tuple(f"{_word(name)}={plan}" for name, plan in plans.items())
    return JobSpec(
        name=f"serve {', '.join(plans)}",
        kind="serve",
        argv=("serve", *models, "--port", str(port)),
        gpus=gpus,
        resumable=True,
    )


def _beside(plain: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ from ``usual``, also in nested records."""
    out: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict) and isinstance(usual[name], dict) and usual[name]:
            value = _beside(value, usual[name])
            if not value:
                continue
        elif value == usual[name]:
            continue
        out[name] = value
    return out


def _by_options(recipe: Recipe) -> Recipe:
    """The recipe that the CLI makes of the options alone."""
    given = Recipe(
        network=recipe.network,
        dataset=recipe.dataset,
        epochs=recipe.epochs,
        batch_size=recipe.batch_size,
        solver=Solver(name=recipe.solver.name, lr=recipe.solver.lr),
        policy=Policy(name=recipe.policy.name),
        precision=recipe.precision,
        gpus=recipe.gpus,
        seed=recipe.seed,
    )
    by_hand = {"solver": ("name", "lr"), "policy": ("name",)}
    return completed(given, {group: dict.fromkeys(names) for group, names in by_hand.items()})


def _gpus_of(target: str) -> int:
    return 1 if "sm_" in target else 0  # of one, or of one of several


def size_text(*sides: int) -> str:
    """Sides as an option has them: ``224``, or ``224x320`` where they differ."""
    return str(sides[0]) if len(set(sides)) == 1 else "x".join(map(str, sides))


def _path(path: PathLike) -> str:
    text = str(path)
    return f"./{text}" if text.startswith("-") else text


def _word(name: str) -> str:
    if not name or name.startswith("-"):
        raise UsageError("a name cannot be empty or begin with a dash", seen=repr(name))
    return name


def _numbers(text: str, number: type[float] | type[int], what: str) -> list[float] | list[int]:
    try:
        values = [number(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(
            f"the {what} are not numbers", seen=text, fix="separate them by commas: 0.1, 0.01"
        ) from error
    return list(dict.fromkeys(values))
