"""The cost model beside a ring that is simulated step by step and moves real numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tessella.core.errors import UsageError
from tessella.telemetry.ring_costs import ring_all_reduce_us, ring_broadcast_us

B = 50e9  # bytes a second over each link


def simulate_broadcast(message: np.ndarray, gpus: int, pieces: int) -> int:
    """Steps until every GPU has every piece. In each, every GPU passes on the oldest piece that the
    next one lacks, of those that it had before the step."""
    held = [list(range(pieces))] + [[] for _ in range(gpus - 1)]
    parts = np.array_split(message, pieces)
    steps = 0
    while any(len(h) < pieces for h in held):
        moves = [
            (gpu + 1, held[gpu][len(held[gpu + 1])])
            for gpu in range(gpus - 1)
            if len(held[gpu]) > len(held[gpu + 1])
        ]
        for gpu, piece in moves:
            held[gpu].append(piece)
        steps += 1
    for h in held:
        assert np.array_equal(np.concatenate([parts[p] for p in h]), message)
    return steps


def simulate_all_reduce(messages: np.ndarray) -> int:
    """Steps until every GPU has the sum; in each, GPU g sends one k-th of its message to g + 1."""
    gpus = len(messages)
    held = [np.array_split(m.copy(), gpus) for m in messages]
    steps = 0
    for phase in ("reduce", "gather"):
        for step in range(gpus - 1):
            first = 0 if phase == "reduce" else 1
            sent = [((g + first - step) % gpus, g) for g in range(gpus)]
            moving = [(piece, (g + 1) % gpus, held[g][piece].copy()) for piece, g in sent]
            for piece, to, content in moving:
                held[to][piece] = held[to][piece] + content if phase == "reduce" else content
            steps += 1
    for parts in held:
        assert np.array_equal(np.concatenate(parts), messages.sum(axis=0))
    return steps


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
@pytest.mark.parametrize("pieces", [1, 2, 7, 64])
def test_broadcast_takes_the_steps_of_the_simulation(gpus, pieces):
    message = np.arange(64 * 7 * 9)
    step_us = 1e6 * message.nbytes / pieces / B
    steps = simulate_broadcast(message, gpus, pieces)
    assert ring_broadcast_us(message.nbytes, gpus, pieces, B) == pytest.approx(steps * step_us)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_all_reduce_takes_the_steps_of_the_simulation(gpus):
    messages = np.random.default_rng(gpus).integers(-99, 99, (gpus, gpus * 30))
    step_us = 1e6 * messages[0].nbytes / gpus / B
    steps = simulate_all_reduce(messages)
    assert ring_all_reduce_us(messages[0].nbytes, gpus, B) == pytest.approx(steps * step_us)


def test_many_pieces_make_a_broadcast_as_cheap_as_one_link():
    assert ring_broadcast_us(10**9, 8, 10_000, B) == pytest.approx(1e6 * 1e9 / B, rel=1e-3)
    assert ring_broadcast_us(10**9, 8, 1, B) == pytest.approx(7 * 1e6 * 1e9 / B)
    assert ring_broadcast_us(10**9, 1, 4, B) == 0.0


@pytest.mark.parametrize("numbers", [(-1, 2, 1, B), (1, 0, 1, B), (1, 2, 0, B), (1, 2, 1, 0.0)])
def test_impossible_numbers(numbers):
    with pytest.raises(UsageError):
        ring_broadcast_us(*numbers)
