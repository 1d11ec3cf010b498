"""The commands that the studio's forms start and show."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
import typer

from tessella import api
from tessella.api import training
from tessella.artifacts.build import BuildRequest
from tessella.artifacts.defaults import completed
from tessella.artifacts.run import Augment, Recipe, Solver
from tessella.artifacts.settings import recipe_from, spelled_out
from tessella.cli import train
from tessella.core.errors import UsageError
from tessella.core.policies import Policy
from tessella.core.preprocess import Preprocess
from tessella.jobs import commands
from tests.support.cli import context
from tests.support.training import write_dataset

RECIPE = Recipe(network="lenet", dataset="data/my digits")


def test_import():
    spec = commands.import_images(
        "my photos", "data/set", Preprocess(height=28, width=28, channels=1), holdout=0.2
    )
    assert commands.shown(spec) == (
        "tessella data import 'my photos' --out data/set --size 28 --channels 1 --depth 8"
        " --resize squash --holdout 0.2 --seed 0"
    )
    assert (spec.kind, spec.name, spec.gpus) == ("import", "set", 0)


def test_import_with_everything():
    preprocess = Preprocess(
        height=224, width=320, channels=3, depth=16, resize="half_crop", crop=(200, 300)
    )
    spec = commands.import_images(
        "a", "b", preprocess, name="--x", val_folder="v", test_folder="t", seed=7, workers=2,
        labels="n",
    )  # fmt: skip
    assert spec.argv == (
        "data", "import", "a", "--out", "b", "--name=--x", "--size", "224x320", "--channels", "3",
        "--depth", "16", "--resize", "half_crop", "--crop", "200x300", "--val-folder", "v",
        "--test-folder", "t", "--seed", "7", "--labels", "n", "--workers", "2",
    )  # fmt: skip


def test_train_shows_its_settings():
    chosen = replace(RECIPE, epochs=2.5, solver=Solver(name="adam", lr=1e-4), precision="bf16")
    recipe = completed(chosen, {"solver": {"name": "adam", "lr": 1e-4}})
    spec = commands.train(recipe, "runs/one")
    assert commands.shown(spec) == (
        "tessella train lenet 'data/my digits' --out runs/one --epochs 2.5 --batch-size 64"
        " --solver adam --lr 0.0001 --policy onecycle --precision bf16 --gpus 1 --seed 0"
    )
    assert spec.files == {}
    assert (spec.gpus, spec.resumable, spec.resume_argv) == (1, True, ("--resume",))


@pytest.mark.parametrize("network", ["lenet", "timm/vit_tiny_patch16_224"])
@pytest.mark.parametrize("solver", ["adamw", "sgd"])
@pytest.mark.parametrize("policy", ["onecycle", "step"])
def test_the_options_alone_make_the_same_recipe(monkeypatch, tmp_path, network, solver, policy):
    """What the studio shows as a command without a recipe file is what the studio starts."""
    by_hand = {"solver": {"name": solver}, "policy": {"name": policy}}
    dataset = write_dataset(tmp_path / "my stripes", train=3)
    chosen = replace(
        RECIPE, network=network, dataset=str(dataset), solver=Solver(name=solver),
        policy=Policy(name=policy),
    )  # fmt: skip
    recipe = completed(chosen, by_hand)
    spec = commands.train(recipe, "runs/one")
    assert spec.files == {}
    monkeypatch.setattr(training.loop, "train", lambda recipe, out, **_: recipe)
    words = spec.argv[5:]
    told = {a.removeprefix("--").replace("-", "_"): b for a, b in zip(words[::2], words[1::2])}
    types = {"epochs": float, "batch_size": int, "lr": float, "gpus": int, "seed": int}
    settings = {name: types.get(name, str)(value) for name, value in told.items()}
    assert training.train(*spec.argv[1:3], out="runs/one", **settings) == recipe


@pytest.mark.parametrize(
    "recipe",
    [
        replace(RECIPE, augment=Augment(flip=True)),
        replace(RECIPE, policy=Policy(name="step", gamma=0.5)),
        replace(RECIPE, solver=Solver(momentum=0.5)),
        replace(RECIPE, patience=3),
        replace(RECIPE, network_options={"dropout": 0.1}),
    ],
)
def test_what_has_no_option_goes_into_a_recipe_that_reads_back(recipe, monkeypatch):
    """The job's file and the shown command, which carries it, say the same."""
    spec = commands.train(recipe, "out")
    assert spec.argv[-2:] == ("--recipe", "{job}/recipe.json")
    told = context(shlex.split(commands.shown(spec))[1:]).params
    assert told["recipe"] == spec.files["recipe.json"]
    given = {}

    def take(*, out, resume, node_rank, rendezvous, emit, **settings):
        given.update(settings)
        raise UsageError("taken, and not trained")

    monkeypatch.setattr(api, "train", take)
    with pytest.raises(typer.Exit):
        train.train(**told)
    assert completed(recipe_from(given), spelled_out(given)) == recipe


