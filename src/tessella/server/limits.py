"""How much a client may send and hold. The defaults serve images; none of them is a tuning knob."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.confined import DEFAULT_BUDGET, Budget


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits beyond which a server refuses a request.

    Attributes:
        body_bytes: largest body, before and after decompression, and largest input tensor.
        json_bytes: largest JSON text; parsing holds up every other request, so tensors that are
            larger have to come as binary data, as have more than 262,000 rows, or 131,000 texts.
        held_bytes: what the bodies of all requests together may take, with answers that wait to be
            read.
        image: what decoding one picture may take: pixels, bytes and seconds.
        waiting: requests that may wait for one model.
        body_idle_s: how long a client may be silent in the middle of a body.
        answer_bytes_s: what a client has to read of an answer in a second, over ``body_idle_s``.
        crowded_bytes_s: the same while answers that wait take half of ``held_bytes``.
        head_bytes: largest request line and headers.
        head_s: how long a client may take to send them.
    """

    body_bytes: int = 256 << 20
    json_bytes: int = 16 << 20
    held_bytes: int = 1 << 30
    image: Budget = DEFAULT_BUDGET
    waiting: int = 512
    body_idle_s: float = 30.0
    answer_bytes_s: float = 240.0
    crowded_bytes_s: float = 16 << 10
    head_bytes: int = 64 << 10
    head_s: float = 30.0


DEFAULT_LIMITS = Limits()
