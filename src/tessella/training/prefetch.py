"""Batches for a GPU, read and page-locked one ahead, so that loading overlaps with the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from tessella.data.loading import Batch


def page_locked(stream: Iterator[Batch]) -> Iterator[Batch]:
    """The batches of ``stream``, in order, in memory that a GPU can copy from by itself."""

    def fetch() -> Batch | None:
        batch = next(stream, None)
        if batch is None:
            return None
        labels = batch.labels
        if isinstance(labels, Tensor):
            labels = labels.pin_memory()
        return dataclasses.replace(batch, images=batch.images.pin_memory(), labels=labels)

    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as pool:
        ahead = pool.submit(fetch)
        while (batch := ahead.result()) is not None:
            ahead = pool.submit(fetch)
            yield batch
