"""What the operations mean: a table from each name to a function in plain torch."""

from tessella.operations.reference.table import REFERENCES, call, family, function

__all__ = ["REFERENCES", "call", "family", "function"]
