"""Results of many calls in their order, while a pool of threads works ahead."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_order(
    call: Callable[[T], R], given: Iterable[T], *, workers: int, ahead: int
) -> Generator[R, None, None]:
    """``call`` of each, in threads; results come in order and are held until they are taken.

    Who stops early closes the generator, which then waits for the calls that have begun.

    Args:
        workers: threads.
        ahead: calls a thread that are begun before their results are asked for.
    """
    waiting = iter(given)
    pending: deque[Future[R]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="import") as pool:

        def submit(count: int) -> None:
            pending.extend(pool.submit(call, one) for one in itertools.islice(waiting, count))

        try:
            submit(ahead * workers)
            while pending:
                yield pending.popleft().result()
                submit(1)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
