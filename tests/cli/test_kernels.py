"""The verb kernels: the catalog, and a search with its table, JSON and picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from tests.support.cli import Tessella

SEARCH = ("kernels", "conv2d", "--input", "1x4x8x8", "--weight", "6x4x3x3", "--padding", "1")


def test_a_search(tessella: Tessella, tmp_path: Path) -> None:
    search = (*SEARCH, "--bias", "--activation", "relu", "--seconds", "0", "--cache", tmp_path)
    plot = tmp_path / "a folder" / "roofline.svg"
    found = tessella(*search, "--json", "--plot", plot).json
    assert found["problem"]["outputs"][0]["shape"] == [1, 6, 8, 8]
    assert found["problem"]["attrs"]["activation"] == "relu"
    best = found["findings"][0]
    assert best["max_rel_error"] < 1e-4
    assert best["time_us"] > 0
    assert ElementTree.parse(plot).findall(".//{*}circle")
    table = tessella(*search)
    assert table.code == 0
    assert best["kernel"] in table.out
    assert "refused: " in table.out


def test_matrix_products(tessella: Tessella, tmp_path: Path) -> None:
    shapes = ("--input", "8x16", "--weight", "4x16", "--transpose-b", "--dtype", "bfloat16")
    found = tessella("kernels", "matmul", *shapes, "--cache", tmp_path, "--json").json
    assert found["problem"]["outputs"][0]["shape"] == [8, 4]
    assert found["findings"][0]["max_rel_error"] < 5e-2


def test_wrong_shapes(tessella: Tessella, tmp_path: Path) -> None:
    for arguments, what in (
        ((*SEARCH[:2], "--input", "1x4x8x8"), "needs two shapes"),
        ((*SEARCH[:2], "--input", "1x4xx8", "--weight", "1"), "numbers with x between"),
        (("kernels", "relu", "--input", "4", "--weight", "4"), "cannot search"),
        ((*SEARCH, "--dtype", "nn"), "a type is one of torch's"),
        ((*SEARCH, "--out-dtype", "nn"), "a type is one of torch's"),
        ((*SEARCH, "--math", "bf16"), "one of two ways"),
        ((*SEARCH, "--algorithm", "magic"), "no algorithm of this name"),
    ):
        answer = tessella(*arguments, "--cache", tmp_path)
        assert (answer.code, what in answer.err) == (2, True)


def test_the_catalog(tessella: Tessella) -> None:
    listed = {k["id"] for k in tessella("kernels", "conv2d", "--json").json["kernels"]}
    assert {"conv2d.onednn", "conv2d.cudnn", "reference"} <= listed
    assert "linear.mkl" not in listed


def test_a_bias_of_narrow_types_is_float32(tessella: Tessella, tmp_path: Path) -> None:
    shapes = ("--input", "8x16", "--weight", "4x16", "--bias", "--dtype", "float8_e4m3fn")
    found = tessella("kernels", "linear", *shapes, "--cache", tmp_path, "--json").json
    assert found["problem"]["inputs"][2]["dtype"] == "float32"
    assert found["findings"][0]["refused"] is None


def test_a_sparse_weight_is_told(tessella: Tessella, tmp_path: Path) -> None:
    shapes = ("--input", "8x16", "--weight", "4x16", "--cache", tmp_path, "--json")
    sparse = tessella("kernels", "linear", *shapes, "--sparse").json["problem"]
    assert (sparse["attrs"]["sparsity"], sparse["constant"]) == ("2:4", [1])
    assert "sparsity" not in tessella("kernels", "linear", *shapes).json["problem"]["attrs"]
    refused = tessella("kernels", "linear", "--input", "8x6", "--weight", "4x6", "--sparse")
    assert (refused.code, "takes fours" in refused.err) == (2, True)


def test_attention_of_queries_and_keys(tessella: Tessella, tmp_path: Path) -> None:
    shapes = ("--input", "1x2x5x8", "--weight", "1x2x6x8", "--causal")
    search = ("kernels", "scaled_dot_product_attention", *shapes, "--cache", tmp_path, "--json")
    found = tessella(*search).json
    assert found["problem"]["outputs"][0]["shape"] == [1, 2, 5, 8]
    assert found["problem"]["attrs"]["is_causal"]
    assert found["findings"][0]["max_rel_error"] < 1e-5
