"""How work is cut among threads: whole, and so that they end together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tessella.device.x86 import code
from tessella.kernels.shared import x86_convolution, x86_shares
from tests.support.problems.direct_convolutions import drawn, exact, problem

# tiles of an image, panels that an item may have, blocks at least: 1×1 layers of networks
LAYERS = {
    "196 pixels": (33, ((3, 2), (2, 2, 1), (1,) * 5), 3),
    "784 pixels": (131, ((3,), (2, 1), (1,) * 3), 9),
    "49 pixels": (9, ((3,) * 4, (2,) * 6, (1,) * 12), 1),
}


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_threads_end_together(name: str, threads: int) -> None:
    """No thread would have to wait for a tenth of the time, however items are given out."""
    tiles, panels, least = LAYERS[name]
    blocks, way = x86_shares.cut(tiles, 1, panels, least, threads)
    first = x86_shares.edges(tiles, blocks)
    sizes = [end - begin for begin, end in pairwise(first)]
    assert (first[0], first[-1], min(sizes) > 0) == (0, tiles, True)
    assert max(sizes) - min(sizes) <= 1
    left = [0.0] * threads
    for work in [n * size for n in panels[way] for size in sizes]:  # to who has least
        left[left.index(min(left))] += work
    assert max(left) < 1.11 * sum(left) / threads


def test_one_thread_and_many_items_stay_as_they_are() -> None:
    tiles, panels, least = LAYERS["196 pixels"]
    assert x86_shares.cut(tiles, 1, panels, least, 1) == (least, 0)
    assert x86_shares.cut(tiles, 8, panels, least, 2) == (least, 0)


@pytest.mark.instructions
def test_a_layer_that_is_cut_for_threads_beside_float64() -> None:
    here = code.instructions()
    if here is None or (why := code.refusal(here.name)):
        pytest.skip(f"no machine code of ours runs here: {why if here else ''}")
    before, counts = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for kernel, padding in ((1, 1), (0, 0)), ((3, 3), (1, 1)):
                p = problem((1, 64, 14, 14), 200, kernel=kernel, padding=padding, activation="relu")
                given, constants = drawn(p)
                call = x86_convolution.bind(p, constants)
                counts.add(call.items.count)
                out = p.output.empty(torch.device("cpu")).fill_(torch.nan)
                made = call(*given, out=out).double()
                torch.testing.assert_close(made, exact(p, given, constants), rtol=1e-4, atol=1e-3)
    finally:
        torch.set_num_threads(before)
    assert len(counts) > 1
