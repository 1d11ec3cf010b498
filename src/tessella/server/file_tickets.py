"""Tickets whose places hold JPEG files: from an acceptor's lane by the GPU's decoder to the engine.

Python's lock is what all of the engine's process shares, so what a picture costs under it bounds
how many there are a second. So what passes between the threads is a decoded batch, what waits for
the engine are some of its pictures together, and answers go to each acceptor once an execution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from tessella.core.errors import ServeError
from tessella.server import tickets
from tessella.server.jpegs import MOST_TOGETHER, Decoded, Files, JpegQueue
from tessella.server.lane import Lane, aligned
from tessella.server.repository import Model
from tessella.server.tickets import Ticket
from tessella.server.waiting import Request

PLENTY = MOST_TOGETHER  # that are decoded, or wait for it
# Pictures of a request: four of eight fill an execution of 32. A request that is cut is answered
# with its last piece, so fewer where that fills no execution.
TOGETHER = 8


class Sender(Protocol):
    """The acceptor that a ticket came from."""

    lane: Lane

    def send(self, frames: bytes) -> None: ...


class Room(Protocol):
    """What the engine's process has beside."""

    def soon(self, call: Callable[[], None]) -> None: ...

    def with_model(self, number: int, use: Callable[[Model], None]) -> None: ...

    def wait(self, model: Model, request: Request) -> None: ...


class _Sent(NamedTuple):
    """A ticket; and how many are one request at most."""

    sender: Sender
    ticket: Ticket
    most: int

    @property
    def is_plain(self) -> bool:
        """Whether others may be computed with it: one file, for which there is always time."""
        return len(self.ticket.sizes) == 1 and not self.ticket.deadline_ns

    def joins(self, other: _Sent) -> bool:
        """Whether both are for the same model, and equally urgent."""
        return self.is_plain and self.ticket[1:3] == other.ticket[1:3]


class FileTickets:
    """All such tickets of the engine's process."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._decoding = 0  # tickets
        self._decoded_here, self._answer_here = self._decoded, self._answer  # told by identity

    def start(self, sender: Sender, ticket: Ticket) -> None:
        """Let a ticket's files be decoded, and then wait for the engine.

        Raises:
            ServeError: as ``JpegQueue.submit``; 500, the ticket is none that an acceptor sends.
        """
        contents = sender.lane.parts(ticket.start, ticket.sizes)

        def submit(model: Model) -> None:
            sent = _Sent(sender, ticket, math.gcd(TOGETHER, model.max_batch))
            # Without frames: nvJPEG shall read what they say, whatever an acceptor does meanwhile
            files = Files(
                contents=contents,
                frames=None,
                deliver=self._decoded_here,
                tag=sent,
                priority=ticket.priority,
                deadline_ns=ticket.deadline_ns or None,
                client=ticket.client,
            )
            _queue_of(model).submit(files)

        self._room.with_model(ticket.model, submit)
        self._decoding += 1

    @property
    def is_busy(self) -> bool:
        """Whether so many files wait to be decoded that no more are needed at once."""
        return self._decoding >= PLENTY

    def _decoded(self, decoded: Decoded) -> None:
        self._room.soon(partial(self._go_on, decoded))

    def _go_on(self, decoded: Decoded) -> None:
        self._decoding -= len(decoded.requests)
        first = 0
        for group in _groups([files.tag for files in decoded.requests]):
            end = first + sum(len(sent.ticket.sizes) for sent in group)
            try:
                self._wait(group, decoded.made()[first:end], decoded.ns)
            except Exception as error:
                _fail(group, error)
            first = end

    def _wait(self, group: Sequence[_Sent], pixels: np.ndarray, decode_ns: int) -> None:
        """Let pictures wait for the engine as one request."""
        first = group[0].ticket

        def wait(model: Model) -> None:
            assert model.signature.image_input is not None, "as it has a decoder"
            request = Request(
                arrays={model.signature.image_input: pixels},
                deliver=self._answer_here,
                priority=first.priority,
                deadline_ns=first.deadline_ns or None,
                client=first.client,
                tag=tuple(group),
                members=len(group),
                shapes=(pixels.shape[1:],),
            )
            request.stages.decoded(decode_ns)
            self._room.wait(model, request)

        self._room.with_model(first.model, wait)

    def _answer(self, requests: list[Request]) -> None:
        """Write the outputs behind the files and tell it, in the engine's thread."""
        frames: dict[Sender, list[bytes]] = defaultdict(list)
        for request in requests:
            group: Sequence[_Sent] = request.tag
            if request.error is None:
                try:
                    for sent, frame in zip(group, _done(group, request), strict=True):
                        frames[sent.sender].append(frame)
                except Exception as error:
                    _fail(group, error)
            elif len(group) == 1:
                _fail(group, request.error)
            else:  # one of them may have caused it
                self._room.soon(partial(self._each_alone, request))
        for sender, told in frames.items():
            sender.send(b"".join(told))

    def _each_alone(self, request: Request) -> None:
        (pixels,) = request.arrays.values()
        for place, sent in enumerate(request.tag):
            try:
                self._wait([sent], pixels[place : place + 1], request.stages.beside)
            except Exception as error:
                _fail([sent], error)


def _queue_of(model: Model) -> JpegQueue:
    if model.jpegs is None or model.signature.image_input is None:
        raise ServeError("a ticket's files are none that a GPU decodes", status=500)
    return model.jpegs


def _groups(all_sent: Sequence[_Sent]) -> Iterator[list[_Sent]]:
    """Cuts tickets that were decoded together into those that wait for the engine as one."""
    group: list[_Sent] = []
    for sent in all_sent:
        if group and not (len(group) < sent.most and group[0].is_plain and sent.joins(group[0])):
            yield group
            group = []
        group.append(sent)
    yield group


def _done(group: Sequence[_Sent], request: Request) -> list[bytes]:
    """Write each ticket's rows of the outputs into its place; the frames that tell it."""
    assert request.outputs is not None
    arrays = [np.ascontiguousarray(array) for array in request.outputs.values()]
    rows = len(arrays[0]) // len(group)  # of a ticket: all have one file, or there is one ticket
    sizes = [size for array in arrays for size in (rows, *array.shape[1:])]
    pack = tickets.done_packer(request.stages, tickets.pack_sizes(sizes))
    parts = [(array.data.cast("B"), array.nbytes // len(group)) for array in arrays]
    frames = []
    for place, (sender, ticket, _) in enumerate(group):
        start = ticket.start + aligned(sum(ticket.sizes))
        try:
            for content, nbytes in parts:
                if start + nbytes > ticket.end:
                    raise ServeError("the outputs are larger than the plan says", status=500)
                sender.lane.write(start, content[place * nbytes : (place + 1) * nbytes])
                start = aligned(start + nbytes)
            frames.append(pack(ticket.number))
        except ServeError as error:  # of this ticket alone
            frames.append(tickets.pack_error(ticket.number, error))
    return frames


def _fail(group: Sequence[_Sent], error: Exception) -> None:
    for sender, ticket, _ in group:
        sender.send(tickets.pack_error(ticket.number, error))
