"""Images become a dataset (``importing``), and a split becomes batches (``loading``).

Imports no torch, and nothing before it is asked for: the processes of an import start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessella.data.doctor import examine, leave_out
    from tessella.data.importing import ImportSettings, images, import_images
    from tessella.data.tiling import Tiled, cut
    from tessella.data.unfinished import discard

__all__ = [
    "ImportSettings", "Tiled", "cut", "discard", "examine", "images", "import_images", "leave_out",
]  # fmt: skip

_PLACES = {
    "data.doctor": ("examine", "leave_out"),
    "data.importing": ("ImportSettings", "images", "import_images"),
    "data.tiling": ("Tiled", "cut"),
    "data.unfinished": ("discard",),
}


def __dir__() -> list[str]:
    """What belongs to a user, resolved yet or not: for Tab and ``help``."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Resolve a name on first use."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"tessella.{place}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
