"""Text and drawing: what they say, that they are well-formed, and that the layout is one."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
import torch

from tessella.core.spec import TensorSpec
from tessella.graph import Graph, capture, svg, text
from tessella.graph.build import Builder
from tessella.graph.layout import GAP_X, layered
from tests.support.graphs import BATCH, Residual, image

SVG = "{http://www.w3.org/2000/svg}"


def test_text() -> None:
    assert text(capture(Residual(), image(3, 8, 8))).splitlines() == [
        "graph Residual(%image: float32[N, 3, 8, 8])",
        "  %conv2d: float32[N, 8, 8, 8] = conv2d(%image, conv.weight[8, 3, 3, 3]) stride=(1, 1)"
        " padding=(1, 1) dilation=(1, 1) groups=1  # layer conv",
        "  %batch_norm: float32[N, 8, 8, 8] = batch_norm(%conv2d, norm.running_mean[8],"
        " norm.running_var[8], norm.weight[8], norm.bias[8]) eps=1e-05  # layer norm",
        "  %conv2d.1: float32[N, 8, 8, 8] = conv2d(%image, down.weight[8, 3, 1, 1], down.bias[8])"
        " stride=(1, 1) padding=(0, 0) dilation=(1, 1) groups=1  # layer down",
        "  %add: float32[N, 8, 8, 8] = add(%batch_norm, %conv2d.1) alpha=1",
        "  %relu: float32[N, 8, 8, 8] = relu(%add)",
        "  %mean: float32[N, 8] = mean(%relu) dim=(2, 3) keepdim=False",
        "  %output: float32[N, 4] = linear(%mean, head.weight[4, 8], head.bias[4])  # layer head",
        "  return %output",
    ]


def test_text_names_a_fallback_and_what_is_left_out() -> None:
    build = Builder("g", ["x", "y"])
    x = build.input(TensorSpec(name="x", dtype="float32", shape=(BATCH, 4)), dynamic=True)
    b = build.constant("b", torch.zeros(4))
    (rolled,) = build.node(
        "fallback", [x], target="aten::roll", args=({"input": 0}, (1,), (1,)), kwargs={}
    )
    y = build.one("layer_norm", [rolled, None, b], normalized_shape=(4,), eps=1.0)
    shown = text(build.finish([y], ["y"]))
    assert "= fallback aten::roll(%x) args=({input: 0}, (1,), (1,)) kwargs={}" in shown
    assert "= layer_norm(%fallback, None, b[4]) normalized_shape=(4,) eps=1.0" in shown


def boxes(drawing: str) -> dict[str, tuple[str, list[str]]]:
    """First line of each box → its operation and all its lines."""
    found = {}
    for group in ET.fromstring(drawing).iter(f"{SVG}g"):
        lines = [t.text or "" for t in group.iter(f"{SVG}text")]
        found[" | ".join(lines)] = (group.attrib["data-op"], lines)
    return found


def test_svg_has_every_layer_once() -> None:
    drawing = svg(capture(Residual(), image(3, 8, 8)))
    assert set(boxes(drawing)) == {
        "image | N × 3 × 8 × 8",
        "conv2d 3×3 | batch_norm | conv | N × 8 × 8 × 8",
        "conv2d 1×1 | down | N × 8 × 8 × 8",
        "add | relu | N × 8 × 8 × 8",
        "mean | N × 8",
        "linear | head | N × 4",
        "output | N × 4",
    }
    assert "http" not in drawing.replace("http://www.w3.org/2000/svg", "")


def test_svg_escapes_names() -> None:
    hostile = "</text><script>alert(1)</script>&'\"]]>\x00\x1b<!--"
    build = Builder(hostile, [hostile, "y"])
    spec = TensorSpec(name=hostile, dtype="float32", shape=(BATCH, 4))
    x = build.input(spec, dynamic=True)
    build.layer = hostile
    graph = build.finish([build.one("cat", [build.one("relu", [x]), x], dim=1)], [hostile + "2"])
    root = ET.fromstring(svg(graph))
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {
        "svg", "style", "path", "g", "title", "rect", "text",
    }  # fmt: skip
    shown = "".join(t.text or "" for t in root.iter(f"{SVG}title"))
    assert "<script>alert(1)</script>" in shown
    assert "\x00" not in shown


def test_a_dense_network_fits_its_picture() -> None:
    """Each of forty layers reads all before it."""
    build = Builder("dense", ["x", "y"])
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 4))
    made = [build.input(spec, dynamic=True)]
    for _ in range(40):
        made.append(build.one("mean", [build.one("cat", made, dim=1)], dim=(1,), keepdim=True))
    root = ET.fromstring(svg(build.finish(made[-1:], ["y"])))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    rectangles = list(root.iter(f"{SVG}rect"))
    assert len(rectangles) == 82
    for rectangle in rectangles:
        x, y, w, h = (float(rectangle.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


@pytest.mark.parametrize("seed", range(20))
def test_layout_of_random_graphs(seed: int) -> None:
    """Edges go down, boxes do not overlap, and everything lies inside."""
    rng = random.Random(seed)
    count = rng.randint(1, 40)
    sizes = [(rng.uniform(20, 150), rng.uniform(10, 60)) for _ in range(count)]
    edges = [(rng.randrange(b), b) for b in range(1, count) for _ in range(rng.randint(0, 3))]
    plan = layered(sizes, edges)
    for (x, y), (w, h) in zip(plan.boxes, sizes, strict=True):
        assert x - w / 2 >= 0
        assert x + w / 2 <= plan.width
        assert 0 <= y <= y + h <= plan.height
    for a, b in edges:
        assert plan.boxes[a][1] + sizes[a][1] < plan.boxes[b][1]
    placed = sorted(zip(plan.boxes, sizes, strict=True), key=lambda p: p[0])
    for i, ((x0, y0), (w0, h0)) in enumerate(placed):
        for (x1, y1), (w1, h1) in placed[i + 1 :]:
            apart = abs(x0 - x1) >= (w0 + w1) / 2 + GAP_X - 1e-6
            assert apart or y0 + h0 <= y1 or y1 + h1 <= y0
    assert len(plan.arrows) == len({b for _, b in edges})


def test_a_chain_is_straight_and_branches_do_not_cross() -> None:
    chain = layered([(50.0, 20.0)] * 9, list(pairwise(range(9))))
    assert len({round(x, 3) for x, _ in chain.boxes}) == 1
    branches = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 5), (3, 6), (4, 7), (5, 7), (6, 7)]
    plan = layered([(50.0, 20.0)] * 8, branches)
    across = [plan.boxes[i][0] for i in range(8)]
    assert (across[1] < across[2]) == (across[4] < across[5])
    assert (across[2] < across[3]) == (across[5] < across[6])


def test_an_empty_graph_is_drawn() -> None:
    assert ET.fromstring(svg(Graph("nothing"))) is not None
    assert text(Graph("nothing")) == "graph nothing()\n  return \n"
