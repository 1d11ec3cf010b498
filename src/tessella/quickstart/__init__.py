"""The quick start: real handwritten digits, the user's way from a folder to a served network."""

from tessella.quickstart.classification import quickstart

__all__ = ["quickstart"]
