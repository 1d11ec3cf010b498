"""A split becomes batches: the order from (seed, epoch), a slice for each process, exact resume.

A batch holds integers, as the network's record has them before ``normalize``: a fourth of the bytes
of float32 on their way to a GPU, where the last step is one of memory only. Small splits are
decoded once; of large ones threads fill the coming batches, some images each.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tessella.artifacts.dataset import Split
from tessella.artifacts.run import Augment
from tessella.core.errors import DataError, UsageError
from tessella.core.integers import ceil_div
from tessella.core.pictures import Pixels
from tessella.core.preprocess import (
    Preprocess,
    centre_crop,
    fitted,
    raw_head,
    stored_pixels,
)
from tessella.data.augment import (
    IMAGE_STREAM,
    ORDER_STREAM,
    augmented,
    drawn_cut,
    generator,
    only_cuts,
)
from tessella.data.scaling import Scaling
from tessella.tasks import targets_of

DECODE_ONCE_BYTES = 256 << 20
AT_ONCE = 16  # images that a thread prepares before it takes the next task

Indices = npt.NDArray[np.int64]
Change = Callable[[Pixels, int], Pixels]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some images of a split.

    Attributes:
        pixels: uint8 or uint16, [N, H, W, C], of the size that the network sees; with ``cuts``, as
            the dataset stores them.
        cuts: int64, [N, 4]: the fields of each image's ``augment.Cut``, still to be made.
        record: says how they become the network's input.
        labels: the targets, as the split's task has them in a batch: int64 [N] for classification.
        indices: int64, [N]: which images of the split they are.
    """

    pixels: torch.Tensor
    record: Preprocess
    labels: Any
    indices: torch.Tensor
    cuts: torch.Tensor | None = None

    @property
    def images(self) -> torch.Tensor:
        """The network's input, float32 [N, C, H, W]."""
        return Scaling(self.record, self.pixels.device)(self.pixels, self.cuts).contiguous()


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
) -> Iterator[Batch]:
    """This process's slices of one epoch's global batches, from batch ``start`` on.

    Training: a permutation that (seed, epoch) decide; the last batch is filled up from its
    beginning, so that every batch is whole. Otherwise: the split's order, the last batch is what is
    left (a process that gets nothing of it yields no batch for it).

    Args:
        batch_size: images in a global batch, a multiple of ``world``; rank r gets the r-th of
            ``world`` equal parts.
        augment: None: the images are exactly as when evaluating. Otherwise, in training: these
            changes, and a random crop if the record has a crop.
        workers: threads that prepare batches ahead; 0: in the calling thread.
        for_gpu: in page-locked memory, of which a GPU copies by itself, and with the cutting left
            to it where an image is not changed in other ways.

    Raises:
        UsageError: a batch size or rank that cannot work.
        DataError: an image of the split cannot be decoded.
    """
    if batch_size < 1 or batch_size % world or not 0 <= rank < world:
        raise UsageError(
            "the batch size must be a positive multiple of the number of processes",
            seen=f"batch_size={batch_size}, rank={rank}, world={world}",
        )
    order = _order(len(split), batch_size, seed, epoch) if training else np.arange(len(split))
    part = batch_size // world
    first = np.arange(start * batch_size, len(order), batch_size) + rank * part
    slices = [order[i : i + part] for i in first.tolist() if i < len(order)]
    if not slices:
        return
    change = _change(augment, preprocess, seed, epoch) if augment and training else None
    cut = _cut(augment if training else None, preprocess, seed, epoch)
    later = for_gpu and (change is None or (augment is not None and only_cuts(augment)))
    pixels_of, targets = _source(split, preprocess, workers), targets_of(split)
    height, width, channels = preprocess.pixel_shape
    if later:
        height, width = preprocess.height, preprocess.width
    dtype = torch.uint8 if preprocess.depth == 8 else torch.uint16

    def begin(indices: Indices) -> Batch:
        """A batch whose pixels and cuts are still to come."""
        shape = (len(indices), height, width, channels)
        labels = in_torch(targets.batch(indices))
        if for_gpu and isinstance(labels, torch.Tensor):
            labels = labels.pin_memory()
        return Batch(
            pixels=torch.empty(shape, dtype=dtype, pin_memory=for_gpu),
            cuts=torch.empty((len(indices), 4), dtype=torch.int64, pin_memory=True)
            if later
            else None,
            record=preprocess,
            labels=labels,
            indices=torch.from_numpy(indices.copy()),
        )

    def read_into(index: int, out: Pixels) -> None:
        """The whole image; where the dataset stores pixels, straight into their place."""
        if split in _DECODED or not _read(split, index, out, preprocess):
            out[...] = pixels_of(index)

    def fill(batch: Batch, first: int, last: int) -> None:
        made, indices = batch.pixels.numpy(), batch.indices.tolist()
        for row in range(first, last):
            index = indices[row]
            if batch.cuts is not None:
                read_into(index, made[row])
                batch.cuts.numpy()[row] = cut(index)
            else:
                pixels = pixels_of(index)
                made[row] = change(pixels, index) if change else centre_crop(pixels, preprocess)

    if workers:
        first_image = np.empty((height, width, channels), np.uint8)
        if later and _read(split, int(slices[0][0]), first_image, preprocess):
            workers = 1  # reads an image in 40 µs, most of it with Python's lock: more only wait
        yield from _ahead(begin, fill, slices, workers)
        return
    for indices in slices:
        batch = begin(indices)
        fill(batch, 0, len(indices))
        yield batch


