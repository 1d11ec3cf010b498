"""The runtime: runs plans. Needs neither model code nor compiler."""

from tessella.runtime.engine import Engine, carry, load
from tessella.runtime.trial import load_tried

__all__ = ["Engine", "carry", "load", "load_tried"]
