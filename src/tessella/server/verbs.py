"""What a request with a task's verb asks, as ``/classify?top=5``, and how its answer is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from tessella.core.errors import InputError, ServeError
from tessella.core.spec import TensorSpec
from tessella.server.answers import JSON, Answer, json_answer
from tessella.server.inference import ServedModel, Watch
from tessella.server.limits import Limits
from tessella.server.protocol import (
    InferRequest,
    check_tensor_bytes,
    parse_priority,
    parse_timeout,
)
from tessella.server.tensors import require_finite
from tessella.tasks import Query, View

LONG_ANSWER = 1 << 20  # bytes of scores that any task puts into words in a thread
MULTIPART = "multipart/form-data"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A query.

    Attributes:
        draws: whether the answer is the picture itself, with what was found drawn into it.
        timeout_us, priority: as of ``InferRequest``.
    """

    query: Query
    draws: bool
    timeout_us: int | None
    priority: int

    def request(self, model: ServedModel, files: list[bytes], limits: Limits) -> InferRequest:
        """The checked request with these files.

        Raises:
            InputError: the model does not take one picture, or there is no room for so many.
        """
        spec = only_image(model)
        check_tensor_bytes(spec, len(files), limits)
        return InferRequest(
            id=None,
            outputs=(),
            timeout_us=self.timeout_us,
            priority=self.priority,
            images={spec.name: files},
        )


def parse_query(query_string: bytes) -> Asked:
    """``?top=5&threshold=0.3&timeout=20000&priority=1``, any of them or none.

    Raises:
        InputError: one of them is no such number.
    """
    asked = parse_qs(query_string.decode("latin-1"))
    top = _whole(asked, "top")
    if top == 0:
        raise InputError("top is not a number of classes", seen=top, fix="use ?top=5")
    threshold = None
    if "threshold" in asked:
        text = asked["threshold"][-1]
        threshold = float(text) if re.fullmatch(r"[01]?\.?[0-9]{1,17}", text) else 2.0
        if not 0 <= threshold <= 1:
            raise InputError(
                "threshold is not a probability", seen=text[:40], fix="use ?threshold=0.5"
            )
    return Asked(
        query=Query(top=top, threshold=threshold),
        draws="draw" in asked,
        timeout_us=parse_timeout(_whole(asked, "timeout") or 0),
        priority=parse_priority(_whole(asked, "priority") or 0),
    )


def _whole(query: dict[str, list[str]], name: str) -> int | None:
    """A whole number of the query, 0 or more, if there is one."""
    if name not in query:
        return None
    text = query[name][-1]
    if not text.isdecimal() or not text.isascii() or len(text) > 9:
        raise InputError(f"{name} is not a number", seen=text[:40], fix=f"use ?{name}=5")
    return int(text)


def with_verb(model: ServedModel, verb: str) -> ServedModel:
    """The model, if this is the verb of its task.

    Raises:
        ServeError: 404, it is not.
    """
    own = model.signature.answers.VERB
    if verb != own:
        what, where = ("arrays", "infer") if _of_volumes(model) else ("pictures", own)
        raise ServeError(
            f"model {model.name!r} does not {verb}",
            status=404,
            seen=f"its task: {model.signature.task.name}",
            fix=f"send {what} to /v2/models/{model.name}/{where}",
        )
    return model


def _of_volumes(model: ServedModel) -> bool:
    record = model.signature.preprocess
    return record is not None and record.volume is not None


def only_image(model: ServedModel) -> TensorSpec:
    """The image input of a model that takes nothing else.

    Raises:
        InputError: it takes something else.
    """
    inputs = model.signature.inputs
    if _of_volumes(model):
        raise InputError(
            f"model {model.name!r} is of volumes, and no picture is one",
            seen=str(next(iter(inputs.values()))),
            fix=f"send arrays of this shape to /v2/models/{model.name}/infer, or segment files "
            "with: tessella run PLAN volume.nii.gz --out labels.nii.gz",
        )
    if model.signature.image_input is None or len(inputs) != 1:
        raise InputError(
            f"model {model.name!r} does not take one image",
            seen=", ".join(str(s) for s in inputs.values()),
            fix=f"send its inputs to /v2/models/{model.name}/infer",
        )
    return inputs[model.signature.image_input]


def scores_of(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a task's answers are made of: the first output.

    Raises:
        InputError: it holds numbers that no answer can say.
    """
    name, scores = next(iter(outputs.items()))
    require_finite(scores, name=name)
    return scores


def in_words(
    model: ServedModel, scores: np.ndarray, views: tuple[View, ...], query: Query
) -> list[Any]:
    """What the model's task says of each picture."""
    known = model.signature
    return known.answers.answer(scores, known.labels, known.task, replace(query, views=views))


def answer_of(model: ServedModel, predictions: list[Any], watch: Watch) -> Answer:
    """The response; all stages of the request are over with it."""
    watch.lap("answer")
    answer = json_answer(
        {"model_name": model.name, "model_version": model.version, "predictions": predictions}
    )
    return replace(answer, headers=(JSON, (b"server-timing", watch.stages.header())))
