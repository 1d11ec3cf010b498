"""How a layer's work is cut into the items that threads take, so that all end at about one time.

A layer of one image has few items: with nine of one size, two threads wait a tenth of their time
for each other, and with blocks of 96, 96 and 4 pixels more. So some cuts are tried on paper, as
``device.x86.chain`` gives items out.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

MANY_ITEMS = 16  # for each thread: whoever is last matters little
MOST_FINER = 4  # times as many blocks
LEAST_TILES = 2  # of a block
ITEM_COST = 0.25  # of a tile of one panel
MOST_TRIED = 4000  # items of all cuts that are tried: some milliseconds
EVEN = 0.97  # of the threads' time is work: more is not looked for


def edges(tiles: int, blocks: int) -> list[int]:
    """Where so many blocks of about the same number of tiles begin, and the last ends."""
    return [block * tiles // blocks for block in range(blocks + 1)]


@functools.lru_cache(1024)
def cut(
    tiles: int, images: int, panels: tuple[tuple[int, ...], ...], least: int, threads: int
) -> tuple[int, int]:
    """How many blocks the tiles of an image should be, and which of ``panels``.

    Args:
        panels: ways to take panels together, each as how many an item has, the fewest items first.
        least: blocks at least.
    """
    if threads == 1 or images * least * len(panels[0]) >= MANY_ITEMS * threads:
        return least, 0
    most = max(least, min(MOST_FINER * least, tiles // LEAST_TILES))
    ways = [(blocks, way) for blocks in range(least, most + 1) for way in range(len(panels))]
    best, found, left = 0.0, (least, 0), MOST_TRIED
    for blocks, way in sorted(ways, key=lambda w: w[0] * len(panels[w[1]])):
        sizes = [end - begin for begin, end in pairwise(edges(tiles, blocks))]
        costs = [ITEM_COST + n * size for n in panels[way] for _ in range(images) for size in sizes]
        share = tiles * images * sum(panels[way]) / (threads * _end(costs, threads))
        if share > best:
            best, found = share, (blocks, way)
        left -= len(costs)
        if best >= EVEN or left < 0:
            break
    return found


def _end(costs: Sequence[float], threads: int) -> float:
    """When the last of the threads ends: the second begins with the second half of the items, the
    others with the first, and then they help.
    """
    middle = math.ceil(len(costs) / 2)
    halves = [list(costs[:middle])[::-1], list(costs[middle:])[::-1]]
    busy = [(0.0, thread) for thread in range(threads)]
    while halves[0] or halves[1]:
        at, thread = heapq.heappop(busy)
        half = halves[thread == 1] or halves[thread != 1]
        heapq.heappush(busy, (at + half.pop(), thread))
    return max(at for at, _ in busy)
