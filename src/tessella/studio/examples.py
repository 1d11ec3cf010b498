"""Some pictures of the split that a network was judged by, to be clicked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.studio import parts, pictures
from tessella.studio.context import Context
from tessella.studio.workspace import open_dataset
from tessella.tasks import of

EXAMPLES = 12


def examples(
    context: Context,
    chosen: Checkpoint,
    clicked: Callable[[Dataset, str, int], Awaitable[None] | None],
) -> None:
    """Pictures of the validation split, where the dataset is still there, and what a click does."""
    path = context.workspace.find_dataset(chosen.info.dataset_hash)
    if path is None:
        return
    dataset = open_dataset(path)
    name = "val" if "val" in dataset.info.splits else next(iter(dataset.info.splits))
    count = len(dataset.split(name))
    picks = np.linspace(0, count - 1, min(EXAMPLES, count)).astype(int)
    ref = context.workspace.ref(path)
    with parts.box("thumbs").style("grid-template-columns:repeat(6,minmax(0,1fr));gap:8px"):
        for index in dict.fromkeys(int(i) for i in picks):
            target = dataset.split(name)[index].label
            truth = of(dataset.info.task).answers.truth(target, dataset.classes)
            with parts.box("thumb").style("cursor:pointer") as thumb:
                shown = pictures.example_picture(dataset, ref, name, index, f"Example: {truth}")
                shown.props["title"] = truth
            thumb.on("click", lambda i=index: clicked(dataset, name, i))
