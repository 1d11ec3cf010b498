"""Two steps in a row as one: what lies between is used on while it is on the chip.

- Two 1×1 convolutions. In a residual network the value between is read again later, and so still
  written; but the second convolution does not read it from memory.
- A convolution and a ``max_pool2d`` that alone reads it: most of what it makes is never stored.

Whether that pays depends on sizes and machine: each chain is asked by auction beside its two steps,
and those that win alone are raced as a whole program, one kind after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tessella.compiler import race
from tessella.compiler.passes.choose_kernels import (
    Choice,
    Tuner,
    as_measured,
    constants_of,
    trials,
)
from tessella.core.errors import CompileError
from tessella.core.events import Emit, phase
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog
from tessella.kernels.auction import Looks
from tessella.kernels.catalog import Kernel
from tessella.kernels.problems import conv2d_chain, conv2d_pool, unchainable, unpoolable

WORTH_IT = 0.995  # the program with chains must win by half a percent
OF_SECOND = {"conv2d": "conv2d_chain", "max_pool2d": "conv2d_pool"}  # what a step is one with


@dataclass(frozen=True)
class Pair:
    """Two steps that may become one, by their places."""

    first: int
    second: int
    step: Choice


def apply(graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit) -> list[Choice]:
    """The choices for a graph with concrete shapes, with chains as one step where that is faster.

    The steps change, the graph's nodes do not. Where no kernel fits, nothing is measured.
    """
    chosen = list(choices)
    for op in OF_SECOND.values():
        won = _without_overlap(_winners(graph, chosen, op, tuner))
        if not won:
            continue
        chained = _with_chains(chosen, won)
        apart_us, chained_us = race.times_us([(graph, chosen), (graph, chained)], tuner)
        times = f"{apart_us:.0f} µs apart, {chained_us:.0f} µs chained"
        emit(phase("chains", f"{len(won)} {op}: {times}"))
        if chained_us < WORTH_IT * apart_us:
            chosen = chained
    return chosen


def kernels(op: str, tuner: Tuner) -> list[Kernel]:
    """Those that may carry out such a chain on the tuner's target."""
    return [
        row
        for row in catalog.candidates(op, tuner.target)
        if not row.last_resort and not row.unproven
    ]


def pairs(graph: Graph, choices: Sequence[Choice], op: str) -> Iterator[Pair]:
    """Convolutions and what reads their results, with the step ``op`` that both would be."""
    readers: dict[Value, list[int]] = {}
    for index, choice in enumerate(choices):
        for value in choice.node.inputs:
            if value is not None:
                readers.setdefault(value, []).append(index)
    held = {place.of for choice in choices for place in choice.slices.values()}
    for index, choice in enumerate(choices):
        if choice.node.op != "conv2d":
            continue
        between = choice.node.output
        for other in readers.get(between, []):
            keep = len(readers[between]) > 1 or between in graph.outputs
            second = choices[other]
            if OF_SECOND.get(second.node.op) == op and not refusal(choice, second, held, keep):
                yield Pair(index, other, chain(choice, second, keep=keep))


def refusal(first: Choice, second: Choice, held: set[str], keep: bool) -> str | None:
    """Why two steps, the second of which reads the first's result, are no chain; or None.

    Args:
        held: values that hold slices.
        keep: the result of the first is needed otherwise, too.
    """
    if second.node.op not in OF_SECOND or second.node.inputs[0] is not first.node.output:
        return "the second is no convolution or pooling of the first's result"
    if first.slices or second.slices or {first.node.output.name, second.node.output.name} & held:
        return "a result lies in another value, or holds one"
    if second.node.op == "max_pool2d":
        return "others read it too" if keep else unpoolable(first.problem, second.problem)
    missing = [i for i in (1, 2, 4) if second.problem.meta(i) and i not in second.problem.constant]
    if missing:
        return "the second's weights are computed: they may not be there yet"
    return unchainable(first.problem, second.problem)


def chain(first: Choice, second: Choice, *, keep: bool) -> Choice:
    """Both steps as one, without trials."""
    if second.node.op == "max_pool2d":
        return _pooled(first, second)
    problem = conv2d_chain(first.problem, second.problem, keep=keep)
    before, after = first.node, second.node
    scale = after.inputs[4] if len(after.inputs) > 4 else None
    node = Node(
        op=problem.op,
        inputs=(*before.inputs, *[None] * (5 - len(before.inputs)), *after.inputs[1:3], scale),
        outputs=(after.output, before.output) if keep else (after.output,),
        attrs=problem.attrs,
        layer=before.layer,
    )
    return Choice(node=node, problem=problem, trials=())


def _pooled(first: Choice, second: Choice) -> Choice:
    problem = conv2d_pool(first.problem, second.problem)
    node = Node(
        op=problem.op,
        inputs=first.node.inputs,
        outputs=second.node.outputs,
        attrs=problem.attrs,
        layer=first.node.layer,
    )
    return Choice(node=node, problem=problem, trials=())


def _winners(
    graph: Graph, choices: Sequence[Choice], op: str, tuner: Tuner
) -> list[tuple[float, Pair]]:
    """Pairs that are faster as one step, and by how much, in µs."""
    won = []
    rows = kernels(op, tuner)
    fitting = [
        pair
        for pair in (pairs(graph, choices, op) if rows else ())
        if not all(row.refusal(pair.step.problem) for row in rows)
    ]
    terms = replace(tuner.terms, algorithms=[row.algorithm for row in rows])
    problems = [as_measured(pair.step.problem) for pair in fitting]
    looks = Looks(
        {
            problem.key: (problem, constants_of(pair.step.node, problem, tuner.constants))
            for pair, problem in zip(fitting, problems, strict=True)
        },
        target=tuner.target,
        cache=tuner.cache,
        terms=terms,
    )
    for pair, problem in zip(fitting, problems, strict=True):
        with contextlib.suppress(CompileError):  # none that fits runs: the steps stay two
            near = looks.near(problem.key)
            found = trials(pair.step.node, pair.step.problem, tuner, near, terms)
            steps = [choices[i].trials[0].time_us or 0.0 for i in (pair.first, pair.second)]
            saved_us = sum(steps) - (found[0].time_us or 0.0)
            if saved_us > 0:
                won.append((saved_us, replace(pair, step=replace(pair.step, trials=found))))
    return won


def _without_overlap(won: Sequence[tuple[float, Pair]]) -> list[Pair]:
    """A step goes into one chain: into that which saves most."""
    taken: set[int] = set()
    kept = []
    for _, pair in sorted(won, key=lambda one: (-one[0], one[1].first)):
        if not {pair.first, pair.second} & taken:
            taken |= {pair.first, pair.second}
            kept.append(pair)
    return kept


def _with_chains(choices: Sequence[Choice], won: Sequence[Pair]) -> list[Choice]:
    """A chain stands where its first step stood: whatever it reads is there."""
    steps = {pair.first: pair.step for pair in won}
    gone = {pair.second for pair in won}
    return [steps.get(i, choice) for i, choice in enumerate(choices) if i not in gone]
