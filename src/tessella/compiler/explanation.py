"""What the compiler does to a graph before it measures anything, pass by pass, as data.

It runs the pipeline's own list through the pipeline's own loop, and keeps the text in between.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from tessella.artifacts.build import Input
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices.variants import (
    layouts_to_try,
    with_layout,
    with_siblings,
    with_sums,
)
from tessella.compiler.passes import Request, by_name, steps
from tessella.compiler.pipeline import require_precision
from tessella.compiler.rewrites.assign_layout import Layout
from tessella.core.preprocess import Preprocess
from tessella.graph.graph import Graph
from tessella.graph.show import text


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """One pass on one graph.

    Attributes:
        name: the pass's name in the list; for a layout also which one.
        rewrites: how many the pass says that it made.
        nodes_before, nodes_after: operations of the graph; constants do not count.
        before, after: the graph's text, as ``graph.show.text`` writes it.
    """

    name: str
    why: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    before: str
    after: str

    @property
    def diff(self) -> str:
        """``before`` → ``after`` as a unified diff; empty where the text did not change."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True),
            self.after.splitlines(keepends=True),
            f"before {self.name}",
            f"after {self.name}",
            n=1,
        )
        return "".join(lines)


def explain(
    graph: Graph,
    *,
    target: str = "cpu",
    precision: str = "fp32",
    input: Input = "float32",
    preprocess: Preprocess | None = None,
    calibration: Calibration | None = None,
) -> tuple[PassRecord, ...]:
    """Every pass that ``compile_graph`` would run on ``graph``, in its order; measures nothing.

    Args:
        graph: as captured; it is not changed.
        target: ``cpu``, a GPU's (``sm_90``) or ``reference``; decides which layouts are tried.
        precision: as for ``compile_graph``; 16-bit ones add ``lower_precision``, and int8 and fp8,
            which need the ``calibration``, the passes that round.
        input, preprocess: ``uint8`` and the record, for a plan that takes images as bytes.

    Returns:
        The passes; then ``fuse_siblings`` and ``join_sums``, if these find any, and
        ``assign_layout`` once for each layout that the compiler would try. These begin with the
        same graph: ``compile_graph`` measures, and takes what is faster.

    Raises:
        UsageError: an unknown precision.
        CompileError: the graph is not valid, before or after a pass.
    """
    require_precision(precision)
    request = Request(
        target=target,
        precision=precision,
        calibration=calibration,
        input=input,
        preprocess=preprocess,
    )
    graph, records = graph.copy(), []
    before, count_before = text(graph), len(graph.nodes)
    for step, rewrites in steps(graph, request, until="mark"):
        after, count_after = text(graph), len(graph.nodes)
        records.append(
            PassRecord(
                name=step.name,
                why=step.why,
                rewrites=rewrites,
                nodes_before=count_before,
                nodes_after=count_after,
                before=before,
                after=after,
            )
        )
        before, count_before = after, count_after
    for name, changed in (("fuse_siblings", with_siblings), ("join_sums", with_sums)):
        records += [
            _compared(name, by_name(name).why, count, graph, variant)
            for variant, count in changed(graph, target)
        ]
    layouts = layouts_to_try(graph, precision, target)
    records += [_laid_out(graph, layout, one_of=len(layouts)) for layout in layouts]
    return tuple(records)


def _laid_out(graph: Graph, layout: Layout, *, one_of: int) -> PassRecord:
    """``assign_layout`` on a copy; its rewrites are the copies into another format."""
    candidate, formats = with_layout(graph, layout)
    fast = sum(format == "channels_last" for format in formats.values())
    taken = "the faster one is taken" if one_of > 1 else "the only one tried"
    why = f"{fast} of {len(formats)} values in channels_last; {taken}"
    copies = len(candidate.nodes) - len(graph.nodes)
    return _compared(f"assign_layout {layout}", why, copies, graph, candidate)


def _compared(name: str, why: str, rewrites: int, graph: Graph, changed: Graph) -> PassRecord:
    return PassRecord(
        name=name,
        why=why,
        rewrites=rewrites,
        nodes_before=len(graph.nodes),
        nodes_after=len(changed.nodes),
        before=text(graph),
        after=text(changed),
    )
