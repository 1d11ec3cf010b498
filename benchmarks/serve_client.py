"""A process that asks a server for ``benchmarks.serve``. Six of them start before each row, so it
imports no torch, which takes seconds.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from tessella import loadtest
from tessella.loadtest.schedule import Schedule


def main() -> None:
    """Ask, once somebody says a line; what came back is written to a file."""
    url, grpc, model, path, clients, seconds, result = sys.argv[1:]
    target = loadtest.Target(url=url, model=model, grpc=grpc or None)
    content = Path(path).read_bytes()
    warm = Schedule(times_s=None, seconds=0.5, clients=int(clients))
    loadtest.generate(target, content, warm)
    print("ready", flush=True)
    sys.stdin.readline()
    began_s = time.process_time()
    found = loadtest.generate(target, content, loadtest.closed(int(clients), float(seconds)))
    told = {"latencies_s": found.latencies_s, "failures": found.failures, "seconds": found.seconds}
    told["processor_s"] = time.process_time() - began_s
    Path(result).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
