"""Choices of kernels, and trials, for which nothing was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessella.compiler.choices import choose_kernels, join_in_place
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.rewrites import assign_layout
from tessella.graph.graph import Graph
from tessella.search.tuning import TimingCache, Trial


def tuner_of(graph: Graph, **changes: Any) -> Tuner:
    constants = {v.name: t for v, t in graph.constants.items()}
    return Tuner(
        target="cpu", math="ieee", constants=constants, cache=TimingCache(), budget_s=0.0, **changes
    )


def choices_of(concrete: Graph, formats: assign_layout.Formats) -> list[Choice]:
    return [
        Choice(
            node=node,
            problem=choose_kernels.problem_of(concrete, node, formats, "ieee", {}),
            trials=(Trial(kernel="reference", time_us=1.0),),
        )
        for node in concrete.nodes
    ]


trials = join_in_place.trials  # before a test puts others there


def for_nothing(*asked: Any) -> tuple[Trial, ...]:
    return tuple(t if t.refused else replace(t, time_us=0.0) for t in trials(*asked))
