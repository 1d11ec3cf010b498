"""Layers that rounding would make slower compute like the rest instead.

A layer in int8 or fp8 whose input no other step writes rounded has a step that rounds it. A product
of few results for each number that it reads is bound by memory: it cannot gain what that step
takes. D-FINE-S in int8, 32 pictures of 640²: to round 105 million numbers for 16 filters takes
82 µs, and the filters' convolution 30 in int8 and 59 in float16 [derived].

What steps take says the cost model, on the graph whose kernels will be chosen: so a network gets
the same layers on every machine of a kind, measured or not.
"""

from __future__ import annotations

from tessella.compiler.choices.choose_kernels import as_measured, problems_of, views
from tessella.compiler.choices.variants import with_layout
from tessella.compiler.passes import Request, run
from tessella.compiler.precision import Assignment
from tessella.core.architectures import is_gpu
from tessella.graph.graph import Graph
from tessella.search.estimate import estimated

# A step that rounds is asked about if it takes so long: each answer is a pass through the rewrites,
# a third of a second for D-FINE-S. And so many of them at most.
LEAST_US, MOST_ASKED = 10.0, 12


def layers(exact: Graph, request: Request, batch: int) -> list[str]:
    """The layers on a GPU that are faster without rounding, by the cost model at this batch size;
    none that the user has named.

    Args:
        exact: the network, optimized.
        request: with the precision that each layer is to have.
    """
    decided = request.decided
    if not is_gpu(request.target) or not decided.kinds or request.calibration is None:
        return []
    model = _Model(exact, request, batch)
    left, (best, rounds) = list[str](), model.cost(decided)
    for name in sorted(rounds, key=lambda n: -rounds[n])[:MOST_ASKED]:
        if rounds[name] < LEAST_US:
            break
        more = [n for n in _readers(exact, name, request) if n not in left]
        cost = model.cost(decided.without([*left, *more]))[0] if more else best
        if cost < best:
            left, best = [*left, *more], cost
    return left


def _readers(exact: Graph, name: str, request: Request) -> list[str]:
    """The layers that read a value rounded, but for those that the user has named."""
    return [
        layer
        for node in exact.nodes
        if (layer := node.outputs[0].name) in request.decided.kinds
        and layer not in request.precisions
        and node["input"].name == name
    ]


class _Model:
    """What the steps of a network take with a precision for each layer, in microseconds."""

    def __init__(self, exact: Graph, request: Request, batch: int) -> None:
        self._exact, self._request, self._batch = exact, request, batch
        self._known: dict[str, float] = {}

    def cost(self, assignment: Assignment) -> tuple[float, dict[str, float]]:
        """The time of all steps, and of each step that only rounds, by the value that it reads."""
        request = self._request.assigned(self._exact, assignment)
        lowered = run(self._exact, request, after="optimize", until="mark")
        graph, formats = with_layout(lowered, "channels_last")
        graph = graph.at_batch(self._batch)
        slices = views(graph, formats, request.target)
        problems = problems_of(graph, formats, "ieee", slices)
        total, rounds = 0.0, dict[str, float]()
        for node, problem in zip(graph.nodes, map(as_measured, problems), strict=True):
            if problem.key not in self._known:
                first = estimated(problem, target=request.target)[0]
                self._known[problem.key] = first.estimate_us or 0.0
            total += self._known[problem.key]
            if node.op == "quantize":
                rounds[node["input"].name] = self._known[problem.key]
        return total, rounds
