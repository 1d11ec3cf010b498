"""The verbs, used as a person and as a script would."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession
from torch import nn

import tessella as ts
from tessella import api
from tessella.artifacts.plan import load_plan
from tessella.cli import VERBS, bench, main
from tessella.core.architectures import TARGETS
from tessella.core.errors import UsageError
from tessella.core.events import read_events
from tessella.core.spec import DimRange, TensorSpec
from tessella.search.timing import Timing
from tests.support.cli import Tessella


def test_help_is_there_before_one_gets_impatient() -> None:
    """It takes 0.3 s, with NumPy 0.2 more, with torch 3. What is heavy is named and modules are
    counted, as a time depends on the machine.
    """
    command = [sys.executable, "-X", "importtime", "-m", "tessella", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = [line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()]
    heavy = {"torch", "numpy", "scipy", "cv2", "PIL", "sqlalchemy", "asyncio", "httpx", "pydantic",
             "uvicorn", "psutil", "nicegui", "onnx", "timm", "triton"}  # fmt: skip
    assert not heavy & {name.partition(".")[0] for name in loaded}
    assert "tessella.cli" in loaded
    assert len(loaded) < 500  # 330
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
    # rich takes what stands in brackets for a style, and drops it
    text = Path(importlib.import_module(f"tessella.cli.{verb}").__file__ or "").read_text()
    assert all(f"tessella[{extra}]" in answer.out for extra in re.findall(r"la\\*\[(\w+)\]", text))


def test_the_whole_way_by_verbs(
    tessella: Tessella, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    same = ("--batch", "1,2,4", "--target", "cpu", "--lock", plan)
    locked = tessella("compile", run, "--out", tmp_path / "again.plan", *same)
    assert locked.code == 0, locked.err
    assert (tmp_path / "again.plan").read_bytes() == plan.read_bytes()

    verified = tessella("verify", plan, "--against", run, "--data", dataset, "--json")
    assert verified.json["agreement"] == 1.0
    assert verified.json["flips"] == []

    other = tmp_path / "blobs.onnx"
    exported = tessella("export", run, other, "--opset", "18", "--json")
    assert exported.code == 0, exported.err
    assert exported.json["opset"] == 18
    images = np.random.default_rng(0).normal(size=(3, 1, 12, 12)).astype(np.float32)
    session = InferenceSession(str(other))
    ((name, ours),) = ts.load(plan)(images).items()
    np.testing.assert_allclose(
        session.run([name], {session.get_inputs()[0].name: images})[0], ours, rtol=1e-4, atol=1e-5
    )

    small, found = tmp_path / "int8.plan", tmp_path / "blobs.calibration"
    refused = tessella("compile", run, "--out", small, "--precision", "int8", "--target", "cpu")
    assert "--calibrate DATASET" in refused.err
    api.calibrate(run, dataset, method="percentile").save(found)
    how = ("--calibrate-samples", "8", "--calibrate-method", "entropy")
    refused = tessella(
        "compile", run, "--out", small, "--precision", "int8", "--calibrate", found, *how
    )
    assert "belong to a dataset" in refused.err
    for given in ((dataset, *how), (found,)):
        rounded = tessella(
            "compile", run, "--out", small, "--precision", "int8", "--calibrate", *given,
            "--batch", "1,2,4", "--target", "cpu",
        )  # fmt: skip
        assert rounded.code == 0, rounded.err
        made = load_plan(small).manifest
        said = shlex.join(map(str, given)).replace("--calibrate", "--calibration")
        assert f"--calibration {said}" in made.rebuild
        assert made.snr_db
        assert all(10 < snr < 80 for snr in made.snr_db.values())
        verified = tessella("verify", small, "--against", run, "--data", dataset, "--json")
        assert verified.json["agreement"] == 1.0
        assert verified.json["max_abs_diff"] > 0

    answer = tessella("run", plan, blobs / "below" / "3.png", "--top", "1", "--json", "--recompile")
    assert answer.json["images"][0]["top"][0]["label"] == "below"
    _answers_for_all_that_is_a_picture(tessella, plan, run, blobs, tmp_path)

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
    picture, trace = tmp_path / "made" / "steps.svg", tmp_path / "steps.json"
    profiled = tessella(
        "profile", plan, "--batch", "2", "--plot", picture, "--trace", trace, "--json",
        "--events", tmp_path / "profile.jsonl",
    )  # fmt: skip
    assert [e.name for e in read_events(tmp_path / "profile.jsonl")[0]] == ["profile", ""]
    assert picture.read_text().startswith("<svg")
    assert json.loads(trace.read_text())["otherData"]["batch"] == 2
    assert sum(s["share"] for s in profiled.json["steps"]) == pytest.approx(1.0)
    benched = tessella("bench", plan, "--against", run, "--seconds", "0.05", "--json")
    assert {row["batch"] for row in benched.json["rows"]} == {1, 2, 4}
    assert all(
        row["plan"]["median_ms"] > 0 < row["torch"]["median_ms"] for row in benched.json["rows"]
    )
    for noisy in (True, False):
        timing = Timing(time_us=1500.0, spread_us=10.0, noisy=noisy)
        monkeypatch.setattr(bench, "latency", lambda runs, t=timing, **_: dict.fromkeys(runs, t))
        told = tessella("bench", plan, "--batch", "2")
        assert "1.50 ± 0.01" in told.out
        assert ("1.50 ± 0.01 ~" in told.out) == noisy
        assert ("other work disturbed the times with a ~" in told.err) == noisy
    row = tessella("bench", plan, "--batch", "2", "--json").json["rows"][0]["plan"]
    assert (row["spread_ms"], row["noisy"]) == (0.01, False)


def test_a_network_of_two_inputs_that_returns_a_dict_is_benched(
    tessella: Tessella, tmp_path: Path
) -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, words: torch.Tensor, by: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scores": self.table(words).sum(1) * by, "first": words[:, 0]}

    batch = DimRange(min=1, opt=2, max=2)
    inputs = [
        TensorSpec(name="words", dtype="int64", shape=(batch, 3)),
        TensorSpec(name="by", dtype="float32", shape=(batch, 4)),
    ]
    made = ts.compile(Words(), batch=batch, target="cpu", inputs=inputs, untuned=True)
    plan = made.save(tmp_path / "words.plan")
    assert [output.name for output in ts.load(plan).outputs] == ["scores", "first"]
    rows = tessella("bench", plan, "--seconds", "0.01", "--json").json["rows"]
    assert all(row["plan"]["median_ms"] > 0 for row in rows)


def _answers_for_all_that_is_a_picture(tessella, plan, run, blobs, folder):
    """A folder, a list and a file that is no picture; by a plan and by an ONNX file."""
    (folder / "damaged.png").write_bytes(b"no picture")
    names = [f"{blobs}/above/{n}.png\tabove" for n in (0, 1)] + ["damaged.png", "", "nowhere.png"]
    (folder / "list.txt").write_text("\n".join(names))
    asked = folder / "list.txt", blobs / "below"
    made = folder / "with_records.onnx"
    assert tessella("export", run, made).code == 0
    told = tessella("run", plan, *asked, "--top", "1", "--json")
    assert told.code == 3
    rows = told.json["images"]
    labels = [row["top"][0]["label"] if "top" in row else row["wrong"] for row in rows]
    assert labels[:2] + labels[4:] == ["above"] * 2 + ["below"] * len(rows[4:])
    assert len(rows) == 4 + len(list((blobs / "below").iterdir()))
    assert [row["error"] for row in rows[2:4]] == ["DataError"] * 2
    assert labels[3] == "there is no image here"
    shown = tessella("run", plan, *asked)
    assert shown.code == 3
    assert "nowhere.png" in shown.err
    assert "damaged.png" in shown.err
    assert shown.out.count(f"{blobs}/above/") == 2  # the names alone are there twice
    by_onnx = tessella("run", made, *asked, "--top", "1", "--json").json["images"]
    for ours, its in zip(rows, by_onnx, strict=True):
        if "top" in ours:
            assert its["top"][0]["label"] == ours["top"][0]["label"]
            assert its["top"][0]["score"] == pytest.approx(ours["top"][0]["score"], abs=1e-5)
        else:
            assert its == ours
    refused = tessella("run", plan, folder / "run")
    assert (refused.code, "no images here" in refused.err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("show", "nowhere"), 2, "nothing of ours"),
        (("run", "nowhere", "photo.jpg"), 4, "no model here"),
        (("evaluate", "nowhere"), 4, "no model here"),
        (("compile", "lenet", "--out", f"{__file__}/x.plan"), 4, "could not be written"),
        (("export", "nowhere", f"{__file__}/x.onnx"), 4, "could not be written"),
        (("data", "import", ".", "--out", f"{__file__}/x"), 4, "could not be written"),
        (("run", ".", "--data", ".", "--out", f"{__file__}/x"), 4, "could not be written"),
        (("compile", "nowhere", "--out", "x.plan"), 4, "no checkpoint here"),
        (("compile", __file__, "--out", "x.plan"), 2, "a checkpoint or a run is a folder"),
        (("compile", "nowhere", "--out", "."), 2, "a plan is a file"),
        (("data", "import", "nowhere", "--out", "x"), 3, "To do"),
        (("data", "import", ".", "--out", "x", "--size", "12xy"), 2, "write 224, 224x320 or"),
        (("data", "import", ".", "--out", "x", "--size", "12x²"), 2, "write 224, 224x320 or"),
        (("data", "import", ".", "--out", "x", "--resize", "stretch"), 2, "fill or half_crop"),
        (("train", "no_such_net", "nowhere", "--out", "x"), 4, "no dataset here"),
        (("show", "network", "resnet51"), 2, "resnet50"),
        (("train", "lenet", "nowhere", "--out", "x", "--epoch", "3"), 2, "--epochs"),
        (("serve", "a=x.plan", "a=y.plan"), 2, "the same name"),
        (("serve", "--tls-cert", "a.pem", "x.plan"), 2, "--tls-key"),
        (("serve", "--on", "ray", "--acceptors", "2", "x.plan"), 2, "for one machine"),
        (("serve", "--replicas", "2:8", "x.plan"), 2, "add --on ray"),
        (("serve", "--folder", "nowhere", "x.plan"), 2, "no such folder"),
        (("serve", "--port", "81", "--grpc-port", "81", "x.plan"), 2, "ports of their own"),
        (("serve", "--on", "ray", "--replicas", "8:2", "x.plan"), 2, "so many replicas"),
        (("serve", "--on", "ray", "--replicas", "-1", "x.plan"), 2, "no number of replicas"),
        (("serve", "--on", "ray", "--host", "0.0.0.0", "x.plan"), 2, "no token"),
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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"epochz": 3}', "use epochs"),
        (b'{"solver": {"learning_rate": 3}}', "use 'lr'"),
        (b'{"momentum": 0.5}', "use solver={'momentum': "),
        (b'{"epochs": 0}', "epochs must be positive"),
        (b'{"solver": {"name": "foo"}}', "adamw"),
        (b'{"epochs": ', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1]", "a JSON object"),
    ],
)
def test_a_bad_recipe_is_a_users_mistake(
    tessella: Tessella, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "recipe.json"
    path.write_bytes(content)
    answer = tessella("train", "lenet", "nowhere", "--out", tmp_path / "run", "--recipe", path)
    assert answer.code == 2, answer.err
    assert said in answer.err


def test_a_setting_is_refused_in_its_own_words(tessella: Tessella, tmp_path: Path) -> None:
    settings = ("--gpus", "2", "--batch-size", "33")
    answer = tessella("train", "lenet", "nowhere", "--out", tmp_path / "run", *settings)
    assert answer.code == 2
    assert "Seen: batch_size=33, gpus=2. To do: use batch_size=34." in answer.err


def test_events_into_a_folder_are_refused(tessella: Tessella, tmp_path: Path) -> None:
    answer = tessella("show", "networks", "--events", tmp_path)
    assert answer.code == 2
    assert "Is a directory" in answer.err


def test_another_datasets_classes_are_refused(
    tessella: Tessella, blobs: Path, tmp_path: Path
) -> None:
    """The same number of classes, in another meaning: any accuracy would be a lie."""
    other = tmp_path / "other"
    shutil.copytree(blobs / "below", other / "a")
    shutil.copytree(blobs / "above", other / "b")
    for source, name in ((blobs, "blobs"), (other, "others")):
        options = ("--size", "12", "--channels", "1", "--holdout", "0.25")
        assert tessella("data", "import", source, "--out", tmp_path / name, *options).code == 0
    trained = tessella(
        "train", "lenet", tmp_path / "blobs", "--out", tmp_path / "run", "--epochs", "0.1"
    )
    assert trained.code == 0, trained.err
    answer = tessella("run", tmp_path / "run", "--data", tmp_path / "others")
    assert answer.code == 3
    assert "'a', 'b'" in answer.err
    assert "'above', 'below'" in answer.err


def test_ctrl_c_says_how_to_go_on(
    tessella: Tessella, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tessella.api.train", interrupted)
    answer = tessella("train", "lenet", "nowhere", "--out", tmp_path / "run")
    assert answer.code == 130
    assert "--resume" in answer.err


def test_ctrl_c_before_anything_began_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["tessella", "train", "lenet", "nowhere"])
    monkeypatch.setattr("tessella.cli.importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped\n"


def test_a_failure_is_told_once_and_rows_are_not_wrapped(
    tessella: Tessella, blobs: Path, tmp_path: Path
) -> None:
    source = tmp_path / "with_bad"
    shutil.copytree(blobs, source)
    (source / "above" / f"{'long' * 40}.png").write_bytes(b"")
    options = ("--size", "12", "--channels", "1")
    answer = tessella("data", "import", source, "--out", tmp_path / "dataset", *options)
    assert f"above/{'long' * 40}.png: the file is empty" in answer.out
    diverged = tessella(
        "train", "lenet", tmp_path / "dataset", "--out", tmp_path / "run", "--lr", "1e9",
        "--epochs", "8", "--batch-size", "4",
    )  # fmt: skip
    assert diverged.code == 5
    assert diverged.err.count("diverged") == 1


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
    network = tessella("show", path.rename(tmp_path / "net.onnx"))
    assert (network.code, "show --passes" in network.err) == (2, True)


def test_networks_and_kernels_are_listed(tessella: Tessella, tmp_path: Path) -> None:
    learns = {
        n["name"]: n["tasks"] for n in tessella("show", "networks", "--json").json["networks"]
    }
    for name in ("lenet", "alexnet", "googlenet", "vgg16", "resnet18", "resnet50", "resnet152"):
        assert {"classification", "regression"} <= {*learns[name]}
    assert (learns["unet"], learns["centernet"]) == (["segmentation"], ["detection"])
    pixelwise = tessella("show", "network", "unet", "--classes", "3", "--size", "32x48", "--json")
    assert pixelwise.json["rows"][-1]["output_shape"][-3:] == [3, 32, 48]
    svg = tmp_path / "net.svg"
    shown = tessella(
        "show", "network", "lenet", "--classes", "3", "--size", "20x28", "--channels", "1",
        "--svg", svg, "--json",
    )  # fmt: skip
    assert shown.json["parameters"] == sum(r["parameters"] for r in shown.json["rows"])
    assert svg.read_text().startswith("<svg")
    own = tmp_path / "net.prototxt"
    own.write_text(
        'input: "x" input_dim: 1 input_dim: 1 input_dim: 4 input_dim: 5 '
        'layer { name: "y" type: "InnerProduct" bottom: "x" top: "y" '
        "inner_product_param { num_output: 3 } }"
    )
    assert tessella("show", own, "--classes", "3", "--json").json["parameters"] == 4 * 5 * 3 + 3
    ids = {k["id"] for k in tessella("kernels", "conv2d", "--json").json["kernels"]}
    assert {"conv2d.onednn", "conv2d.cudnn", "reference"} <= ids


def test_doctor_names_the_target_and_the_libraries(tessella: Tessella) -> None:
    report = tessella("doctor", "--json").json
    assert report["target"] in TARGETS
    assert report["libraries"]["torch"]


def test_an_onnx_file_without_a_batch_is_one_sample(tessella: Tessella, tmp_path: Path) -> None:
    shape = [2, 3, 4]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n in "xy")
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=0)], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path, plan = tmp_path / "model.onnx", tmp_path / "model.plan"
    path.write_bytes(model.SerializeToString())

    refused = tessella("compile", path, "--out", plan, "--target", "cpu")
    assert refused.code == 2
    assert "captured for another batch" in refused.err
    answer = tessella("compile", path, "--out", plan, "--batch", "1", "--target", "cpu")
    assert answer.code == 0, answer.err
    x = np.random.default_rng(1).normal(size=(5, *shape)).astype(np.float32)
    made = ts.load(plan)(x=x)["y"]  # five samples, each of them the whole input
    (expected,) = InferenceSession(str(path)).run(None, {"x": x[3]})
    np.testing.assert_allclose(made[3], expected, rtol=1e-5, atol=1e-6)


def test_an_onnx_file_becomes_a_plan(tessella: Tessella, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1], name="conv"),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["scores"]),
    ]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])
    scores = helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 4, 1, 1])
    graph = helper.make_graph(nodes, "g", [image], [scores], [numpy_helper.from_array(weight, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path, plan = tmp_path / "model.onnx", tmp_path / "model.plan"
    path.write_bytes(model.SerializeToString())

    answer = tessella("compile", path, "--out", plan, "--batch", "1,2,2", "--target", "cpu")
    assert answer.code == 0, answer.err
    x = np.random.default_rng(1).normal(size=(3, 3, 8, 8)).astype(np.float32)
    (expected,) = InferenceSession(str(path)).run(None, {"image": x})
    np.testing.assert_allclose(ts.load(plan)(image=x)["scores"], expected, rtol=1e-4, atol=1e-5)


def test_load_is_told_what_an_address_is_for(tessella: Tessella) -> None:
    refused = tessella("load", "http://127.0.0.1:1/")
    assert refused.code == UsageError.exit_code
    assert "load MODEL --url http://127.0.0.1:1/" in refused.err.replace("\n", " ")
    assert "http://127.0.0.1:1/v2/models" in refused.err.replace("\n", " ")
