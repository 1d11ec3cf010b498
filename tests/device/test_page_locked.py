"""What is asked of the driver for locked memory; a library that counts plays the driver."""

from __future__ import annotations

import pytest

from tessella.core.errors import KernelError
from tessella.device import page_locked
from tessella.device.page_locked import CHUNK_BYTES, PageLocked

ADDRESS, CONTEXT = 1 << 40, 77


class Driver:
    """Knows which ranges are locked, and in whose context calls are made."""

    def __init__(self) -> None:
        self.current = CONTEXT
        self.locked: dict[int, int] = {}
        self.refuses = False

    def context(self) -> int:
        return self.current

    def lock_pages(self, address: int, nbytes: int) -> bool:
        assert self.current == CONTEXT
        if address in self.locked:
            raise KernelError("locked already")
        if not self.refuses:
            self.locked[address] = nbytes
        return not self.refuses

    def unlock_pages(self, address: int) -> None:
        if self.current != CONTEXT:
            raise KernelError("no context")
        del self.locked[address]

    def within(self, context: int) -> Driver:
        self.before, self.current = self.current, context
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.current = self.before


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(page_locked, "cuda_driver", lambda: made)
    return made


def test_chunks_are_locked_once_and_the_last_one_ends_with_the_memory(driver: Driver) -> None:
    memory = PageLocked(ADDRESS, 2 * CHUNK_BYTES + 4096)
    memory.lock(0, 10)
    memory.lock(5, CHUNK_BYTES)
    assert driver.locked == {ADDRESS: CHUNK_BYTES}
    memory.lock(CHUNK_BYTES - 1, 2 * CHUNK_BYTES + 1)
    assert driver.locked == {
        ADDRESS: CHUNK_BYTES,
        ADDRESS + CHUNK_BYTES: CHUNK_BYTES,
        ADDRESS + 2 * CHUNK_BYTES: 4096,
    }
    driver.current = 0  # released in a thread that has no context
    memory.release()
    assert (driver.locked, driver.current) == ({}, 0)


def test_a_thread_without_a_context_locks_nothing_and_the_next_does(driver: Driver) -> None:
    memory = PageLocked(ADDRESS, CHUNK_BYTES)
    driver.current = 0
    memory.lock(0, 10)
    memory.release()
    assert driver.locked == {}
    driver.current = CONTEXT
    memory.lock(0, 10)
    assert driver.locked == {ADDRESS: CHUNK_BYTES}


def test_memory_that_may_not_be_locked_is_asked_for_once_and_never_unlocked(driver: Driver) -> None:
    memory = PageLocked(ADDRESS, CHUNK_BYTES)
    driver.refuses = True
    memory.lock(0, 10)
    driver.refuses = False
    memory.lock(0, 10)
    assert driver.locked == {}
    memory.release()


def test_pages_that_are_locked_for_what_lay_there_before_are_an_error(driver: Driver) -> None:
    driver.locked[ADDRESS] = CHUNK_BYTES
    memory = PageLocked(ADDRESS, CHUNK_BYTES)
    for _ in range(2):
        with pytest.raises(KernelError, match="locked already"):
            memory.lock(0, 10)
