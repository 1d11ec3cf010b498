"""``TESSELLA_ISA``: the widest instruction set of the processor that this process may use.

``TESSELLA_ISA=avx2`` makes any machine one without AVX-512, as most desktops are: for tests, and to
build a plan for such a machine on another one.
"""

from __future__ import annotations

import os

from tessella.core.errors import UsageError

VARIABLE = "TESSELLA_ISA"
# what torch and oneDNN call each set, in variables that they read when they first compute
_LIBRARIES: dict[str, dict[str, str]] = {
    "avx512": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}


def widest_allowed() -> str | None:
    """The set that ``TESSELLA_ISA`` names, or None if it names none.

    Raises:
        UsageError: it names one that is not known.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    if named not in _LIBRARIES:
        raise UsageError(
            f"{VARIABLE} names an instruction set that is not known",
            seen=repr(named),
            fix=f"set it to one of {', '.join(_LIBRARIES)}, or not at all",
        )
    return named


def limit_libraries() -> None:
    """Hand ``TESSELLA_ISA`` on to the libraries, before they compute; a name that is not known is
    left to ``widest_allowed``, as an import is no place for an error."""
    for variable, value in _LIBRARIES.get(os.environ.get(VARIABLE, ""), {}).items():
        os.environ.setdefault(variable, value)
