"""Searches compare their winner with float64: each problem of a GPU's plan must have an answer."""

from __future__ import annotations

import pytest
import torch

from tessella import compiler
from tessella.compiler import pipeline
from tessella.compiler.choices.choose_kernels import constants_of, views
from tessella.compiler.choices.variants import layouts_to_try, with_layout
from tessella.compiler.passes import request_for, run
from tessella.compiler.precision import assign
from tessella.search.inputs import sample_inputs
from tessella.search.inspection import exact_answers
from tests.support.choices import problem_of
from tests.support.networks import captured

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision"),
    [("vit", "fp16"), ("vit", "int8"), ("vit", "fp8"), ("lenet", "int8")],
)
def test_each_problem_of_a_network_has_an_answer_in_float64(name: str, precision: str) -> None:
    graph, found = captured(name), None
    if precision in compiler.KINDS:
        image = torch.randn(4, *map(int, graph.inputs[0].shape[1:]))
        found = compiler.calibrate(graph, [{"image": image}], kinds=(precision,))
    exact = pipeline.optimized(graph)
    assignment = assign(exact, precision, {}, "sm_90", found)
    lowered = run(exact, request_for(exact, assignment, found), after="optimize", until="fuse")
    (layout,) = layouts_to_try(lowered, precision, "sm_90")
    lowered, formats = with_layout(lowered, layout)
    concrete = lowered.at_batch(2)
    constants = {v.name: t for v, t in concrete.constants.items()}
    slices, seen = views(concrete, formats, "sm_90"), set()
    for node in concrete.nodes:
        problem = problem_of(concrete, node, formats, slices)
        if problem.key in seen or problem.op == "fallback":
            continue
        seen.add(problem.key)
        inputs = sample_inputs(problem, CPU)
        answers = exact_answers(problem, constants_of(node, problem, constants), inputs)
        for answer, meta in zip(answers, problem.outputs, strict=True):
            assert (answer.dtype, tuple(answer.shape)) == (torch.float64, meta.shape), node.op
            assert answer.isfinite().all(), node.op
    assert len(seen) >= 5
