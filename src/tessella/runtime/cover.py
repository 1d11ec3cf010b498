"""How a batch is cut into the sizes that a plan has: padding the last part, whatever is fastest."""

from __future__ import annotations

from collections.abc import Mapping

from tessella.artifacts.plan import Plan

OVERHEAD_US = 20.0  # of one more run: copying in and out, and the call


def covers(costs_us: Mapping[int, float | None]) -> list[tuple[int, ...]]:
    """For each batch size from 0 to the largest bucket, the buckets to run, in order.

    Args:
        costs_us: the measured time of each bucket; if one is None, a batch runs in the smallest
            bucket that holds it.

    >>> covers({1: 10.0, 4: 90.0})[2]
    (1, 1)
    """
    sizes = sorted(costs_us)
    plans: list[tuple[int, ...]] = [()]
    if any(cost is None for cost in costs_us.values()):
        return plans + [(min(s for s in sizes if s >= n),) for n in range(1, sizes[-1] + 1)]
    best = [0.0]
    for n in range(1, sizes[-1] + 1):
        cost, size = min(
            (OVERHEAD_US + (costs_us[s] or 0.0) + best[max(0, n - s)], -s) for s in sizes
        )
        best.append(cost)
        # the largest first, so that only the last part is padded
        plans.append(tuple(sorted((-size, *plans[max(0, n + size)]), reverse=True)))
    return plans


def costs_us(plan: Plan) -> dict[int, float | None]:
    """The measured time of each bucket, all steps; None where nothing was measured."""
    times: dict[int, list[float | None]] = {b.batch: [] for b in plan.program.buckets}
    for candidate in plan.tuning:
        if candidate.chosen and candidate.batch in times:
            times[candidate.batch].append(candidate.time_us)
    return {
        batch: None if not found or None in found else sum(t for t in found if t is not None)
        for batch, found in times.items()
    }
