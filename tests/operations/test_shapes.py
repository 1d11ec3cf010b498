"""Shapes without numbers: what the rules say is what torch makes, or torch is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella.operations import shapes
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tests.support.networks import captured, plan

CONV = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
POOL = {"kernel_size": [3, 3], "stride": [2, 2], "padding": [1, 1], "ceil_mode": False}
AVERAGE = {**POOL, "count_include_pad": True, "divisor_override": None}
SOFT = {"is_causal": False, "scale": None, "enable_gqa": False}
X, W = (2, 4, 7, 9), (6, 4, 3, 2)
SHAPES_ATTRS: list[tuple[str, list[tuple[int, ...] | None], dict[str, Any]]] = [
    *[
        ("conv2d", [X, W, *more], {**CONV, "stride": s, "padding": p, "dilation": d})
        for s, p, d in product([[1, 1], [2, 3]], [[0, 0], [1, 2]], [[1, 1], [2, 3]])
        for more in ([], [(6,)])
    ],
    ("conv2d", [X, (6, 2, 3, 3)], {**CONV, "groups": 2, "activation": "relu"}),
    ("conv2d", [X, W, None, (2, 6, 5, 8), (6,)], {**CONV, "activation": "gelu", "alpha": 2.0}),
    (
        "conv1d",
        [(2, 4, 9), (6, 4, 3)],
        {"stride": [2], "padding": [1], "dilation": [1], "groups": 1},
    ),
    ("linear", [(2, 5, 7), (3, 7), (3,)], {"activation": "silu"}),
    ("linear", [(7,), (3, 7)], {}),
    ("matmul", [(4, 1, 5, 7), (3, 7, 2)], {"alpha": 0.5}),
    ("matmul", [(5, 7), (2, 7)], {"transpose_b": True}),
    ("max_pool2d", [X], {**POOL, "dilation": [1, 1]}),
    ("max_pool2d", [X], {**POOL, "dilation": [1, 1], "ceil_mode": True}),
    *[
        (
            "max_pool2d",
            [X],
            {
                **POOL,
                "kernel_size": k,
                "stride": s,
                "padding": p,
                "dilation": [1, 1],
                "ceil_mode": True,
            },
        )
        for k, s, p in [
            ([2, 3], [3, 2], [1, 0]),
            ([2, 2], [4, 5], [1, 1]),
            ([3, 3], [2, 2], [0, 0]),
        ]
    ],
    ("avg_pool2d", [X], AVERAGE),
    ("adaptive_avg_pool2d", [X], {"output_size": [1, 3]}),
    ("scaled_dot_product_attention", [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4)], SOFT),
    (
        "scaled_dot_product_attention",
        [(2, 3, 5, 8), (2, 3, 6, 8), (2, 3, 6, 4), (2, 1, 1, 6)],
        SOFT,
    ),
    ("mean", [X], {"dim": [-1, 2], "keepdim": True}),
    ("sum", [X], {"dim": None, "keepdim": False}),
    ("softmax", [X], {"dim": -1}),
    ("layer_norm", [X, (7, 9), (7, 9)], {"normalized_shape": [7, 9], "eps": 1e-5}),
    ("batch_norm", [X, (4,), (4,), (4,), None], {"eps": 1e-5}),
    ("group_norm", [X, (4,), (4,)], {"num_groups": 2, "eps": 1e-5}),
    ("group_norm", [(2, 4)], {"num_groups": 2, "eps": 1e-5}),
    ("leaky_relu", [X], {"negative_slope": 0.1}),
    ("peak_boxes", [(2, 8, 3, 4)], {"down": 0.25, "along": 0.25, "most": 20}),
    ("add", [X, (4, 1, 9)], {}),
    ("mul", [X], {"scalar": 2}),
    ("sub", [(9,), X], {}),
    ("relu", [X], {}),
    ("cat", [X, (2, 3, 7, 9), X], {"dim": -3}),
    ("gelu", [X], {"approximate": "tanh"}),
    ("clamp", [X], {"min": 0.0, "max": None}),
]


def metas(of: list[tuple[int, ...] | None], dtype: str = "float32") -> list[TensorMeta | None]:
    return [None if s is None else TensorMeta(shape=s, dtype=dtype) for s in of]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("op", "of", "attrs"), SHAPES_ATTRS)
def test_a_rule_says_what_torch_makes(
    op: str, of: list[Any], attrs: dict[str, Any], dtype: str
) -> None:
    tensors = [
        None if m is None else m.empty(torch.device("cpu")).zero_() for m in metas(of, dtype)
    ]
    right = [
        (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for t in operation(op).call(tensors, attrs)
    ]
    assert shapes.made(op, metas(of, dtype), attrs) == right


@pytest.mark.parametrize(
    ("op", "of", "attrs"),
    [
        ("relu", [X], {}),
        ("cat", [X, (2, 3, 7, 9)], {"dim": 1}),
        ("max_pool2d", [X], {**POOL, "dilation": [1, 1]}),
        ("conv2d", [X, W], {**CONV, "dtype": "int8"}),
        ("linear", [(2, 5, 7), (3, 7)], {"dtype": "float16"}),
        ("quantize", [X, ()], {"axis": 0, "dtype": "int8"}),
        ("dequantize", [X, ()], {"axis": 0, "dtype": "float32"}),
    ],
)
def test_a_rule_says_what_int8_makes(op: str, of: list[Any], attrs: dict[str, Any]) -> None:
    kinds = metas(of, "int8")
    if op.endswith("quantize"):
        kinds[1] = TensorMeta(shape=(), dtype="float32")
    tensors = [m.empty(torch.device("cpu")).zero_() + (m.dtype == "float32") for m in kinds]
    right = [
        (str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for t in operation(op).call(tensors, attrs)
    ]
    assert shapes.made(op, kinds, attrs) == right


WRONG: list[tuple[str, list[tuple[int, ...] | None], dict[str, Any]]] = [
    ("conv2d", [X, (6, 3, 3, 3)], CONV),  # other channels
    ("conv2d", [X, W, (5,)], CONV),
    ("conv2d", [X, W, (1,)], {**CONV, "dtype": "int8"}),  # nothing is broadcast in int8
    ("conv2d", [X, W, None, (6, 5, 8)], {**CONV, "dtype": "int8"}),
    ("linear", [(5, 7), (3, 7), None, None, (1,)], {"dtype": "int8"}),
    ("quantize", [X, (3,)], {"axis": 1, "dtype": "int8"}),
    ("cat", [X, (2, 4, 7, 8)], {"dim": 1}),
    ("cat", [X, X], {"dim": 4}),
    ("conv2d", [X, W], {**CONV, "stride": [0, 1]}),
    ("conv2d", [X, W], {**CONV, "stride": [1, 1, 1]}),
    ("conv2d", [X, W], {**CONV, "groups": 3}),
    ("conv2d", [X, W], {**CONV, "padding": [-1, 0]}),
    ("conv2d", [X, (6, 4, 9, 9)], CONV),  # larger than the image
    ("conv2d", [X, W], {**CONV, "dilation": [10**12, 1]}),
    ("conv2d", [X, W], {**CONV, "padding": "everywhere"}),
    ("linear", [(2, 5), (3, 7)], {}),
    ("linear", [(2, 7), (3, 7), (4,)], {}),
    ("matmul", [(5, 7), (6, 2)], {}),
    ("matmul", [(2, 5, 7), (3, 7, 2)], {}),
    ("max_pool2d", [X], {**POOL, "padding": [2, 2], "dilation": [1, 1]}),
    ("max_pool2d", [X], {**POOL, "kernel_size": [0, 3], "dilation": [1, 1]}),
    ("adaptive_avg_pool2d", [X], {"output_size": [1, -3]}),
    ("mean", [X], {"dim": [4], "keepdim": True}),
    ("mean", [X], {"dim": [1, 1], "keepdim": True}),
    ("softmax", [X], {"dim": 4}),
    ("layer_norm", [X, (9,), (9,)], {"normalized_shape": [7, 9], "eps": 1e-5}),
    ("layer_norm", [X], {"normalized_shape": [8], "eps": 1e-5}),
    ("batch_norm", [X, (5,), (4,), None, None], {"eps": 1e-5}),
    ("group_norm", [X], {"num_groups": 3, "eps": 1e-5}),
    ("group_norm", [X], {"num_groups": 0, "eps": 1e-5}),
    ("group_norm", [X, (5,)], {"num_groups": 2, "eps": 1e-5}),
    ("group_norm", [(1, 4)], {"num_groups": 4, "eps": 1e-5}),
    ("leaky_relu", [X], {"negative_slope": "steep"}),
    ("add", [X, (3, 1, 9)], {}),
    ("add", [X], {"scalar": "more"}),
    ("relu", [X], {"more": 1}),
    ("gelu", [X], {"approximate": "roughly"}),
    ("clamp", [X], {"min": "low", "max": None}),
]


@pytest.mark.parametrize(("op", "of", "attrs"), WRONG)
def test_what_is_wrong_ends_as_on_the_meta_device(
    op: str, of: list[Any], attrs: dict[str, Any]
) -> None:
    """Which lets some of it pass: such shapes are then none that a plan says."""

    def outcome(ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:
            return type(error)

    def on_meta() -> list[shapes.Made]:
        tensors = [None if m is None else m.empty(shapes.META) for m in metas(of)]
        made = operation(op).call(tensors, attrs)
        return [(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in made]

    assert outcome(lambda: shapes.made(op, metas(of), attrs)) == outcome(on_meta)


def test_shapes_of_any_size_allocate_nothing() -> None:
    wide = [(1 << 20, 64, 1 << 10, 1 << 10), (64, 64, 3, 3)]
    ((dtype, shape),) = shapes.made("conv2d", metas(wide, "float16"), {**CONV, "padding": [1, 1]})
    assert (dtype, shape) == ("float16", wide[0])


LOAD = """
import sys
import torch
before = set(sys.modules)
from tessella import runtime
engine = runtime.load(sys.argv[1])
engine(torch.zeros(1, 1, 28, 28))
needless = {
    "torch._dynamo", "torch._inductor", "sympy",  # 0.9 s
    "tessella.search.find", "tessella.compiler",  # nothing can be measured
    "cv2", "tifffile",  # 0.04 s
}
print(*needless & (set(sys.modules) - before))
"""


def test_loading_a_plan_imports_no_compiler_and_measures_nothing(tmp_path: Path) -> None:
    """torch's meta device would import one: 0.9 s of 2.1 for a ResNet-50."""
    path = plan(captured("lenet")).save(tmp_path / "lenet.plan")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    command = [sys.executable, "-c", LOAD, str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == []
