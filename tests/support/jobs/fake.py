"""Stands in for the ``tessella`` program: each verb does one thing that a job can do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Ignores SIGTERM and lives in a session of its own: what a careless worker of a trainer is like.
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main(verb: str, *arguments: str) -> int:
    arguments, events = arguments[:-2], Path(arguments[-1])
    assert sys.argv[-2] == "--events"
    if verb == "ok":
        print("fine")
    elif verb == "sleep":
        time.sleep(float(arguments[0]))
    elif verb == "until":  # until FILE is there
        while not Path(arguments[0]).exists():
            time.sleep(0.02)
    elif verb == "fail":
        print("some noise")
        event = {"kind": "error", "text": "no classes. To do: add a folder.", "time": time.time()}
        events.write_text(json.dumps(event) + "\n")
        return 3
    elif verb == "crash":
        print("Traceback …\nZeroDivisionError: division by zero", file=sys.stderr)
        return 1
    elif verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif verb == "environment":
        names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
        Path(arguments[0]).write_text(json.dumps({n: os.environ.get(n) for n in names}))
    elif verb == "tree":  # a child that ignores SIGTERM, in a session of its own
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
        Path(arguments[0]).write_text(str(child.pid))
        time.sleep(600)
    elif verb == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(arguments[0]).write_text("ready")
        time.sleep(600)
    elif verb in ("count", "stick"):  # FILE [--resume]: a line a tick, until ten are there
        resume = "--resume" in arguments
        return count(Path(arguments[0]), resume=resume, sticks=verb == "stick" and not resume)
    return 0


def count(path: Path, *, resume: bool, sticks: bool) -> int:
    """``sticks``: it goes no further than to the fifth line."""
    lines = path.read_text().splitlines() if resume and path.exists() else []
    print("resumed" if resume else "fresh", "at", len(lines))
    while len(lines) < 10:
        lines.append(str(len(lines)))
        path.write_text("\n".join(lines) + "\n")
        time.sleep(600 if sticks and len(lines) == 5 else 0.02)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
