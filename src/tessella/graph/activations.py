"""Activations that files write as several operators, found again: GELU, SiLU, Hardswish, Mish.

All of them are a product of x and a gate of x: ``x / 2 · (1 + erf(x / √2))``, in any order of
factors. So the steps around a gate are read as a polynomial in x and the gate, and compared with
what an activation's is (Hendrycks and Gimpel 2016 for GELU and SiLU, Howard et al. 2019 for
Hardswish, Misra 2019 for Mish).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessella.graph.graph import Graph, Node, Value

# coefficients, by the power of x and of the gate
Polynomial = Mapping[tuple[int, int], float]

_HALF = {(1, 0): 0.5, (1, 1): 0.5}
_ROOT = math.sqrt(2 / math.pi)
_CLOSE = 1e-4  # files round their constants as they like
_MOST_STEPS = 6  # between x and its gate, and from there to the result
_HIGHEST = 4
_FAR = 15  # where softplus is x in float32


@dataclass(frozen=True, kw_only=True)
class _Activation:
    """``whole`` in x and the gate, which is an operation on ``inside``, in x."""

    op: str
    attrs: dict[str, Any]
    gate: str
    inside: Polynomial
    whole: Polynomial


_KNOWN = (
    _Activation(
        op="gelu",
        attrs={"approximate": "none"},
        gate="erf",
        inside={(1, 0): math.sqrt(0.5)},
        whole=_HALF,
    ),
    _Activation(
        op="gelu",
        attrs={"approximate": "tanh"},
        gate="tanh",
        inside={(1, 0): _ROOT, (3, 0): _ROOT * 0.044715},
        whole=_HALF,
    ),
    _Activation(op="silu", attrs={}, gate="sigmoid", inside={(1, 0): 1.0}, whole={(1, 1): 1.0}),
    _Activation(
        op="hardswish", attrs={}, gate="hardsigmoid", inside={(1, 0): 1.0}, whole={(1, 1): 1.0}
    ),
    _Activation(
        op="hardswish",
        attrs={},
        gate="relu6",
        inside={(1, 0): 1.0, (0, 0): 3.0},
        whole={(1, 1): 1 / 6},
    ),
    _Activation(op="mish", attrs={}, gate="tanh", inside={(1, 1): 1.0}, whole={(1, 1): 1.0}),
)


def recognize(graph: Graph) -> int:
    """Replace the last operator of each by the activation; returns how many."""
    found = 0
    for gate in [n for n in graph.nodes if _kind(n) in {a.gate for a in _KNOWN}]:
        for activation in (a for a in _KNOWN if a.gate == _kind(gate)):
            made = _find(graph, gate, activation)
            if made is not None:
                last, x = made
                attrs = dict(activation.attrs)
                node = Node(activation.op, (x,), last.outputs, attrs, last.layer)
                graph.nodes.replace(last, node)
                found += 1
                break
    return found


def _kind(node: Node) -> str:
    """The operation; a clamp between 0 and 6 is a relu6."""
    bounds = (node.attrs.get("min"), node.attrs.get("max"))
    return "relu6" if node.op == "clamp" and bounds == (0, 6) else node.op


def _find(graph: Graph, gate: Node, activation: _Activation) -> tuple[Node, Value] | None:
    """The last operator of the activation around a gate, and its x."""
    reader = _Reader(graph)
    inside, outside = gate["input"], gate.output
    if activation.op == "mish":  # tanh(softplus(x))
        softplus = graph.producer(inside)
        if softplus is None or softplus.op != "softplus" or softplus.attrs["beta"] != 1:
            return None
        if softplus.attrs["threshold"] < _FAR:
            return None
        candidates = [softplus["input"]]
    else:
        candidates = [
            x
            for x in reader.sources(inside)
            if _same(reader.polynomial(inside, x, outside), activation.inside)
        ]
    value = outside
    for _ in range(_MOST_STEPS):
        node = graph.only_reader(value)
        if node is None or node.op not in ("mul", "div", "add"):
            return None
        value = node.output
        for x in candidates:
            same_kind = (x.shape, x.dtype) == (value.shape, value.dtype)
            if same_kind and _same(reader.polynomial(value, x, outside), activation.whole):
                return node, x
    return None


def _same(made: Polynomial | None, known: Polynomial) -> bool:
    return (
        made is not None
        and made.keys() == known.keys()
        and all(math.isclose(made[k], known[k], rel_tol=_CLOSE) for k in known)
    )


class _Reader:
    """Reads values as polynomials, through sums, products and powers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def sources(self, value: Value) -> list[Value]:
        """What the value may be a polynomial of, the nearest first."""
        found, level = [value], [value]
        for _ in range(_MOST_STEPS):
            nodes = [n for v in level if (n := self.graph.producer(v)) is not None]
            level = [
                v
                for n in nodes
                if n.op in ("mul", "div", "add", "pow")
                for v in n.inputs
                if v is not None and v not in found and v not in self.graph.constants
            ]
            found += dict.fromkeys(level)
        return found

    def polynomial(
        self, value: Value | None, x: Value, gate: Value, depth: int = 0
    ) -> Polynomial | None:
        """``value`` as a polynomial in x and the gate; None if it is none."""
        if value is x:
            return {(1, 0): 1.0}
        if value is gate:
            return {(0, 1): 1.0}
        constant = self.graph.constant(value)
        if constant is not None:
            return {(0, 0): float(constant)} if constant.numel() == 1 else None
        node = self.graph.producer(value)
        if node is None or node.op not in ("mul", "div", "add", "pow") or depth > _MOST_STEPS:
            return None
        left = self.polynomial(node["input"], x, gate, depth + 1)
        number = node.attrs["scalar"]
        if number is not None:
            right: Polynomial | None = {(0, 0): float(number)}
        else:
            right = self.polynomial(node["other"], x, gate, depth + 1)
        if left is None or right is None:
            return None
        return _combined(node, left, right)


def _combined(node: Node, left: Polynomial, right: Polynomial) -> Polynomial | None:
    if node.op == "mul":
        return _product(left, right)
    if node.op == "add":
        return _sum(left, right, node.attrs["alpha"])
    number = right.get((0, 0), 0.0)
    if set(right) != {(0, 0)} or number == 0:
        return None
    if node.op == "div":
        return _product(left, {(0, 0): 1 / number})
    if number not in range(1, _HIGHEST):
        return None
    power: Polynomial = {(0, 0): 1.0}
    for _ in range(int(number)):
        power = _product(power, left) or {}
    return power or None


def _sum(left: Polynomial, right: Polynomial, alpha: float) -> Polynomial:
    return {k: left.get(k, 0.0) + alpha * right.get(k, 0.0) for k in {**left, **right}}


def _product(left: Polynomial, right: Polynomial) -> Polynomial | None:
    made: dict[tuple[int, int], float] = {}
    for (a, b), one in left.items():
        for (c, d), other in right.items():
            made[a + c, b + d] = made.get((a + c, b + d), 0.0) + one * other
    return made if all(a + b <= _HIGHEST for a, b in made) else None
