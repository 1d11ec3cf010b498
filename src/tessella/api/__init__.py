"""What a person calls: train, evaluate, compile, load, serve, …: a file for each kind of verb.

``sources`` and ``samples`` open what the verbs are given: networks, and data in any form. A verb's
file is imported when the verb is first used: who trains waits for no compiler and no server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessella.api.answering import Answering
    from tessella.api.checkpoints import open_checkpoint
    from tessella.api.compiling import build, calibrate, compile, explain, export, pareto
    from tessella.api.drawing import network_svg
    from tessella.api.evaluating import Judgement, evaluate
    from tessella.api.loading import load
    from tessella.api.predicting import (
        Model,
        answer,
        answer_each,
        classify,
        drawn,
        eager_predictor,
        engine_predictor,
        name_of,
        open_model,
        pictures,
        plain_answer,
        predictor,
        task_of,
    )
    from tessella.api.quantizing import quantization_aware, quantizer
    from tessella.api.samples import CalibrationData, JudgingData
    from tessella.api.segmenting import Segmented, segment, segment_each
    from tessella.api.serving import deploy, serve
    from tessella.api.sizing import Sizing, size
    from tessella.api.sources import Batch, batch_range
    from tessella.api.sweeping import sweep
    from tessella.api.training import forecast, train
    from tessella.api.tuning import tune
    from tessella.api.verifying import Flip, Verification, evaluate_split, verify
    from tessella.artifacts.plan import load_plan
    from tessella.artifacts.settings import recipe_from
    from tessella.compiler import read_quantized

__all__ = [
    "Answering", "Batch", "CalibrationData", "Flip", "Judgement", "JudgingData", "Model",
    "Segmented", "Sizing", "Verification", "answer", "answer_each", "batch_range", "build",
    "calibrate", "classify", "compile", "deploy", "drawn", "eager_predictor", "engine_predictor",
    "evaluate", "evaluate_split", "explain", "export", "forecast", "load", "load_plan", "name_of",
    "network_svg", "open_checkpoint", "open_model", "pareto", "pictures", "plain_answer",
    "predictor", "quantization_aware", "quantizer", "read_quantized", "recipe_from", "segment",
    "segment_each", "serve", "size", "sweep", "task_of", "train", "tune", "verify",
]  # fmt: skip

_PLACES = {
    "api.answering": ("Answering",),
    "api.checkpoints": ("open_checkpoint",),
    "api.compiling": ("build", "calibrate", "compile", "explain", "export", "pareto"),
    "api.drawing": ("network_svg",),
    "api.evaluating": ("Judgement", "evaluate"),
    "api.loading": ("load",),
    "api.predicting": (
        "Model", "answer", "answer_each", "classify", "drawn", "eager_predictor",
        "engine_predictor", "name_of", "open_model", "pictures", "plain_answer", "predictor",
        "task_of",
    ),
    "api.quantizing": ("quantization_aware", "quantizer"),
    "api.samples": ("CalibrationData", "JudgingData"),
    "api.segmenting": ("Segmented", "segment", "segment_each"),
    "api.serving": ("deploy", "serve"),
    "api.sizing": ("Sizing", "size"),
    "api.sources": ("Batch", "batch_range"),
    "api.sweeping": ("sweep",),
    "api.training": ("forecast", "train"),
    "api.tuning": ("tune",),
    "api.verifying": ("Flip", "Verification", "evaluate_split", "verify"),
    "artifacts.plan": ("load_plan",),
    "artifacts.settings": ("recipe_from",),
    "compiler": ("read_quantized",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Resolve a name on first use."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"tessella.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