def test_sweep():
    specs = commands.sweep(RECIPE, "runs/s", lr="0.1, 0.01,0.1", batch_size="32,64", group="g")
    assert [s.name for s in specs] == [
        "s-lr0.1-b32", "s-lr0.1-b64", "s-lr0.01-b32", "s-lr0.01-b64",
    ]  # fmt: skip
    assert {s.group for s in specs} == {"g"}
    argv = specs[3].argv
    assert argv[argv.index("--lr") + 1] == "0.01"
    assert argv[argv.index("--batch-size") + 1] == "64"
    assert argv[argv.index("--out") + 1] == "runs/s-lr0.01-b64"


@pytest.mark.parametrize(("lr", "batch_size"), [("0.1;0.2", "1"), ("0.1", "1.5"), (",", "1")])
def test_a_sweep_over_no_numbers(lr, batch_size):
    with pytest.raises(UsageError, match="are not numbers"):
        commands.sweep(RECIPE, "s", lr=lr, batch_size=batch_size, group="g")


def test_the_other_verbs():
    built = [
        (
            commands.compile_plan(BuildRequest(source="runs/one", out="p.plan", target="sm_90")),
            "compile runs/one --out p.plan --target sm_90 --precision fp32 --batch 1,8,32",
        ),
        (
            commands.verify("p.plan", "ckpt", "data"),
            "verify p.plan --against ckpt --data data --split val --out report.json",
        ),
        (
            commands.classify("p.plan", ["a b.png", "-c.png"], top=3),
            "run p.plan 'a b.png' ./-c.png --top 3",
        ),
        (
            commands.evaluate("p.plan", "data"),
            "run p.plan --data data --split val --out evaluation.json",
        ),
        (
            commands.show_layers("ckpt", "a.png"),
            "show layers ckpt --image a.png --out layers",
        ),
        (commands.show_networks(), "show networks --json"),
        (
            commands.show_network("vgg16", classes=10, channels=3, size=(224, 320)),
            "show network vgg16 --classes 10 --channels 3 --size 224x320 --svg network.svg",
        ),
        (
            commands.serve({"digits": "p.plan", "b": "q.plan"}, port=8001),
            "serve digits=p.plan b=q.plan --port 8001",
        ),
    ]
    for spec, text in built:
        assert commands.shown(spec) == f"tessella {text}"
    gpus = {spec.kind: spec.gpus for spec, _ in built}
    assert gpus["compile"] == 1
    assert gpus["verify"] == gpus["serve"] == 0


def test_nothing_that_people_type_becomes_an_option():
    assert commands.classify("--help", ["-x"]).argv[:3] == ("run", "./--help", "./-x")
    for network in ("--help", "-h", ""):
        with pytest.raises(UsageError):
            commands.show_network(network, classes=2, channels=1, size=(8, 8))
    with pytest.raises(UsageError):
        commands.serve({"--port": "p.plan"})
