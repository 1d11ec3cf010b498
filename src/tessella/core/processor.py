"""``TESSELLA_ISA``: the widest instruction set of the processor that this process may use.

``TESSELLA_ISA=avx2`` makes any machine one without AVX-512, as most desktops are: for tests, and to
build a plan for such a machine on another one. Names between leave out what newer processors of
either width have.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import re
from pathlib import Path

from tessella.core.errors import UsageError

VARIABLE = "TESSELLA_ISA"
_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA = 158, 0x1023, 18  # of Linux (x86/xstate.rst)
CPUINFO = Path("/proc/cpuinfo")
# what a set of ours needs beside its vectors, in Linux's words
EXTENSIONS: dict[str, tuple[str, ...]] = {
    "avx2_vnni": ("avx_vnni",),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_int8": ("amx_tile", "amx_int8"),
    "amx_bf16": ("amx_tile", "amx_bf16"),
}
# each with the extensions that it allows, and what torch and oneDNN call it, in variables that they
# read when they first compute
_SETS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "avx512_amx": (tuple(EXTENSIONS), {}),
    "avx512_bf16": (("avx512_vnni", "avx512_bf16"), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    "avx512_vnni": (("avx512_vnni",), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
    "avx512": ((), {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    "avx2_vnni": (
        ("avx2_vnni",),
        {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"},
    ),
    "avx2": ((), {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
}


def widest_allowed() -> str | None:
    """The set that ``TESSELLA_ISA`` names, or None if it names none.

    Raises:
        UsageError: it names one that is not known.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    if named not in _SETS:
        raise UsageError(
            f"{VARIABLE} names an instruction set that is not known",
            seen=repr(named),
            fix=f"set it to one of {', '.join(_SETS)}, or not at all",
        )
    return named


def may_use(extension: str) -> bool:
    """Whether the processor has one of ``EXTENSIONS``, and ``TESSELLA_ISA`` allows it."""
    allowed, _ = _SETS[widest_allowed() or "avx512_amx"]
    return extension in allowed and flags() >= set(EXTENSIONS[extension])


def extensions() -> tuple[str, ...]:
    """Those of ``EXTENSIONS`` that this process may use: where Linux refuses it the tiles of AMX,
    times of kernels are others, and code on tiles would end it.
    """
    found = tuple(filter(may_use, EXTENSIONS))
    has_tiles = any(map(on_tiles, found)) and tiles_refusal() is None
    return tuple(name for name in found if has_tiles or not on_tiles(name))


def on_tiles(isa: str) -> bool:
    """Whether an instruction set is one on the tiles of AMX."""
    return isa.startswith("amx")


_granted: list[bool] = []  # filled once: a refusal may end, leave does not


def tiles_refusal() -> str | None:
    """Why Linux does not let this process use the data of AMX's tiles, or None: it is asked for
    that.
    """
    if _granted:
        return None
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "tiles of AMX are asked of Linux on x86-64 alone"
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes, call.restype = (ctypes.c_long,) * 3, ctypes.c_long
    if call(_ARCH_PRCTL, _REQUEST_STATE, _TILE_DATA) == 0:
        _granted.append(True)
        return None
    if ctypes.get_errno() == errno.ENOSPC:
        return "a thread's alternate signal stack (sigaltstack) is too small for the tiles of AMX"
    return "Linux does not let this process use the tiles of AMX"


@functools.cache
def flags() -> frozenset[str]:
    """What Linux says that the processor can do, in its words; nothing where it says nothing."""
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(line[1].split() if line else ())


def limit_libraries() -> None:
    """Hand ``TESSELLA_ISA`` on to the libraries, before they compute; a name that is not known is
    left to ``widest_allowed``, as an import is no place for an error."""
    _, variables = _SETS.get(os.environ.get(VARIABLE, ""), ((), {}))
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
