"""A compile request: refused before anything is loaded, the same in words, JSON and Python."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import pytest
import typer

from tessella import api
from tessella.api.requests import keywords
from tessella.artifacts.build import METHODS, NETWORKS, BuildRequest, read_batch
from tessella.cli import compile as compile_verb
from tessella.compiler import histogram
from tessella.core.architectures import TARGETS
from tessella.core.device import torch_device
from tessella.core.errors import UsageError, WrongDevice
from tessella.core.preprocess import Preprocess
from tessella.core.record import canonical_json, from_plain
from tessella.core.spec import DimRange, TensorSpec
from tessella.nn import zoo
from tests.support.cli import context

TOKENS = TensorSpec(name="a:b", dtype="int64", shape=(1, DimRange(min=1, opt=8, max=16)))
IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 3, 32, 48))
PLAIN = BuildRequest(source="runs/a b")
# Together they give every field a value that is not the usual one.
REQUESTS = (
    PLAIN,
    BuildRequest(source="a'\"$(y)", out="-o 'p'.plan", batch=(7,), target="sm_90", trust_code=True),
    BuildRequest(source="lenet", target="sm_89", untuned=True),
    BuildRequest(source="lenet", target="cpu,sm_80,sm_90"),
    BuildRequest(
        source="my nets/n.py:make", precision="int8", calibration="-d s", calibration_split="test",
        calibration_samples=9, calibration_method="entropy", lock="a b.plan", imports=("m.k",),
        precisions={"layer=1": "fp32", "fc": "int8+2:4"}, inputs=(IMAGE, TOKENS), cache="c d",
        time_limit_s=0.1 + 0.2,
    ),
    BuildRequest(
        source="x.onnx", input="uint8", budget=0.3, data="d", front="f", chart="c.svg", point=2,
        preprocess=Preprocess(height=8, width=9, mean=(0.5, 0.1, 1 / 3), std=(1.0, 1.0, 1.0)),
    ),
)  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS)
def test_words_and_json_read_back(request_: BuildRequest) -> None:
    verb = [w for i, w in enumerate(request_.argv()) if i >= 2 * len(request_.imports)]
    read = compile_verb.requested(context([*verb, *(["--out", "o"] * (request_.out is None))]))
    out = request_.out or "o"
    assert read == replace(request_, out=out, imports=())  # the app's own option, see below
    assert request_.argv()[: -len(verb)] == [w for m in request_.imports for w in ("--import", m)]
    assert shlex.split(request_.command()) == ["tessella", *request_.argv()]
    plain = json.loads(canonical_json(request_))
    assert from_plain(BuildRequest, plain, where="request") == request_


def test_several_targets_are_a_cpu_and_gpus_each_once() -> None:
    for target in ("cpu,cpu", "cpu,reference", "cpu,", ",cpu", "cpu,sm_81", "cpu sm_80", ""):
        with pytest.raises(UsageError, match="target"):
            BuildRequest(source="lenet", target=target)
    with pytest.raises(UsageError, match="one machine"):
        BuildRequest(source="lenet", target="cpu,sm_80", budget=1.0, data="d")
    spaced = compile_verb.requested(
        context(["compile", "lenet", "--out", "o", "--target", "cpu, sm_80"])
    )
    assert spaced.targets == ("cpu", "sm_80")
    assert "--target cpu,sm_80" in spaced.command()


def test_a_path_is_never_taken_for_an_option() -> None:
    dashed = BuildRequest(source="--json", calibration="-c", lock="--lock")
    read = compile_verb.requested(context([*dashed.argv(), "--out", "o"]))
    assert read == replace(dashed, source="./--json", out="o")


def test_every_field_has_an_option_and_every_option_a_field() -> None:
    names = {f.name for f in fields(BuildRequest)}
    for name in names - {"source"}:
        assert any(getattr(r, name) != getattr(PLAIN, name) for r in REQUESTS), name
    options = set(context(["compile", "x", "--out", "y"]).params)
    assert options - {"uint8", "json", "events"} == names - {"imports"}
    python = set(api.compile.__kwdefaults__) | set(api.pareto.__kwdefaults__)
    assert python - {"emit", "samples", "metric", "device"} <= names  # tessella --device: before it
    written_only = {"out", "front", "chart", "point", "imports"}
    details = {n for n in names if n.startswith("calibration_")}  # one CalibrationSet in Python
    assert names - written_only - details - {"source"} <= python | {"data"}
    assert set(keywords(PLAIN)) == names - written_only - details


def test_modules_before_the_verb_are_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    read = context(["compile", "x", "--out", "y"])
    parent = typer.Context(read.command)
    parent.params = {"modules": ["m.k"]}
    read.parent = parent
    assert compile_verb.requested(read).imports == ("m.k",)


def test_shorter_and_older_spellings() -> None:
    words = "compile x --out y --uint8 --calibrate d --calibrate-method mse --time-limit 5"
    read = compile_verb.requested(context([*words.split(), "--layer", "fc=int8"]))
    assert read == BuildRequest(
        source="x", out="y", input="uint8", calibration="d", calibration_method="mse",
        time_limit_s=5.0, precisions={"fc": "int8"},
    )  # fmt: skip


def test_the_lists_are_those_of_the_compiler_and_the_zoo() -> None:
    assert tuple(zoo.names()) == NETWORKS
    assert set(histogram.METHODS) == set(METHODS)
    for target in TARGETS:
        with suppress(WrongDevice):  # an unknown one is a UsageError
            torch_device(target)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"source": ""}, "a source"),
        ({"source": 5}, "nothing that can be compiled"),
        ({"precision": "fp12"}, "unknown precision"),
        ({"target": "sm_12"}, "unknown target"),
        ({"input": "int4"}, "unknown kind of input"),
        ({"batch": (1, 8)}, "a batch is"),
        ({"batch": (8, 1, 9)}, "a batch is"),
        ({"batch": (0,)}, "a batch is"),
        ({"batch": (True,)}, "a batch is"),
        ({"batch": (1.0, 2.0, 4.0)}, "a batch is"),
        ({"precision": "int8"}, "needs a calibration"),
        ({"precisions": {"fc": "fp8"}}, "needs a calibration"),
        ({"precisions": {"fc": "tf32"}}, "no precision of a single layer"),
        ({"calibration_samples": 8}, "belong to a dataset"),
        ({"calibration": "x", "calibration_samples": 0}, "needs samples"),
        ({"calibration": "x", "calibration_method": "best"}, "unknown method"),
        ({"budget": 1.0}, "labelled data"),
        ({"budget": 100.0, "data": "d"}, "percentage points"),
        ({"budget": float("nan"), "data": "d"}, "percentage points"),
        ({"budget": 1.0, "data": "d", "lock": "l"}, "chooses the precisions"),
        ({"budget": 1.0, "data": "d", "precisions": {"fc": "fp32"}}, "chooses the precisions"),
        ({"budget": 1.0, "data": "d", "point": -1}, "no such point"),
        ({"data": "d"}, "belongs to --budget"),
        ({"time_limit_s": 0.0}, "time limit"),
        ({"time_limit_s": float("nan")}, "time limit"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        BuildRequest(**{"source": "runs/x", **settings})


def test_a_plan_is_not_written_over_what_it_is_made_of(tmp_path: Path) -> None:
    network = tmp_path / "net.onnx"
    network.write_bytes(b"a network")
    with pytest.raises(UsageError, match="over what it is made of"):
        BuildRequest(source=str(network), out=str(network)).require_files()
    BuildRequest(source=str(network), out=str(tmp_path / "net.plan")).require_files()


@pytest.mark.parametrize("text", ["1,8", "8, 1, 32", "", "²", "0", "9" * 5_000, "1;8"])
def test_what_is_no_batch(text: str) -> None:
    with pytest.raises(UsageError, match="a batch is") as refused:
        read_batch(text)
    assert refused.value.seen == (text or "nothing")
    assert read_batch("1, 8, 32") == (1, 8, 32)


@pytest.mark.parametrize(
    "option",
    [("--inputs", "x:float32"), ("--inputs", "x:float32:1x-3"), ("--inputs", ":float32:1"),
     ("--inputs", "x:float99:1x3"), ("--preprocess", "nowhere.json"), ("--preprocess", "{"),
     ("--preprocess", '{"height": 3}'), ("--layer", "fc")],
)  # fmt: skip
def test_texts_that_cannot_be_read_are_a_users_mistake(option: tuple[str, str]) -> None:
    with pytest.raises(UsageError):
        compile_verb.requested(context(["compile", "x", "--out", "y", *option]))


CHECKED = """
import sys
from tessella.cli import main
sys.argv = ["tessella", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    print("code", stop.code, "torch" in sys.modules, "timm" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("lenet", "--batch", "1,8"), 2),
        (("lenet", "--precision", "int9"), 2),
        (("lenet", "--precision", "int8"), 2),
        (("resnet51",), 4),
        (("nowhere.onnx",), 2),
        (("nowhere.py:net",), 2),
        (("lenet", "--budget", "1", "--data", "nowhere"), 4),
        (("lenet", "--lock", "nowhere"), 2),
    ],
)
def test_a_refusal_loads_neither_torch_nor_timm(words: tuple[str, ...], code: int) -> None:
    """What torch takes to be imported, seconds, is more than all of such a refusal."""
    started = time.perf_counter()
    answer = subprocess.run(
        [sys.executable, "-c", CHECKED, "compile", *words, "--out", "x.plan"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout.splitlines()[-1] == f"code {code} False False", answer.stderr
    assert time.perf_counter() - started < 30  # 0.4 s of a processor


def test_what_is_in_memory_has_no_command() -> None:
    module = BuildRequest(source="<Net>", inputs=(IMAGE,), target="cpu", precisions={"fc": "bf16"})
    line = module.rebuild()
    code, comment = line.split("  # ")
    assert comment == "in Python: module is of the class Net"
    asked: dict = {}
    tessella = type("tessella", (), {"compile": lambda source, **given: asked.update(given)})
    names = {"tessella": tessella, "module": None, "TensorSpec": TensorSpec}
    eval(code, names)
    assert asked["inputs"] == (IMAGE,)
    assert asked["precisions"] == {"fc": "bf16"}
    rounded = replace(PLAIN, precision="int8", calibration="<calibration>")
    assert rounded.rebuild().endswith("# in Python: calibration is in memory")
    assert PLAIN.rebuild("samples").startswith("tessella.compile('runs/a b', ")
    assert PLAIN.rebuild("metric").startswith("tessella.pareto('runs/a b', ")


def test_how_a_build_was_made_is_not_in_what_builds_it_again() -> None:
    made = replace(PLAIN, out="somewhere/x.plan", cache="c", lock="l", time_limit_s=3.0)
    assert made.rebuild() == PLAIN.rebuild()
    assert shlex.split(PLAIN.rebuild()) == [
        "tessella", "compile", "runs/a b", "--out", "a b.plan", "--precision", "fp32",
        "--batch", "1,8,32",
    ]  # fmt: skip