def in_torch(targets: Any) -> Any:
    """Targets as the loss takes them: an array is a tensor."""
    return torch.from_numpy(targets) if isinstance(targets, np.ndarray) else targets


def _order(count: int, batch_size: int, seed: int, epoch: int) -> Indices:
    permutation = generator(seed, epoch, ORDER_STREAM).permutation(count)
    return np.resize(permutation, steps_per_epoch(count, batch_size) * batch_size)


def _change(settings: Augment, record: Preprocess, seed: int, epoch: int) -> Change:
    return lambda pixels, index: augmented(
        pixels, settings, record, generator(seed, epoch, IMAGE_STREAM, index)
    )


def _cut(
    settings: Augment | None, record: Preprocess, seed: int, epoch: int
) -> Callable[[int], tuple[int, int, bool, bool]]:
    """The fields of an image's cut: drawn, or where nothing is changed, the centre."""
    if settings is None:
        height, width = record.crop or (record.height, record.width)
        centre = (record.height - height) // 2, (record.width - width) // 2, False, False
        return lambda index: centre

    def drawn(index: int) -> tuple[int, int, bool, bool]:
        made = drawn_cut(settings, record, generator(seed, epoch, IMAGE_STREAM, index))
        return made.top, made.left, made.mirrored, made.upside_down

    return drawn


def _ahead(
    begin: Callable[[Indices], Batch],
    fill: Callable[[Batch, int, int], None],
    slices: list[Indices],
    workers: int,
) -> Iterator[Batch]:
    """The batches in order, filled by threads, so many ahead that each has something to do."""
    ahead = 1 + ceil_div(2 * workers * AT_ONCE, len(slices[0]))
    pending: deque[tuple[Batch, list[Future[None]]]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loading") as pool:

        def submit(indices: Indices) -> None:
            batch, count = begin(indices), len(indices)
            parts = [
                pool.submit(fill, batch, first, min(first + AT_ONCE, count))
                for first in range(0, count, AT_ONCE)
            ]
            pending.append((batch, parts))

        def filled() -> Batch:
            batch, parts = pending.popleft()
            for part in parts:
                part.result()
            return batch

        try:
            for indices in slices:
                submit(indices)
                if len(pending) > ahead:
                    yield filled()
            while pending:
                yield filled()
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


def _read(split: Split, index: int, out: Pixels, record: Preprocess) -> bool:
    """Read an image that is stored as pixels into HWC memory of its size; False if it is not."""
    head = raw_head(record)
    if head is None:
        return False
    seen = bytearray(len(head))
    return split.read(index, seen, out.reshape(-1).data) and seen == head


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
