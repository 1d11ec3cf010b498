"""One problem of the kernels' benchmark, and random operands for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tessella.core.device import default_target, torch_device
from tessella.kernels import catalog
from tessella.kernels.sparse.two_four import TWO_FOUR, prune_two_four
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta, memory_format
from tessella.search import find as search
from tessella.search.find import SearchOptions

TARGET = default_target() if torch.cuda.is_available() else "sm_90"
Peer = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem with its peers.

    Attributes:
        peers: functions of the problem's operands, by name. The ratio is against the fastest.
        others: further functions that are timed, but do not count in the ratio.
        algorithms: our algorithms that may win; None for all.
        chained: whether to time a sequence of products with constant weights, as consecutive
            layers have them, so that no weight is in the L2 cache.
        published_ms: published times by algorithm, on a Quadro GV100.
    """

    family: str
    name: str
    problem: Problem
    peers: Mapping[str, Peer]
    others: Mapping[str, Peer] = field(default_factory=dict)
    algorithms: tuple[str, ...] | None = None
    chained: bool = False
    published_ms: Mapping[str, float] = field(default_factory=dict)


def meta(dtype: str, *shape: int, last: bool = False) -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype, format="channels_last" if last else "contiguous")


def best(
    problem: Problem, algorithms: tuple[str, ...], sources: tuple[str, ...] | None = None
) -> Peer:
    """The fastest of some candidates of the search, on operands as the search asks for."""
    constants = drawn_constants(problem)
    options = SearchOptions(algorithms=algorithms, sources=sources, budget_s=0.02)
    best = search.find(problem, constants, target=TARGET, options=options)[0]
    row, device = catalog.kernel(best.kernel), torch_device(TARGET)
    call, buffers = search.bind(row, problem, constants, device, best.config)
    return lambda *inputs: call(*inputs, **buffers)


def drawn_constants(problem: Problem) -> dict[int, torch.Tensor]:
    """Random weights and vectors; scales bring the sums of int8 products into its range."""
    made = {i: drawn(operand(problem, i)) for i in problem.constant}
    places = {name: place for place, name in enumerate(problem.operation.operands)}
    if problem.attr("sparsity") == TWO_FOUR:
        made[places["weight"]] = prune_two_four(made[places["weight"]])
    for weight, scale in (("weight", "scale"), ("next_weight", "next_scale")):  # these of chains
        if (place := places.get(scale)) in made:
            products = math.prod(problem[weight].shape[1:])
            made[place] = made[place].abs() * (40 / (73 * 73 * products**0.5))
    return made


def operand(problem: Problem, position: int) -> TensorMeta:
    """An operand that the problem has."""
    found = problem.meta(position)
    assert found is not None
    return found


def drawn(meta: TensorMeta) -> torch.Tensor:
    """Random numbers in the problem's layout: normal, or uniform in int8 (a deviation of 73)."""
    device, dtype = torch_device(TARGET), getattr(torch, meta.dtype)
    if dtype == torch.int8:
        made = torch.randint(-127, 128, meta.shape, dtype=dtype, device=device)
    else:
        made = torch.randn(meta.shape, device=device).to(dtype)
    return made.contiguous(memory_format=memory_format(meta.format, len(meta.shape)))
