"""The runtime: runs plans. Needs neither model code nor compiler."""

from tessella.runtime.engine import Engine, carry, load

__all__ = ["Engine", "carry", "load"]
