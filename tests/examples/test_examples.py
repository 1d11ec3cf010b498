"""The examples run, and do what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

import tessella as ts
from examples import any_module, folder_to_http
from tests.support.pictures.folders import write_stripes

EXAMPLES = Path(folder_to_http.__file__).parent


def test_folder_to_http(tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes", images=30)
    answers = folder_to_http.main(tmp_path / "stripes")
    assert len(answers) >= 4
    assert all(path.startswith(label) for path, label in answers.items())


def test_own_network_trains_and_becomes_a_plan(tmp_path: Path, monkeypatch) -> None:
    write_stripes(tmp_path / "stripes")
    dataset = ts.data.images(
        tmp_path / "stripes", size=16, channels=1, holdout=0.25, out=tmp_path / "dataset"
    )
    name = f"{EXAMPLES / 'own_network.py'}:Mixer"
    run = ts.train(
        name, dataset, out=tmp_path / "run", epochs=8, batch_size=12,
        solver={"name": "adamw", "lr": 0.005}, network_options={"depth": 1},
    )  # fmt: skip
    plan = ts.compile(run, batch=2, target="cpu")
    report = ts.verify(plan, against=run, data=dataset)
    assert report.agreement == 1.0
    assert report.plan_score > 0.9


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_any_module() -> None:
    assert any_module.main() < 1e-4
