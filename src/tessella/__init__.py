"""Tessella: from a folder of examples to a tuned, served network, on your own GPUs.

>>> import tessella as ts
>>> flowers = ts.data.images("flowers/", size=224, holdout=0.1)
>>> run = ts.train("resnet50", flowers, out="runs/flowers", epochs=30)
>>> plan = ts.compile(run.best("val/accuracy"), batch=(1, 8, 32))
>>> plan.save("flowers.plan")
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "compile", "data", "kernels", "load", "serve", "train", "verify"]

# Resolved on first use, so that `import tessella` and `tessella --help` need no torch.
_LAZY = {
    "compile": ("tessella.api", "compile"),
    "load": ("tessella.api", "load"),
    "serve": ("tessella.api", "serve"),
    "train": ("tessella.api", "train"),
    "verify": ("tessella.api", "verify"),
    "data": ("tessella.data", None),
    "kernels": ("tessella.kernels", None),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tessella' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    loaded = importlib.import_module(module)
    return loaded if attribute is None else getattr(loaded, attribute)
