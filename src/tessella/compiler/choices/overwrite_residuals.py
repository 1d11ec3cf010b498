"""Results that take the memory of an operand that nobody needs any more, where that is faster.

Which operands die is known once every step has its kernel: a view of one keeps it alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessella.compiler.choices.choose_kernels import Choice, Tuner, trials
from tessella.core.events import Emit, silent
from tessella.execution import liveness
from tessella.execution.liveness import Use
from tessella.graph.graph import Graph
from tessella.kernels import catalog


def apply(
    graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit = silent
) -> list[Choice]:
    """The choices for a graph with concrete shapes; steps that may overwrite are asked again."""
    slices = {n for c in choices for name, s in c.slices.items() for n in (name, s.of)}
    lasting = {v.name for v in (*graph.inputs, *graph.outputs, *graph.constants)} | slices
    uses = [
        Use(
            [None if v is None else v.name for v in c.node.inputs],
            [v.name for v in c.node.outputs],
            aliases=catalog.kernel(c.kernel).aliases,
        )
        for c in choices
    ]
    changed = list(choices)
    for index, ends in enumerate(liveness.dying(uses, lasting)):
        choice = choices[index]
        rows = catalog.candidates(choice.node.op, tuner.target)
        taken = {row.overwritten for row in rows if row.overwritten is not None} & set(ends)
        if taken:
            problem = replace(choice.problem, dying=tuple(sorted(taken)))
            changed[index] = replace(
                choice, problem=problem, trials=trials(choice.node, problem, tuner)
            )
    return changed
