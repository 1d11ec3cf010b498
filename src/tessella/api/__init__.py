"""What a person calls: train, compile, verify, load, serve. One file for each kind of verb.

``sources`` and ``samples`` open what the verbs are given: networks, and data in any form.
"""

from tessella.api.compiling import calibrate, compile, explain, export, pareto
from tessella.api.predicting import (
    Model,
    classify,
    eager_predictor,
    engine_predictor,
    load,
    open_model,
    predictor,
)
from tessella.api.samples import CalibrationData, JudgingData
from tessella.api.serving import serve
from tessella.api.sources import Batch, batch_range, open_checkpoint
from tessella.api.training import recipe_from, train
from tessella.api.verifying import Flip, Verification, evaluate_split, verify
from tessella.artifacts.plan import load_plan

__all__ = [
    "Batch", "CalibrationData", "Flip", "JudgingData", "Model", "Verification", "batch_range",
    "calibrate", "classify", "compile", "eager_predictor", "engine_predictor", "evaluate_split",
    "explain", "export", "load", "load_plan", "open_checkpoint", "open_model", "pareto",
    "predictor", "recipe_from", "serve", "train", "verify",
]  # fmt: skip
