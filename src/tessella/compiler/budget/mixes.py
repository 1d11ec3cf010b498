"""A mix: which layers of a network are lowered to what; how a mix is spelled for the compiler.

``int8+2:4`` is a choice like ``int8``: the layer's weight is pruned to two of each four before.

What is no layer (pooling, sums, norms) follows the layers that it reads: it computes in 16 bits
where all of these do, so that nothing is cast to and fro between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tessella.compiler import precision as precision_of
from tessella.compiler.calibration import DTYPES as KINDS
from tessella.compiler.calibration import Calibration, lowerable
from tessella.compiler.layers import PRODUCTS
from tessella.compiler.passes import request_for, run
from tessella.compiler.precision import Assignment
from tessella.compiler.slow_precisions import slowdown
from tessella.core.architectures import has, is_gpu
from tessella.core.dtype import SPARSE, plain_precision
from tessella.core.errors import UsageError
from tessella.graph.graph import Graph, Node, Value
from tessella.kernels import catalog

Mix = Mapping[str, str]  # layer → precision; what is not named stays fp32

WIDE = ("fp32", "fp16", "bf16")  # what a layer and all around it may be in
WITH_SPARSITY = ("fp16", "bf16", "int8")  # what sparse tensor cores multiply
STAYS = ("fallback", "user")  # operators that are not known to take other types


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that read one value: they are lowered together, so that it is rounded once.

    Attributes:
        layers: by their result's name.
        kinds: the precisions that all of them may get.
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]

    def mix(self, precision: str) -> dict[str, str]:
        return dict.fromkeys(self.layers, precision)


def beside(target: str) -> str:
    """The precision of the layers around a quantized one."""
    return "fp16" if is_gpu(target) else "fp32"


def offered(target: str, least: str) -> tuple[str, ...]:
    """The precisions to choose from: what suits the target, nothing less exact than ``least``.

    A 16-bit precision in which this processor is slower than in float32 is none of them, unless it
    is ``least``. Where sparse weights have a kernel, each is there a second time with them.

    Raises:
        UsageError: the target has nothing between float32 and ``least``.
    """
    kinds = _precisions(target, least)
    rows = catalog.rows()
    if not any(row.sparse and not row.unproven and row.runs_on(target) for row in rows):
        return kinds
    return (*kinds, *(k + SPARSE for k in kinds if k in WITH_SPARSITY))


def _precisions(target: str, least: str) -> tuple[str, ...]:
    order = list(precision_of.ORDER)
    if least == "fp32":
        return tuple(kind for kind in _all_precisions(target) if slowdown(kind, target) == 1.0)
    if least in ("bf16", "fp16"):
        return (least,)
    quick = _precisions(target, "fp32")
    kinds = tuple(p for p in quick if order.index(p) <= order.index(least))
    if least not in kinds:
        raise UsageError(
            "a budget cannot be spent on this precision here",
            seen=f"{least} on {target}",
            fix=f"use one of {', '.join(_all_precisions(target))}, or leave it out",
        )
    return kinds


def _all_precisions(target: str) -> tuple[str, ...]:
    """What a layer may be lowered to on a target."""
    if not is_gpu(target):
        return ("bf16", "int8")
    return ("fp16", "int8", "fp8") if has(target, "fp8_mma") else ("fp16", "int8")


def units(exact: Graph, kinds: Sequence[str], target: str, calibration: Calibration) -> list[Unit]:
    """The choices that there are in an optimized graph, in its order."""
    fits = {
        kind: precision_of.assign(exact, kind, {}, target, calibration).kinds.keys()
        for kind in {plain_precision(kind) for kind in kinds} & set(KINDS)
    }
    readers: dict[Value, list[Node]] = {}  # of each value, the layers
    for node in lowerable(exact):
        readers.setdefault(node["input"], []).append(node)
    found = []
    for nodes in readers.values():
        names = tuple(n.output.name for n in nodes)
        found.append(
            Unit(
                layers=names,
                kinds=tuple(
                    kind
                    for kind in kinds
                    if fits.get(plain_precision(kind), set(names)) >= set(names)
                    and (plain_precision(kind) == kind or all(map(_can_be_sparse, nodes)))
                ),
            )
        )
    return found


def _can_be_sparse(node: Node) -> bool:
    """Whether a sparse matrix product can carry it out."""
    return precision_of.can_be_sparse(node) and not set(node["weight"].shape[2:]) - {1}


def spelled(exact: Graph, mix: Mix, target: str) -> tuple[str, dict[str, str]]:
    """``precision`` and ``precisions`` of ``compile_graph`` for a mix."""
    side = _sides(exact, mix, beside(target))
    wide = {s for s in side.values() if s != "fp32"}
    rest = min(wide) if wide and is_gpu(target) else "fp32"
    precisions = {n: s for n, s in side.items() if s != rest}
    return rest, precisions | {name: p for name, p in mix.items() if p not in WIDE}


def _sides(exact: Graph, mix: Mix, beside: str) -> dict[str, str]:
    """The 16- or 32-bit precision of each node, by its first output's name."""
    side: dict[str, str] = {}
    of_value: dict[Value, str] = {}
    for node in exact.nodes:
        name = node.outputs[0].name
        read = {of_value[v] for v in node.inputs if v in of_value}
        if name in mix:
            made = plain_precision(mix[name])
            made = beside if made in KINDS else made
        elif len(read) == 1 and node.op not in STAYS:
            (made,) = read
        else:
            made = "fp32"
        side[name] = made
        for value in node.outputs:
            if value.dtype == "float32":
                of_value[value] = made
    return side


def assigned(exact: Graph, mix: Mix, target: str, calibration: Calibration) -> Assignment:
    precision, precisions = spelled(exact, mix, target)
    return precision_of.assign(exact, precision, precisions, target, calibration)


def lowered(exact: Graph, mix: Mix, target: str, calibration: Calibration) -> Graph:
    """The graph whose kernels are measured."""
    request = request_for(exact, assigned(exact, mix, target, calibration), calibration)
    return run(exact, request, after="optimize", until="mark")


def simulated(exact: Graph, mix: Mix, target: str, calibration: Calibration) -> Graph:
    """A graph that rounds where a mix does, and multiplies quantized values in floating numbers.

    It is what ``lowered`` computes, and runs on libraries' kernels wherever it is interpreted.
    """
    request = request_for(exact, assigned(exact, mix, target, calibration), calibration)
    return run(exact, request, after="optimize", until="narrow", without=("lower",))


def layer_nodes(graph: Graph) -> list[Node]:
    """Convolutions and matrix products in order, which no lowering changes."""
    return [n for n in graph.nodes if n.op in PRODUCTS]


def weight_bytes(exact: Graph, mix: Mix) -> int:
    """About what the constants of a mix take."""
    size = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}
    total = sum(t.numel() * t.element_size() for t in exact.constants.values())
    for node in lowerable(exact):
        weight = exact.constant(node["weight"])
        count = 0 if weight is None else weight.numel()
        total -= count * (4 - size[plain_precision(mix.get(node.output.name, "fp32"))])
    return total
