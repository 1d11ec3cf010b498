"""The records of a job: the request that submits one, and the state of one in the store."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tessella.core.errors import UsageError

Kind = Literal[
    "import", "train", "sweep", "compile", "verify", "run", "show", "serve", "profile", "bench"
]
Status = Literal["waiting", "running", "done", "failed", "aborted"]

ENDED: tuple[Status, ...] = ("done", "failed", "aborted")

# A path in ``JobSpec.argv`` that begins so lies in the folder that the job gets when submitted.
JOB_FOLDER = "{job}/"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job to be submitted.

    Attributes:
        name: for people.
        kind: the verb's kind of work; it decides where the studio shows the job.
        argv: arguments of ``tessella``, the verb first. ``{job}/…`` means the job's own folder.
        files: small input files by plain name, written into the job's folder before it can start.
        gpus: how many GPUs the job leases, each exclusively. With 0 the job sees none.
        depends_on: ids of jobs that must be done before. If one fails or is aborted, this job does
            not start and ends in the same state.
        resumable: start again after a kill from outside (a crash, a reboot), three times in all.
        resume_argv: appended to ``argv`` when the job starts again.
        priority: higher first; jobs of equal priority in the order of submission.
        group: jobs that belong together, such as a sweep.
    """

    name: str
    kind: Kind
    argv: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    gpus: int = 0
    depends_on: tuple[str, ...] = ()
    resumable: bool = False
    resume_argv: tuple[str, ...] = ()
    priority: int = 0
    group: str | None = None
    notes: str = ""

    def __post_init__(self) -> None:
        if not self.name.strip() or len(self.name) > 200:
            raise UsageError("a job needs a name of 1 to 200 characters", seen=len(self.name))
        if not self.argv or self.argv[0].startswith("-"):
            raise UsageError(
                "a job needs a command that begins with a verb",
                seen=shlex.join(self.argv) or "none",
            )
        if any("\0" in argument for argument in (*self.argv, *self.resume_argv)):
            raise UsageError("a command cannot hold a zero byte", seen=repr(self.argv))
        if self.gpus < 0:
            raise UsageError("a job cannot ask for fewer than 0 GPUs", seen=self.gpus)
        for name in self.files:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise UsageError("a job's input file needs a plain name", seen=repr(name))


@dataclass(frozen=True, kw_only=True)
class StatusChange:
    """A change into ``status`` at ``time`` (seconds since 1970); ``text`` may have the reason."""

    status: Status
    time: float
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it was in the store when the record was read. Times are seconds since 1970.

    Attributes:
        id: when it was submitted, and six random digits: ``20261121-103045-5f3a9c``.
        leased: indices of the GPUs that the job holds now.
        pid: the process of the job's executor, while the job runs.
        aborting: an abort was asked for and the process has not ended yet.
        continues: the next start appends ``resume_argv``.
        attempts: how often the job was started since it was submitted (or resumed by hand).
        error: what went wrong, for people.
        trashed: when the job was deleted; its folder stays.
    """

    id: str
    name: str
    kind: Kind
    argv: tuple[str, ...]
    folder: str
    gpus: int
    leased: tuple[int, ...]
    depends_on: tuple[str, ...]
    status: Status
    history: tuple[StatusChange, ...]
    aborting: bool
    resumable: bool
    resume_argv: tuple[str, ...]
    continues: bool
    attempts: int
    pid: int | None
    exit_code: int | None
    error: str | None
    priority: int
    group: str | None
    notes: str
    created: float
    started: float | None
    finished: float | None
    trashed: float | None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def state(self) -> str:
        """The status for people: a server that somebody stopped has done its work."""
        if self.aborting and self.status == "running":
            return "stopping"
        return "stopped" if (self.kind, self.status) == ("serve", "aborted") else self.status

    @property
    def events_path(self) -> Path:
        """The file of the command's events, for ``core.events.read_events``."""
        return Path(self.folder) / "events.jsonl"

    @property
    def log_path(self) -> Path:
        """The file of everything that the command printed."""
        return Path(self.folder) / "output.log"

    @property
    def command(self) -> str:
        """The command that a person would type to do the same."""
        return shlex.join(("tessella", *self.argv))
