"""Labels of whole volumes: a model over the windows of each, and files of what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessella.api.predicting import Openable, opened, predictor, task_of
from tessella.artifacts.shards import Example
from tessella.core.errors import DataError, TessellaError, UsageError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, normalize
from tessella.core.volumes import Header, array_in, read_values, scaled, write_labels
from tessella.tasks import Query
from tessella.tasks.volumes.answers import counted


@dataclass(frozen=True, kw_only=True)
class Segmented:
    """What a model says of a volume.

    Attributes:
        labels: the number of the class of each voxel, uint8 [D, H, W], of the file's own size.
        header: of the file; its spacing says how large a voxel is.
        classes: their names.
        file: what was read; None: a volume of a dataset.
    """

    labels: Pixels = field(repr=False)
    header: Header
    classes: tuple[str, ...]
    file: Path | None

    def answer(self, query: Query | None = None) -> list[dict[str, Any]]:
        """The classes in it, largest first: voxels, share, and volume in the unit of the spacing,
        cubed (mm³ mostly)."""
        top = None if query is None else query.top
        told = counted(self.labels, self.classes, len(self.classes), top)
        voxel = float(np.prod(self.header.spacing))
        return [{**one, "volume": one["voxels"] * voxel} for one in told]

    def save(self, out: str | Path) -> None:
        """Write the labels as .npy, .nii or .nii.gz; these lie in space where the volume does."""
        write_labels(out, self.labels, self.header.spacing, self.file)


def segment(
    model: Openable, volume: str | Path | Example, *, trust_code: bool = False
) -> Segmented:
    """The labels of a volume of any size, by overlapping windows: of a file, or of a dataset
    (``dataset.val[0]``).

    >>> api.segment("organs.plan", "scan.nii.gz").save("labels.nii.gz")

    Raises:
        DataError: no volume that can be read.
        UsageError: the model is not one of volumes.
    """
    ((_, told),) = segment_each(model, [volume], trust_code=trust_code)
    if isinstance(told, TessellaError):
        raise told
    return told


def segment_each(
    model: Openable,
    volumes: Sequence[str | Path | Example],
    *,
    trust_code: bool = False,
) -> Iterator[tuple[Path, Segmented | DataError]]:
    """Each volume's path with its labels, or with the error that says why it has none."""
    model = opened(model)
    predict, record, classes = predictor(model, trust_code=trust_code)
    if record.volume is None:
        raise UsageError(
            "this model is not of volumes", seen=task_of(model)[0].title, fix="call answer()"
        )
    for volume in volumes:
        file = None if isinstance(volume, Example) else Path(volume)
        path = Path(volume.path) if isinstance(volume, Example) else Path(volume)
        try:
            pixels, header = _pixels(volume, record)
        except MemoryError:
            yield path, DataError("there is not enough memory for it", seen=path)
            continue
        except DataError as error:
            yield path, DataError(error.wrong, seen=error.seen or path, fix=error.fix)
            continue
        image = torch.from_numpy(normalize(pixels, record))
        scores = predict(image[None])
        labels = scores[0].argmax(0).to(torch.uint8).cpu().numpy()
        yield path, Segmented(labels=labels, header=header, classes=classes, file=file)


def _pixels(volume: str | Path | Example, record: Preprocess) -> tuple[Pixels, Header]:
    """A volume as a dataset stores it, uint16 [D, H, W, 1], and its header."""
    if isinstance(volume, Example):
        pixels = array_in(volume.content, "uint16")
        slices, rows, columns = pixels.shape[:3]
        z, y, x = volume.label["spacing"]
        shape, spacing = (slices, rows, columns), (z, y, x)
        return pixels, Header(shape=shape, dtype=pixels.dtype, spacing=spacing)
    values, header = read_values(volume)
    window = None if record.volume is None else record.volume.window
    return scaled(values, window)[..., None], header
