"""Rewrites by worklist do what a loop does that begins again after every rewrite."""

from __future__ import annotations

import gc
import random
import time

import pytest

from benchmarks.rewriting import KINDS, graph_of
from tessella.compiler.passes import Request, run
from tessella.compiler.rewrites import lower_quantization, move_reshapes, worklist
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.build import Builder
from tessella.graph.check import check
from tessella.graph.graph import Dim, Graph
from tessella.graph.show import text


def restarted(graph: Graph, *rewrites: worklist.Rewrite) -> int:
    """The definition: from the first node and the first rewrite again, after each that applies."""
    count = 0
    while any(rewrite(graph, n) for rewrite in rewrites for n in list(graph.nodes)):
        count += 1
    return count


def reshapes(seed: int) -> Graph:
    """Element-wise operations with reshapes between, in two shapes."""
    dice = random.Random(seed)
    build = Builder("g")
    spec = TensorSpec(name="x", dtype="float32", shape=(DimRange(min=1, opt=2, max=8), 4, 6))
    x = build.input(spec, dynamic=True)
    whole, cut = [build.one("reshape", [x], shape=(Dim(4), 6))], [build.one("relu", [x])]
    for _ in range(24):
        here, there = (whole, cut) if dice.random() < 0.5 else (cut, whole)
        v = dice.choice(here[-3:])
        if dice.random() < 0.45:
            shape = (Dim(1), 4, 6) if there is cut else (Dim(4), 6)
            there.append(build.one("reshape", [v], shape=shape))
        elif dice.random() < 0.5:
            here.append(build.one("add", [v, dice.choice(here)], alpha=1))
        else:
            here.append(build.one("sigmoid", [v]))
    ends = [v for v in (*whole, *cut) if not build.graph.users(v)]
    return build.finish(ends, [f"y{i}" for i in range(len(ends))])


@pytest.mark.parametrize("seed", range(24))
def test_reshapes_move_as_with_restarts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = reshapes(seed)
    made, right = graph.copy(), graph.copy()
    count = move_reshapes.apply(made)
    monkeypatch.setattr(move_reshapes, "until_done", restarted)
    assert move_reshapes.apply(right) == count
    check(made)
    assert text(made) == text(right)


@pytest.mark.parametrize("seed", range(6))
def test_roundings_meet_as_with_restarts(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("rounded", 40 + 7 * seed)
    made, right = graph.copy(), graph.copy()
    count = lower_quantization.apply(made)
    monkeypatch.setattr(lower_quantization, "until_done", restarted)
    assert lower_quantization.apply(right) == count
    check(made)
    assert text(made) == text(right)


@pytest.mark.parametrize("kind", KINDS)
def test_all_rewrites_are_linear(kind: str) -> None:
    """Six times the nodes take less than 18 times as long; by a restart for each it was 36."""
    request = Request(target="cpu")
    run(graph_of(kind, 50), request)  # imports, and shapes that are inferred once

    def least_s(nodes: int, runs: int) -> float:
        """Of the quickest run, without the collector, which other tests' objects slow down."""
        seconds = []
        for _ in range(runs):
            graph = graph_of(kind, nodes)
            gc.collect()
            gc.disable()
            try:
                begun = time.process_time()
                run(graph, request)
                seconds.append(time.process_time() - begun)
            finally:
                gc.enable()
        return min(seconds)

    assert least_s(720, runs=1) < 18 * least_s(120, runs=2)
