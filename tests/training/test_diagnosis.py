"""When a training is said to have learned nothing, and what people are told to change."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tessella.artifacts.defaults import completed
from tessella.artifacts.run import Augment, Recipe, Run, Solver
from tessella.training.diagnosis import diagnosis
from tessella.training.loop import train
from tests.support import training as examples
from tests.support.training import recipe, write_dataset

RECIPE = completed(Recipe(network="resnet18", dataset="x", batch_size=32), {})
SGD = completed(replace(RECIPE, solver=Solver(name="sgd", lr=0.01)), {"solver": Solver(name="sgd")})
TRAIN, VAL = [48] * 20, [12] * 20


def told(train: float, val: float | None, recipe: Recipe = RECIPE, **counts) -> str | None:
    measured = {"train/accuracy": train} | ({} if val is None else {"val/accuracy": val})
    counts = {"train_counts": TRAIN, "val_counts": None if val is None else VAL, **counts}
    return diagnosis(recipe, measured, **counts)


@pytest.mark.parametrize(("train", "val"), [(0.95, 0.93), (0.5, 0.3), (0.2, 0.15), (0.99, 0.7)])
def test_a_run_that_learns_is_left_alone(train, val):
    assert told(train, val) is None
    assert told(train, None) is None


def test_guessing_is_told():
    note = told(0.06, 0.05)
    assert note is not None
    assert "learned nothing: 5 % of the images are classified correctly, guessing gets 5 %" in note
    assert "lr=0.00015" in note
    few = {"train_counts": [6] * 4, "val_counts": [6] * 4}
    assert "24 images do not tell whether" in str(told(0.42, 0.42, **few))
    rounded = replace(
        RECIPE, quantize="int8", init="runs/x"
    )  # it went on from a network that had learned
    assert told(0.42, 0.42, rounded, **few) is None
    assert told(0.06, None) is not None
    assert "precision bf16" not in note
    assert "precision bf16" in str(told(0.06, 0.05, replace(RECIPE, precision="fp8")))


@pytest.mark.parametrize(("times", "side"), [(20.0, "above"), (0.02, "below")])
def test_a_rate_far_from_the_default_is_named_first(times, side):
    solver = replace(RECIPE.solver, lr=RECIPE.solver.lr * times)
    note = told(0.06, 0.05, replace(RECIPE, solver=solver))
    assert note is not None
    assert f"far {side} the default of adamw here: set lr=0.0015" in note


def test_learning_by_heart_is_told_and_the_solver_named():
    note = told(0.45, 0.08, SGD)  # as SGD 0.01 ends on the glyphs
    assert note is not None
    assert "the network overfits. Try the default solver (adamw, lr=0.0015)" in note
    assert "no more than guessing" in note
    some, every = Augment(rotation=10, color=0.1), Augment(rotation=10, color=0.1, scale=0.1)
    said = str(told(0.9, 0.4, replace(RECIPE, augment=some)))
    assert "augmentation (scale, as in" in said
    assert "batches" not in said
    counts = {"train_counts": [90] * 5, "val_counts": [10] * 5}
    assert "Try batches of 16 (--batch-size 16)" in str(told(0.99, 0.4, **counts))
    shared = replace(RECIPE, gpus=3, batch_size=48)
    assert "(--batch-size 24)" in str(told(0.99, 0.4, shared, **counts))
    counts = {"train_counts": [15] * 2, "val_counts": [15] * 2}
    assert "batches of" not in str(told(0.99, 0.4, **counts))
    asked = json.loads(said.split("--recipe '")[1].split("'")[0])
    assert Augment(**asked["augment"]) == replace(some, scale=0.2)
    assert "stronger augmentation" in str(told(0.9, 0.4, replace(RECIPE, augment=every)))


def test_unequal_classes_are_no_success():
    """A network that always says the most frequent class is 90 % right."""
    counts = {"train_counts": [900, 100], "val_counts": [180, 20]}
    note = told(0.9, 0.9, **counts)
    assert note is not None
    assert "class_weights='balanced'" in note
    assert told(0.97, 0.97, **counts) is None
    even = replace(RECIPE, class_weights="balanced")
    assert told(0.9, 0.9, even, **counts) is None


def test_few_images_prove_nothing():
    assert told(0.9, 0.5, train_counts=[10, 10], val_counts=[3, 3]) is None


def warned(run: Run) -> list[str]:
    return [e.text for e in run.events() if e.kind == "warning"]


def test_trainings(tmp_path, monkeypatch):
    """Whole trainings: one that learns, one too slow to, and one of labels by chance."""
    usual = recipe(write_dataset(tmp_path / "good", train=40, val=24))
    assert not warned(train(usual, tmp_path / "a"))
    (note,) = warned(train(replace(usual, solver=Solver(lr=1e-7)), tmp_path / "b"))
    assert "far below the default of nesterov" in note
    draw = examples.picture
    monkeypatch.setattr(
        examples, "picture", lambda _, g, size: draw(int(g.integers(0, 3)), g, size)
    )
    chance = write_dataset(tmp_path / "chance", train=40, val=24)
    (note,) = warned(train(replace(usual, dataset=str(chance)), tmp_path / "c"))
    assert "check that the labels belong to the images" in note
