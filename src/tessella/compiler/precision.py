"""Which layer works in which precision: what a user asks for, as an element type for each node."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from tessella.compiler.calibration import DTYPES, Calibration, lowerable
from tessella.core.architectures import is_gpu
from tessella.core.dtype import PRECISIONS, SPARSE, plain_precision
from tessella.core.errors import UsageError
from tessella.device.x86 import code
from tessella.graph.graph import Graph, Node
from tessella.graph.value import fixed
from tessella.kernels.sparse.two_four import FOUR

PICTURE_CHANNELS = 8  # fewer are a picture's
FEWEST_CHANNELS = 16  # of a layer's input: a product of fewer leaves tensor cores empty
NAMES = (
    "use the name of its result without %, which tessella show --passes --graph tells"
    " (in Python compiler.layers)"
)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A precision for every node of an optimized graph.

    Attributes:
        kinds: ``int8`` or ``fp8`` for these layers, by the name of their result.
        dtypes: an element type for other nodes that are not like the rest.
        rest: the element type of everything else.
        loosest: the precision that says how exact the whole may be expected to be.
        target: the device.
        pruned: the layers whose weights become 2:4 sparse, by the name of their result.
        fallen: layers that would be int8 or fp8, but compute like the rest as rounding does not
            suit them: their precision, by the name of their result.
    """

    kinds: dict[str, str]
    dtypes: dict[str, str]
    rest: str
    loosest: str
    target: str
    pruned: frozenset[str] = frozenset()
    fallen: dict[str, str] = field(default_factory=dict)

    def without(self, layers: Iterable[str]) -> Assignment:
        """These layers compute like the rest."""
        fallen = {**self.fallen, **dict.fromkeys(layers, _named(self.rest))}
        kinds = {name: kind for name, kind in self.kinds.items() if name not in fallen}
        return replace(self, kinds=kinds, fallen=fallen)


def most_harmed(
    assignment: Assignment, calibration: Calibration, asked: Collection[str]
) -> list[str]:
    """The layers in int8 or fp8 that nobody asked for by name, the noisiest in the calibration
    first.
    """

    def snr_db(name: str) -> float:
        return calibration.snr_db.get(assignment.kinds[name], {}).get(name, math.inf)

    return sorted((name for name in assignment.kinds if name not in asked), key=snr_db)


def layers(graph: Graph) -> tuple[str, ...]:
    """The layers of an optimized graph whose precision may be chosen, by their result's name."""
    return tuple(node.output.name for node in lowerable(graph))


def assign(
    graph: Graph,
    precision: str,
    precisions: Mapping[str, str],
    target: str,
    calibration: Calibration | None,
) -> Assignment:
    """What ``precision`` for the network and ``precisions`` for single nodes come to.

    ``int8`` and ``fp8`` are for layers whose products fill tensor cores: one group, and 16 input
    channels or more; on a CPU with VNNI or AMX ``int8`` is for those on pictures, too. What else
    there is computes in float16 on a GPU, in float32 on a CPU. A file that rounds by itself has
    chosen its layers: without a calibration they are those.

    Raises:
        UsageError: an unknown node or precision, a node that cannot be int8, fp8 or sparse, or no
            calibration where one is needed.
    """
    pruned = frozenset(name for name, p in precisions.items() if p.endswith(SPARSE))
    precisions = {name: plain_precision(p) for name, p in precisions.items()}
    small = precision in DTYPES
    rest = ("float16" if is_gpu(target) else "float32") if small else PRECISIONS[precision]
    can = {node.output.name: node for node in lowerable(graph)}
    _require_known(graph, precisions, can)
    _require_fours(pruned, can)
    rounds = any(node.op == "quantize" for node in graph.nodes)  # a file's own
    chosen = small and not (rounds and calibration is None)  # that file has chosen its layers
    pictures = target == "cpu" and precision == "int8" and code.adds_in_32_bits()
    kinds = {name: precision for name, node in can.items() if chosen and _fills(node, pictures)}
    kinds = {name: kind for name, kind in kinds.items() if name not in precisions}
    kinds |= {name: kind for name, kind in precisions.items() if kind in DTYPES}
    if kinds and calibration is None:
        raise UsageError(
            f"{precision if small else 'int8 and fp8'} needs a calibration",
            seen="none",
            fix="give calibration=compiler.calibrate(graph, batches), or --calibrate DATASET",
        )
    others = {name: PRECISIONS[p] for name, p in precisions.items() if p not in DTYPES}
    used = {precision, *precisions.values()} - ({precision} if small and not kinds else set())
    if rounds:
        used.add("int8")
    order = list(ORDER)
    return Assignment(
        kinds=kinds,
        dtypes={name: dtype for name, dtype in others.items() if dtype != rest},
        rest=rest,
        loosest=max(used | {_named(rest)}, key=order.index),
        target=target,
        pruned=pruned,
    )


ORDER = ("fp32", "tf32", "fp16", "bf16", "int8", "fp8")  # from the most exact


def _named(dtype: str) -> str:
    return next(name for name, known in PRECISIONS.items() if known == dtype)


def _fills(node: Node, pictures: bool) -> bool:
    """Whether a layer's products fill the units that multiply; or it reads pictures, which may be.

    3 → 64 channels by 7×7, 224×224, on AMX: 161 µs where float32 takes 1,400; without VNNI no gain.
    """
    channels = fixed(node["weight"].shape[1])
    is_picture = node.op == "conv2d" and channels < PICTURE_CHANNELS
    fills = channels >= FEWEST_CHANNELS or (pictures and is_picture)
    return bool(node.attrs.get("groups", 1) == 1) and fills


def _require_known(graph: Graph, precisions: Mapping[str, str], can: Mapping[str, Node]) -> None:
    names = {node.outputs[0].name for node in graph.nodes}
    for name, precision in precisions.items():
        if name not in names:
            raise UsageError(
                "no operation of the optimized network has this name",
                seen=name,
                fix=NAMES,
            )
        if precision not in PRECISIONS or precision == "tf32":
            raise UsageError(
                "this is no precision of a single layer",
                seen=f"{precision} for {name}",
                fix=f"use {', '.join(p for p in PRECISIONS if p != 'tf32')}",
            )
        if precision in DTYPES and name not in can:
            raise UsageError(
                "only convolutions and linear layers with constant weights can be int8 or fp8",
                seen=name,
                fix=NAMES,
            )


def can_be_sparse(node: Node) -> bool:
    """Whether the weight of a layer may be pruned to two of each four along its input channels."""
    channels = fixed(node["weight"].shape[1])
    return bool(node.attrs.get("groups", 1) == 1) and channels % FOUR == 0


def _require_fours(pruned: Iterable[str], can: Mapping[str, Node]) -> None:
    for name in pruned:
        if name not in can or not can_be_sparse(can[name]):
            raise UsageError(
                "only convolutions and linear layers with constant weights, one group and a"
                " multiple of 4 input channels can be sparse",
                seen=name,
                fix="leave its weight dense",
            )
