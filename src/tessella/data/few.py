"""Few files to stored pictures, by threads of this process.

What is not plain from its header they hand on to confined processes; many files are read by such
processes alone (``parts``). Either way a file that takes all memory or never ends is one bad file,
and a script needs no ``__main__`` guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from tessella.artifacts.dataset import SkippedFile
from tessella.core.decoding import Decoder
from tessella.core.errors import DataError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, Storing
from tessella.data import reading
from tessella.data.in_order import in_order
from tessella.data.reading import Read, Stored, Way, read, read_volume, skipped
from tessella.tasks import Source


def read_all(
    sources: Sequence[Source],
    record: Preprocess,
    *,
    stored: Stored,
    workers: int,
    store: Storing = "png",
) -> Iterator[Read]:
    """Each source's picture, or why there is none, in order; holds a few pictures a worker.

    Args:
        store: how ``encode`` stores them.
    """
    decoder = Decoder(reading.BUDGET, processes=workers)

    def decode(content: bytes) -> Pixels:
        return decoder(content, record, name="the file")

    way = Way(record=record, store=store, decode=decode)

    def read_one(source: Source) -> Read:
        if record.volume is not None:
            made = read_volume(source.file, source.path, record.volume)
        else:
            made = read(source.file, source.path, way)
        if isinstance(made, SkippedFile):
            return made
        try:
            return replace(made, label=stored(source.label, source.file, record))
        except DataError as error:
            return skipped(source.path, error)

    with closing(decoder), closing(in_order(read_one, sources, workers=workers, ahead=4)) as made:
        yield from made
