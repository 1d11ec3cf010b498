"""What an import costs, and reading its dataset again: ``python -m benchmarks.intake``, no GPU.

- *stages*: milliseconds of one core for each step that a picture goes through, one after another in
  this process, for files that lie in the system's cache;
- *import*: images a second with a process a core, and the processor time of a picture in the parent
  and in its processes. The parent's is the limit that more cores cannot pass;
- *loading*: images a second from the dataset into batches of the host, as a training on a GPU asks
  for them, by one thread and by one a core.

The pictures are made here: cuts of smoothed noise of 500×375 or ``--sides``, saved as JPEG at
quality 90. Loading of ``original`` and ``png`` is in turns, so that it tells which one a host reads
quicker.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.report import markdown
from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Recipe
from tessella.cli.parsing import parse_size
from tessella.core.headers import keeps_original
from tessella.core.pictures import read_pixels
from tessella.core.preprocess import Store, encode, fit
from tessella.data import ImportSettings
from tessella.data import loading as decoded
from tessella.data.importing import import_images
from tessella.data.loading import batches
from tessella.data.moments import sums_of
from tessella.data.quick_jpeg import QuickJpeg

CLASSES, SIDES, STORED, SEEN = 10, (375, 500), 256, 224
STAGED = 256  # pictures whose stages are timed
STORES: tuple[Store, ...] = ("original", "pixels", "png")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3, help="of each loading")
    parser.add_argument("--sides", type=parse_size, default=SIDES, help="HEIGHTxWIDTH of a picture")
    parser.add_argument("--rounds", type=int, default=1, help="of the loadings")
    args = parser.parse_args()
    decoded.DECODE_ONCE_BYTES = 0  # few pictures stand for many
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        nbytes = write_pictures(root / "jpeg", args.pictures, args.sides)
        print(f"{args.pictures} JPEG files of {nbytes / 1e3:.0f} kB; {cores} cores")
        show(importing(root, store) for store in STORES)
        show(
            loading(root, store, args.batch, args.seconds, threads)
            for threads in (1, cores)
            for _ in range(args.rounds)
            for store in STORES
        )
        show(stages(sorted((root / "jpeg").rglob("*.jpg"))[:STAGED]))  # last: takes standard error


def show(rows: Iterable[Row]) -> None:
    told = [*rows]
    print(markdown(list(told[0]), [list(row.values()) for row in told]) + "\n", flush=True)


def settings(store: Store) -> ImportSettings:
    return ImportSettings(size=STORED, crop=SEEN, holdout=0.0, store=store, resize="crop")


def write_pictures(root: Path, count: int, sides: tuple[int, int] = SIDES) -> float:
    """JPEG files in a folder for each class; their mean size in bytes."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1200, 1600, 3), np.uint8)
    scene = sum(
        cv2.GaussianBlur(noise, (0, 0), sigma).astype(np.float32) * gain
        for sigma, gain in ((1.5, 0.7), (6, 2.0), (30, 9.0))
    )
    scene = cv2.normalize(scene, None, 0, 255, cv2.NORM_MINMAX).astype(np.uint8)
    tops, lefts = rng.integers(0, (1200 - sides[0], 1600 - sides[1]), (count, 2)).T

    def save(number: int) -> int:
        top, left = int(tops[number]), int(lefts[number])
        part = scene[top : top + sides[0], left : left + sides[1]]
        content = cv2.imencode(".jpg", part, [cv2.IMWRITE_JPEG_QUALITY, 90])[1]
        (root / str(number % CLASSES) / f"{number}.jpg").write_bytes(content.tobytes())
        return int(content.size)

    for number in range(CLASSES):
        (root / str(number)).mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        return statistics.fmean(pool.map(save, range(count)))


# --- measures -------------------------------------------------------------------------------------


def importing(root: Path, store: Store) -> Row:
    """An import of the files in ``root/jpeg`` into a folder named like the way of storing."""
    before, began = _processor_s(), time.perf_counter()
    dataset = import_images(root / "jpeg", root / store, settings(store))
    seconds, after = time.perf_counter() - began, _processor_s()
    count = sum(split.count for split in dataset.info.splits.values())
    parent, processes = ((b - a) / count * 1e3 for a, b in zip(before, after, strict=True))
    return {
        "what": "import",
        "who": store,
        "images_per_s": round(count / seconds),
        "parent_ms": round(parent, 4),
        "processes_ms": round(processes, 3),
    }


def _processor_s() -> tuple[float, float]:
    """Processor seconds of this process, and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own, others = (u.ru_utime + u.ru_stime for u in used)
    return own, others


def loading(root: Path, store: Store, batch: int, seconds: float, threads: int) -> Row:
    dataset, count, began, used = Dataset(root / store), 0, 0.0, 0.0
    augment = Recipe(network="", dataset="").augment
    for epoch in range(1 << 20):
        made = batches(
            dataset.train, dataset.preprocess, batch_size=batch, epoch=epoch, augment=augment,
            training=True, workers=threads, for_gpu=True,
        )  # fmt: skip
        if not epoch:  # threads begin, and the shards are opened
            for _ in islice(made, 4):
                pass
            began, used = time.perf_counter(), time.process_time()
        for one in made:
            count += len(one.pixels)
            if (lasted := time.perf_counter() - began) > seconds:
                return {
                    "what": "loading",
                    "who": store,
                    "threads": threads,
                    "images_per_s": round(count / lasted),
                    "processor_ms": round((time.process_time() - used) / count * 1e3, 4),
                }
    raise AssertionError("there are epochs enough")


def stages(files: list[Path]) -> Iterable[Row]:
    """Milliseconds a picture of each stage."""
    cv2.setNumThreads(1)
    record = settings("pixels").record()
    quick = QuickJpeg()
    contents = [path.read_bytes() for path in files]
    pixels = [read_pixels(content) for content in contents]
    fitted = [fit(one, record) for one in pixels]
    raw, png = ([encode(one, store) for one in fitted] for store in ("pixels", "png"))

    def sha256(content: bytes) -> bytes:
        return hashlib.sha256(content).digest()

    def row(name: str, call: Callable[[Any], object], given: list[Any]) -> Row:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            for one in given:
                call(one)
            times.append((time.perf_counter() - began) / len(given) * 1e3)
        return {"stage": name, "ms": round(min(times), 4)}

    yield row("read", Path.read_bytes, files)
    yield row("header", lambda content: keeps_original(content, record, "original"), contents)
    yield row("decode", lambda content: quick(content, 1 << 28), contents)
    yield row("decode by Pillow", read_pixels, contents)
    yield row("try to decode (original)", quick.is_sound, contents)
    yield row("resize", lambda one: fit(one, record), pixels)
    yield row("statistics", sums_of, fitted)
    yield row("encode as pixels", lambda one: encode(one, "pixels"), fitted)
    yield row("encode as PNG", encode, fitted)
    for name, given in (("original", contents), ("pixels", raw), ("PNG", png)):
        yield row(f"hash of {name}, twice", lambda one: (sha256(one), sha256(one)), given)


if __name__ == "__main__":
    main()
