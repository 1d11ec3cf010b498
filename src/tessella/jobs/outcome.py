"""The outcome of a job's command: the exit code that its executor wrote, and the error's text."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from tessella.core.errors import CorruptArtifact
from tessella.core.events import read_events
from tessella.jobs.executor import CANNOT_START, EXIT_FILE
from tessella.jobs.job import Job

_TAIL_BYTES = 4096
_TAIL_LINES = 15
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}

KILLED = (
    "the machine or the process was killed: it ended without an exit code "
    "(a reboot, kill -9 or the memory running out)"
)


def exit_code(folder: Path) -> int | None:
    """The command's exit code (negative: its signal); None if the executor died, too.

    A file that cannot be read, as a disk leaves it that lost its power, says as little as none.
    """
    try:
        return int(json.loads((folder / EXIT_FILE).read_text())["exit_code"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def error_text(job: Job, code: int) -> str:
    """Why a job failed: its last ``error`` event, or else the end of what it printed."""
    message = _last_error_event(job) or _log_tail(job.log_path) or "it printed nothing"
    if code < 0:
        name = _SIGNAL_NAMES.get(-code, f"signal {-code}")
        hint = " (as the system does when memory runs out)" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}; the last it said: {message}"
    if code == CANNOT_START:
        return f"the command could not be started: {message}"
    return message


def _last_error_event(job: Job) -> str | None:
    """The last error of this attempt; the file also has the events of earlier attempts."""
    try:
        events, _ = read_events(job.events_path)
    except CorruptArtifact:  # the command's output will have to do
        return None
    errors = [e.text for e in events if e.kind == "error" and e.time >= (job.started or 0.0)]
    return errors[-1] if errors else None


def _log_tail(path: Path) -> str:
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "\n".join(lines[-_TAIL_LINES:]).strip()
