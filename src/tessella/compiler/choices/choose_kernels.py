"""Kernel choice by measurement: every kernel that fits a step is run, and the fastest is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tessella.artifacts.program import Slice, begins_aligned, in_place
from tessella.compiler.problems import problem_of
from tessella.compiler.rewrites.assign_layout import Formats
from tessella.core.device import fingerprint
from tessella.core.dtype import Math
from tessella.core.events import Emit, progress
from tessella.graph.graph import Graph, Node, Value
from tessella.graph.value import fixed
from tessella.kernels.catalog import Config, kernel
from tessella.kernels.epilogue.int8 import LARGEST_BETA
from tessella.kernels.epilogue.sixteen_bit import LEAST_GAMMA, MOST_GAMMA
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.allowance import Allowance
from tessella.search.estimate import estimated
from tessella.search.evidence import Candidate, Evidence
from tessella.search.find import SearchOptions, find
from tessella.search.prefetch import Prefetch
from tessella.search.tuning import TimingCache, Trial

WORKSPACE_BYTES = 1 << 30  # of one step; it lies in the arena, which all steps share
# In 50 layers of ResNet-50 no kernel won whose first configuration took 1.22 times the best time.
CUTOFF = 1.3

# in the names of algorithms that round more than plain sums: Winograd's F(4, 3) ten times as much
ROUGH = ("winograd", "fft")
TOO_ROUGH = "this network carries its roundings too far"

Slices = dict[str, Slice]  # by value name: those that lie in another value's memory


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A node of a graph with concrete shapes, as a problem, with its trials: the first one won.

    Attributes:
        slices: its outputs that are slices of other values.
        raced_us: the whole program's time with a kernel, by kernel, where that decided.
    """

    node: Node
    problem: Problem
    trials: tuple[Trial, ...]
    slices: Slices = field(default_factory=dict)
    raced_us: Mapping[str, float] = field(default_factory=dict)

    @property
    def kernel(self) -> str:
        return self.trials[0].kernel

    @property
    def config(self) -> Config:
        return self.trials[0].config

    @property
    def workspace_bytes(self) -> int:
        """What a plan must set aside: a library's kernel asks torch's allocator by itself."""
        return kernel(self.kernel).workspace_bytes(self.problem, self.config)


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """The settings and measurements that all choices of a plan share.

    Attributes:
        constants: by name, on the target's device.
        budget_s: about how long to measure one problem.
        allowance: of time, for all that is measured.
        evidence: what the searches have shown so far, for those of other batch sizes.
        raced: the kernel that a program was faster with, by the kind of the problem and the two.
        joined: the slices of concatenations, once a batch size was asked for them.
        measures: whether kernels are timed; else the cost model chooses, for a machine that may not
            be this one.
        refused: by problem and kernel, what was found wrong where nothing is measured.
        too_rough: kernels that this build takes nowhere, with the reason; what was measured of them
            stays true.
    """

    target: str
    math: Math
    constants: Mapping[str, torch.Tensor]
    cache: TimingCache
    budget_s: float
    allowance: Allowance = field(default_factory=Allowance)
    evidence: Evidence = field(default_factory=Evidence)
    raced: dict[tuple[str, ...], str] = field(default_factory=dict)
    joined: list[Slices] = field(default_factory=list)
    measures: bool = True
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    too_rough: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> SearchOptions:
        """What a search may use."""
        return SearchOptions(
            budget_s=self.budget_s,
            max_workspace_bytes=WORKSPACE_BYTES,
            cutoff=CUTOFF,
            allowance=self.allowance,
            refused=self.too_rough,
        )

    def refuse(self, choice: Choice, reason: str) -> None:
        """Let a kernel lose every search for the problem that it was wrong at."""
        row = kernel(choice.kernel)
        trial = Trial(kernel=row.id, refused=reason)
        key = as_measured(choice.problem).key
        if not self.measures:
            self.refused.setdefault(key, {})[row.id] = reason
            return
        self.cache.put(fingerprint(self.target).hash, key, row.version, trial)


def apply(
    graph: Graph,
    formats: Formats,
    tuner: Tuner,
    emit: Emit,
    name: str,
    joined: Slices | None = None,
    most_us: float = math.inf,
) -> list[Choice]:
    """A choice for each node of ``graph`` (concrete shapes), in order; equal problems run once.

    Args:
        joined: values that shall lie in others.
        most_us: behind the node with which the choices take so long, no more are made.
    """
    choices: list[Choice] = []
    taken_us = 0.0
    known: dict[str, tuple[Trial, ...]] = {}
    slices = views(graph, formats, tuner.target) | (joined or {})
    problems = problems_of(graph, formats, tuner.math, slices)
    measured = [as_measured(problem) for problem in problems]
    prefetch = None
    if tuner.measures:
        prefetch = Prefetch(
            {
                problem.key: (problem, constants_of(node, problem, tuner.constants))
                for node, problem in zip(graph.nodes, measured, strict=True)
            },
            target=tuner.target,
            cache=tuner.cache,
            options=tuner.options,
            evidence=tuner.evidence,
        )
    for done, (node, problem) in enumerate(zip(graph.nodes, problems, strict=True)):
        key = measured[done].key
        if key not in known:
            candidates = None if prefetch is None else prefetch.candidates(key)
            known[key] = trials(node, problem, tuner, candidates)
        made = {v.name: slices[v.name] for v in node.outputs if v.name in slices}
        choices.append(Choice(node=node, problem=problem, trials=known[key], slices=made))
        emit(progress(name, done + 1, len(graph.nodes)))
        taken_us += cost_us(choices[-1:])
        if taken_us >= most_us:
            break
    return choices


