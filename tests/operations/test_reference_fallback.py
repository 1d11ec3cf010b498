"""The fallback: which operators may run, and that their arguments arrive as they were."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

import tessella.graph.onnx
from tessella.core.errors import CompileError
from tessella.kernels.fallback import aten
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tessella.operations.torch_operators.allowed import ALLOWED
from tessella.operations.torch_operators.operators import refusal


@pytest.mark.parametrize(
    "target",
    [
        "aten::roll", "aten::max.dim", "aten::topk", "aten::grid_sampler", "aten::index.Tensor",
        "aten::split.Tensor", "aten::_to_copy", "torchvision::roi_align", "aten::eq.Scalar",
    ],
)  # fmt: skip
def test_pure_operators_may_run(target: str) -> None:
    assert refusal(target) is None


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("aten::relu_", "changes its arguments"),
        ("aten::add.out", "changes its arguments"),
        ("aten::copy_", "changes its arguments"),
        ("aten::from_file", "takes no tensor"),
        ("aten::as_strided", "is not on the list"),
        ("aten::_unsafe_index.Tensor", "is not on the list"),
        ("aten::_cudnn_init_dropout_state", "takes no tensor"),
        ("aten::zeros", "takes no tensor"),
        ("aten::size.int", "does not return tensors"),
        ("aten::item", "does not return tensors"),
        ("aten::sym_size.int", "does not return tensors"),
        ("aten::rand_like", "draws random numbers"),
        ("aten::bernoulli", "draws random numbers"),
        ("aten::nonzero", "depends on the data"),
        ("aten::unique_dim", "depends on the data"),
        ("aten::frobnicate", "has no operator"),
        ("aten::roll.frobnicate", "has no operator"),
        ("aten::roll.__class__", "has no operator"),
        ("aten::name", "has no operator"),
        ("aten::__class__", "has no operator"),
        ("prims::add", "only operators of aten and torchvision"),
        ("quantized::add", "only operators of aten and torchvision"),
        ("aten::roll; import os", "is not the name of an operator"),
        ("", "is not the name of an operator"),
        ("None", "is not the name of an operator"),
        ("aten::to_mkldnn", "is not on the list"),
        ("aten::quantized_lstm.input", "is not on the list"),
        ("aten::fbgemm_linear_fp16_weight", "is not on the list"),
        ("aten::max_pool2d_with_indices_backward", "is not on the list"),
    ],
)
def test_other_operators_may_not(target: str, reason: str) -> None:
    assert reason in str(refusal(target))
    problem = problem_of(target, [torch.zeros(1)])
    assert reason in str(aten.fits(problem))
    with pytest.raises(CompileError):
        aten.bind(problem, {})
    with pytest.raises(CompileError):
        operation("fallback").call([torch.zeros(1)], problem.attrs)


def test_the_list_holds_pure_operators_that_exist() -> None:
    """Each has an overload that may run, here or in another supported version of torch."""
    refused = {}
    for name in ALLOWED:
        namespace, short = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        overloads = packet.overloads() if packet is not None else []
        targets = [name if o == "default" else f"{name}.{o}" for o in overloads]
        reasons = [refusal(t) for t in targets]
        if None not in reasons:
            refused[name] = reasons
        for target, reason in zip(targets, reasons, strict=True):
            operator = getattr(packet, target.partition(".")[2] or "default")
            assert reason is not None or not operator._schema.is_mutable
    assert not refused


def test_what_the_readers_ask_for_is_on_the_list() -> None:
    folder = Path(tessella.graph.onnx.__file__).parent
    text = "".join(p.read_text() for p in folder.glob("*.py"))
    asked = re.findall(r"""(?:\.atens?|_torch|_widened)\(\s*"([\w.]+)\"""", text)
    assert len(asked) > 50
    assert not [name for name in asked if f"aten::{name.split('.')[0]}" not in ALLOWED]


def problem_of(
    target: str, tensors: list[torch.Tensor], *args: Any, kwargs: dict[str, Any] | None = None
) -> Problem:
    metas = tuple(TensorMeta(shape=tuple(t.shape), dtype="float32") for t in tensors)
    attrs = {"target": target, "args": list(args), "kwargs": kwargs or {}}
    return Problem(op="fallback", inputs=metas, outputs=metas[:1], attrs=attrs)


def test_templates() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    cases: list[tuple[str, list[Any], dict[str, Any], torch.Tensor]] = [
        ("aten::roll", [{"input": 0}, [1], [1]], {}, x.roll(1, 1)),
        ("aten::cat", [[{"input": 1}, {"input": 0}], 1], {}, torch.cat([y, x], 1)),
        ("aten::masked_fill.Scalar", [{"input": 0}, {"input": 2}, {"float": "-inf"}], {},
         x.masked_fill(y > 0, -torch.inf)),
        ("aten::cumsum", [{"input": 0}, 1], {"dtype": {"dtype": "float64"}},
         x.cumsum(1, dtype=torch.float64)),
        ("aten::index.Tensor", [{"input": 0}, [None, {"input": 3}]], {}, x[:, [2, 0]]),
    ]  # fmt: skip
    tensors = [x, y, y > 0, torch.tensor([2, 0])]
    for target, args, kwargs, want in cases:
        attrs = {"target": target, "args": args, "kwargs": kwargs}
        (got,) = operation("fallback").call(tensors, attrs)
        torch.testing.assert_close(got, want)
        problem = problem_of(target, tensors, *args, kwargs=kwargs)
        bound = aten.bind(problem, {1: y, 3: tensors[3]})  # the rest is given at the call, in order
        torch.testing.assert_close(bound(x, y > 0), want)


def test_memory_format_and_several_outputs() -> None:
    x = torch.randn(1, 2, 3, 4)
    kwargs = {"memory_format": {"memory_format": "channels_last"}}
    attrs = {"target": "aten::clone", "args": [{"input": 0}], "kwargs": kwargs}
    (got,) = operation("fallback").call([x], attrs)
    assert got.is_contiguous(memory_format=torch.channels_last)
    attrs = {"target": "aten::max.dim", "args": [{"input": 0}, 1], "kwargs": {}}
    values, indices = operation("fallback").call([x], attrs)
    assert torch.equal(values, x.amax(1))
    assert torch.equal(indices, x.argmax(1))


@pytest.mark.parametrize("template", [{"dtype": "load"}, {"layout": "float32"}, {"frob": "x"}])
def test_a_template_reaches_no_other_attribute_of_torch(template: dict[str, str]) -> None:
    attrs = {"target": "aten::cumsum", "args": [{"input": 0}, 0], "kwargs": {"dtype": template}}
    with pytest.raises(CompileError, match=r"is not of the type ScalarType"):
        operation("fallback").call([torch.zeros(3)], attrs)


def test_torchvision_operators() -> None:
    x, boxes = torch.randn(1, 2, 8, 8), torch.tensor([[0.0, 1.0, 1.0, 6.0, 6.0]])
    args = [{"input": 0}, {"input": 1}, 1.0, 2, 2, -1, False]
    attrs = {"target": "torchvision::roi_align", "args": args, "kwargs": {}}
    (got,) = operation("fallback").call([x, boxes], attrs)
    torch.testing.assert_close(got, torchvision.ops.roi_align(x, boxes, 2))
