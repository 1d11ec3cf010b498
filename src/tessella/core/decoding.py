"""Pictures of strangers, decoded within a budget of pixels, memory and time.

A decoder in C cannot be interrupted, and what a thread has taken does not always come back: 16 MB
of lossless WebP held one for 22 s and 690 MB. So only files whose header bounds their cost
(``headers.is_plain``) are decoded in the calling thread. All others go to processes that can be
ended: each has an address-space limit and an alarm, which end it from within, whatever its decoder
does, and another one takes its place. The pixels are the same in both ways.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
from typing import NamedTuple

import numpy as np

from tessella.core.confined import DEFAULT_BUDGET, Budget, Confined, Order, Pool, serve
from tessella.core.errors import DataError
from tessella.core.headers import is_plain
from tessella.core.pictures import MAX_PIXELS, MAX_SAMPLES, Pixels, out_of_memory, read_pixels
from tessella.core.preprocess import Preprocess, fitted_and_size, to_depth
from tessella.core.record import canonical_json, from_plain


class Decoded(NamedTuple):
    """A picture, HWC: as a dataset with a record stores it, or in its own size at 8 bits.

    Attributes:
        size: the picture's own height and width.
    """

    pixels: Pixels
    size: tuple[int, int]


class Decoder:
    """Decodes, in the calling thread or in a process; may be called from many threads at once.

    Args:
        processes: how many costly pictures are decoded at a time; further callers wait.
    """

    def __init__(self, budget: Budget = DEFAULT_BUDGET, *, processes: int) -> None:
        self.budget = budget
        self._pool = Pool(
            lambda: Confined("tessella.core.decoding", budget),
            most=processes,
            lives_after=(DataError,),
        )

    def __call__(self, content: bytes, record: Preprocess | None, *, name: str) -> Pixels:
        """The pixels of ``Decoded``.

        Raises:
            DataError: not an image that can be decoded, or not within the budget.
        """
        decode = self.decode_here if is_plain(content, record) else self.decode_apart
        return decode(content, record, name=name).pixels

    def decode_here(self, content: bytes, record: Preprocess | None, *, name: str) -> Decoded:
        """Decode in the calling thread, which is safe for a file that ``is_plain``."""
        return _decode(content, record, name, self.budget.pixels)

    def decode_apart(self, content: bytes, record: Preprocess | None, *, name: str) -> Decoded:
        """Decode in a process with the budget's limits."""
        process: Confined | None = None
        try:
            with self._pool.one() as process:
                return _decode_in(process, content, record, name)
        except (EOFError, OSError) as error:
            if process is None:  # none was started
                raise
            raise why_it_ended(process, self.budget, name, len(content)) from error

    def close(self) -> None:
        """End the idle processes now, and every busy process when its picture is decoded."""
        self._pool.close()


def _decode(content: bytes, record: Preprocess | None, name: str, most_pixels: int) -> Decoded:
    if record is not None:
        return Decoded(*fitted_and_size(content, record, name=name, most_pixels=most_pixels))
    try:
        pixels = to_depth(read_pixels(content, name=name, most_pixels=most_pixels), 8)
        return Decoded(pixels, (pixels.shape[0], pixels.shape[1]))
    except MemoryError as error:
        raise out_of_memory(name, content) from error


def why_it_ended(process: Confined, budget: Budget, name: str, nbytes: int) -> DataError:
    """What to say of the picture that a process was decoding when it ended."""
    code = process.exit_code()
    if code == -signal.SIGALRM:
        return DataError(
            f"{name} takes longer than {budget.seconds:g} s to decode",
            seen=f"a file of {nbytes:,} bytes",
            fix="shrink it first, or save it as JPEG or PNG",
        )
    seen = f"exit code {code}"
    with contextlib.suppress(ValueError):
        seen = signal.Signals(-code).name
    return DataError(
        f"{name} made its decoder fail", seen=seen, fix="save it again, as JPEG or PNG"
    )


def _decode_in(process: Confined, content: bytes, record: Preprocess | None, name: str) -> Decoded:
    """Decode in a process.

    Raises:
        DataError: the process says why the picture cannot be decoded.
        EOFError, OSError: the process has ended.
    """
    process.send({"record": None if record is None else text_of(record), "name": name}, content)
    reply = process.reply()
    if "wrong" in reply:
        raise DataError(reply["wrong"], seen=reply["seen"], fix=reply["fix"])
    if reply["dtype"] not in ("uint8", "uint16") or math.prod(reply["shape"]) > MAX_SAMPLES:
        raise EOFError("no pixels")  # it decodes foreign bytes: not even it is believed
    out = np.empty(reply["shape"], reply["dtype"])
    process.connection.recv_bytes_into(out.data.cast("B"))
    height, width = map(int, reply["size"])
    if not (height > 0 and width > 0 and height * width <= MAX_PIXELS):
        raise EOFError("no size")
    return Decoded(out, (height, width))


text_of = functools.lru_cache(maxsize=64)(canonical_json)


# --- inside the process ---------------------------------------------------------------------------


def main() -> None:
    """Decode one picture after another."""
    import cv2  # before the limit and the first alarm
    import tifffile  # noqa: F401

    cv2.setNumThreads(1)
    serve(_answer)


def _answer(order: Order, content: bytes, budget: Budget) -> tuple[Order, memoryview | None]:
    try:
        record = None if order["record"] is None else record_of(order["record"])
        decoded, size = _decode(content, record, order["name"], budget.pixels)
        pixels = np.ascontiguousarray(decoded)
    except DataError as error:
        return told(error, order["name"], budget), None
    told_of = {"shape": pixels.shape, "dtype": str(pixels.dtype), "size": size}
    return told_of, pixels.data.cast("B")


def told(error: DataError, name: str, budget: Budget) -> Order:
    """An error as a confined process tells it: memory that was missing was the budget's."""
    if isinstance(error.__cause__, MemoryError):
        error.wrong = f"{name} takes more than {budget.nbytes:,} bytes to decode"
    return dict(error.to_json())


@functools.lru_cache(maxsize=64)
def record_of(text: str) -> Preprocess:
    """The record that ``canonical_json`` wrote."""
    return from_plain(Preprocess, json.loads(text), where="the record")


if __name__ == "__main__":
    main()
