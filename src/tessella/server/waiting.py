"""A request that waits for an engine, who waits for its answer, and what both ask of a batcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from tessella.core.jpeg import Frame
from tessella.server.statistics import Stages

Arrays = dict[str, np.ndarray]

PRIORITIES = (1, 2, 3)  # 1 runs before 2 before 3, as in Triton
DEFAULT_PRIORITY = 2
SHADOW_PRIORITY = PRIORITIES[-1] + 1  # of copies, which no client can ask for


class Waiter(Protocol):
    """Who waits for the outputs on an event loop; an ``asyncio.Future`` is one."""

    def done(self) -> bool: ...

    def set_result(self, outputs: Arrays, /) -> None: ...

    def set_exception(self, error: Exception, /) -> None: ...


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """Inputs that wait for an engine, and later their outputs or the error.

    Attributes:
        deliver: called with all requests of an execution that share it, in the thread that ran it.
        deadline_ns: when the answer has to be there, on ``perf_counter``'s clock; None is whenever.
        answer: what an event loop waits for; None where ``deliver`` is all.
        tag: what ``deliver`` knows it by.
        client: whose it is, as ``fairness`` numbers them.
        members: how many clients' requests it stands for.
        shapes: of the inputs, but for the batch: only requests of equal ones can be joined.
        parts: outputs of its pieces, by the sample that each begins with.
        answered: samples that are in ``parts``.
        losses: executions of it whose instance ended.
    """

    arrays: Arrays
    deliver: Callable[[list[Request]], object]
    priority: int = DEFAULT_PRIORITY
    deadline_ns: int | None = None
    client: int = 0
    stages: Stages = field(default_factory=Stages)
    answer: Waiter | None = None
    tag: tuple[Any, ...] = ()
    members: int = 1
    outputs: Arrays | None = None
    error: Exception | None = None
    since_ns: int = 0
    batch: int = 0
    begun: int = 0  # samples that have been given to the engine
    parts: dict[int, Arrays] = field(default_factory=dict)
    answered: int = 0
    losses: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.shapes:
            self.shapes = shapes_of(self.arrays)

    def gave_up(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self.answer is not None and self.answer.done()


def shapes_of(arrays: Arrays) -> tuple[tuple[int, ...], ...]:
    """As ``Request.shapes``, by the inputs' names."""
    if len(arrays) == 1:
        (array,) = arrays.values()
        return (array.shape[1:],)
    return tuple(arrays[name].shape[1:] for name in sorted(arrays))


Piece = tuple[Request, int, int]  # of a request, the samples from the first to the second number


class Infers(Protocol):
    """Computes requests: in this process, or in the one with the engines."""

    async def infer(
        self,
        arrays: Arrays,
        *,
        timeout_us: int | None = None,
        priority: int = DEFAULT_PRIORITY,
        client: int = 0,
        stages: Stages | None = None,
    ) -> Arrays:
        """The engine's outputs for these inputs, computed alone or in a batch with other requests.

        Args:
            timeout_us: when the answer is of no use any more, from now on.
            client: of ``fairness.client_of``, with whom others share the engine.
            stages: where the time went is added to it.

        Raises:
            ServeError: 503, too many requests wait; 429, there is no time for this one.
            Exception: whatever the engine raised for this request.
        """
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.begin(
            arrays, answer, timeout_us=timeout_us, priority=priority, client=client, stages=stages
        )
        return await answer

    def begin(
        self,
        arrays: Arrays,
        answer: Waiter,
        *,
        timeout_us: int | None = None,
        priority: int = DEFAULT_PRIORITY,
        client: int = 0,
        stages: Stages | None = None,
    ) -> None:
        """As ``infer``, for a waiter that the event loop tells the outputs or the error.

        Raises:
            ServeError: as ``infer``; the waiter is told nothing then.
        """

    def let_go(self) -> None:
        """Hold no request for which nobody waits; a process that hands them on holds none."""
        return


class InfersFiles(Protocol):
    """Computes requests whose one picture is a JPEG file, which the engine's GPU decodes."""

    async def infer_files(
        self,
        files: Sequence[bytes],
        frames: Sequence[Frame],
        *,
        timeout_us: int | None,
        priority: int,
        client: int,
        stages: Stages,
    ) -> Arrays:
        """As ``Infers.infer``, for files whose frames ``core.jpeg.frame_of`` read.

        Raises:
            InputError: a file is damaged. ServeError: as ``Infers.infer``.
        """
        answer: asyncio.Future[Arrays] = asyncio.get_running_loop().create_future()
        self.begin_files(
            files,
            frames,
            answer,
            timeout_us=timeout_us,
            priority=priority,
            client=client,
            stages=stages,
        )
        return await answer

    def begin_files(
        self,
        files: Sequence[bytes],
        frames: Sequence[Frame],
        answer: Waiter,
        *,
        timeout_us: int | None,
        priority: int,
        client: int,
        stages: Stages,
    ) -> None:
        """As ``infer_files``, for a waiter that the event loop tells the outputs or the error.

        Raises:
            ServeError: as ``Infers.infer``; the waiter is told nothing then.
        """
