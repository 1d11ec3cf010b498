from __future__ import annotations

import pytest
import torch

from tessella.core.errors import DataError
from tessella.data.loading import Batch
from tessella.training.prefetch import page_locked


def stream(count: int, read: list[int], *, fail_at: int | None = None):
    for i in range(count):
        if i == fail_at:
            raise DataError("an image cannot be decoded", seen=i)
        read.append(i)
        label = torch.tensor([i])
        yield Batch(images=torch.zeros(1, 1, 2, 2), labels=label, indices=label)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    """Page-locking needs a GPU; order, errors and look-ahead do not."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)


def test_keeps_the_order_and_reads_one_ahead():
    read: list[int] = []
    for i, batch in enumerate(page_locked(stream(5, read))):
        assert batch.labels.tolist() == [i]
        assert len(read) <= i + 2
    assert read == [0, 1, 2, 3, 4]


def test_an_error_comes_at_its_batch():
    batches = page_locked(stream(5, [], fail_at=2))
    assert [next(batches).labels.item(), next(batches).labels.item()] == [0, 1]
    with pytest.raises(DataError, match="cannot be decoded"):
        next(batches)


def test_may_be_left_early():
    batches = page_locked(stream(1000, read := []))
    next(batches)
    batches.close()
    assert len(read) <= 3
