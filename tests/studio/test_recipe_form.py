import dataclasses

import pytest

from tessella.artifacts.run import Augment, Recipe, Solver
from tessella.core.policies import Policy
from tessella.studio.recipe_form import ELSEWHERE, VISIBLE, descriptions, flat, settings


def test_every_field_of_a_recipe_has_a_place():
    nested = {"solver": Solver, "policy": Policy, "augment": Augment}
    expected = set()
    for field in dataclasses.fields(Recipe):
        if field.name in nested:
            inner = dataclasses.fields(nested[field.name])
            expected |= {f"{field.name}.{f.name}" for f in inner}
        elif field.name not in ELSEWHERE:
            expected.add(field.name)
    assert {s.path for s in settings()} == expected
    assert set(VISIBLE) <= expected


def test_defaults_and_help_are_the_recipes_own():
    by_path = {s.path: s for s in settings()}
    assert by_path["solver.lr"].default == Solver().lr
    assert by_path["batch_size"].help.startswith("images a step")
    assert "inverse class frequency" in by_path["class_weights"].help


def test_descriptions_join_lines_and_share_names():
    text = (
        "Title.\n\n    Attributes:\n        a, b: first\n            second.\n        c: third.\n"
    )
    assert descriptions(text) == {"a": "first second.", "b": "first second.", "c": "third."}


@pytest.mark.parametrize("path", ["solver.lr", "policy.name", "epochs", "augment.flip"])
def test_flat_has_the_same_paths(path):
    assert path in flat(Recipe(network="lenet", dataset="x"))
