"""The runtime: runs plans. Needs neither model code nor compiler."""

from tessella.runtime.engine import Engine, load

__all__ = ["Engine", "load"]
