"""What a report says of a processor or a GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

from tessella.core.architectures import ARCHITECTURES
from tessella.core.device import fingerprint
from tessella.core.processor import flags
from tessella.device.x86 import code
from tessella.search.kernel_report.record import Chip

# Linux's names of what kernels of ours or of the libraries are written in, on x86 and on Arm
INSTRUCTION_SETS = (
    "sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq",
    "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm",
)  # fmt: skip
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def processor() -> Chip:
    """The processor of this machine, as this process may use it."""
    here, own = fingerprint("cpu"), code.instructions()
    return Chip(
        name=here.name,
        arch=here.arch,
        units=here.units,
        threads=torch.get_num_threads(),
        instruction_sets=_instruction_sets(),
        own_code=None if own is None else own.name,
        cache_bytes=_cache_bytes(),
        versions=here.libraries,
    )


def gpu(target: str) -> Chip:
    """The current GPU; what torch does not say is the architecture's."""
    here, kind = fingerprint(target), ARCHITECTURES[target]
    seen = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Chip(
        name=here.name,
        arch=here.arch,
        units=here.units,
        memory_bytes=here.memory_bytes,
        l2_bytes=getattr(seen, "L2_cache_size", None),
        shared_bytes=getattr(seen, "shared_memory_per_multiprocessor", kind.shared_bytes),
        shared_bytes_of_block=getattr(
            seen, "shared_memory_per_block_optin", kind.shared_bytes_of_block()
        ),
        registers=getattr(seen, "regs_per_multiprocessor", kind.registers),
        versions=here.libraries,
    )


def _instruction_sets() -> tuple[str, ...]:
    has = flags()
    return tuple(name for name in INSTRUCTION_SETS if name in has)


def _cache_bytes() -> dict[str, int]:
    """The caches that the first core reads through, by level; instructions' are left out."""
    found: dict[str, int] = {}
    for folder in sorted(CACHES.glob("index*")):
        try:
            kind, level, size = (
                (folder / n).read_text().strip() for n in ("type", "level", "size")
            )
        except OSError:  # a virtual machine may not say
            continue
        number = re.fullmatch(r"(\d+)([KM]?)", size)
        if kind != "Instruction" and number:
            unit = {"": 1, "K": 1 << 10, "M": 1 << 20}[number[2]]
            found[f"L{level}"] = int(number[1]) * unit
    return found


def host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
