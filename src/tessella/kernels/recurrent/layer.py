"""What the kernels of recurrent layers share: their problem, and the weights of a direction.

Letters as in ``operations/reference/recurrent.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

Tensor = torch.Tensor
# x [T, N, I] and the states before it, by name → the output [T, N, P], and the last states [N, …]
Run = Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor, ...]]

FLOATS = ("float32", "float16", "bfloat16", "float64")
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def refusal(problem: Problem, *floats: str) -> str | None:
    """Why a kernel for these types, which packs the weights, cannot run the problem, or None."""
    given = operands(problem)
    if not all(problem.is_constant(name) for name in WEIGHTS if name in given):
        return "weights and biases must be constants"
    if set(problem.constants) - {*WEIGHTS}:
        return "input, states and lengths may not be constants"
    types = {meta.dtype for name, meta in given.items() if name != "lengths"}
    if len(types) > 1 or not types <= {*floats}:
        return f"{' or '.join(floats)} throughout, not {', '.join(sorted(types))}"
    if any(0 in meta.shape for name, meta in given.items()):
        return "empty"
    if any(meta.format != "contiguous" for meta in problem.outputs):
        return "makes contiguous tensors"
    return None


def operands(problem: Problem) -> dict[str, TensorMeta]:
    """The operands that are given, by name."""
    pairs = zip(problem.operation.operands, problem.inputs, strict=False)
    return {name: meta for name, meta in pairs if meta is not None}


def backward(problem: Problem) -> tuple[bool, ...]:
    """For each direction, whether it begins at the end."""
    both = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    return both[problem.attrs["direction"]]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Those of one direction.

    Attributes:
        bias_ih, bias_hh: both, zero where one is left out, or neither.
        weight_hr: the projection.
        way: the direction's number.
        whole: ``weight_hh`` of all directions: what packed forms are kept with.
    """

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None
    way: int
    whole: Tensor

    @property
    def listed(self) -> list[Tensor]:
        """In torch's order, without what is left out."""
        each = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh, self.weight_hr)
        return [weight for weight in each if weight is not None]


def weights(problem: Problem, constants: Mapping[int, Tensor]) -> list[Weights]:
    """The weights of each direction."""
    row = problem.operation
    known = {row.operands[position]: tensor for position, tensor in constants.items()}
    if "bias_ih" in known or "bias_hh" in known:
        some = known.get("bias_ih", known.get("bias_hh"))
        assert some is not None
        known = {"bias_ih": torch.zeros_like(some), "bias_hh": torch.zeros_like(some), **known}

    def of(name: str, way: int) -> Tensor | None:
        return known[name][way] if name in known else None

    return [
        Weights(
            weight_ih=known["weight_ih"][way],
            weight_hh=known["weight_hh"][way],
            bias_ih=of("bias_ih", way),
            bias_hh=of("bias_hh", way),
            weight_hr=of("weight_hr", way),
            way=way,
            whole=known["weight_hh"],
        )
        for way in range(len(backward(problem)))
    ]


def joined(problem: Problem, ways: Sequence[Run]) -> Call:
    """The step of a plan: runs each direction, and puts their results together."""
    given = operands(problem)
    names = [name for name in given if name not in WEIGHTS]

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        states = dict(zip(names, tensors, strict=True))
        x = states.pop("input").contiguous()
        made = [
            way(x, {n: t if n == "lengths" else t[d] for n, t in states.items()})
            for d, way in enumerate(ways)
        ]
        outputs, *lasts = zip(*made, strict=True)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)
        return output, *(torch.stack(each) for each in lasts)

    return run
