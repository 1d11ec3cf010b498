"""Starting, finding and ending the processes of jobs on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tessella.jobs import executor


@dataclass(frozen=True, kw_only=True)
class Executor:
    """A job's executor: started by this process (``child``), or found running and adopted."""

    folder: Path
    pid: int
    child: subprocess.Popen[bytes] | None = None

    def ended(self) -> bool:
        if self.child is not None:
            return self.child.poll() is not None
        try:
            return _folder_of(psutil.Process(self.pid)) != self.folder
        except psutil.NoSuchProcess:
            return True

    def send(self, number: signal.Signals) -> None:
        """Signal the executor, which passes SIGTERM on to the command's whole process group."""
        if not self.ended():
            os.kill(self.pid, number)


def start(folder: Path, command: list[str], *, cwd: Path, environment: dict[str, str]) -> Executor:
    """Start ``command`` under an executor, in a session of its own, printing into ``output.log``.

    Raises ``OSError`` where no process or file can be made.
    """
    (folder / executor.EXIT_FILE).unlink(missing_ok=True)
    with (folder / "output.log").open("ab") as log:
        child = subprocess.Popen(
            # -P: a file in the workspace must never be taken for a module
            [sys.executable, "-P", "-m", executor.__name__, str(folder), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )
    return Executor(folder=folder, pid=child.pid, child=child)


def executors_in(root: Path) -> list[Executor]:
    """The living executors of all jobs whose folders lie in ``root``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # ended meanwhile, or another user's
            folder = _folder_of(process)
            if folder is not None and folder.parent == root:
                found.append(Executor(folder=folder, pid=process.pid))
    return found


def adopt(folder: Path) -> Executor | None:
    """The living executor of the job in ``folder``, whoever started it, or None.

    No other process has the job's folder in its command line. Unlike a process id and a start time,
    this survives a change of the clock, and a crash before they were saved.
    """
    return next((e for e in executors_in(folder.parent) if e.folder == folder), None)


def kill_marked(folder: Path) -> None:
    """SIGKILL all processes that the job's command started, and wait until they hold nothing."""
    killed = []
    for process in _marked(folder):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
        killed.append(process)
    # two seconds: the kernel may still be busy for them, by a disk that does not answer
    end = time.monotonic() + 2.0
    while any(_holds_something(process) for process in killed) and time.monotonic() < end:
        time.sleep(0.01)


def _marked(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(executor.MARK) == str(folder):
                yield process
        except (psutil.Error, OSError):  # ended meanwhile, or another user's
            continue


def _holds_something(process: psutil.Process) -> bool:
    """Whether the process lives; a zombie holds neither memory nor a GPU."""
    try:
        return not _is_zombie(process)
    except psutil.NoSuchProcess:
        return False


def _is_zombie(process: psutil.Process) -> bool:
    zombie: bool = process.status() == psutil.STATUS_ZOMBIE
    return zombie


def _folder_of(process: psutil.Process) -> Path | None:
    """The folder of the job whose executor a process is, or None."""
    arguments: list[str] = [] if _is_zombie(process) else process.cmdline()
    if executor.__name__ not in arguments[:-1]:
        return None
    return Path(arguments[arguments.index(executor.__name__) + 1])
