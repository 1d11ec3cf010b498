"""A split becomes batches: the order from (seed, epoch), a slice for each process, exact resume.

A batch holds integers, as the network's record has them before ``normalize``: a fourth of the bytes
of float32 on their way to a GPU, where the last step is one of memory only. Small splits are
decoded once; of large ones threads fill the coming batches, some images each, and where images are
to be decoded each thread has a process do it (``filling``).
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch

from tessella.artifacts.dataset import Split
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.integers import ceil_div
from tessella.core.jpeg import Frame, frame_of
from tessella.core.memory import room_for
from tessella.core.pictures import Pixels
from tessella.core.preprocess import (
    Preprocess,
    centre_crop,
    fitted,
    raw_head,
    stored_pixels,
)
from tessella.data.augment import ORDER_STREAM, applied, generator, joins, only_cuts
from tessella.data.blocks import Located, seen_block, stored_volume
from tessella.data.changes import Changes, Drawn
from tessella.data.cuts import Cuts, cuts_of
from tessella.data.filling import Fillers, Wanted
from tessella.data.joining import drawn_pieces, made_of
from tessella.data.storing import DECODE_ONCE_BYTES as DECODE_ONCE_BYTES  # measurements set it here
from tessella.device.scaling import Scaling, has_one_pass
from tessella.tasks import Block, Moves, Piece, still, targets_of

AT_ONCE = 16  # images that a thread prepares before it takes the next task
READERS = 4  # threads where images are only read: copies of memory, of which few fill its bandwidth

Indices = npt.NDArray[np.int64]


class Files(NamedTuple):
    """JPEG files of a batch, to be decoded and fitted on the GPU.

    Attributes:
        frames: what each one's header says.
        rows: which images of the batch they are.
    """

    contents: list[bytes]
    frames: list[Frame]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some images of a split.

    Attributes:
        pixels: uint8 or uint16, [N, H, W, C], of the size that the network sees; with ``cuts``, of
            the record's whole size; with ``files``, only of the images that are not among these. Of
            volumes uint16 [N, D, H, W, C].
        cuts: int64, [N, 4]: top, left, mirror and flip of each image's ``Moves``, still to be made.
        changes: what else is to be made of each, before and behind its cut.
        record: says how they become the network's input.
        labels: the targets, as the split's task has them in a batch: int64 [N] for classification.
        indices: int64, [N]: which images of the split they are.
    """

    pixels: torch.Tensor
    record: Preprocess
    labels: Any
    indices: torch.Tensor
    cuts: torch.Tensor | None = None
    changes: Changes | None = None
    files: Files | None = None

    @property
    def images(self) -> torch.Tensor:
        """The network's input, float32 [N, C, H, W], of volumes [N, C, D, H, W]."""
        pixels, cuts = self.pixels, self.cuts
        if self.changes is not None:
            settings, each = self.changes.settings, self.changes.each
            pairs = zip(pixels.numpy(), each, strict=True)
            made = [applied(one, change, settings, self.record) for one, change in pairs]
            pixels, cuts = torch.from_numpy(np.stack(made)), None
        return Scaling(self.record, pixels.device)(pixels, cuts).contiguous()


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Global batches in which ``count`` images are seen."""
    return math.ceil(count / batch_size)


def batches(
    split: Split,
    preprocess: Preprocess,
    *,
    batch_size: int,
    seed: int = 0,
    epoch: int = 0,
    start: int = 0,
    rank: int = 0,
    world: int = 1,
    augment: Augment | None,
    training: bool,
    workers: int = 0,
    for_gpu: bool = False,
    decodes: bool = False,
    fillers: Fillers | None = None,
) -> Generator[Batch, None, None]:
    """This process's slices of one epoch's global batches, from batch ``start`` on.

    Training: a permutation that (seed, epoch) decide; the last batch is filled up from its
    beginning, so that every batch is whole. Otherwise: the split's order, the last batch is what is
    left (a process that gets nothing of it yields no batch for it).

    Of volumes a training gets blocks of the record's size, and who evaluates whole ones, one in a
    batch.

    Args:
        batch_size: images in a global batch, a multiple of ``world``; rank r gets the r-th of
            ``world`` equal parts.
        augment: None: the images are exactly as when evaluating. Otherwise, in training: these
            changes, and a random crop if the record has a crop.
        workers: how many prepare batches ahead; 0: only the calling thread does. They are threads,
            or where the images of a split that is not kept decoded are to be decoded, or changed in
            other ways than by cuts, processes, each asked by a thread.
        for_gpu: in page-locked memory, of which a GPU copies by itself, and with all changes left
            to it but the joining of images.
        decodes: the GPU decodes JPEG files, too: those of a split that is not kept decoded, where
            the cutting is left to it.
        fillers: the processes, for who asks for many epochs; by default they start and end here.

    Raises:
        UsageError: a batch size or rank that cannot work.
        DataError: an image of the split cannot be decoded.
        TrainError: a process that decodes has ended.
    """
    if batch_size < 1 or batch_size % world or not 0 <= rank < world:
        raise UsageError(
            "the batch size must be a positive multiple of the number of processes",
            seen=f"batch_size={batch_size}, rank={rank}, world={world}",
        )
    if preprocess.volume is not None and not training:
        batch_size = world
    order = _order(len(split), batch_size, seed, epoch) if training else np.arange(len(split))
    part = batch_size // world
    first = np.arange(start * batch_size, len(order), batch_size) + rank * part
    slices = [order[i : i + part] for i in first.tolist() if i < len(order)]
    if not slices:
        return
    changes = augment if training else None
    if preprocess.volume is not None:
        whole = not training
        volumes = _VolumeLoader(split, preprocess, changes, for_gpu, (seed, epoch), whole=whole)
        yield from _ahead(volumes, slices, min(workers, READERS)) if workers else volumes(slices)
        return
    loader = _Loader(split, preprocess, changes, for_gpu, workers, (seed, epoch), decodes)
    if workers:
        if loader.only_reads(slices[0]):
            workers = min(workers, READERS)
        elif loader.works_much(slices[0]):
            with (
                closing(Fillers(workers))
                if fillers is None
                else nullcontext(fillers) as loader.fillers
            ):
                yield from _ahead(loader, slices, workers)
            return
        yield from _ahead(loader, slices, workers)
        return
    for indices in slices:
        begun = loader.begin(indices)
        loader.fill(begun, 0, len(indices))
        yield loader.finished(begun)


def in_torch(targets: Any) -> Any:
    """Targets as the loss takes them: an array is a tensor."""
    return torch.from_numpy(targets) if isinstance(targets, np.ndarray) else targets


def _order(count: int, batch_size: int, seed: int, epoch: int) -> Indices:
    permutation = generator(seed, epoch, ORDER_STREAM).permutation(count)
    return np.resize(permutation, steps_per_epoch(count, batch_size) * batch_size)


@dataclass(frozen=True)
class _Begun:
    """A batch whose images and moves still come."""

    indices: Indices
    pixels: torch.Tensor
    moves: MutableSequence[Any] | Cuts  # moves, or of volumes blocks
    files: dict[int, tuple[bytes, Frame]]  # of the images that the GPU decodes, by row


class _Loader:
    """Makes batches of one epoch: an empty one, then its images, some at a time, and the targets.

    Args:
        changes: those of the images; None where they are to be as in an evaluation.
        drawn_from: seed and epoch of the random numbers.

    Attributes:
        fillers: the processes that are asked for images; None: they are made here.
    """

    fillers: Fillers | None = None

    def __init__(
        self,
        split: Split,
        record: Preprocess,
        changes: Augment | None,
        for_gpu: bool,
        workers: int,
        drawn_from: tuple[int, int],
        decodes: bool,
    ) -> None:
        self._split, self._record, self._changes = split, record, changes
        self._pinned = for_gpu and torch.cuda.is_available()
        self._drawn_from = drawn_from
        self._draws = changes is not None and not only_cuts(changes)
        draws_later = self._draws and has_one_pass() and not (changes and joins(changes))
        self._cuts_later = for_gpu and (draws_later or not self._draws)
        self._pixels_of, self._targets = _source(split, record, workers), targets_of(split)
        self._decodes = decodes and self._cuts_later and split not in _DECODED
        self._still = still(record)
        self._shape = record.pixel_shape
        if self._cuts_later:
            self._shape = record.height, record.width, record.channels

    def begin(self, indices: Indices) -> _Begun:
        """An empty batch of some images."""
        dtype = torch.uint8 if self._record.depth == 8 else torch.uint16
        # of files that the GPU decodes nothing is written here: memory that nobody touches is free
        pinned = self._pinned and not self._decodes
        with room_for(len(indices), "the host"):
            pixels = torch.empty((len(indices), *self._shape), dtype=dtype, pin_memory=pinned)
        return _Begun(indices, pixels, self._moves(indices), {})

    def _moves(self, indices: Indices) -> list[Moves] | Cuts:
        if not self._cuts_later:
            return [self._still] * len(indices)
        if self._changes is None:
            centre = [self._still.top, self._still.left, 0, 0]
            return Cuts(np.tile(np.array(centre, np.int64), (len(indices), 1)), self._still)
        if self._draws:
            return Drawn(self._changes, self._record, self._drawn_from, indices)
        made = cuts_of(self._changes, self._record, self._drawn_from, indices)
        return Cuts(made, self._still)

    def fill(self, begun: _Begun, first: int, last: int) -> None:
        """Put some of the images into it."""
        made, rows = begun.pixels.numpy(), [*range(first, last)]
        if isinstance(begun.moves, Cuts):
            rows = [first + n for n in self._read(begun.indices[first:last], made[first:last])]
        if self._decodes:
            rows = [row for row in rows if not self._left_to_gpu(begun, row)]
        if self.fillers is not None and rows:
            rows = self._fill_apart(begun, rows, self.fillers)
        for row in rows:
            index = int(begun.indices[row])
            if not isinstance(begun.moves, Cuts):
                made[row], begun.moves[row] = self._changed(index)
            else:
                made[row] = self._pixels_of(index)

    def _left_to_gpu(self, begun: _Begun, row: int) -> bool:
        """Note the file of an image if the GPU decodes it."""
        file = self._file(int(begun.indices[row]))
        if file is not None:
            begun.files[row] = file
        return file is not None

    def _fill_apart(self, begun: _Begun, rows: list[int], fillers: Fillers) -> list[int]:
        """Let a process make some of the images; gives the rows that it leaves."""
        made, whole = begun.pixels.numpy(), isinstance(begun.moves, Cuts)
        wanted = Wanted(self._record, whole, self._changes, self._drawn_from)
        in_a_row = len(rows) == rows[-1] + 1 - rows[0]
        out = made[rows[0] : rows[-1] + 1] if in_a_row else np.empty_like(made[rows])
        indices = begun.indices[rows].tolist()
        pieces = [self._pieces(index) for index in indices]
        moves = fillers.fill(self._split, indices, wanted, out, pieces)
        if not in_a_row:
            made[rows] = out
        if not isinstance(begun.moves, Cuts):
            for place, moved in moves.items():
                begun.moves[rows[place]] = moved
        return [row for place, row in enumerate(rows) if place not in moves]

    def finished(self, begun: _Begun) -> Batch:
        """The full batch, with the targets moved as the images are."""
        labels = in_torch(self._targets.batch(begun.indices, begun.moves))
        if self._pinned and isinstance(labels, torch.Tensor):
            labels = labels.pin_memory()
        cuts, changes = None, None
        if isinstance(begun.moves, Drawn):
            changes = begun.moves.numbers()
            if self._pinned:
                changes = changes._replace(words=changes.words.pin_memory())
        if isinstance(begun.moves, Cuts):
            cuts = torch.from_numpy(begun.moves.array_N4)
            cuts = cuts.pin_memory() if self._pinned else cuts
        pixels, files = begun.pixels, None
        if begun.files:
            rows = sorted(begun.files)
            contents, frames = zip(*(begun.files[row] for row in rows), strict=True)
            files = Files(list(contents), list(frames), rows)
            pixels = pixels[[row for row in range(len(pixels)) if row not in begun.files]]
        if self._pinned and not pixels.is_pinned():
            pixels = pixels.pin_memory()
        return Batch(
            pixels=pixels,
            files=files,
            cuts=cuts,
            changes=changes,
            record=self._record,
            labels=labels,
            indices=torch.from_numpy(begun.indices.copy()),
        )

    def only_reads(self, indices: Indices) -> bool:
        """Whether nothing of images is done here but reading, as far as the first ones tell."""
        if not self._cuts_later:
            return False
        some = indices[:AT_ONCE]
        others = self._read(some, np.empty((len(some), *self._shape), np.uint8))
        return not others or self._only_files(some[others])

    def works_much(self, indices: Indices) -> bool:
        """Whether images are decoded here, or changed much, as far as the first ones tell."""
        if self._split in _DECODED or self._only_files(indices[:AT_ONCE]):
            return False
        if self._draws and not self._cuts_later:
            return True
        head, some = raw_head(self._record), indices[:AT_ONCE].tolist()
        return head is None or not all(self._split.content(i).startswith(head) for i in some)

    def _only_files(self, indices: Indices) -> bool:
        """Whether the GPU decodes all of some images."""
        return self._decodes and all(self._file(index) for index in indices.tolist())

    def _file(self, index: int) -> tuple[bytes, Frame] | None:
        """The file of an image, if the GPU may decode it."""
        content = self._split.content(index)
        frame = frame_of(content)
        return None if frame is None else (content, frame)

    def _read(self, indices: Indices, out: Pixels) -> Sequence[int]:
        """Read images that are stored as pixels into their places; gives those of the others."""
        head = raw_head(self._record)
        if head is None or self._split in _DECODED:
            return range(len(indices))
        return self._split.read_each(indices, head, [one.reshape(-1).data for one in out])

    def _changed(self, index: int) -> tuple[Pixels, Moves]:
        if self._changes is None:
            return centre_crop(self._pixels_of(index), self._record), self._still
        return made_of(
            index, self._pieces(index), self._pixels_of, self._changes, self._record,
            self._drawn_from,
        )  # fmt: skip

    def _pieces(self, index: int) -> tuple[Piece, ...]:
        """What an image is joined of; none: it is one picture."""
        if self._changes is None:
            return ()
        return drawn_pieces(self._changes, self._record, self._drawn_from, index, self._targets)


class _VolumeLoader:
    """As ``_Loader``, of volumes: of their mapped arrays only the blocks that are seen are read."""

    def __init__(
        self, split: Split, record: Preprocess, changes: Augment | None, for_gpu: bool,
        drawn_from: tuple[int, int], *, whole: bool,
    ) -> None:  # fmt: skip
        self._split, self._record, self._changes, self._whole = split, record, changes, whole
        self._pinned = for_gpu and torch.cuda.is_available()
        self._drawn_from, self._targets = drawn_from, targets_of(split)
        self._located = cast(Located, self._targets)

    def __call__(self, slices: list[Indices]) -> Iterator[Batch]:
        for indices in slices:
            begun = self.begin(indices)
            self.fill(begun, 0, len(indices))
            yield self.finished(begun)

    def begin(self, indices: Indices) -> _Begun:
        sides = self._record.sides
        if self._whole:  # one is a batch
            sides = self._located.shape(int(indices[0]))
        pixels = torch.empty((len(indices), *sides, 1), dtype=torch.uint16, pin_memory=self._pinned)
        blocks = [Block(first=(0,) * 3, sides=sides)] * len(indices)
        return _Begun(indices, pixels, blocks, {})

    def fill(self, begun: _Begun, first: int, last: int) -> None:
        made, blocks = begun.pixels.numpy(), cast("list[Block]", begun.moves)
        for row in range(first, last):
            index = int(begun.indices[row])
            content = self._split.view(index)
            if self._whole:
                made[row] = stored_volume(content, self._located, index)
            else:
                made[row], blocks[row] = seen_block(
                    content, self._located, index, self._record, self._changes, self._drawn_from
                )

    def finished(self, begun: _Begun) -> Batch:
        labels = in_torch(self._targets.batch(begun.indices, cast("Any", begun.moves)))
        return Batch(
            pixels=begun.pixels,
            record=self._record,
            labels=labels.pin_memory() if self._pinned else labels,
            indices=torch.from_numpy(begun.indices.copy()),
        )


@dataclass
class _Coming:
    """A batch that threads fill; who puts the last images into it finishes it."""

    begun: _Begun
    parts: int
    errors: dict[int, BaseException] = field(default_factory=dict)
    batch: Future[Batch] = field(default_factory=Future)
    lock: Lock = field(default_factory=Lock)

    def fill(self, loader: _Loader | _VolumeLoader, first: int) -> None:
        """Put some images into it; an error becomes that of the batch, the first image's first."""
        try:
            loader.fill(self.begun, first, min(first + AT_ONCE, len(self.begun.indices)))
        except BaseException as error:
            self.errors[first] = error
        with self.lock:
            self.parts -= 1
            if self.parts:
                return
        try:
            if self.errors:
                raise self.errors[min(self.errors)]
            self.batch.set_result(loader.finished(self.begun))
        except BaseException as error:
            self.batch.set_exception(error)


