"""Which query learns which thing, of many small problems at once on a GPU: the assignment of the
least cost, by shortest augmenting paths, a problem a block.

A problem's queries lie side by side in the threads, so that a step of a path is a few reductions.
On the host each of a training step's hundreds of problems is a call, and the host waits for costs.

Source: Crouse, On implementing 2D rectangular assignment algorithms, IEEE TAES 52 (2016).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tessella.device.launch import launch

FAR = tl.constexpr(1e30)  # more than any sum of costs


@triton.jit
def assign_kernel(cost, counts, out, queries, things, LANES: tl.constexpr):
    """``out[problem, thing]`` is the query of each of ``counts[problem]`` things, at most as many
    as there are queries; ``cost`` is [problems, things, queries]."""
    problem = tl.program_id(0)
    lane = tl.arange(0, LANES)
    count = tl.load(counts + problem)
    cost += problem.to(tl.int64) * things * queries
    price = tl.zeros((LANES,), tl.float32)  # of queries
    held = tl.zeros((LANES,), tl.float32)  # of the thing that a query has
    owner = tl.full((LANES,), -1, tl.int32)  # which one
    for thing in range(count):
        nearest = tl.full((LANES,), FAR, tl.float32)
        before = tl.full((LANES,), -1, tl.int32)  # the query in front of it on the shortest path
        seen = (lane >= queries).to(tl.int32)
        last = tl.full((), -1, tl.int32)
        row = thing + 0
        of_row = tl.zeros((), tl.float32)
        mine = tl.zeros((), tl.float32)
        going = tl.full((), LANES, tl.int32)  # steps that are left: a query is seen once
        while going > 0:
            told = tl.load(cost + row * queries + lane, mask=lane < queries, other=0)
            reached = told - of_row - price
            nearer = (reached < nearest) & (seen == 0)
            nearest = tl.where(nearer, reached, nearest)
            before = tl.where(nearer, last, before)
            free = tl.where(seen == 0, nearest, FAR)
            step = tl.min(free, 0)
            last = tl.argmin(free, 0).to(tl.int32)
            held = tl.where(seen == 1, held + step, held)
            price = tl.where(seen == 1, price - step, price)
            nearest = tl.where(seen == 1, nearest, nearest - step)
            mine += step
            here = lane == last
            row = tl.sum(tl.where(here, owner, 0), 0)
            of_row = tl.sum(tl.where(here, held, 0.0), 0)
            seen = tl.where(here, 1, seen)
            going = tl.where(row >= 0, going - 1, 0)
        hops = tl.full((), LANES, tl.int32)
        while (last >= 0) & (hops > 0):  # back along the path: each gets the thing of that in front
            here = lane == last
            front = tl.sum(tl.where(here, before, 0), 0)
            there = lane == front
            given = tl.sum(tl.where(there, owner, 0), 0)
            worth = tl.sum(tl.where(there, held, 0.0), 0)
            owner = tl.where(here, tl.where(front < 0, thing, given), owner)
            held = tl.where(here, tl.where(front < 0, mine, worth), held)
            last = front + 0
            hops -= 1
    tl.store(out + problem * things + owner, lane.to(tl.int64), mask=owner >= 0)


def assign(cost_PTQ: torch.Tensor, counts_P: torch.Tensor) -> torch.Tensor:
    """The query of each thing of some problems, int64 [P, T]; −1 behind a problem's things.

    Args:
        cost_PTQ: of each thing and query, float32 on a GPU, none above 1e9; some thousand queries
            at most.
        counts_P: how many things each problem has, int32: not more than there are queries.
    """
    problems, things, queries = cost_PTQ.shape
    costs = cost_PTQ.contiguous()
    out = torch.full((problems, things), -1, dtype=torch.int64, device=costs.device)
    if out.numel():
        lanes = triton.next_power_of_2(queries)
        launch(
            assign_kernel, (problems,), costs, counts_P, out, queries, things,
            LANES=lanes, num_warps=max(1, min(8, lanes // 128)),
        )  # fmt: skip
    return out