def as_measured(problem: Problem) -> Problem:
    """The problem whose search decides: kernels take equally long for usual factors but 0 and 1.

    Each residual of an int8 network has a factor of its own, and so has each result behind an
    activation; shapes repeat.
    """
    beta, gamma = problem.epilogue.beta, problem.epilogue.gamma
    if abs(beta * gamma) > LARGEST_BETA or not LEAST_GAMMA <= gamma <= MOST_GAMMA:
        return problem  # some kernels refuse it, or compute it otherwise
    changed = {} if beta in (0.0, 1.0) else {"beta": 0.5}
    if gamma != 1.0:
        changed["gamma"] = 0.5
    if problem.epilogue.floor != 0:
        changed["floor"] = 0.5
    return replace(problem, attrs={**problem.attrs, **changed}) if changed else problem


def trials(
    node: Node,
    problem: Problem,
    tuner: Tuner,
    candidates: Sequence[Candidate] | None = None,
    options: SearchOptions | None = None,
) -> tuple[Trial, ...]:
    """Every kernel for a node's problem, the fastest first.

    Args:
        candidates: what ``Prefetch`` found worth running.
        options: others than the tuner's.
    """
    if not tuner.measures:
        problem = as_measured(problem)
        return estimated(
            problem,
            target=tuner.target,
            max_workspace_bytes=WORKSPACE_BYTES,
            refused={**tuner.too_rough, **tuner.refused.get(problem.key, {})},
        )
    return find(
        as_measured(problem),
        constants_of(node, problem, tuner.constants),
        target=tuner.target,
        cache=tuner.cache,
        options=options or tuner.options,
        candidates=candidates,
        evidence=tuner.evidence,
    )


def is_rough(choice: Choice) -> bool:
    """Whether the kernel of a choice rounds more than plain sums do."""
    algorithm = kernel(choice.kernel).algorithm
    return any(word in algorithm for word in ROUGH)


def views(graph: Graph, formats: Formats, target: str) -> Slices:
    """The results of ``split`` that are slices of a dense value: their strides are known."""
    made = {value for node in graph.nodes for value in node.outputs}
    slices: Slices = {}
    for node in graph.nodes:
        if node.op != "split" or (whole := node["input"]) not in made:
            continue
        meta, axis, start = _meta(graph, whole, formats), int(node.attrs["dim"]), 0
        for value, size in zip(node.outputs, node.attrs["sizes"], strict=True):
            place = Slice(of=whole.name, axis=axis, start=start)
            strides = None if meta.format == "strided" else meta.part(axis, int(size)).strides
            if strides is not None and is_aligned(meta, place, target):
                slices[value.name] = place
            start += int(size)
    return slices


def is_aligned(whole: TensorMeta, place: Slice, target: str) -> bool:
    """Whether a slice begins where every kernel can read and write it."""
    return begins_aligned(place.start * whole.dense_strides[place.axis] * whole.itemsize, target)


def _meta(graph: Graph, value: Value, formats: Formats) -> TensorMeta:
    shape = tuple(map(fixed, value.shape))
    format = "contiguous" if value in graph.constants else formats.get(value.name, "contiguous")
    return TensorMeta(shape=shape, dtype=value.dtype, format=format)


def problems_of(graph: Graph, formats: Formats, math: Math, slices: Slices) -> list[Problem]:
    """What kernels are asked to do for the nodes of a graph with concrete shapes, in order."""
    wholes = {v.name: v for v in graph.values()} if slices else {}

    def meta(value: Value) -> TensorMeta:
        plain, place = _meta(graph, value, formats), slices.get(value.name)
        if place is None:
            return plain
        return _meta(graph, wholes[place.of], formats).part(place.axis, plain.shape[place.axis])

    return [
        replace(problem_of(node, meta, graph.constants, math), in_place=lying(node, slices, meta))
        for node in graph.nodes
    ]


def lying(node: Node, slices: Slices, meta: Callable[[Value], TensorMeta]) -> tuple[int, ...]:
    """Positions of the inputs of a concatenation that lie in its result already."""
    if node.op != "cat":
        return ()
    axis = node.attrs["dim"]
    parts = [(v.name, meta(v).shape[axis]) for v in node.inputs if v is not None]
    return in_place(slices, node.output.name, axis, parts)


def constants_of(
    node: Node, problem: Problem, constants: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The node's constant inputs by position."""
    known = ((i, value) for i, value in enumerate(node.inputs) if i in problem.constant)
    return {i: constants[value.name] for i, value in known if value is not None}


def cost_us(choices: list[Choice]) -> float:
    """The measured time of all chosen kernels."""
    return sum(choice.trials[0].time_us or 0.0 for choice in choices)
