"""Plans that take images as bytes: the answers of the plans that take what the host scaled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import tessella as ts
from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.compiler.rewrites import take_pixels
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess, normalize
from tessella.core.spec import DimRange, TensorSpec
from tests.support.networks import ABOUT, captured, graph_of, network

RECORD = Preprocess(height=32, width=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PIXELS = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)


def build(
    name: str, input: str, precision: str = "fp32", record: Preprocess | None = RECORD
) -> Plan:
    return compiler.compile_graph(
        captured(name),
        target="cpu",
        batch=DimRange(min=1, opt=2, max=4),
        precision=precision,
        input=input,
        about=replace(ABOUT, preprocess=record),
        measuring=compiler.Measuring(budget_s=0.0),
    )


@pytest.mark.parametrize(("name", "precision"), [("resnet18", "fp32"), ("vit", "bf16")])
def test_answers_like_the_plan_of_floats(name: str, precision: str) -> None:
    pixels = from_bytes(to_bytes(build(name, "uint8", precision)))
    (image,) = pixels.manifest.inputs
    assert (image.name, image.dtype, image.shape[1:]) == ("image", "uint8", (32, 32, 3))
    first, second = pixels.program.buckets[0].steps[:2]
    assert (first.op, first.inputs) == ("image_to_tensor", ("image",))
    assert second.op == "conv2d"  # nothing is cast or laid out in between
    module, _ = network(name)
    scaled = normalize(PIXELS, RECORD)
    made = runtime.load(pixels)(image=PIXELS)["scores"]
    with torch.inference_mode():
        right = module(torch.from_numpy(scaled)).numpy()
    assert np.abs(made - right).max() / np.abs(right).max() < (
        1e-4 if precision == "fp32" else 5e-2
    )
    cosine = (made * right).sum() / np.linalg.norm(made) / np.linalg.norm(right)
    assert cosine > 0.999


def test_a_first_layer_in_int8_reads_the_bytes_that_the_host_would_scale() -> None:
    """To the last bit of every code: both plans do the same two steps, scaling and rounding."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 5, 3)).eval()
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, 32, 32))
    graph = graph_of(module, spec, DimRange(min=1, opt=2, max=8))
    scaled = torch.from_numpy(normalize(PIXELS, RECORD))
    calibration = compiler.calibrate(graph, [{"image": scaled}])
    first, _ = compiler.layers(graph)
    answers = []
    for input, images in (("uint8", PIXELS), ("float32", scaled.numpy())):
        plan = compiler.compile_graph(
            graph,
            target="cpu",
            batch=DimRange(min=5, opt=5, max=5),
            precision="int8",
            precisions={first: "int8"},
            calibration=calibration,
            input=input,
            about=replace(ABOUT, preprocess=RECORD),
            measuring=compiler.Measuring(budget_s=0.0),
        )
        steps = plan.program.buckets[0].steps
        assert [s.op for s in steps].count("quantize") == 1
        answers.append(runtime.load(plan)(image=images)["scores"])
    assert np.array_equal(*answers)
    with torch.inference_mode():
        right = module(scaled).numpy()
    assert np.abs(answers[0] - right).max() / np.abs(right).max() < 5e-2


def test_from_the_api_with_its_command() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 30 * 30, 2)).eval()
    image = TensorSpec(name="image", dtype="float32", shape=(1, 3, 32, 32))
    record = Preprocess(height=40, width=36, crop=(32, 32), mean=(0.5,), std=(0.25,))
    plan = ts.compile(
        module, inputs=[image], batch=2, target="cpu", input="uint8", preprocess=record
    )
    assert f"input='uint8', preprocess={record!r}" in plan.manifest.rebuild
    assert plan.manifest.preprocess == record
    engine = ts.load(plan)
    right = module(torch.from_numpy(normalize(PIXELS, record))).detach().numpy()
    np.testing.assert_allclose(engine(PIXELS)["output"], right, rtol=1e-4, atol=1e-5)
    predict, _, _ = ts.api.predictor(engine)  # what evaluates plans hands over scaled images
    scores = predict(torch.from_numpy(normalize(PIXELS, record)))
    assert np.array_equal(scores.numpy(), engine(PIXELS)["output"])


def test_one_of_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, size: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
            return image.mean((2, 3)) * size

    specs = [TensorSpec(name="size", dtype="float32", shape=(1, 3)),
             TensorSpec(name="image", dtype="float32", shape=(1, 3, 32, 32))]  # fmt: skip
    plan = ts.compile(
        Two(), inputs=specs, batch=1, target="reference", input="uint8", preprocess=RECORD
    )
    assert [(s.name, s.dtype) for s in plan.manifest.inputs] == [
        ("size", "float32"), ("image", "uint8"),
    ]  # fmt: skip


def test_explained_as_the_first_pass() -> None:
    first, *_ = compiler.explain(captured("resnet18"), input="uint8", preprocess=RECORD)
    assert (first.name, first.rewrites) == ("take_pixels", 1)
    assert "+" in first.diff
    assert "image_to_tensor" in first.diff


@pytest.mark.parametrize(("input", "record", "wrong"), [
    ("uint8", None, "need a preprocessing record"),
    ("int8", RECORD, "unknown kind of input"),
    ("uint8", Preprocess(height=32, width=32, depth=16), "8 bits a sample"),
    ("uint8", Preprocess(height=30, width=32), "no input is the image"),
])  # fmt: skip
def test_what_cannot_be(input: str, record: Preprocess | None, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        build("resnet18", input, record=record)


def test_the_graph_that_was_given_is_not_changed() -> None:
    graph = captured("resnet18")
    before = (graph.inputs[0].dtype, len(graph.nodes))
    copy = graph.copy()
    assert take_pixels.apply(copy, RECORD) == 1
    assert (graph.inputs[0].dtype, len(graph.nodes)) == before
