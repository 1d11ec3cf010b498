"""A split becomes batches: the order from (seed, epoch), a slice for each process, exact resume.

Small splits are decoded once and normalized in whole batches; large ones image by image, in threads
that work ahead. Either way an image gets the bits that ``core.preprocess`` gives it.
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
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, centre_crop, fitted, normalize
from tessella.data.augment import IMAGE_STREAM, ORDER_STREAM, augmented, generator
from tessella.tasks import targets_of

DECODE_ONCE_BYTES = 256 << 20

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some images of a split.

    Attributes:
        images: float32, [N, C, H, W].
        labels: the targets, as the split's task has them in a batch: int64 [N] for classification.
        indices: int64, [N]: which images of the split they are.
    """

    images: torch.Tensor
    labels: Any
    indices: torch.Tensor


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
    change = _change(augment, preprocess, seed, epoch) if augment and training else None
    if not slices:
        return
    pixels_of, targets = _source(split, preprocess, workers), targets_of(split)

    def load(indices: Indices) -> Batch:
        pixels = pixels_of(indices)
        if change is None:
            images = normalize(centre_crop(pixels, preprocess), preprocess)
        else:
            changed = [change(p, i) for p, i in zip(pixels, indices.tolist(), strict=True)]
            images = normalize(np.stack(changed), preprocess)
        return Batch(
            images=torch.from_numpy(images),
            labels=in_torch(targets.batch(indices)),
            indices=torch.from_numpy(indices.copy()),
        )

    yield from map(load, slices) if workers == 0 else _ahead(load, slices, workers)


def in_torch(targets: Any) -> Any:
    """Targets as the loss takes them: an array is a tensor."""
    return torch.from_numpy(targets) if isinstance(targets, np.ndarray) else targets


def _order(count: int, batch_size: int, seed: int, epoch: int) -> Indices:
    permutation = generator(seed, epoch, ORDER_STREAM).permutation(count)
    return np.resize(permutation, steps_per_epoch(count, batch_size) * batch_size)


def _change(
    settings: Augment, record: Preprocess, seed: int, epoch: int
) -> Callable[[Pixels, int], Pixels]:
    return lambda pixels, index: augmented(
        pixels, settings, record, generator(seed, epoch, IMAGE_STREAM, index)
    )


def _ahead(
    load: Callable[[Indices], Batch], slices: list[Indices], workers: int
) -> Iterator[Batch]:
    """``map(load, slices)`` in threads, in order, at most ``workers`` + 1 batches ahead."""
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="loading") as pool:
        try:
            for indices in slices:
                pending.append(pool.submit(load, indices))
                if len(pending) > workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# --- pixels ---------------------------------------------------------------------------------------

# The decoded pixels of small splits, for as long as the split lives: NHWC, by the record they fit.
_DECODED: weakref.WeakKeyDictionary[Split, tuple[Preprocess, Pixels]] = weakref.WeakKeyDictionary()


def _source(split: Split, record: Preprocess, workers: int) -> Callable[[Indices], Pixels]:
    """A function that gives the fitted pixels of some images, NHWC."""
    nbytes = len(split) * record.height * record.width * record.channels * record.depth // 8
    if nbytes > DECODE_ONCE_BYTES:
        return lambda indices: np.stack([_pixels(split, i, record) for i in indices.tolist()])
    if split not in _DECODED or _DECODED[split][0] != record:
        with ThreadPoolExecutor(max(1, workers), thread_name_prefix="decoding") as pool:
            all_pixels = pool.map(lambda i: _pixels(split, i, record), range(len(split)))
            _DECODED[split] = (record, np.stack(list(all_pixels)))
    decoded = _DECODED[split][1]
    return lambda indices: decoded[indices]


def _pixels(split: Split, index: int, record: Preprocess) -> Pixels:
    example = split[index]
    try:
        return fitted(example.content, record)
    except DataError as error:
        raise DataError(
            f"image {index} of the {split.name} split cannot be decoded",
            seen=f"{example.path}: {error.wrong}",
            fix="import the dataset again",
        ) from error
