"""A model that stays open and answers one picture after another: what a page asks of a network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tessella.api.predicting import Model, engine_predictor, predictor
from tessella.artifacts.checkpoint import Checkpoint
from tessella.core.errors import UsageError
from tessella.device.float32_math import float32_math
from tessella.nn import inspect, zoo


class Answering:
    """A checkpoint or a plan, opened once. A checkpoint's network runs on the CPU: GPUs belong to
    jobs, and one picture takes a CPU milliseconds.
    """

    def __init__(self, model: Model, *, trust_code: bool = False) -> None:
        self._module: torch.nn.Module | None = None
        self._weights = inspect.WeightViews()
        if isinstance(model, Checkpoint):
            self._module = zoo.load(model, trust_code=trust_code)
            self._record, self._labels = model.info.preprocess, model.info.labels
            self._predict: Callable[[torch.Tensor], torch.Tensor] = self._eager
        else:
            _, self._record, self._labels = predictor(model)
            self._predict = engine_predictor(model)
        # once now: libraries prepare themselves at the first call, and a person waits at the next
        self._predict(torch.zeros(1, *self._record.input_shape))

    def classify(self, image: Path, *, top: int = 5) -> list[dict[str, object]]:
        """The ``top`` labels of an image file with their probabilities, best first."""
        probabilities = self._predict(self._pixels(image)).float().softmax(1)[0]
        best = probabilities.topk(min(top, len(self._labels)))
        return [
            {"label": self._labels[int(i)], "score": float(p)}
            for p, i in zip(best.values, best.indices, strict=True)
        ]

    def layers(self, image: Path, folder: Path) -> None:
        """Write every layer's pictures and ``layers.json`` into ``folder``; see ``write_views``."""
        if self._module is None:
            raise UsageError(
                "a plan has no layers to look into",
                fix="ask the checkpoint that the plan was made of",
            )
        inspect.write_views(self._module, self._pixels(image), folder, weights=self._weights)

    def _eager(self, images: torch.Tensor) -> torch.Tensor:
        assert self._module is not None
        with torch.inference_mode(), float32_math("ieee"):
            scores: torch.Tensor = self._module(images)
        return scores

    def _pixels(self, image: Path) -> torch.Tensor:
        if not image.is_file():
            raise UsageError("there is no image here", seen=image)
        return torch.from_numpy(self._record(image.read_bytes(), name=image.name)[None])
