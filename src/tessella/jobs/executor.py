"""The process between the scheduler and a job's command: it outlives the scheduler.

    python -m tessella.jobs.executor FOLDER -- PROGRAM ARGUMENT…

It starts the command in a process group of its own, passes SIGTERM and SIGINT on to that group,
waits, and writes the exit code into ``FOLDER/exit.json``. Nothing heavy is imported: every running
job has one of these.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from tessella.artifacts.files import write_atomic

# An environment variable of every process that a job starts, however deep and in whatever session;
# it identifies what a dead command left behind. Its value is the job's folder.
MARK = "TESSELLA_JOB"

EXIT_FILE = "exit.json"
CANNOT_START = 127  # the shell's code for a command that is not there


def run(folder: Path, command: list[str]) -> int:
    """Run ``command`` to its end; returns its exit code (negative: the signal that killed it)."""
    child: subprocess.Popen[bytes] | None = None
    pending: list[int] = []

    def forward(number: int, frame: object) -> None:
        if child is None:
            pending.append(number)
        else:
            _signal_group(child, number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, MARK: str(folder)},
            process_group=0,
        )
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        code = CANNOT_START
    else:
        for early in pending:
            _signal_group(child, early)
        code = _wait(child)
    document = {"exit_code": code, "time": time.time()}
    write_atomic(folder / EXIT_FILE, json.dumps(document).encode())
    return code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """The child's exit code, once it has ended; signals that come meanwhile are handled at once.

    A signal that arrives right before the system call of a plain ``wait`` is noted, and its
    handler runs only when that call returns: at the child's end. Python writes a byte into the
    wakeup pipe for each signal, so that no order of the two loses one.
    """
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # ignored, it would wake nobody
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    while (code := child.poll()) is None:
        select.select([reader], [], [])
        with contextlib.suppress(BlockingIOError):
            os.read(reader, 4096)
    signal.set_wakeup_fd(before)
    os.close(reader)
    os.close(writer)
    return code


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    if child.returncode is None:  # not waited for yet, so the group still bears its number
        os.killpg(child.pid, number)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[3:])
