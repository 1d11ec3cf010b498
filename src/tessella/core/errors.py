"""Every error that Tessella raises on purpose, in one tree. The number is the exit code of the CLI.

TessellaError          1
├── UsageError         2   an argument or a setting that cannot work
├── DataError          3   images or lists that cannot be used
├── ArtifactError      4   a file of ours that cannot be trusted
│   ├── UnknownVersion     written by a version that this one does not read
│   ├── CorruptArtifact    truncated, changed, or not what its manifest says
│   └── WrongDevice        a plan for another device
├── TrainError         5   training cannot start or go on
│   └── OutOfMemory        with settings that fit
├── CompileError       6   a network that cannot become a plan
│   ├── UnboundInput       a model's shapes depend on the value of one of its inputs
│   └── BuildStopped       out of time or memory; another build goes on from there
├── InputError         7   a tensor or request that does not match a plan
├── JobError           8   the queue cannot do what was asked
├── ServeError         9   a request that a server refuses, with its HTTP status
└── KernelError       10   a kernel that cannot do what it was asked to do
"""

from __future__ import annotations

from typing import Any

from tessella.core.legible import legible


def first_line(error: BaseException) -> str:
    """What an error of others says, in at most 200 characters; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class TessellaError(Exception):
    """An error that names what is wrong, what was seen and what to do.

    Args:
        wrong: one sentence: what is wrong.
        seen: what was found instead (a value, a shape, a path).
        fix: what the user can do, as an instruction.
    """

    exit_code = 1

    def __init__(self, wrong: str, *, seen: object = None, fix: str | None = None) -> None:
        self.wrong = legible(str(wrong))  # a file's name in it may be no UTF-8
        self.seen = None if seen is None else legible(str(seen))
        self.fix = None if fix is None else legible(str(fix))
        super().__init__(self.wrong, self.seen, self.fix)

    def __str__(self) -> str:
        parts = [self.wrong.rstrip(".") + "."]
        if self.seen is not None:
            parts.append(f"Seen: {self.seen.rstrip('.')}.")
        if self.fix is not None:
            parts.append(f"To do: {self.fix.rstrip('.')}.")
        return " ".join(parts)

    def __reduce__(self) -> Any:
        """Errors come back whole from a process that raised them."""
        return _restored, (type(self), self.args, self.__dict__)

    def to_json(self) -> dict[str, str | None]:
        """The same as data: ``{"error", "wrong", "seen", "fix"}``."""
        return {
            "error": type(self).__name__,
            "wrong": self.wrong,
            "seen": self.seen,
            "fix": self.fix,
        }


def _restored(
    kind: type[TessellaError], arguments: tuple[Any, ...], fields: dict[str, Any]
) -> TessellaError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(fields)
    return error


class UsageError(TessellaError):
    exit_code = 2


class DataError(TessellaError):
    exit_code = 3


class ArtifactError(TessellaError):
    exit_code = 4


class UnknownVersion(ArtifactError):
    pass


class CorruptArtifact(ArtifactError):
    pass


class WrongDevice(ArtifactError):
    pass


class TrainError(TessellaError):
    exit_code = 5


class OutOfMemory(TrainError):
    pass


class CompileError(TessellaError):
    exit_code = 6


class UnboundInput(CompileError):
    """A model's shapes depend on the value of one of its inputs.

    Args:
        input: the input's name.
    """

    def __init__(
        self, wrong: str, *, input: str, seen: object = None, fix: str | None = None
    ) -> None:
        super().__init__(wrong, seen=seen, fix=fix)
        self.input = input


class BuildStopped(CompileError):
    """A build that ran out of time or memory. What it measured is in its timing cache."""


class InputError(TessellaError):
    exit_code = 7


class JobError(TessellaError):
    exit_code = 8


class ServeError(TessellaError):
    """A request that a server refuses or cannot carry out now.

    Args:
        status: the HTTP status that says so (401, 404, 413, 503, …).
        retry_after_s: when it is worth to try again, for a server that is busy (429, 503).
    """

    exit_code = 9

    def __init__(
        self,
        wrong: str,
        *,
        status: int,
        seen: object = None,
        fix: str | None = None,
        retry_after_s: int = 1,
    ) -> None:
        super().__init__(wrong, seen=seen, fix=fix)
        self.status = status
        self.retry_after_s = retry_after_s


class KernelError(TessellaError):
    exit_code = 10
