"""What cuDNN is told of a convolution; whether its plans are right, only a GPU shows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tessella.kernels.conv.libraries import cudnn_graph
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


def layer(dtype: str, out: str, *, residual: bool = True, beta: float = 0.5) -> Problem:
    def meta(dtype: str, *shape: int) -> TensorMeta:
        return TensorMeta(
            shape=shape, dtype=dtype, format="channels_last" if shape[1:] else "contiguous"
        )

    return problems.conv(
        meta(dtype, 2, 64, 9, 10),
        meta(dtype, 32, 64, 3, 3),
        meta("float32", 32),
        meta(out, 2, 32, 5, 5) if residual else None,
        meta("float32", 32),
        stride=2,
        padding=1,
        out_dtype=out,
        activation="relu",
        beta=beta,
    )


def nodes(problem: Problem) -> list[dict]:
    graph, _, _ = cudnn_graph.described(problem)
    graph.validate()  # cuDNN's own look at shapes and types
    return json.loads(str(graph))["nodes"]


@pytest.mark.parametrize(("dtype", "sums"), [("int8", "INT32"), ("float16", "FLOAT")])
def test_the_graph_is_the_layer_in_the_epilogues_order(dtype: str, sums: str) -> None:
    conv, *rest = nodes(layer(dtype, dtype))
    assert (conv["tag"], conv["compute_data_type"]) == ("CONV_FPROP", sums)
    assert (conv["stride"], conv["pre_padding"], conv["dilation"]) == ([2, 2], [1, 1], [1, 1])
    # scale, bias, beta times residual, plus, relu
    assert [n["mode"] for n in rest] == ["MUL", "ADD", "MUL", "ADD", "RELU_FWD"]
    assert {n["compute_data_type"] for n in rest} == {"FLOAT"}
    assert (rest[0]["inputs"]["IN_1"], rest[1]["inputs"]["IN_1"]) == ("scale", "bias")
    assert set(rest[2]["inputs"].values()) == {"residual", "beta"}


def test_what_does_nothing_is_left_out() -> None:
    modes = [n["mode"] for n in nodes(layer("int8", "int8", residual=False))[1:]]
    assert modes == ["MUL", "ADD", "RELU_FWD"]
    assert len(nodes(layer("int8", "int8", beta=0.0))) == 4
    assert len(nodes(layer("int8", "int8", beta=1.0))) == 5


def test_what_it_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer("int8", "int8")
    assert cudnn_graph.fits(right) is None
    rows = replace(right.outputs[0], format="contiguous")
    for other, why in (
        (replace(right, attrs={**right.attrs, "activation": "gelu"}), "relu only"),
        (replace(right, attrs={**right.attrs, "alpha": 2.0}), "alpha"),
        (replace(right, outputs=(rows,)), "channels_last"),
        (layer("float32", "float32"), "not float32"),
    ):
        assert why in (cudnn_graph.fits(other) or "")
    monkeypatch.setattr(cudnn_graph.importlib.util, "find_spec", lambda name: None)
    assert "pip install" in (cudnn_graph.fits(right) or "")