def _ahead(loader: _Loader | _VolumeLoader, slices: list[Indices], workers: int) -> Iterator[Batch]:
    """The batches in order, filled by threads, so many ahead that each has something to do."""
    ahead = 1 + ceil_div(2 * workers * AT_ONCE, len(slices[0]))
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loading") as pool:

        def submit(indices: Indices) -> None:
            parts = range(0, len(indices), AT_ONCE)
            coming = _Coming(loader.begin(indices), len(parts))
            for first in parts:
                pool.submit(coming.fill, loader, first)
            pending.append(coming.batch)

        try:
            for indices in slices:
                submit(indices)
                if len(pending) > ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# --- pixels ---------------------------------------------------------------------------------------

# The decoded pixels of small splits, for as long as the split lives: NHWC, by the record they fit.
_DECODED: weakref.WeakKeyDictionary[Split, tuple[Preprocess, Pixels]] = weakref.WeakKeyDictionary()


def _source(split: Split, record: Preprocess, workers: int) -> Callable[[int], Pixels]:
    """A function that gives the fitted pixels of an image, HWC."""
    nbytes = len(split) * record.height * record.width * record.channels * record.depth // 8
    if nbytes > DECODE_ONCE_BYTES:
        return lambda index: _pixels(split, index, record)
    if split not in _DECODED or _DECODED[split][0] != record:
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="decoding") as pool:
            all_pixels = pool.map(lambda i: _pixels(split, i, record), range(len(split)))
            _DECODED[split] = (record, np.stack(list(all_pixels)))
    decoded = _DECODED[split][1]
    return lambda index: decoded[index]


def _pixels(split: Split, index: int, record: Preprocess) -> Pixels:
    stored = stored_pixels(split.content(index), record)
    if stored is not None:
        return stored
    try:
        return fitted(split[index].content, record)
    except DataError as error:
        raise DataError(
            f"image {index} of the {split.name} split cannot be decoded",
            seen=f"{split[index].path}: {error.wrong}",
            fix="import the dataset again",
        ) from error
