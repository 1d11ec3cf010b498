"""2:4 weights: told, pruned, compressed; torch's own conversion to CUTLASS's form is the peer."""

from __future__ import annotations

import pytest
import torch
from torch.sparse import _semi_structured_conversions as peer

from tessella.core.errors import UsageError
from tessella.kernels.sparse.two_four import (
    compress,
    is_two_four,
    prune_two_four,
    wgmma_metadata,
)
from tests.support.kernels.sparse_row import decompress

NIBBLES = {torch.float16: 4, torch.bfloat16: 4, torch.int8: 8}  # of a word of the peer's metadata


def sparse_weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """2:4, with groups of one and of no number among them."""
    weight = prune_two_four((20 * torch.randn(rows, columns)).to(dtype))
    weight[1, ::4], weight[2, 3::4], weight[3, : columns // 2] = 0, 0, 0
    return weight


def test_two_of_four_along_the_channels():
    weight = torch.zeros(2, 8, 3, 3)
    weight[:, ::2] = 1
    assert is_two_four(weight)
    assert is_two_four(torch.zeros(4, 4))
    weight[1, 1, 2, 2] = 0.1
    assert not is_two_four(weight)
    # [2, 9, 8] has fours along other axes
    assert not is_two_four(weight.movedim(1, -1).reshape(2, 9, 8))
    assert not is_two_four(torch.zeros(4, 6))
    assert not is_two_four(torch.zeros(8))
    late = torch.zeros(40_000, 4)
    late[-1] = 1
    assert not is_two_four(late)


@pytest.mark.parametrize("shape", [(5, 12), (8, 16, 3, 3), (4, 8, 5)])
def test_pruning_keeps_the_two_largest_of_four(shape):
    weight = torch.randn(shape)
    pruned = prune_two_four(weight)
    assert is_two_four(pruned)
    assert pruned.shape == weight.shape
    seen, kept = weight.movedim(1, -1).reshape(-1, 4), pruned.movedim(1, -1).reshape(-1, 4)
    for before, after in zip(seen.tolist(), kept.tolist(), strict=True):
        least = sorted(map(abs, before))[2]
        assert after == [x if abs(x) >= least else 0 for x in before]
    assert torch.equal(prune_two_four(pruned), pruned)


def test_of_equal_weights_the_first_stay():
    assert prune_two_four(torch.tensor([[1.0, -1, 1, 1, -128, 2, 2, 2]])).tolist() == [
        [1, -1, 0, 0, -128, 2, 0, 0]
    ]
    assert prune_two_four(torch.tensor([[-128, 3, 4, 5]], dtype=torch.int8)).tolist() == [
        [-128, 0, 0, 5]
    ]
    with pytest.raises(UsageError, match="leave this layer dense"):
        prune_two_four(torch.zeros(4, 3, 3, 3))


@pytest.mark.parametrize("dtype", NIBBLES)
def test_compressed_and_back(dtype):
    weight = sparse_weight(64, 256, dtype)
    made = compress(weight)
    assert made.values.shape == (64, 128)
    assert made.values.dtype == dtype
    assert torch.equal(decompress(made), weight)
    assert bool(((made.places & 3) < (made.places >> 2)).all())
    with pytest.raises(UsageError, match="not 2:4"):
        compress(torch.ones(64, 64, dtype=dtype))


@pytest.mark.parametrize("dtype", NIBBLES)
def test_torch_reads_our_compressed_weights(dtype):
    weight = sparse_weight(64, 256, dtype)
    made = compress(weight)
    count = NIBBLES[dtype]
    fours = made.places.long().view(64, -1, count)
    words = (fours << torch.arange(0, 4 * count, 4)).sum(-1)
    words = words.to(torch.int16 if count == 4 else torch.int32)
    order = peer._calculate_meta_reordering_scatter_offsets(*words.shape, words.dtype, "cpu")
    reordered = torch.empty_like(words.view(-1)).scatter_(0, order, words.view(-1))
    dense = peer.sparse_semi_structured_to_dense_cutlass(made.values, reordered.view(words.shape))
    assert torch.equal(dense, weight)

    full = prune_two_four(torch.randn(64, 256).add(3).mul(20).to(dtype))  # two of each four
    values, theirs = peer.sparse_semi_structured_from_dense_cutlass(full)
    plain = theirs.view(-1).gather(0, order).view(theirs.shape)
    read = torch.stack([plain.long() >> 4 * i & 15 for i in range(count)], -1).view(64, -1)
    two = (full.view(64, -1, 4) != 0).sum(-1) == 2
    ours = compress(full)
    assert float(two.float().mean()) > 0.95
    assert torch.equal(ours.places.long()[two], read[two])
    assert torch.equal(ours.values.view(64, -1, 2)[two], values.view(64, -1, 2)[two])


@pytest.mark.parametrize("itemsize", [1, 2])
@pytest.mark.parametrize("shape", [(64, 64), (100, 112), (200, 256)])
def test_registers_of_wgmma_hold_every_place_once(itemsize, shape):
    """Read back as the PTX manual's figures say, thread by thread."""
    rows, columns = shape
    places = torch.randint(0, 16, (rows, columns // 4), dtype=torch.uint8)
    words = wgmma_metadata(places, itemsize)
    assert words.shape == (-(-rows // 64), -(-columns // 64), 128)
    read = torch.full((words.shape[0] * 64, words.shape[1] * 16), 255)
    for thread in range(128):
        warp, quad, within = thread // 32, thread % 32 // 4, thread % 4
        row = 16 * warp + quad
        for bit in range(0, 32, 4):
            if itemsize == 2:
                at_row, column = row + 8 * (bit // 16), 16 * within + bit % 16
            else:
                at_row, column = row + 8 * (within % 2), 32 * (within // 2) + bit
            read[at_row::64, column // 4 :: 16] = words[..., thread] >> bit & 15
    assert torch.equal(read[:rows, : columns // 4], places.long())
    assert set(read[rows:].flatten().tolist()) <= {0b1110}
