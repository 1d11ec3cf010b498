"""The verbs, used as a person and as a script would."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tessella.cli import VERBS
from tessella.core.events import read_events
from tests.cli.conftest import Tessella


def test_help_is_there_before_one_gets_impatient() -> None:
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        shown = subprocess.run(
            [sys.executable, "-m", "tessella", "--help"], capture_output=True, text=True, check=True
        )
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.5
    assert all(verb in shown.stdout for verb in VERBS)


def test_the_version_is_the_packages(tessella: Tessella) -> None:
    assert tessella("--version").out == f"tessella {importlib.metadata.version('tessella')}\n"


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; sys.argv = ['tessella', '--help']\n"
        "from tessella.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'cv2', 'pyarrow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(tessella: Tessella, verb: str) -> None:
    answer = tessella(verb, "--help")
    assert answer.code == 0
    assert f"Example: tessella {verb}" in answer.out


def test_the_whole_way_by_verbs(tessella: Tessella, blobs: Path, tmp_path: Path) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    plan, events = tmp_path / "blobs.plan", tmp_path / "events.jsonl"

    imported = tessella(
        "data", "import", blobs, "--out", dataset, "--size", "12", "--channels", "1",
        "--holdout", "0.25", "--json", "--events", events,
    )  # fmt: skip
    assert imported.code == 0, imported.err
    assert imported.json["classes"] == ["above", "below"]
    kinds = {e.kind for e in read_events(events)[0]}
    assert {"phase", "progress", "result"} <= kinds

    trained = tessella(
        "train", "lenet", dataset, "--out", run, "--epochs", "4", "--batch-size", "10",
        "--solver", "adam", "--lr", "0.003", "--json",
    )  # fmt: skip
    assert trained.code == 0, trained.err
    assert trained.json["metrics"]["val/accuracy"] == 1.0

    compiled = tessella("compile", run, "--out", plan, "--batch", "1,2,4", "--target", "cpu")
    assert compiled.code == 0, compiled.err
    assert "conv1" in compiled.out
    assert str(plan) in compiled.out

    verified = tessella("verify", plan, "--against", run, "--data", dataset, "--json")
    assert verified.json["agreement"] == 1.0
    assert verified.json["flips"] == []

    answer = tessella("run", plan, blobs / "below" / "3.png", "--top", "1", "--json")
    assert answer.json["images"][0]["top"][0]["label"] == "below"

    measured = tessella("run", run, "--data", dataset, "--json")
    assert measured.json["accuracy"] == 1.0
    assert measured.json["confusion"] == [[5, 0], [0, 5]]
    assert [c["label"] for c in measured.json["per_class"]] == ["above", "below"]

    layers = tmp_path / "layers"
    pictured = tessella(
        "show", "layers", run, "--image", blobs / "above" / "0.png", "--out", layers
    )
    assert pictured.code == 0, pictured.err
    assert (layers / "layers.json").exists()

    for path in (dataset, run, plan, imported.json["dataset"], trained.json["best"]):
        assert tessella("show", path, "--json").code == 0
    profiled = tessella("profile", plan, "--batch", "2", "--json")
    assert sum(s["share"] for s in profiled.json["steps"]) == pytest.approx(1.0)
    benched = tessella("bench", plan, "--against", run, "--seconds", "0.05", "--json")
    assert {row["batch"] for row in benched.json["rows"]} == {1, 2, 4}
    assert all(
        row["plan"]["median_ms"] > 0 < row["torch"]["median_ms"] for row in benched.json["rows"]
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "nowhere"), 2, "nothing of ours"),
        (("run", "nowhere", "photo.jpg"), 4, "no checkpoint here"),
        (("compile", "nowhere", "--out", "x.plan"), 4, "no checkpoint here"),
        (("compile", "nowhere", "--out", "."), 2, "a plan is a file"),
        (("data", "import", "nowhere", "--out", "x"), 3, "To do"),
        (("data", "import", ".", "--out", "x", "--size", "12xy"), 2, "write 224 or 224x320"),
        (("train", "no_such_net", "nowhere", "--out", "x"), 4, "no dataset here"),
        (("show", "network", "resnet51"), 2, "resnet50"),
        (("serve", "a=x.plan", "a=y.plan"), 2, "the same name"),
        (("run", "m"), 2, "one of the two"),
    ],
)
def test_a_mistake_gets_a_line_and_an_exit_code(
    tessella: Tessella, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments, code, said
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = tessella(*arguments)
    assert answer.code == code, answer.err
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_json_of_a_mistake_is_json(tessella: Tessella) -> None:
    answer = tessella("show", "nowhere", "--json")
    assert answer.json["error"] == "UsageError"
    assert answer.json["fix"]


def test_a_plan_with_a_flipped_byte_is_refused(tessella: Tessella, tmp_path: Path) -> None:
    path = tmp_path / "broken.plan"
    path.write_bytes(b"PK\x03\x04 this is no plan")
    answer = tessella("show", path)
    assert answer.code == 4
    assert "truncated or changed" in answer.err


def test_networks_and_kernels_are_listed(tessella: Tessella, tmp_path: Path) -> None:
    names = {n["name"] for n in tessella("show", "networks", "--json").json["networks"]}
    assert {"lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152"} <= names
    svg = tmp_path / "net.svg"
    shown = tessella(
        "show", "network", "lenet", "--classes", "3", "--size", "20x28", "--channels", "1",
        "--svg", svg, "--json",
    )  # fmt: skip
    assert shown.json["parameters"] == sum(r["parameters"] for r in shown.json["rows"])
    assert svg.read_text().startswith("<svg")
    ids = {k["id"] for k in tessella("kernels", "conv2d", "--json").json["kernels"]}
    assert {"conv2d.onednn", "conv2d.cudnn", "reference"} <= ids


def test_doctor_names_the_target_and_the_libraries(tessella: Tessella) -> None:
    report = tessella("doctor", "--json").json
    assert report["target"] in ("cpu", "sm_90")
    assert report["libraries"]["torch"]
