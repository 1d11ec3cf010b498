"""Epochs follow each other without a pause, in order, and nothing stays behind."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from tessella.core.errors import DataError
from tessella.data.epochs import EARLY, endless


class Epochs:
    """Of each epoch its begin and end are noted; a batch is (epoch, place)."""

    def __init__(self, count: int, *, first_s: float = 0.0, broken: int | None = None) -> None:
        self.count, self.first_s, self.broken = count, first_s, broken
        self.begun, self.ended, self.threads = [], [], []
        self.made: queue.Queue[int] = queue.Queue()  # of each epoch, when its first one is there

    def __call__(self, epoch: int, start: int):
        try:
            self.begun.append((epoch, start))
            self.threads.append(threading.current_thread().name)
            time.sleep(self.first_s)
            if epoch == self.broken:
                raise DataError("an image cannot be decoded", seen=epoch)
            self.made.put(epoch)
            for place in range(start, self.count):
                yield epoch, place
        finally:
            self.ended.append(epoch)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("count", "start"), [(5, 0), (5, 2), (5, 4), (1, 0), (2, 1)])
def test_every_batch_comes_once_and_in_order(count, start, early):
    made = Epochs(count)
    stream = endless(made, epoch=3, start=start, count=count, early=early)
    expected = [(e, p) for e in range(3, 9) for p in range(start if e == 3 else 0, count)]
    assert [next(stream) for _ in expected] == expected
    stream.close()
    assert sorted(made.ended) == [epoch for epoch, _ in made.begun]
    assert made.begun[0] == (3, start)
    assert {place for _, place in made.begun[1:]} == {0}


def test_the_next_epoch_begins_before_the_end():
    made = Epochs(6)
    stream = endless(made, epoch=0, start=0, count=6, early=True)
    for _ in range(6 - EARLY):
        next(stream)
    assert made.begun == [(0, 0)]
    next(stream)
    # while a step computes: nobody has asked for it
    assert [made.made.get(timeout=60) for _ in range(2)] == [0, 1]
    assert made.begun == [(0, 0), (1, 0)]
    assert [next(stream), next(stream)] == [(0, 5), (1, 0)]
    stream.close()
    assert sorted(made.ended) == [0, 1]
    late = Epochs(6)
    stream = endless(late, epoch=0, start=0, count=6, early=False)
    for _ in range(6):
        next(stream)
    assert (late.begun, set(late.threads)) == ([(0, 0)], {threading.current_thread().name})


def test_an_error_comes_where_its_batch_would():
    made = Epochs(3, broken=1)
    stream = endless(made, epoch=0, start=0, count=3, early=True)
    assert [next(stream) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
    with pytest.raises(DataError, match="cannot be decoded"):
        next(stream)


def test_who_stops_in_an_early_begin_waits_for_it():
    made = Epochs(2, first_s=0.05)
    stream = endless(made, epoch=0, start=0, count=2, early=True)
    next(stream)  # the next epoch is being begun
    stream.close()
    assert sorted(made.ended) == [0, 1]
