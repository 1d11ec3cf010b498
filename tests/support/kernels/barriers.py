"""Barriers whose place in shared memory a kernel may give away while they are still valid.

Triton gives the place of what is not used any more to what comes later, a reduction's scratch for
instance. A barrier has to be invalidated before (PTX, ``mbarrier.inval``); else an ordinary store
to it may come undone. Those that warps of other roles use stay where they are until the end.
"""

from __future__ import annotations

import re

from tessella.device.launch import Launched

_LINE = re.compile(r"\s*(?:(%[\w.$-]+)(?::\d+)? = )?\"?(ttn?g\.\w+)\"?\(?(.*)")
_NAME = re.compile(r"%[\w.$-]+")
_VIEWS = ("ttg.memdesc_index", "ttg.memdesc_subslice", "ttg.memdesc_subview")


def left_valid(launched: Launched) -> list[str]:
    """The barriers that a kernel initializes and neither keeps to its end nor invalidates."""
    return left_valid_in(launched.compiled.asm["ttgir"])


def left_valid_in(text: str) -> list[str]:
    """As ``left_valid``, of a kernel's TTGIR."""
    alloc_of: dict[str, str] = {}
    begun: dict[str, None] = {}
    kept: set[str] = set()
    for line in text.splitlines():
        found = _LINE.match(line)
        if not found:
            continue
        made, operation, rest = found.groups()
        given = _NAME.findall(rest)
        if operation == "ttg.local_alloc" and made:
            alloc_of[made] = made
        elif operation in _VIEWS and given and given[0] in alloc_of:
            alloc_of[made] = alloc_of[given[0]]
        elif operation == "ttng.init_barrier":
            begun[alloc_of.get(given[0], given[0])] = None
        elif operation in ("ttng.inval_barrier", "ttg.warp_specialize"):
            kept.update(alloc_of[name] for name in given if name in alloc_of)
    return [name for name in begun if name not in kept]
