"""Choices of kernels, and trials, for which nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessella.compiler.choices import choose_kernels, join_in_place
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.rewrites import assign_layout
from tessella.graph.graph import Graph, Node
from tessella.operations.problem import Problem
from tessella.search.tuning import TimingCache, Trial


def tuner_of(graph: Graph, **changes: Any) -> Tuner:
    constants = {v.name: t for v, t in graph.constants.items()}
    return Tuner(
        target="cpu", math="ieee", constants=constants, cache=TimingCache(), budget_s=0.0, **changes
    )


def choices_of(concrete: Graph, formats: assign_layout.Formats) -> list[Choice]:
    problems = choose_kernels.problems_of(concrete, formats, "ieee", {})
    trials = (Trial(kernel="reference", time_us=1.0),)
    return [
        Choice(node=node, problem=problem, trials=trials)
        for node, problem in zip(concrete.nodes, problems, strict=True)
    ]


def problem_of(
    concrete: Graph,
    node: Node,
    formats: assign_layout.Formats,
    slices: choose_kernels.Slices | None = None,
) -> Problem:
    """What kernels are asked to do for one node."""
    problems = choose_kernels.problems_of(concrete, formats, "ieee", slices or {})
    return problems[list(concrete.nodes).index(node)]


trials = join_in_place.trials  # before a test puts others there


def for_nothing(*asked: Any) -> tuple[Trial, ...]:
    return tuple(t if t.refused else replace(t, time_us=0.0) for t in trials(*asked))
