"""Chosen kernels bound to tensors, step by step, before there is a plan: to check and to race them.

Every value has memory of its own, except slices, which lie where the plan will have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tessella.compiler.choices.choose_kernels import Choice, Tuner, constants_of
from tessella.core.device import torch_device
from tessella.graph.graph import Node, Value
from tessella.kernels import catalog
from tessella.search.find import bind

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A step: ``run(*inputs)`` takes what ``reads`` names, and returns a tensor for each output."""

    node: Node
    reads: tuple[Value, ...]
    run: Callable[..., Tensors]


def bound(choices: Sequence[Choice], tuner: Tuner) -> list[Bound]:
    """Each choice's kernel with its constants and its memory, in order."""
    device = torch_device(tuner.target)
    metas = {
        value.name: meta
        for choice in choices
        for value, meta in zip(choice.node.outputs, choice.problem.outputs, strict=True)
    }
    wholes = {place.of for choice in choices for place in choice.slices.values()}
    memory: dict[str, torch.Tensor] = {}

    def place(choice: Choice) -> torch.Tensor | None:
        """Where a kernel writes its result, if others share that memory."""
        row, value = catalog.kernel(choice.kernel), choice.node.outputs[0]
        slice = choice.slices.get(value.name)
        base = value.name if slice is None else slice.of
        if not row.writes_out or base not in wholes:
            return None
        if base not in memory:
            memory[base] = metas[base].empty(device)
        if slice is None:
            return memory[base]
        size = metas[value.name].shape[slice.axis]
        return memory[base].narrow(slice.axis, slice.start, size)

    return [_bound(choice, place(choice), tuner) for choice in choices]


def _bound(choice: Choice, out: torch.Tensor | None, tuner: Tuner) -> Bound:
    node, row = choice.node, catalog.kernel(choice.kernel)
    constants = constants_of(node, choice.problem, tuner.constants)
    device = torch_device(tuner.target)
    call, buffers = bind(row, choice.problem, constants, device, choice.config, out)

    def run(*inputs: torch.Tensor) -> Tensors:
        made = call(*inputs, **buffers)
        return (made,) if isinstance(made, torch.Tensor) else tuple(made)

    reads = tuple(v for i, v in enumerate(node.inputs) if v is not None and i not in constants)
    return Bound(node=node, reads=reads, run=run)
