from __future__ import annotations

import itertools

import pytest
import torch

from tessella.core.memory import is_out_of_memory
from tessella.training.memory import largest_that_runs, out_of_memory


def step_with_room_for(images: int, calls: list[int]):
    def step(batch: int) -> None:
        calls.append(batch)
        if batch > images:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    return step


@pytest.mark.parametrize(
    ("failed", "room", "answer"), [(128, 40, 32), (100, 99, 50), (7, 1, 1), (64, 0, None)]
)
def test_halves_until_a_step_runs(failed, room, answer):
    calls: list[int] = []
    assert largest_that_runs(step_with_room_for(room, calls), failed) == answer
    assert calls[0] == failed // 2
    assert all(b == a // 2 for a, b in itertools.pairwise(calls))


def test_other_errors_are_not_hidden():
    def step(batch: int) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        largest_that_runs(step, 8)


def test_batch_normalization_that_refuses_one_image_is_no_fit():
    def step(batch: int) -> None:
        if batch == 1:
            torch.nn.BatchNorm1d(2)(torch.zeros(1, 2))
        raise MemoryError

    assert largest_that_runs(step, 4) is None


def test_recognizes_a_real_allocation_failure():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory\nSearch for `cudaError"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_message():
    device = torch.device("cuda", 0)
    text = str(out_of_memory("tried 2 GiB\nmore", batch_size=128, fits=32, device=device))
    assert "128 images" in text
    assert "tried 2 GiB." in text
    assert "use --batch-size 32" in text
    assert "one image does not fit" in str(
        out_of_memory("", batch_size=1, fits=None, device=device)
    )
