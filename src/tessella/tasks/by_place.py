"""What tasks with a class for each place of an image share: of pixels, and of a volume's voxels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from tessella.annotations.files import read_text
from tessella.core.errors import DataError

APART = 0.05  # of the places: targets of two equal images that differ in more contradict
Classes = npt.NDArray[np.uint8]
Target = TypeVar("Target")


def state_of(file: Path) -> str:
    """Size and time of a file: an import knows again whether it has changed."""
    status = file.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def listed(file: Path) -> tuple[str, ...]:
    """The classes that a file names, a line each."""
    return tuple(line.strip() for line in read_text(file).splitlines() if line.strip())


def occurs(target: Any) -> Iterable[int]:
    """The classes of a stored target; those of a file count when it is stored."""
    return target["classes"] if isinstance(target, dict) else ()


def renumbered(target: Target, numbers: Sequence[int], classes: int) -> Target:
    if list(numbers) != list(range(len(numbers))):
        raise DataError(
            "the held-out images count their classes in another order",
            seen=list(numbers)[:20],
            fix="give both the same classes.txt, dataset.json or categories",
        )
    return target


def contradiction_of(
    decoded: Callable[[bytes], Classes],
) -> Callable[[Sequence[dict[str, Any]]], Callable[[Sequence[int]], bool]]:
    """A task's ``contradiction``, whose stored targets ``decoded`` reads."""

    def contradiction(targets: Sequence[dict[str, Any]]) -> Callable[[Sequence[int]], bool]:
        def contradict(places: Sequence[int]) -> bool:
            first, *others = (decoded(targets[i]["mask"]) for i in places)
            return any(float((first != other).mean()) > APART for other in others)

        return contradict

    return contradiction


def strata(targets: Sequence[Any]) -> npt.NDArray[np.int64]:
    return np.zeros(len(targets), np.int64)


def having(classes: pa.ListArray, label: int) -> npt.NDArray[np.int64]:
    """The rows of lists of classes in which one occurs."""
    rows = pa.compute.list_parent_indices(classes).to_numpy(zero_copy_only=False)
    labels = pa.compute.list_flatten(classes).to_numpy(zero_copy_only=False)
    return np.unique(rows[labels == label])
