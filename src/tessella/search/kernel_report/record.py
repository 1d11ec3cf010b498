"""The file of a report: what a machine is, and what each kernel did there.

docs/kernel-report.md describes it; ``VERSION`` is raised when a reader of the last one would err.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tessella.core.errors import UnknownVersion, UsageError
from tessella.core.record import from_plain, parse_json

Kind = Literal["tessella kernel report"]
KIND: Kind = "tessella kernel report"
VERSION = 1
MOST_BYTES = 64 << 20  # a report of eight GPUs takes about 4 MB

Outcome = Literal["right", "wrong", "failed", "crashed", "timed out", "refused"]
Ended = Literal["complete", "out of time", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kernel on one problem, in one configuration.

    Attributes:
        kernel: its id in the catalog; ``source``: who wrote it; ``family``: of its operation.
        problem: a name in the report's ``problems``.
        config: as ``bind`` takes it.
        outcome: ``refused``: it says itself that it does not take the problem. ``failed``: it
            raised an error. ``crashed``: its process ended, or its GPU did.
        why: of everything but ``right``.
        error: largest deviation from float64 over the largest value; ``bound``: what is allowed.
        repeatable: two runs gave the same bits.
        time_us: the median; ``spread_us``: half the distance between the quartiles; ``noisy``:
            other work disturbed the timing.
        peer: the kernel that it was timed beside: torch's own; ``ratio``: the peer's time over its
            own, above 1 where it is the faster one.
        registers, shared_bytes, occupancy: of its largest launch on a GPU.
    """

    kernel: str
    source: str
    family: str
    problem: str
    config: dict[str, Any] = field(default_factory=dict)
    outcome: Outcome
    why: str | None = None
    error: float | None = None
    bound: float | None = None
    repeatable: bool | None = None
    time_us: float | None = None
    spread_us: float | None = None
    noisy: bool = False
    peer: str | None = None
    peer_us: float | None = None
    ratio: float | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A processor or a GPU; what does not apply, or cannot be read, is None.

    Attributes:
        arch: ``x86_64-avx2``, ``aarch64-default``, or a GPU's compute capability (``sm_86``).
        units: cores that may be used, or multiprocessors.
        threads: that torch computes with.
        instruction_sets: of the processor, as Linux names them, those that matter here.
        own_code: the set that our machine code is written in here.
        shared_bytes: of a multiprocessor; ``shared_bytes_of_block``: the most of one block.
        versions: of what the kernels come from: torch, CUDA, cuDNN.
    """

    name: str
    arch: str
    units: int
    threads: int | None = None
    instruction_sets: tuple[str, ...] = ()
    own_code: str | None = None
    cache_bytes: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    shared_bytes: int | None = None
    shared_bytes_of_block: int | None = None
    registers: int | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """All kernels on one device.

    Attributes:
        device: ``cpu``, ``cuda:0``, …; ``gpu`` where there is none, with what could not run.
        target: the target of plans for it; None where it has none.
        chip: None where no process could say.
        left_out: ``kernel on problem`` that time was too short for, the most important first.
        not_run: kernels by the reason why none of the problems was tried.
        trouble: what ended the device's part early.
        seconds: that it took.
    """

    device: str
    target: str | None
    chip: Chip | None = None
    rows: tuple[Row, ...] = ()
    left_out: tuple[str, ...] = ()
    not_run: dict[str, tuple[str, ...]] = field(default_factory=dict)
    trouble: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """A whole report.

    Attributes:
        system: the operating system; ``versions``: of Python, libraries and the NVIDIA driver.
        cores: that the system shows; ``memory_bytes``: of the host.
        problems: by target and name, each a problem as JSON, from which it can be made again.
        ended: ``stopped`` by Ctrl-C, or a file that was written on the way.
    """

    kind: Kind = KIND
    version: int = VERSION
    tessella: str
    date: str
    minutes: float
    ended: Ended
    system: str
    cores: int
    memory_bytes: int
    versions: dict[str, str] = field(default_factory=dict)
    problems: dict[str, dict[str, Any]] = field(default_factory=dict)
    devices: tuple[DeviceReport, ...] = ()


def read_report(path: Path) -> KernelReport:
    """The report in a file, which a stranger may have sent.

    Raises:
        UsageError: there is no such file, or one that is too large.
        UnknownVersion: another version of Tessella wrote it.
        CorruptArtifact: it is no report.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(
            "the report cannot be read",
            seen=f"{path}: {error.strerror}",
            fix="write one with tessella doctor --report",
        ) from error
    if len(content) > MOST_BYTES:
        raise UsageError(
            "this is too large for a report",
            seen=f"{path}: more than {MOST_BYTES >> 20} MB",
            fix="give the file that tessella doctor --report wrote",
        )
    plain = parse_json(content, where="the report")
    version = plain.get("version") if isinstance(plain, dict) else None
    if isinstance(version, int) and version != VERSION and plain.get("kind") == KIND:
        raise UnknownVersion(
            "this version does not read that report",
            seen=f"version {version}, this one reads {VERSION}",
            fix="read it with the version of Tessella that wrote it",
        )
    return from_plain(KernelReport, plain, where="the report")
