"""JPEG files decoded on the host, beside torch's DataLoader: ``python -m benchmarks.loading``.

Crops of 224×224 of JPEG files of 500×375 as normalized float32, images a second, for several
numbers of workers; on the GPU where there is one, else in the host's memory, where a row more tells
how fast the bytes come that a GPU would be given. Both ways take turns and begin anew each time;
``ratio`` is the median of one over the median of the other.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision.transforms import v2

from benchmarks.intake import SEEN, STORED, Row, importing, write_pictures
from benchmarks.report import markdown
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Recipe
from tessella.core.preprocess import Preprocess
from tessella.data import epochs, loading
from tessella.data.filling import Fillers
from tessella.data.loading import Batch, batches, steps_per_epoch
from tessella.training.feed import Feed

PEER = "DataLoader"
Stream = Callable[[], Generator[Tensor, None, None]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="1,2", help="numbers of them, as 2,4,8,16")
    parser.add_argument("--pictures", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=4, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", choices=("original", "png"), default="original")
    parser.add_argument("--bound", action="store_true", help="on as many cores as workers")
    args = parser.parse_args()
    loading.DECODE_ONCE_BYTES = 0  # few pictures stand for many
    with tempfile.TemporaryDirectory() as folder:
        root, rows = Path(folder), list[Row]()
        write_pictures(root / "jpeg", args.pictures)
        importing(root, args.store)
        cores = sorted(os.sched_getaffinity(0))
        for workers in map(int, args.workers.split(",")):
            if args.bound:
                os.sched_setaffinity(0, cores[:workers])
            rows += compared(root, args.store, workers, args.batch, args.rounds, args.seconds)
            print(markdown(list(rows[0]), [list(row.values()) for row in rows]), flush=True)


def compared(
    root: Path, store: str, workers: int, batch: int, rounds: int, seconds: float
) -> list[Row]:
    """The rates of all ways with some workers."""
    dataset = Dataset(root / store)
    files = sorted((root / "jpeg").rglob("*.jpg"))
    ways: dict[str, Stream] = {
        "tessella": lambda: ours(dataset, batch, workers),
        PEER: lambda: theirs(files, dataset.preprocess, batch, workers),
    }
    if not torch.cuda.is_available():
        ways["tessella, bytes"] = lambda: only_bytes(dataset, batch, workers)
    rates: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(rounds):
        for who, stream in ways.items():
            with closing(stream()) as made:
                rates[who].append(images_per_s(made, seconds, workers))
    medians = {who: statistics.median(of) for who, of in rates.items()}
    return [
        {
            "workers": workers,
            "who": who,
            "images_per_s": round(rate),
            "ratio": round(rate / medians[PEER], 2),
            "lowest": round(min(rates[who])),
            "highest": round(max(rates[who])),
        }
        for who, rate in medians.items()
    ]


def images_per_s(stream: Iterator[Tensor], seconds: float, workers: int) -> float:
    """After the first batches, which wait for processes to begin.

    Whole rounds of the workers are counted, as each worker of a DataLoader makes a whole batch.
    """
    for _ in islice(stream, 2 * workers):
        pass
    _wait()
    began, count, elapsed = time.perf_counter(), 0, 0.0
    while elapsed < seconds:
        count += sum(len(images) for images in islice(stream, workers))
        _wait()
        elapsed = time.perf_counter() - began
    return count / elapsed


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- ours -----------------------------------------------------------------------------------------


def ours(dataset: Dataset, batch: int, workers: int) -> Generator[Tensor, None, None]:
    """What a training on this machine is fed."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    feed = Feed(
        dataset.preprocess, device, torch.channels_last if on_gpu else torch.contiguous_format
    )
    with (
        closing(endless(dataset, batch, workers, for_gpu=on_gpu)) as made,
        closing(feed.stream(made)) as stream,
    ):
        for fed in stream:
            yield fed.images


def only_bytes(dataset: Dataset, batch: int, workers: int) -> Generator[Tensor, None, None]:
    with closing(endless(dataset, batch, workers, for_gpu=True)) as made:
        for one in made:
            yield one.pixels


def endless(
    dataset: Dataset, batch: int, workers: int, *, for_gpu: bool, decodes: bool = False
) -> Generator[Batch, None, None]:
    """Training batches, epoch after epoch."""

    def one(epoch: int, start: int) -> Generator[Batch, None, None]:
        return batches(
            dataset.train,
            dataset.preprocess,
            batch_size=batch,
            epoch=epoch,
            start=start,
            augment=Recipe(network="", dataset="").augment,
            training=True,
            workers=workers,
            for_gpu=for_gpu,
            decodes=decodes,
            fillers=fillers,
        )

    count = steps_per_epoch(len(dataset.train), batch)
    with closing(Fillers(workers)) as fillers:
        yield from epochs.endless(one, epoch=0, start=0, count=count, early=workers > 0)


# --- the peer -------------------------------------------------------------------------------------


def theirs(
    files: list[Path], record: Preprocess, batch: int, workers: int
) -> Generator[Tensor, None, None]:
    """A DataLoader with processes; on the GPU where there is one."""
    on_gpu = torch.cuda.is_available()
    loader = DataLoader(
        Files(files * 64, record),
        batch_size=batch,
        shuffle=True,
        num_workers=workers,
        pin_memory=on_gpu,
        drop_last=True,
        prefetch_factor=4,
    )
    for images in loader:
        yield images.to("cuda", non_blocking=True) if on_gpu else images


class Files(TorchDataset[torch.Tensor]):
    """What people write: OpenCV decodes; torchvision resizes, crops and normalizes."""

    def __init__(self, files: list[Path], record: Preprocess) -> None:
        self._files = files
        self._change = v2.Compose(
            [
                v2.Resize(STORED, antialias=True),
                v2.RandomCrop(SEEN),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(record.mean, record.std),
            ]
        )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.set_num_threads(1)
        content = np.fromfile(self._files[index], np.uint8)
        bgr = cv2.imdecode(content, cv2.IMREAD_COLOR)
        pixels = np.ascontiguousarray(np.asarray(bgr)[:, :, ::-1])
        made: torch.Tensor = self._change(torch.from_numpy(pixels).permute(2, 0, 1))
        return made


if __name__ == "__main__":
    main()
