"""The runtime: runs plans. Needs neither model code nor compiler."""

from tessella.runtime.engine import Engine, add_kernels, load
from tessella.runtime.trial import load_tried

__all__ = ["Engine", "add_kernels", "load", "load_tried"]
