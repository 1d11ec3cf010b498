"""Tessella: from a folder of examples to a tuned, served network, on your own GPUs.

In the order in which data flows; ``help(tessella.train)`` and so on says more:

    data        import images into a dataset: ``data.images``
    train       a network on a dataset: a run, with its checkpoints
    sweep       many trainings that look for the best settings
    evaluate    a model on images that nothing was chosen by, with intervals
    calibrate   what int8 and fp8 need to know of a network's values
    quantization_aware a network, to be trained with the roundings of its INT8 plan
    compile     a checkpoint, a torch module or an ONNX file: a plan, tuned for one device
    pareto      the fastest plan for each loss of accuracy that a budget allows
    tune        a plan again, on the machine that it shall run on
    export      a checkpoint as an ONNX file
    verify      a plan beside its checkpoint, sample by sample
    load        a plan, ready to run: an engine, called with arrays or tensors
    serve       plans over HTTP (Open Inference Protocol)
    size        how to serve a plan: the most answers a second within a p99, and the command
    kernels     single layers by the fastest kernel: ``kernels.conv2d``, ``kernels.find``

>>> import tessella as ts
>>> flowers = ts.data.images("flowers/", size=224, holdout=0.1)
>>> run = ts.train("resnet50", flowers, out="runs/flowers", epochs=30)
>>> plan = ts.compile(run.best("val/accuracy"), batch=(1, 8, 32))
>>> plan.save("flowers.plan")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tessella.core.processor import limit_libraries
from tessella.core.version import VERSION

if TYPE_CHECKING:
    from tessella import data, kernels
    from tessella.api import (
        calibrate,
        compile,
        evaluate,
        export,
        load,
        pareto,
        quantization_aware,
        serve,
        size,
        sweep,
        train,
        tune,
        verify,
    )

__version__ = VERSION
limit_libraries()

__all__ = [
    "__version__",
    "calibrate",
    "compile",
    "data",
    "evaluate",
    "export",
    "kernels",
    "load",
    "pareto",
    "quantization_aware",
    "serve",
    "size",
    "sweep",
    "train",
    "tune",
    "verify",
]

_API = (
    "calibrate", "compile", "evaluate", "export", "load", "pareto", "quantization_aware", "serve",
    "size", "sweep", "train", "tune", "verify",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Resolve a name on first use, so that ``tessella --help`` needs no torch."""
    if name in _API:
        return getattr(importlib.import_module("tessella.api"), name)
    if name in ("data", "kernels"):
        return importlib.import_module(f"tessella.{name}")
    raise AttributeError(f"module 'tessella' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What belongs to a user, resolved yet or not: for Tab and ``help``."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
