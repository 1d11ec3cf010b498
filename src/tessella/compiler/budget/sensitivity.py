"""Sensitivity: what lowering one unit alone does to the answers, on few samples, finely measured.

Top-1 of 64 samples does not tell layers apart; the divergence of their probabilities does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tessella.compiler.budget.judging import Labelled, Predict, Tensors, answers, probabilities
from tessella.compiler.budget.mixes import Unit, simulated
from tessella.compiler.calibration import Calibration
from tessella.core.device import torch_device
from tessella.core.errors import CompileError
from tessella.core.events import Emit, progress, silent
from tessella.device.float32_math import float32_math
from tessella.graph.graph import Dim, Graph
from tessella.graph.interpret import interpret

SAMPLES = 64
CHUNK = 32  # samples that are interpreted at once


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What each unit's precisions do to the answers.

    Attributes:
        damage: by the unit's place and precision, ``divergence`` from float32.
        refused: why a precision of a unit is no choice, by its first layer and precision.
    """

    damage: dict[tuple[int, str], float] = field(default_factory=dict)
    refused: dict[tuple[str, str], str] = field(default_factory=dict)


def measure(
    exact: Graph,
    units: Sequence[Unit],
    *,
    target: str,
    calibration: Calibration,
    data: Labelled,
    emit: Emit = silent,
) -> Sensitivity:
    """Lower each unit to each of its precisions, alone, and compare the answers with float32's."""
    few, found = data.spread(SAMPLES), Sensitivity()
    before = answers(interpreter(exact, target), few, CHUNK)
    for index, unit in enumerate(units):
        for kind in unit.kinds:
            try:
                graph = simulated(exact, unit.mix(kind), target, calibration)
                after = answers(interpreter(graph, target), few, CHUNK)
            except CompileError as error:
                found.refused[unit.layers[0], kind] = str(error)
            else:
                found.damage[index, kind] = _damage(before, after, data)
        emit(progress("sensitivity", index + 1, len(units)))
    return found


def interpreter(graph: Graph, target: str) -> Predict:
    """A graph as a function of any number of samples, interpreted on the target's device."""
    device, (first, *_) = torch_device(target), graph.inputs
    size = None if isinstance(first.shape[0], Dim) else int(first.shape[0])

    def predict(batch: Tensors) -> Tensors:
        with float32_math("ieee"):
            inputs = {n: t.to(device) for n, t in batch.items()}
            if size is None:
                return interpret(graph, inputs)
            count = len(inputs[first.name])
            parts = [  # a network of a fixed batch: the last part is filled up
                interpret(
                    graph,
                    {n: t[torch.arange(at, at + size) % count] for n, t in inputs.items()},
                )
                for at in range(0, count, size)
            ]
        return {n: torch.cat([p[n] for p in parts])[:count] for n in parts[0]}

    return predict


def _damage(before: Tensors, after: Tensors, data: Labelled) -> float:
    """How far answers are from float32's; those of a task may have an order of their own."""
    if data.score is None:
        return divergence(before, after)
    made = data.score.aligned(before, after)
    return sum(_error(before[name].double(), made[name].double()) for name in before)


def divergence(before: Tensors, after: Tensors) -> float:
    """How far answers are from each other; 0 where they are equal.

    Of scores [N, K]: the mean Kullback–Leibler divergence of the probabilities, in nats. Of other
    outputs: the power of the error over that of the answer.
    """
    return sum(_divergence(before[name].double(), after[name].double()) for name in before)


def _divergence(before: torch.Tensor, after: torch.Tensor) -> float:
    if before.dim() == 2 and before.shape[1] > 1:
        p, q = (probabilities(t).clamp_min(1e-30) for t in (before, after))
        return float((p * (p.log() - q.log())).sum(1).mean().clamp_min(0))
    return _error(before, after)


def _error(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).square().sum() / before.square().sum().clamp_min(1e-30))
