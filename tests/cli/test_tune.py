"""``compile --untuned`` and ``tune``, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

import tessella as ts
from tessella.artifacts.plan import load_plan
from tessella.core.spec import TensorSpec
from tests.support.cli import Tessella


def test_a_plan_is_built_untuned_and_tuned_where_it_runs(
    tessella: Tessella, tmp_path: Path
) -> None:
    path = tmp_path / "net.plan"
    built = tessella(
        "compile", "lenet", "--inputs", "image:float32:1x1x28x28", "--out", str(path),
        "--target", "cpu", "--batch", "1", "--untuned",
    )  # fmt: skip
    assert built.code == 0
    assert "untuned: nothing was measured" in built.out
    assert load_plan(path).manifest.untuned
    told = tessella("tune", str(path), "--time-limit", "600", "--out", str(tmp_path / "c.plan"))
    assert "with --cache FILE it is not" in told.err
    tuned = tessella("tune", str(path), "--out", str(tmp_path / "b.plan"), "--json")
    assert tuned.code == 0
    assert json.loads(tuned.out)["steps"] == len(load_plan(path).program.buckets[0].steps)
    assert not load_plan(tmp_path / "b.plan").manifest.untuned
    assert load_plan(path).manifest.untuned


class Told(nn.Module):
    """Words by their numbers, and a weight for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 16)

    def forward(self, number: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (self.words(number) * weight[..., None]).sum(1)


def test_a_plan_of_several_inputs_is_timed(tessella: Tessella, tmp_path: Path) -> None:
    inputs = [
        TensorSpec(name="number", dtype="int64", shape=(1, 5)),
        TensorSpec(name="weight", dtype="float32", shape=(1, 5)),
    ]
    made = ts.compile(Told().eval(), inputs=inputs, batch=1, target="cpu", untuned=True)
    path = made.save(tmp_path / "words.plan")
    timed = tessella("bench", str(path), "--seconds", "0.01", "--json")
    assert [row["plan"]["median_ms"] > 0 for row in timed.json["rows"]] == [True]


def test_a_plan_for_another_machine_is_refused_with_what_to_do(
    tessella: Tessella, tmp_path: Path
) -> None:
    path = tmp_path / "net.plan"
    built = tessella(
        "compile", "lenet", "--inputs", "image:float32:1x1x28x28", "--out", str(path),
        "--target", "sm_75", "--batch", "1", "--untuned",
    )  # fmt: skip
    assert built.code == 0
    refused = tessella("tune", str(path))
    assert refused.code != 0
    assert "rebuild it here" in refused.err


def test_a_plan_for_several_machines_says_which_program_it_uses(
    tessella: Tessella, tmp_path: Path
) -> None:
    path, other = str(tmp_path / "net.plan"), str(tmp_path / "other.plan")
    lenet = ("compile", "lenet", "--inputs", "image:float32:1x1x28x28", "--batch", "1")
    built = tessella(*lenet, "--out", path, "--target", "cpu,sm_75", "--json")
    assert built.json["target"] == "cpu"
    assert built.json["targets"] == ["cpu", "sm_75"]
    assert tessella("show", path, "--json").json["targets"] == ["cpu", "sm_75"]
    assert "untuned" in tessella("show", path, "--target", "sm_75").out.splitlines()[0]
    assert "no program for sm_90" in tessella("show", path, "--target", "sm_90").err
    assert tessella("tune", path, "--json").json["targets"] == ["cpu", "sm_75"]
    assert load_plan(path).at("sm_75").manifest.untuned
    assert tessella("bench", path, "--seconds", "0.01", "--json").json["target"] == "cpu"
    assert tessella(*lenet, "--out", other, "--target", "sm_75", "--untuned").code == 0
    same = tessella("diff", path, other, "--json").json  # of the target that both have
    assert [d["name"] for d in same["differences"]] == ["rebuild", "targets"]
    assert all(s["change"] == "same" for b in same["buckets"] for s in b["steps"])
