"""CUDA C++ from files of the package, for kernels that need what Gluon has no instruction for.

``TYPES`` and ``INSTRUCTIONS`` begin their sources. A test puts plain C++ with the same functions in
the place of ``INSTRUCTIONS``, which only a Hopper GPU has, and runs all the rest on a processor.
"""

from __future__ import annotations

from importlib.resources import files


def cuda_source(package: str, name: str) -> str:
    """A file's text, from a line of its own on."""
    return "\n" + files(package).joinpath(name).read_text(encoding="utf-8")


TYPES = cuda_source(__package__, "types.cuh")
CONVERSIONS = cuda_source(__package__, "conversions.cuh")  # what every GPU has
INSTRUCTIONS = CONVERSIONS + cuda_source(__package__, "hopper.cuh")[1:]
