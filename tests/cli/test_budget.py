"""``tessella compile --budget``: the table, the picture, another point, and the same plan again."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tessella import api
from tessella.artifacts.front import read_front
from tessella.artifacts.plan import load_plan
from tessella.data.importing import ImportSettings, import_images
from tests.support.cli import Tessella


@pytest.fixture(scope="module")
def trained(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its dataset."""
    folder = tmp_path_factory.mktemp("budget")
    settings = ImportSettings(size=12, channels=1, holdout=0.25)
    dataset = import_images(blobs, folder / "dataset", settings)
    api.train("lenet", dataset, out=folder / "run", epochs=3, batch_size=10)
    return folder / "run", folder / "dataset"


@pytest.mark.parametrize("kind", ["float32", "uint8"])
def test_a_budget_chooses_and_the_plan_says_what_it_costs(
    tessella: Tessella, trained: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    run, dataset = trained
    plan, chart, cache = tmp_path / "a.plan", tmp_path / "front.svg", tmp_path / "times.jsonl"
    same = ("compile", run, "--batch", "1,2,4", "--target", "cpu", "--cache", cache)
    same += ("--uint8",) if kind == "uint8" else ()
    searched = (*same, "--budget", "10", "--data", dataset)
    folder = tmp_path / "front"
    answer = tessella(*searched, "--out", plan, "--chart", chart, "--front", folder)
    assert answer.code == 0, answer.err
    assert "the fastest that loses at most 10 points of top1 on 10 samples" in answer.out
    assert "these samples cannot resolve a budget of 10 points" in answer.out
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    front = read_front(folder)
    assert (folder / front.points[front.chosen].plan).read_bytes() == plan.read_bytes()
    for point in (*front.points, front.exact):
        assert load_plan(folder / point.plan).manifest.receipt == point.receipt
    assert (front.batch, front.budget, front.exact.receipt.loss) == (2, 10.0, 0.0)
    made = load_plan(plan)
    assert made.manifest.inputs[0].dtype == kind
    receipt = made.manifest.receipt
    assert receipt is not None
    assert (receipt.samples, receipt.budget) == (10, 10.0)
    assert receipt.after == api.evaluate_split(api.load(plan), dataset).accuracy
    assert f"--budget 10 --data {dataset}" in made.manifest.rebuild

    answer = tessella(*searched, "--out", tmp_path / "b.plan", "--point", "0", "--json")
    assert answer.code == 0, answer.err
    first = answer.json["front"]["points"][0]
    assert load_plan(tmp_path / "b.plan").manifest.precisions == first["precisions"]
    assert answer.json["front"]["chosen"] == 0 or first["receipt"]["loss"] > 10

    again = tessella(*same, "--out", tmp_path / "c.plan", "--lock", plan, "--calibrate", dataset)
    assert again.code == 0, again.err
    assert (tmp_path / "c.plan").read_bytes() == plan.read_bytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--budget", "1"), "a budget needs labelled data"),
        (("--data", "x"), "belongs to --budget"),
        (("--point", "0"), "belongs to --budget"),
        (("--front", "x"), "belongs to --budget"),
        (("--budget", "1", "--data", "DATASET", "--point", "99"), "no such point"),
    ],
)
def test_what_does_not_go_together_is_said(
    tessella: Tessella, trained: tuple[Path, Path], tmp_path: Path, given: tuple, message: str
) -> None:
    run, dataset = trained
    given = tuple(dataset if g == "DATASET" else g for g in given)
    answer = tessella("compile", run, "--out", tmp_path / "x.plan", "--batch", "1", *given)
    assert answer.code == 2
    assert message in answer.err
    assert not (tmp_path / "x.plan").exists()
