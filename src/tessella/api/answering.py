"""A model that stays open and answers one picture after another: what a page asks of a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tessella.api.checkpoints import module_of
from tessella.api.predicting import Model, plain_answer, predictor, seen, task_of
from tessella.artifacts.checkpoint import Checkpoint
from tessella.core.errors import UsageError
from tessella.core.record import to_plain
from tessella.device.float32_math import float32_math
from tessella.nn import inspect
from tessella.tasks import Query, View
from tessella.tasks.finished import finished


class Answering:
    """A checkpoint, a plan or an ONNX file, opened once.

    A checkpoint's network runs on the CPU: GPUs belong to jobs, and one picture takes a CPU
    milliseconds.
    """

    def __init__(self, model: Model, *, trust_code: bool = False) -> None:
        self._task, self._about = task_of(model)
        self._module: torch.nn.Module | None = None
        self._layers = inspect.KnownViews()
        self._last: tuple[object, tuple[torch.Tensor, View]] | None = None  # picture, by its file
        if isinstance(model, Checkpoint):
            module = module_of(model, trust_code=trust_code)
            self._module = None if model.is_quantized else module
            self._finished = finished(module, self._task.head, self._about.numbers)
            self._record, self._labels = model.info.preprocess, model.info.labels
            self._predict: Callable[[torch.Tensor], torch.Tensor] = self._eager
        else:
            self._predict, self._record, self._labels = predictor(model)
        # once now: libraries prepare themselves at the first call, and a person waits at the next
        self._predict(torch.zeros(1, *self._record.input_shape))

    def answer(self, image: Path, *, top: int | None = None) -> dict[str, Any]:
        """The answer to an image file as ``tessella run --json`` has it, and the image's height and
        width in pixels."""
        pixels, view = self._seen(image)
        outputs = self._predict(pixels).float().numpy()
        query = Query(top=top, views=(view,))
        told = self._task.answers.answer(outputs, self._labels, self._about, query)
        return plain_answer(self._task, told[0]) | {"size": [view.height, view.width]}

    def layers(self, image: Path, folder: Path, index: int = 0) -> dict[str, Any]:
        """All layers in a list, and what layer number ``index`` makes of the picture; its pictures
        are written into ``folder``."""
        if self._module is None:
            raise UsageError(
                "only a checkpoint that does not round has layers to look into",
                fix="ask the checkpoint that this was made of",
            )
        pixels = self._seen(image)[0]
        look = inspect.write_view(self._module, pixels, folder, index, known=self._layers)
        return dict(to_plain(look))

    def _eager(self, images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), float32_math("ieee"):
            scores: torch.Tensor = self._finished(images)
        return scores

    def _seen(self, image: Path) -> tuple[torch.Tensor, View]:
        if not image.is_file():
            raise UsageError("there is no image here", seen=image)
        about = image.stat()
        key = image, about.st_mtime_ns, about.st_size
        if self._last is None or self._last[0] != key:  # answers and layers are asked in turn
            pixels, view = seen(image.read_bytes(), self._record, name=image.name)
            self._last = key, (torch.from_numpy(pixels[None]), view)
        kept, view = self._last[1]
        return kept.clone(), view  # a network may change what it is given
