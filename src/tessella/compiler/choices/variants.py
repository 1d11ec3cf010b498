"""Graphs that compute the same, of which only a measurement can tell the fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from tessella.compiler.choices import choose_kernels, join_in_place, race
from tessella.compiler.choices.choose_kernels import Tuner
from tessella.compiler.rewrites import assign_layout, dead_code, fuse_siblings, join_sums
from tessella.compiler.rewrites.assign_layout import Formats, Layout
from tessella.core.architectures import has, is_gpu
from tessella.core.device import torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.events import Emit, phase
from tessella.graph.check import check
from tessella.graph.graph import Graph
from tessella.search.tuning import NotInLock

# Fused siblings must win by so much: on a CPU, where another program takes a core, by more. BERT in
# fp8 at 32 × 384 words, on an H200, won 1.2 and 1.1 % in two builds
WORTH_IT = {"cpu": 0.98, "cuda": 0.995}


def fastest(
    variants: Sequence[Graph], opt: int, precision: str, tuner: Tuner, emit: Emit
) -> tuple[Graph, Formats]:
    """The variant that is fastest at the usual batch size, all in the first one's best layout."""
    layout = _fastest_layout(variants[0], opt, precision, tuner, emit)
    laid_out = [with_layout(graph, layout) for graph in variants]
    if len(laid_out) == 1:
        return laid_out[0]
    programs = []
    for graph, formats in laid_out:
        concrete = graph.at_batch(opt)
        choices = choose_kernels.apply(concrete, formats, tuner, emit, "variants")
        programs.append((concrete, join_in_place.apply(concrete, choices, tuner)))
    apart, *fused = race.times_us(programs, tuner)
    times = " or ".join(f"{time:.0f}" for time in fused)
    emit(phase("variants", f"{apart:.0f} µs apart, {times} µs fused, at batch {opt}"))
    worth_it = WORTH_IT[torch_device(tuner.target).type] * apart
    return laid_out[1 + fused.index(min(fused)) if min(fused) < worth_it else 0]


def with_siblings(graph: Graph, target: str) -> list[tuple[Graph, int]]:
    """Copies of the graph with siblings fused, to race with it, and how many layers went.

    All siblings, and those alone whose results do not go straight into a concatenation.
    """
    ways = (True, False) if target != "reference" else ()
    return _changed(graph, [partial(fuse_siblings.apply, joined=joined) for joined in ways])


def with_sums(graph: Graph, target: str) -> list[tuple[Graph, int]]:
    """Copies of the graph with convolutions joined whose results are added, and how many went.

    All of them, and those alone that read every pixel. Not on Hopper, where a chain has the second
    convolution already, nor on a CPU, where it was not measured.
    """
    ways = (True, False) if is_gpu(target) and not has(target, "wgmma") else ()
    return _changed(graph, [partial(join_sums.apply, strided=strided) for strided in ways])


def _changed(graph: Graph, ways: Sequence[Callable[[Graph], int]]) -> list[tuple[Graph, int]]:
    """Copies of the graph, each changed in a way, and how often; none that was not, or as often."""
    variants: list[tuple[Graph, int]] = []
    for change in ways:
        changed = graph.copy()
        count = change(changed)
        if count and count not in [n for _, n in variants]:
            dead_code.apply(changed)  # the single weights
            check(changed)
            variants.append((changed, count))
    return variants


def layouts_to_try(graph: Graph, precision: str, target: str) -> tuple[Layout, ...]:
    """The layouts that a plan may get, the likely one first: several where only a measurement can
    tell.
    """
    is_wide = PRECISIONS[precision] == "float32"
    # volumes in 16 bits with their channels together were not measured on a CPU
    convolutions = ("conv2d", "conv3d") if is_gpu(target) or is_wide else ("conv2d",)
    if target == "reference" or not any(n.op in convolutions for n in graph.nodes):
        return ("contiguous",)
    if not is_wide:
        return ("channels_last",)  # tensor cores and oneDNN's 16-bit code want it
    norms = [n for n in graph.nodes if n.op == "group_norm" and len(n.output.shape) == 5]
    if norms and not is_gpu(target):  # those of volumes that torch computes
        return ("contiguous", "channels_last")
    return ("channels_last", "contiguous")


def with_layout(graph: Graph, layout: Layout) -> tuple[Graph, Formats]:
    """A copy of the graph with the copies that a layout needs, and its formats."""
    graph = graph.copy()
    formats = assign_layout.apply(graph, layout)
    check(graph)
    return graph, formats


def _fastest_layout(graph: Graph, opt: int, precision: str, tuner: Tuner, emit: Emit) -> Layout:
    """The layout that is fastest at the usual batch size, all steps together."""
    layouts = layouts_to_try(graph, precision, tuner.target)
    if len(layouts) == 1 or not tuner.measures:
        return layouts[0]
    costs: list[float] = []
    for layout in layouts:
        candidate, formats = with_layout(graph, layout)
        emit(phase("layout", f"{layout} at batch {opt}"))
        concrete = candidate.at_batch(opt)
        most_us = min(costs, default=math.inf)  # it has lost then, whatever its other steps take
        try:
            choices = choose_kernels.apply(concrete, formats, tuner, emit, layout, most_us=most_us)
        except NotInLock as error:
            if not costs or error.is_known:
                raise
            costs.append(math.inf)  # it had lost before, when the lock was made
            continue
        costs.append(choose_kernels.cost_us(choices))
    return layouts[costs.index(min(costs))]
