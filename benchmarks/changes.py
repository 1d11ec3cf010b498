"""Random changes on the GPU: ``python -m benchmarks.changes``, on a machine with one.

A batch of uint8 pictures of 500×375 that lies on the GPU is turned, zoomed, cut to 224×224,
mirrored, coloured (brightness, contrast, saturation, hue), made noisy and normalized: by our
kernel, each picture in its own way, and by torchvision's transforms (v2), once for each picture,
as a training wants it, and once for the whole batch, all of whose pictures then change alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms import v2

from benchmarks.intake import Row
from benchmarks.report import RESULTS, document, markdown, write
from tessella.artifacts.run import Augment
from tessella.core.device import default_target
from tessella.core.preprocess import Preprocess
from tessella.data.changes import Drawn
from tessella.kernels.pictures.scale import OnePassScaling

DEVICE = torch.device("cuda")
RECORD = Preprocess(
    height=375, width=500, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)
SETTINGS = {
    "cut and mirrored, turned and zoomed": Augment(flip=True, rotation=15, scale=0.2),
    "and coloured": Augment(flip=True, rotation=15, scale=0.2, color=0.3, hue=0.1),
    "and noisy": Augment(flip=True, rotation=15, scale=0.2, color=0.3, hue=0.1, noise=0.02),
}
ROUNDS = 7
Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--out", type=Path, default=RESULTS / "changes-sm_90.json")
    arguments = parser.parse_args()
    random = np.random.default_rng(0)
    shape = arguments.batch, RECORD.height, RECORD.width, 3
    pixels = torch.from_numpy(random.integers(0, 256, shape, np.uint8)).to(DEVICE)
    rows: list[Row] = []
    for name, settings in SETTINGS.items():
        calls = {"tessella": ours(pixels, settings), **theirs(pixels, settings)}
        times: dict[str, list[float]] = {who: [] for who in calls}
        for _ in range(ROUNDS):
            for who, call in calls.items():
                times[who].append(seconds(call, 2 if "each" in who else 20))
        for who, found in times.items():
            middle = statistics.median(found)
            row = {"what": name, "who": who, "ms": round(1e3 * middle, 3)}
            rows.append(row | {"images/s": round(arguments.batch / middle)})
            print(rows[-1], flush=True)
        began = time.perf_counter()
        Drawn(settings, RECORD, (0, 0), np.arange(arguments.batch)).numbers()
        drawn = 1e3 * (time.perf_counter() - began)
        rows.append({"what": name, "who": "tessella, drawing on the host", "ms": round(drawn, 2)})
        write(arguments.out, document(default_target(), rows))
    head = ["what", "who", "ms", "images/s"]
    print(markdown(head, [[row.get(key) for key in head] for row in rows]))


def ours(pixels: Tensor, settings: Augment) -> Call:
    scaling = OnePassScaling(RECORD, DEVICE)
    drawn = Drawn(settings, RECORD, (0, 0), np.arange(len(pixels)))
    cuts, words = torch.from_numpy(drawn.array_N4).to(DEVICE), drawn.numbers().words.to(DEVICE)
    return lambda: scaling.changed(pixels, cuts, words, settings)


def theirs(pixels: Tensor, settings: Augment) -> dict[str, Call]:
    """Of torchvision's: NCHW, as it is quickest there."""
    pictures = pixels.permute(0, 3, 1, 2).contiguous()
    parts: list[torch.nn.Module] = [
        v2.RandomAffine(
            settings.rotation, scale=(1 - settings.scale, 1 + settings.scale),
            interpolation=v2.InterpolationMode.BILINEAR,
        ),
        v2.RandomCrop(RECORD.crop), v2.RandomHorizontalFlip(),
    ]  # fmt: skip
    if settings.color:
        strength = settings.color
        parts += [v2.ColorJitter(strength, strength, strength, settings.hue)]
    parts += [v2.ToDtype(torch.float32, scale=True)]
    if settings.noise:
        parts += [v2.GaussianNoise(sigma=settings.noise)]
    parts += [v2.Normalize(RECORD.mean, RECORD.std)]
    every = v2.Compose(parts)
    return {
        "torchvision, each picture": lambda: torch.stack([every(one) for one in pictures]),
        "torchvision, the batch alike": lambda: every(pictures),
    }


def seconds(call: Call, count: int) -> float:
    """The time of a call, the mean of several after one."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main()
