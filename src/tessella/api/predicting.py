"""classify: a checkpoint or a plan as a function of images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tessella.api.loading import load
from tessella.api.sources import open_checkpoint
from tessella.artifacts.checkpoint import Checkpoint
from tessella.core.device import default_target, torch_device
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess, denormalize
from tessella.core.task import CLASSIFICATION, TaskRecord
from tessella.device.float32_math import float32_math
from tessella.nn import zoo
from tessella.runtime.engine import Engine
from tessella.tasks import Query, Task, of
from tessella.tasks.finished import finished

Model = Checkpoint | Engine


def open_model(path: str | Path, *, compiled: bool = True) -> Model:
    """A checkpoint (a folder, or the best of a run) or a plan; ``compiled`` as for ``load``."""
    path = Path(path)
    return load(path, compiled=compiled) if path.is_file() else open_checkpoint(path)


def predictor(
    model: Model, *, trust_code: bool = False
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Preprocess, tuple[str, ...]]:
    """A model as a function of images, with its preprocessing record and its labels."""
    if isinstance(model, Checkpoint):
        info = model.info
        return eager_predictor(model, trust_code=trust_code), info.preprocess, info.labels
    if model.preprocess is None:
        raise UsageError(
            "this plan does not say how images become its input",
            seen=", ".join(str(s) for s in model.inputs),
            fix="compile it from a checkpoint, or call the engine with arrays",
        )
    return engine_predictor(model), model.preprocess, model.labels


def eager_predictor(
    checkpoint: Checkpoint, *, trust_code: bool = False
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's network in plain torch, on the GPU where there is one; answers on the CPU.

    The scores are a reference: float32 products are IEEE, where torch would let cuDNN round them
    to TF32.
    """
    device = torch_device(default_target())
    task = checkpoint.info.task
    module = zoo.load(checkpoint, trust_code=trust_code)
    module = finished(module, of(task).head, task.numbers).to(device)

    def predict(images: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(), float32_math("ieee"):
            scores: torch.Tensor = module(images.to(device))
        return scores.float().cpu()

    return predict


def engine_predictor(engine: Engine) -> Callable[[torch.Tensor], torch.Tensor]:
    """An engine as a function from normalized images to its first output."""
    (image,), (scores, *_) = engine.inputs, engine.outputs
    record = engine.preprocess if image.dtype == "uint8" else None

    def predict(images: torch.Tensor) -> torch.Tensor:
        array = images.numpy()
        if record is not None:  # the plan scales them itself
            array = denormalize(array, record)
        return torch.from_numpy(engine(**{image.name: array})[scores.name])

    return predict


def task_of(model: Model) -> tuple[Task, TaskRecord]:
    """A model's task, and the record of it."""
    record = model.info.task if isinstance(model, Checkpoint) else model.manifest.task
    return of(record), record


def answer(
    model: Model,
    images: Sequence[str | Path],
    *,
    query: Query | None = None,
    trust_code: bool = False,
) -> list[Any]:
    """The answer to each image file, as the model's task gives it to a client of a server: JSON."""
    predict, record, labels = predictor(model, trust_code=trust_code)
    task, about = task_of(model)
    answers = []
    for image in images:
        path = Path(image)
        if not path.is_file():
            raise UsageError("there is no image here", seen=path)
        pixels = record(path.read_bytes(), name=path.name)
        outputs = predict(torch.from_numpy(pixels[None])).float().numpy()
        answers += task.answers.answer(outputs, labels, about, query or Query())
    return answers


def plain_answer(task: Task, answer: Any) -> dict[str, Any]:
    """An image's answer in the JSON of a terminal: of a classification labels and probabilities."""
    if task.name == CLASSIFICATION.name:
        return {"top": [{"label": a["label"], "score": a["probability"]} for a in answer]}
    return {"answer": answer}


def classify(
    model: Model, images: Sequence[str | Path], *, top: int = 5, trust_code: bool = False
) -> list[list[tuple[str, float]]]:
    """The ``top`` labels of each image file with their probabilities.

    Raises:
        UsageError: the model does not classify; ``answer`` is for every task.
    """
    task, _ = task_of(model)
    if task.answers.VERB != "classify":
        raise UsageError("the model does not classify", seen=task.title, fix="call answer()")
    told = answer(model, images, query=Query(top=top), trust_code=trust_code)
    return [[(str(a["label"]), a["probability"]) for a in one] for one in told]
