"""Memory in large pages: as large as asked for, its own, and where a page begins."""

from __future__ import annotations

import pytest
import torch

from tessella.core import memory

CPU = torch.device("cpu")


@pytest.mark.parametrize("nbytes", [0, 1, 100, memory.LARGE_PAGE - 1])
def test_little_memory_is_torchs(nbytes: int) -> None:
    made = memory.empty_bytes(nbytes, CPU)
    assert made.shape == (nbytes,)
    assert made.untyped_storage().nbytes() == nbytes


@pytest.mark.parametrize("more", [0, 1, 64, memory.LARGE_PAGE])
def test_much_memory_begins_with_a_page_and_is_nobody_elses(more: int) -> None:
    nbytes = memory.LARGE_PAGE + more
    one, other = (memory.empty_bytes(nbytes, CPU).fill_(v) for v in (1, 2))
    assert one.shape == other.shape == (nbytes,)
    assert one.data_ptr() % memory.LARGE_PAGE == other.data_ptr() % memory.LARGE_PAGE == 0
    assert int(one.sum(dtype=torch.int64)) == nbytes
    assert int(other.sum(dtype=torch.int64)) == 2 * nbytes


def test_a_system_without_large_pages_gives_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert int(memory.empty_bytes(memory.LARGE_PAGE, CPU).fill_(3)[-1]) == 3
