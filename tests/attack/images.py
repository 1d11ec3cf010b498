"""Attacks on the decoding of pictures: every format with other bytes, cut, doubled, or at random.

What both ways of decoding take, in the calling thread and in a process, must be the same pixels.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable

from tessella.core.decoding import Budget, Decoder
from tessella.core.errors import DataError
from tessella.core.headers import is_plain
from tessella.core.preprocess import Preprocess
from tests.support.pictures.hostile import PROMISES, good_pictures, mutated, peak_bytes

BUDGET = Budget(nbytes=256 << 20, seconds=5.0)
MOST_APART_BYTES = 450 << 20  # of a decoding process: its libraries take 120 MB
RECORDS = (
    Preprocess(height=12, width=16, channels=3),
    Preprocess(height=9, width=24, channels=1, depth=16),
    Preprocess(height=40, width=7, channels=3, resize="fill"),
    None,
)


@functools.cache
def _decoder() -> Decoder:
    """One for each child: made when the child first asks."""
    return Decoder(BUDGET, processes=1)


@functools.cache
def _files() -> list[tuple[str, bytes]]:
    return [*good_pictures().items(), *((name, content) for name, content, _ in PROMISES)]


def prepare() -> None:
    for name, content in good_pictures().items():
        assert outcome(content, RECORDS[0]) == "answered", name
    _decoder().close()
    _decoder.cache_clear()  # each child has its own


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The file of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    files = _files()
    kind, content = files[index % len(files)]
    how = "as it is"
    if rng.random() < 0.97:
        content, how = mutated(content, rng.getrandbits(60)), "changed"
    if rng.random() < 0.05:
        other = rng.choice(files)[1]
        content, how = content[: rng.randrange(64)] + other, "with another's head"
    record = RECORDS[rng.randrange(len(RECORDS))]
    return f"{kind.replace(' ', '-')} {how} {record}", functools.partial(outcome, content, record)


def outcome(content: bytes, record: Preprocess | None) -> str:
    """``refused``, or ``answered`` with pixels that are the same both ways."""
    decoder = _decoder()
    ways = [decoder.decode_apart, *([decoder.decode_here] if is_plain(content, record) else [])]
    told: list[bytes | str] = []
    for decode in ways:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of damaged tags
                told.append(decode(content, record, name="picture").pixels.tobytes())
        except DataError as error:
            told.append(str(error))
    if len(set(told)) > 1:
        return f"differs {[t if isinstance(t, str) else len(t) for t in told]}"
    if "made its decoder fail" in str(told[0]):
        return f"ended {told[0]!r}"
    for process in decoder._pool.idle:
        if peak_bytes(str(process._popen.pid)) > MOST_APART_BYTES:
            return f"large {peak_bytes(str(process._popen.pid)) >> 20} MB in its process"
    return "refused" if isinstance(told[0], str) else "answered"
