"""Concatenations that copy nothing: whoever makes a part writes it where the whole wants it.

A part is then a slice of the concatenation's buffer. That is no rule that always pays: few kernels
write into slices, and what else reads a part then reads a slice. So every part is asked by
search, with all who make or read it: as a slice, or copied as before. What concatenations take is
computed from the time of copying all their parts: DenseNet's are asked in 4,900 ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tessella.artifacts.program import Slice
from tessella.compiler.choices import choose_kernels
from tessella.compiler.choices.choose_kernels import (
    Choice,
    Slices,
    Tuner,
    as_measured,
    is_aligned,
    lying,
    trials,
)
from tessella.compiler.rewrites.assign_layout import Formats
from tessella.core.errors import CompileError
from tessella.core.events import Emit, silent
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.tuning import Trial

WORTH_IT = 0.98  # a concatenation in slices must be 2 % faster, with all who are concerned


def apply(
    graph: Graph, choices: Sequence[Choice], tuner: Tuner, emit: Emit = silent
) -> list[Choice]:
    """The choices for a graph with concrete shapes, with concatenations in slices where faster.

    The last concatenation is asked first: others that join the same parts, as DenseNet's do, then
    lie in its buffer as well.
    """
    if tuner.target == "reference":
        return list(choices)
    program = _Program(graph, choices, tuner)
    for index in reversed(range(len(choices))):
        if choices[index].node.op == "cat":
            program.join(index)
    program.measure_joins()
    return program.choices


def again(
    graph: Graph, formats: Formats, tuner: Tuner, emit: Emit, name: str
) -> list[Choice] | None:
    """The choices for another batch size, with the slices that one has; None where that cannot be.

    What is faster as a slice is so at each size, within what noise decides (DenseNet-121 on a CPU
    with AVX2: of 116 parts 14 to 96 were slices at six sizes, asked at each); and each step is
    searched once, as it will be, not as it would be without slices, too.
    """
    if not tuner.joined or any(place.axis == 0 for place in tuner.joined[0].values()):
        return None
    try:
        choices = choose_kernels.apply(graph, formats, tuner, emit, name, tuner.joined[0])
    except CompileError:
        return None
    for index, choice in enumerate(choices):
        if choice.slices and choice.node.op != "split":
            choices[index] = replace(choice, trials=_writer_first(choice.trials))
    return choices if all(choice.trials for choice in choices) else None


@dataclass(frozen=True)
class _Part:
    """An input of a concatenation, and where it would lie."""

    value: Value
    place: Slice


class _Program:
    """The steps of a bucket, and which of their values are slices so far."""

    def __init__(self, graph: Graph, choices: Sequence[Choice], tuner: Tuner) -> None:
        self.choices = list(choices)
        self._before = tuple(choices)
        self._tuner, self._constants = tuner, set(graph.constants)
        self._slices: Slices = {n: s for c in choices for n, s in c.slices.items()}
        self._maker = {v: i for i, c in enumerate(choices) for v in c.node.outputs}
        self._joins = {c.node.output.name for c in choices if c.node.op == "cat"}
        self._readers: dict[Value, list[int]] = {}
        self._plain: dict[str, TensorMeta] = {}  # what values are as no slices of anything
        for index, choice in enumerate(choices):
            for value in dict.fromkeys(_read(choice.node)):
                self._readers.setdefault(value, []).append(index)
            values = (*choice.node.inputs, *choice.node.outputs)
            metas = (*choice.problem.inputs, *choice.problem.outputs)
            for end, meta in zip(values, metas, strict=True):
                if end is not None and meta is not None:
                    self._plain[end.name] = meta

    def join(self, index: int) -> None:
        """Let the parts of a concatenation lie in it, those for which that is faster."""
        self._lie_in_another(index)
        share_us = self._cost_us([index])
        whole = self._plain[self.choices[index].node.output.name].nbytes
        found: Slices = {}
        for part in self._parts(index):
            alone = {part.value.name: part.place}
            # DenseNet's parts are read by a dozen concatenations, whose turn comes with all parts
            concerned = [i for i in self._concerned(part.value) if self._op(i) != "cat"]
            after = self._after(alone, concerned)
            if after is None:
                continue
            copy_us = share_us * self._plain[part.value.name].nbytes / max(whole, 1)
            if _sum_us(after.values()) - self._cost_us(concerned) < copy_us:
                found |= alone
        if found:
            values = {v for v in self._maker if v.name in found}
            self._take_if_faster(found, {i for v in values for i in self._concerned(v)})

    def measure_joins(self) -> None:
        """Measure the concatenations whose problem has changed since they were measured."""
        for index, (before, now) in enumerate(zip(self._before, self.choices, strict=True)):
            if now.node.op == "cat" and now.problem != before.problem:
                tried = trials(now.node, now.problem, self._tuner)
                self.choices[index] = replace(now, trials=tried)

    def _lie_in_another(self, index: int) -> None:
        """A concatenation of parts that lie side by side in a longer one is a slice of that."""
        node = self.choices[index].node
        axis, parts = node.attrs["dim"], _read(node)
        first = self._slices.get(parts[0].name)
        if first is None or first.axis != axis or not self._free(node.output):
            return
        if first.of not in self._joins:  # parts of a split: whoever made the whole gave it a place
            return
        start = first.start
        for value in parts:
            if self._slices.get(value.name) != replace(first, start=start):
                return
            start += self._plain[value.name].shape[axis]
        self._take_if_faster({node.output.name: first}, set(self._concerned(node.output)))

    def _parts(self, index: int) -> list[_Part]:
        """The inputs that can be slices of the result."""
        choice = self.choices[index]
        axis, whole = choice.node.attrs["dim"], choice.node.output.name
        base = self._slices.get(whole, Slice(of=whole, axis=axis, start=0))
        dense, parts, start = self._plain[base.of], [], base.start
        if base.axis != axis or dense.format == "strided":
            return []
        for value in _read(choice.node):
            meta, place = self._plain[value.name], replace(base, start=start)
            start += meta.shape[axis]
            made = (
                value in self._maker
                and not catalog.kernel(self.choices[self._maker[value]].kernel).views
            )
            alike = (meta.format, meta.dtype) == (dense.format, dense.dtype)
            once = choice.node.inputs.count(value) == 1
            aligned = is_aligned(dense, place, self._tuner.target)
            if made and alike and once and aligned and self._free(value):
                parts.append(_Part(value, place))
        return parts

    def _op(self, index: int) -> str:
        return self.choices[index].node.op

    def _free(self, value: Value) -> bool:
        """Whether a value lies in nothing yet, and nothing in it."""
        lies = value.name in self._slices
        return not lies and all(s.of != value.name for s in self._slices.values())

    def _concerned(self, value: Value) -> list[int]:
        return [self._maker[value], *self._readers.get(value, ())]

    def _take_if_faster(self, found: Slices, concerned: set[int]) -> None:
        order = sorted(concerned)
        after = self._after(found, order)
        if after is not None and _sum_us(after.values()) < WORTH_IT * self._cost_us(order):
            self._slices |= found
            for index, choice in after.items():
                self.choices[index] = choice

    def _cost_us(self, indices: Iterable[int]) -> float:
        return _sum_us(self.choices[i] for i in indices)

    def _after(self, found: Slices, concerned: Iterable[int]) -> dict[int, Choice] | None:
        """The steps chosen again with more slices; None if nobody can carry one out."""
        slices = self._slices | found
        chosen = {}
        for index in concerned:
            node = self.choices[index].node
            problem = self._problem(index, slices)
            made = {v.name: slices[v.name] for v in node.outputs if v.name in slices}
            try:
                tried = self._tried(index, problem)
            except CompileError:
                return None
            if made and node.op != "split":
                tried = _writer_first(tried)
            if not tried:
                return None
            chosen[index] = Choice(node=node, problem=problem, trials=tried, slices=made)
        return chosen

    def _tried(self, index: int, problem: Problem) -> tuple[Trial, ...]:
        """The trials of a step; of a convolution that is to write a slice only as it is already.

        On an H200 the winning configuration takes as long into a slice, within 1 %.
        """
        choice = self.choices[index]
        if choice.node.op == "cat":
            before = self._before[index]
            return before.trials if problem == before.problem else (self._joined(index, problem),)
        node, row, config = choice.node, catalog.kernel(choice.kernel), choice.config
        sliced = problem.outputs[0].strides is not None and node.op != "cat"
        if not sliced or row.refusal(problem) or config not in row.configs(problem):
            return trials(node, problem, self._tuner)
        options = self._tuner.options
        options = replace(options, algorithms=(row.algorithm,), sources=(row.source,))
        found = trials(node, problem, self._tuner, [(row, config)], options)
        if self._tuner.target == "cpu":
            # of the others, what they took without a slice is what other batch sizes know of them
            others = (trial for trial in choice.trials if trial.kernel != row.id)
            self._tuner.evidence.add(as_measured(problem), (*found, *others))
        return found

    def _joined(self, index: int, problem: Problem) -> Trial:
        """A concatenation's trial as it would be, by the bytes that are still copied."""
        rows = catalog.candidates("cat", self._tuner.target)
        row = next((r for r in rows if not r.last_resort and r.refusal(problem) is None), None)
        if row is None:
            raise CompileError("no kernel can join these slices", seen=problem)
        parts = [(i, meta.nbytes) for i, meta in enumerate(problem.inputs) if meta is not None]
        copied = sum(nbytes for i, nbytes in parts if i not in problem.in_place)
        share = copied / max(1, sum(nbytes for _, nbytes in parts))
        whole_us = self._before[index].trials[0].time_us or 0.0
        return Trial(kernel=row.id, time_us=share * whole_us)

    def _problem(self, index: int, slices: Slices) -> Problem:
        """The problem of a step whose values are slices as ``slices`` has them."""
        node, problem = self.choices[index].node, self.choices[index].problem

        def meta(value: Value) -> TensorMeta:
            plain, place = self._plain[value.name], slices.get(value.name)
            if place is None or plain.strides is not None:
                return plain
            return self._plain[place.of].part(place.axis, plain.shape[place.axis])

        return replace(
            problem,
            inputs=tuple(None if v is None else meta(v) for v in node.inputs),
            outputs=tuple(meta(v) for v in node.outputs),
            in_place=lying(node, slices, meta),
        )


def _read(node: Node) -> list[Value]:
    return [value for value in node.inputs if value is not None]


def _writer_first(tried: tuple[Trial, ...]) -> tuple[Trial, ...]:
    """The trials, the fastest that writes where it is told to at their head; none without one."""
    for trial in tried:
        if trial.refused is None and catalog.kernel(trial.kernel).writes_out:
            return (trial, *(t for t in tried if t is not trial))
    return ()


def _sum_us(choices: Iterable[Choice]) -> float:
    """The measured time of these steps. A concatenation of what lies there already runs nothing."""
    return sum(
        0.0 if len(c.problem.in_place) == len(c.node.inputs) else c.trials[0].time_us or 0.0
        for c in choices
    )
