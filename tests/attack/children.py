"""Cases that may end the process that runs them: run in children, and what became of each.

A subject is a module with ``prepare()``, done once before children are born, and ``case(seed,
index)``: a label, and a function that says what became of the case in a word (``refused``), or a
word and what it answered (``answered 3f2a``). A child runs cases until it dies or one of them takes
too long; the next begins behind that one. All is done twice, in processes whose fresh memory has
other content: an answer that is not the same twice was read from memory that nothing had written.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MEMORY_BYTES = 6 << 30  # address space of a child: torch's libraries take about half of it
TOO_LONG_S = 60.0  # for one case, by the clock: it hangs
SLOW_S = 10.0  # of the processor, whatever else the machine does
MOST_BYTES = 1 << 30  # that a case may take more than its process had before
GOOD = ("answered", "same", "alone", "unrun", "refused")  # what may become of a case
PATTERNS = (85, 170)  # glibc fills memory with these, taken and given back


@dataclass
class Report:
    """What became of the cases: a word each, and a line for what must not have happened."""

    words: list[str] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    answered: Counter[str] = field(default_factory=Counter)  # by the label's first word
    tried: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def attack(module: str, seed: int, first: int, count: int, *, patterns: Any = PATTERNS) -> Report:
    """Run the cases of a subject, and judge them.

    Args:
        module: the subject's name, ``tests.attack.fallback``.
        patterns: content of fresh memory, a run for each.
    """
    command = [sys.executable, "-m", __name__, module, str(seed), str(first), str(count)]
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MALLOC_PERTURB_": str(pattern), "OMP_NUM_THREADS": "1"},
        )
        for pattern in patterns
    ]
    runs = [[json.loads(line) for line in process.communicate()[0].splitlines()]
            for process in running]  # fmt: skip
    report = Report()
    for process, said in zip(running, runs, strict=True):
        if process.returncode or len(said) != count:
            report.failures.append(f"{module}: {len(said)} of {count}, {process.returncode}")
    for same in zip(*runs):
        index, label, outcome = same[0]
        word = outcome.split()[0]
        report.tried[label.split()[0]] += 1
        report.answered[label.split()[0]] += word in ("answered", "same")
        outcomes = list(dict.fromkeys(o for _, _, o in same))
        if len(outcomes) > 1:
            word = "unsteady"
        report.words.append(word)
        report.outcomes[word] += 1
        if word not in GOOD:
            report.failures.append(f"{seed}/{index} {' | '.join(outcomes)}: {label}")
    return report


# --- inside of the process that forks -------------------------------------------------------------


def outcomes(subject: Any, seed: int, first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """Index, label and outcome of each case, in order, whatever it does to its process."""
    index, end = first, first + count
    while index < end:
        said, lost = _child(subject, seed, range(index, end))
        ended = [line for line in said if line[2] is not None]
        yield from ended
        index += len(ended)
        if lost is not None:
            alone, again = _child(subject, seed, range(index, index + 1))
            more = "" if again == lost else f" (alone: {again or alone[-1][2]})"
            yield index, said[-1][1] if len(said) > 2 * len(ended) else "?", lost + more
            index += 1


def _child(
    subject: Any, seed: int, indices: range
) -> tuple[list[tuple[int, str, Any]], str | None]:
    """Run cases in a child; what it said, and how it was lost, if it was.

    Each case is said twice: at its begin without an outcome, and at its end.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _run(subject, seed, indices, write)
    os.close(write)
    said: list[tuple[int, str, Any]] = []
    text, hung = b"", False
    while True:
        if not select.select([read], [], [], TOO_LONG_S)[0]:
            hung = True
            os.kill(pid, signal.SIGKILL)
        chunk = os.read(read, 1 << 16)
        if not chunk:
            break
        *lines, text = (text + chunk).split(b"\n")
        said += [tuple(json.loads(line)) for line in lines]
    os.close(read)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if hung:
        return said, f"hung {TOO_LONG_S:.0f}s"
    if status == 0:
        return said, None
    return said, f"crashed {signal.Signals(-status).name}" if status < 0 else f"left {status}"


def _run(subject: Any, seed: int, indices: range, write: int) -> None:
    """In the child: never returns."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)
    os.dup2(quiet, 1)

    def say(*words: Any) -> None:
        os.write(write, json.dumps(words).encode() + b"\n")

    for index in indices:
        began, before = time.process_time(), _peak_bytes()
        try:
            label, run = subject.case(seed, index)
            say(index, label, None)
            outcome = run()
        except Exception as error:
            outcome = f"raised {type(error).__name__}: {str(error)[:300]}"
        if (took := time.process_time() - began) > SLOW_S:
            outcome = f"slow {took:.0f}s {outcome}"
        if (more := _peak_bytes() - before) > MOST_BYTES:
            outcome = f"large {more >> 20} MB {outcome}"
        say(index, label, outcome)
    os._exit(0)


def _peak_bytes() -> int:
    """The most memory that this process has held since the last call; counted anew from now on."""
    with open("/proc/self/status") as status:
        (line,) = (line for line in status if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    name, *numbers = sys.argv[1:]
    attacked = importlib.import_module(name)
    attacked.prepare()
    for found in outcomes(attacked, *map(int, numbers)):
        print(json.dumps(found), flush=True)
