"""Barriers whose place in shared memory a kernel may give away while they are still valid.

Triton gives the place of what is not used any more to what comes later, a reduction's scratch for
instance. A barrier has to be invalidated before (PTX, ``mbarrier.inval``); else an ordinary store
to it may come undone. Those that warps of other roles use stay where they are until the end, and
those of a role that is one loop, behind which nothing is exchanged, too.
"""

from __future__ import annotations

import re
from collections import Counter

from tessella.device.launch import Launched

_LINE = re.compile(r"\s*(?:(%[\w.$-]+)(?::\d+)? = )?\"?((?:ttn?g|tt)\.\w+)\"?\(?(.*)")
_NAME = re.compile(r"%[\w.$-]+")
# what threads exchange through shared memory, some of it at least
_EXCHANGES = ("tt.reduce", "tt.scan", "tt.gather", "ttg.convert_layout", "ttg.local_alloc")
_VIEWS = ("ttg.memdesc_index", "ttg.memdesc_subslice", "ttg.memdesc_subview")


def left_valid(launched: Launched) -> list[str]:
    """The barriers that a kernel initializes and neither keeps to its end nor invalidates."""
    return left_valid_in(launched.compiled.asm["ttgir"])


def left_valid_in(text: str) -> list[str]:
    """As ``left_valid``, of a kernel's TTGIR."""
    alloc_of: dict[str, str] = {}
    begun: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    kept: set[str] = set()
    looped: set[str] = set()
    level, loops = 0, list[int]()  # braces that are open, and at which of them loops began
    for line in text.splitlines():
        is_loop = "scf.for" in line or "scf.while" in line
        loops += [level] if is_loop else []
        level += line.count("{") - line.count("}")
        loops = [begin for begin in loops if begin < level]
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
            begun[alloc_of.get(given[0], given[0])] += 1
        elif operation == "ttng.inval_barrier":
            ended[alloc_of.get(given[0], given[0])] += 1
        elif operation == "ttg.warp_specialize":
            kept.update(alloc_of[name] for name in given if name in alloc_of)
        elif operation in _EXCHANGES and not loops:
            looped.clear()  # it may get their place
        elif loops:
            looped.update(alloc_of[name] for name in given if name in alloc_of)
    return [name for name in begun if name not in kept | looped and ended[name] < begun[name]]
