"""Two steps in a row as one: what lies between is used on while it is on the chip.

- Two 1×1 convolutions. In a residual network the value between is read again later, and so still
  written; but the second convolution does not read it from memory.
- A convolution and a ``max_pool2d`` that alone reads it: most of what it makes is never stored.
- A ``linear`` and the layer norm over its rows, with the quantization that one step may hold.
  Where the norm comes first in a block (ViT), the sum is the next residual, and is written, too.

Whether that pays depends on sizes and machine: each chain is asked by search beside its two steps,
and those that win alone are raced as a whole program, one kind after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tessella.compiler.choices import race
from tessella.compiler.choices.choose_kernels import (
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
from tessella.kernels.catalog import Kernel
from tessella.operations.norm_step import norm_step
from tessella.operations.problem import Problem
from tessella.operations.problems import (
    conv2d_chain,
    conv2d_pool,
    linear_norm,
    unchainable,
    unnormable,
    unpoolable,
)
from tessella.search.prefetch import Prefetch

WORTH_IT = 0.995  # the program with chains must win by half a percent


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
    for op in OPS:
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
    """The kernels that may run a chain, as operation ``op``, on the tuner's target."""
    return [
        row
        for row in catalog.candidates(op, tuner.target)
        if not row.last_resort and not row.unproven
    ]


def pairs(graph: Graph, choices: Sequence[Choice], op: str) -> Iterator[Pair]:
    """Steps and what reads their results, with the step ``op`` that both would be."""
    firsts = {first for (first, _), kind in KINDS.items() if kind.op == op}
    readers: dict[Value, list[int]] = {}
    for index, choice in enumerate(choices):
        for value in choice.node.inputs:
            if value is not None:
                readers.setdefault(value, []).append(index)
    held = {place.of for choice in choices for place in choice.slices.values()}
    for index, choice in enumerate(choices):
        if choice.node.op not in firsts:
            continue
        between = choice.node.output
        for other in readers.get(between, []):
            keep = len(readers[between]) > 1 or between in graph.outputs
            second = choices[other]
            kind = KINDS.get((choice.node.op, second.node.op))
            if kind is None or kind.op != op or refusal(choice, second, held, keep):
                continue
            yield Pair(index, other, chain(choice, second, keep=keep))


def refusal(first: Choice, second: Choice, held: set[str], keep: bool) -> str | None:
    """Why two steps are no chain, or None.

    Args:
        held: values that hold slices.
        keep: the result of the first is needed otherwise, too.
    """
    kind = KINDS.get((first.node.op, second.node.op))
    if kind is None:
        return "there is no such chain"
    results = {value.name for value in (*first.node.outputs, *second.node.outputs)}
    if first.slices or second.slices or results & held:
        return "a result lies in another value, or holds one"
    return kind.refusal(first, second, keep)


def chain(first: Choice, second: Choice, *, keep: bool) -> Choice:
    """Both steps as one, without trials."""
    problem, inputs = KINDS[first.node.op, second.node.op].join(first, second, keep)
    node = Node(
        op=problem.op,
        inputs=inputs,
        outputs=(*second.node.outputs, *first.node.outputs[: int(keep)]),
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
    options = replace(tuner.options, algorithms=[row.algorithm for row in rows])
    problems = [as_measured(pair.step.problem) for pair in fitting]
    prefetch = Prefetch(
        {
            problem.key: (problem, constants_of(pair.step.node, problem, tuner.constants))
            for pair, problem in zip(fitting, problems, strict=True)
        },
        target=tuner.target,
        cache=tuner.cache,
        options=options,
        evidence=tuner.evidence,
    )
    for pair, problem in zip(fitting, problems, strict=True):
        with contextlib.suppress(CompileError):  # none that fits runs: the steps stay two
            candidates = prefetch.candidates(problem.key)
            found = trials(pair.step.node, pair.step.problem, tuner, candidates, options)
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


# ------------------------------------------------------------------ the kinds of chains

Inputs = tuple[Value | None, ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of chain.

    Attributes:
        op: what both steps are as one.
        refusal: why two steps are not of this kind, or None; whether others read the first's
            result is given.
        join: both as one problem, and what it reads.
    """

    op: str
    refusal: Callable[[Choice, Choice, bool], str | None]
    join: Callable[[Choice, Choice, bool], tuple[Problem, Inputs]]


def _not_chained(first: Choice, second: Choice, keep: bool) -> str | None:
    constants = second.problem.operation.positions(("weight", "bias", "scale"))
    if why := _not_read(first, second, 0) or _computed(second, constants):
        return why
    return unchainable(first.problem, second.problem)


def _chained(first: Choice, second: Choice, keep: bool) -> tuple[Problem, Inputs]:
    problem = conv2d_chain(first.problem, second.problem, keep=keep)
    following = {f"next_{name}": second.node.get(name) for name in ("weight", "bias", "scale")}
    return problem, problem.operation.ordered(**_operands(first), **following)


def _not_pooled(first: Choice, second: Choice, keep: bool) -> str | None:
    if keep:
        return "others read it too"
    return _not_read(first, second, 0) or unpoolable(first.problem, second.problem)


def _pooled(first: Choice, second: Choice, keep: bool) -> tuple[Problem, Inputs]:
    return conv2d_pool(first.problem, second.problem), first.node.inputs


def _not_normed(first: Choice, second: Choice, keep: bool) -> str | None:
    norm = norm_step(second.problem)
    if isinstance(norm, str):
        return norm
    if why := _not_read(first, second, norm.value) or _computed(second, (norm.weight, norm.bias)):
        return why
    return unnormable(first.problem, second.problem)


def _normed(first: Choice, second: Choice, keep: bool) -> tuple[Problem, Inputs]:
    norm = norm_step(second.problem)
    assert not isinstance(norm, str)
    problem, read = linear_norm(first.problem, second.problem, keep=keep), second.node.inputs
    vectors = {
        "norm_weight": read[norm.weight],
        "norm_bias": read[norm.bias],
        "code_scale": None if norm.code_scale is None else read[norm.code_scale],
    }
    return problem, problem.operation.ordered(**_operands(first), **vectors)


def _operands(layer: Choice) -> dict[str, Value | None]:
    """What a layer reads, by name."""
    names = ("input", "weight", "bias", "residual", "scale")
    return {name: layer.node.get(name) for name in names}


def _not_read(first: Choice, second: Choice, position: int) -> str | None:
    if second.node.inputs[position] is first.node.output:
        return None
    return "the second does not read the first's result"


def _computed(second: Choice, positions: Sequence[int]) -> str | None:
    problem = second.problem
    if all(problem.meta(i) is None or i in problem.constant for i in positions):
        return None
    return "the second's weights are computed: they may not be there yet"


_NORM = Kind(op="linear_norm", refusal=_not_normed, join=_normed)
KINDS: dict[tuple[str, str], Kind] = {  # by the two steps' operations, in the order they are asked
    ("conv2d", "conv2d"): Kind(op="conv2d_chain", refusal=_not_chained, join=_chained),
    ("conv2d", "max_pool2d"): Kind(op="conv2d_pool", refusal=_not_pooled, join=_pooled),
    ("linear", "layer_norm"): _NORM,
    ("linear", "pointwise"): _NORM,
}
OPS = tuple(dict.fromkeys(kind.op for kind in KINDS.values()))
