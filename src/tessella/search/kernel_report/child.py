"""The process in which kernels are tried: it may crash, hang or run out of memory.

Its argument is a descriptor, over which it gets orders and gives answers, each a line of JSON. An
order is a kernel, a problem and the place of a configuration. Before each thing that may end it, it
says what it is about to do. An alarm ends it from within where an order takes too long.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tessella.core.device import gpu_target
from tessella.core.record import to_plain
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.search.kernel_report import chip
from tessella.search.kernel_report.trying import Bench, Gone

SPARE_BYTES = 6 << 30  # of addresses, beside what is taken at the start: numbers in float64
SPARE_BYTES_A_CORE = 64 << 20  # stacks
LOST = 3  # the exit code where the GPU is lost


def main(descriptor: int, device_name: str, modules: list[str]) -> int:
    """Answer orders until the parent closes the connection."""
    connection = Connection(descriptor)
    device = torch.device(device_name)
    for name in modules:
        importlib.import_module(name)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # let this process go first where memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        target = gpu_target()
    else:
        target = "cpu"
        _limit_memory()
    if target is None:
        _answer(connection, {"target": None, "chip": None})
        return 0
    here = chip.gpu(target) if device.type == "cuda" else chip.processor()
    isas = {row.isa for row in catalog.rows() if row.isa}
    codes = {isa: code.refusal(isa) for isa in sorted(isas)}
    _answer(connection, {"target": target, "chip": to_plain(here), "codes": codes})
    bench = Bench(target, device, lambda what: _answer(connection, {"doing": what}))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            order = json.loads(connection.recv_bytes())
            signal.setitimer(signal.ITIMER_REAL, order["limit_s"])  # unhandled: it ends the process
            try:
                answer = _tried(bench, order)
            except Gone as error:
                _answer(connection, {"gone": str(error)})
                return LOST
            signal.setitimer(signal.ITIMER_REAL, 0)
            _answer(connection, answer)
    return 0


def _tried(bench: Bench, order: dict[str, Any]) -> dict[str, Any]:
    row = catalog.kernel(order["kernel"])
    try:
        made, configs = bench.try_kernel(row, order["problem"], order["place"])
    except ImportError as error:
        return {"missing": str(error)}
    return {"row": to_plain(made), "configs": configs}


def _answer(connection: Connection, answer: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(answer).encode())


def _limit_memory() -> None:
    """An address-space limit, so that who asks for too much gets an error instead of swapping."""
    cores = os.cpu_count() or 1
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = now + SPARE_BYTES + SPARE_BYTES_A_CORE * cores
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
