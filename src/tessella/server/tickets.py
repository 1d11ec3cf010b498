"""What acceptors and the engine's process say to each other: frames over a socket, no tensors.

A frame is its length, a letter, and what the letter says:

    d  engine → acceptor   the models that there are and the rules of traffic, as JSON
    k  acceptor → engine   no ticket will come for the models that the d of this number left out
    i  acceptor → engine   a ticket: run these places of my lane through a model
    p  acceptor → engine   a ticket whose place holds JPEG files: decode them first
    o  engine → acceptor   a ticket's outputs lie in its place; where the time went
    e  engine → acceptor   a ticket's or a question's error, as JSON
    s  acceptor → engine   what has been counted since the last time, as JSON
    q  acceptor → engine   a question: an HTTP request that is not for inference
    r  engine → acceptor   a question's answer
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tessella.core.errors import InputError, ServeError, TessellaError
from tessella.server.statistics import Stages

_HEAD = struct.Struct("<Ic")
_HEAD_BYTES = _HEAD.size
_TICKET = struct.Struct("<IIBqQQI")
_DONE = struct.Struct("<IQQQ")
_SPENT = struct.Struct("<QQQ")
_NUMBER = struct.Struct("<I")
MOST_STRUCTS = 256  # of tickets by their dimensions: those of usual requests
MOST_FRAME = 64 << 20  # of answers to questions; tickets are some tens of bytes


def frame(letter: bytes, content: bytes) -> bytes:
    return _HEAD.pack(len(content), letter) + content


class Frames:
    """Puts frames together that arrive in any parts."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The letter and the content of each frame that is complete now."""
        data = self._rest + data if self._rest else data
        found, position, size, unpack = [], 0, len(data), _HEAD.unpack_from
        while (start := position + _HEAD_BYTES) <= size:
            nbytes, letter = unpack(data, position)
            if nbytes > MOST_FRAME:
                raise ServeError("a frame is larger than any may be", status=500, seen=nbytes)
            if start + nbytes > size:
                break
            position = start + nbytes
            found.append((letter, data[start:position]))
        self._rest = data[position:]
        return found


class Ticket(NamedTuple):
    """A request whose tensors lie in the acceptor's lane, each input behind the other, then room
    for the outputs.

    Attributes:
        number: the acceptor's name for it until its answer.
        model: the model's number in the last description.
        deadline_ns: on the clock that all processes share; 0 is none.
        start, end: where its place begins and ends.
        sizes: the dimensions of all inputs, one behind the other; of files, the bytes of each.
        letter: of its frame: ``i``, or ``p`` for files.
        client: whose it is, as ``fairness`` numbers them.
    """

    number: int
    model: int
    priority: int
    deadline_ns: int
    start: int
    end: int
    sizes: tuple[int, ...]
    letter: bytes = b"i"
    client: int = 0

    def pack(self) -> bytes:
        head = _TICKET.pack(
            self.number,
            self.model,
            self.priority,
            self.deadline_ns,
            self.start,
            self.end,
            self.client,
        )
        return frame(self.letter, head + pack_sizes(self.sizes))

    @classmethod
    def unpack(cls, content: bytes, letter: bytes = b"i") -> Ticket:
        told = _ticket((len(content) - _TICKET.size) // 4).unpack_from(content)
        number, model, priority, deadline_ns, start, end, client = told[:7]
        return cls(number, model, priority, deadline_ns, start, end, told[7:], letter, client)


@functools.lru_cache(MOST_STRUCTS)
def _ticket(count: int) -> struct.Struct:
    """A ticket of so many dimensions."""
    return struct.Struct(f"{_TICKET.format}{count}I")


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """Dimensions of tensors, one behind the other, as ``pack_done`` takes them."""
    return struct.pack(f"<{len(sizes)}I", *sizes)


def pack_done(number: int, stages: Stages, sizes: bytes) -> bytes:
    """The frame of a ticket that is done; ``sizes`` as in ``Ticket``, of the outputs."""
    return done_packer(stages, sizes)(number)


def done_packer(stages: Stages, sizes: bytes) -> Callable[[int], bytes]:
    """``pack_done`` for tickets of which all but the number is alike."""
    head = _HEAD.pack(_DONE.size + len(sizes), b"o")
    tail = _SPENT.pack(stages.beside, stages.copy, stages.compute) + sizes
    return lambda number: head + _NUMBER.pack(number) + tail


def unpack_done(content: bytes) -> tuple[int, tuple[int, int, int], tuple[int, ...]]:
    """The ticket's number, the nanoseconds of decoding, copying and computing, and the sizes."""
    sizes = struct.unpack_from(f"<{(len(content) - _DONE.size) // 4}I", content, _DONE.size)
    number, *spent_ns = _DONE.unpack_from(content)
    return number, (spent_ns[0], spent_ns[1], spent_ns[2]), sizes


def pack_error(number: int, error: BaseException) -> bytes:
    """An error as its reader will raise it; what is none of ours is told without its text."""
    if isinstance(error, ServeError):
        told: dict[str, Any] = {"status": error.status, "retry_after_s": error.retry_after_s}
    else:
        told = {"status": 400 if isinstance(error, InputError) else 500}
    if isinstance(error, TessellaError):
        told |= {"wrong": error.wrong, "seen": error.seen, "fix": error.fix}
    else:
        told |= {"wrong": "the server failed to answer", "fix": "look into its log"}
    return frame(b"e", _NUMBER.pack(number) + json.dumps(told).encode())


def unpack_error(content: bytes) -> tuple[int, ServeError]:
    told = json.loads(content[_NUMBER.size :])
    return _NUMBER.unpack_from(content)[0], ServeError(told.pop("wrong"), **told)


def pack_understood(number: int) -> bytes:
    return frame(b"k", _NUMBER.pack(number))


def unpack_number(content: bytes) -> int:
    number: int = _NUMBER.unpack(content)[0]
    return number


def pack_question(number: int, question: dict[str, Any], body: bytes) -> bytes:
    return frame(b"q", _numbered(number, question, body))


def pack_reply(number: int, reply: dict[str, Any], body: bytes) -> bytes:
    return frame(b"r", _numbered(number, reply, body))


def _numbered(number: int, told: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(told).encode()
    return _NUMBER.pack(number) + _NUMBER.pack(len(text)) + text + body


def unpack_numbered(content: bytes) -> tuple[int, dict[str, Any], bytes]:
    """Number, JSON and body of a question or its answer."""
    (number,), (nbytes,) = _NUMBER.unpack_from(content), _NUMBER.unpack_from(content, 4)
    return number, json.loads(content[8 : 8 + nbytes]), content[8 + nbytes :]
