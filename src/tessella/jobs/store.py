"""The job store: every job with its command, its state and its outcome.

Every method is one short transaction. The studio and the CLI submit, list, abort and delete; the
scheduler claims, attaches and settles. They may be different processes, which share the store only.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Exists, delete, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from tessella.core.errors import JobError
from tessella.jobs.database import Database
from tessella.jobs.job import ENDED, JOB_FOLDER, Job, JobSpec, Kind, Status
from tessella.jobs.tables import JobRow, LeaseRow, NeedRow, StatusRow


class Store:
    """The queue in a database.

    Args:
        where: a path (SQLite, made if it is not there) or a database URL of SQLAlchemy.
        folder: under it every job gets a folder of its own; by default ``jobs`` beside the file.

    Raises:
        JobError: the database cannot be opened, is damaged, or is newer than this Tessella.
    """

    def __init__(self, where: str | Path, *, folder: str | Path | None = None) -> None:
        url = str(where)
        if "://" not in url:
            path = Path(where).absolute()
            folder = folder or path.parent / "jobs"
            path.parent.mkdir(parents=True, exist_ok=True)
            url = f"sqlite:///{path}"
        if folder is None:
            raise JobError("a job store at a URL needs a folder for its jobs", fix="pass folder=")
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.database = Database(url)

    def close(self) -> None:
        self.database.close()

    # For people

    def submit(self, spec: JobSpec) -> Job:
        """Put a job into the queue; ``JobError`` if it depends on an unknown job."""
        job_id = _new_id()
        folder = self.folder / job_id
        folder.mkdir()
        try:
            for name, content in spec.files.items():
                (folder / name).write_text(content, encoding="utf-8")
            with self.database.write() as session:
                for needed in spec.depends_on:
                    _row(session, needed)
                row = _new_row(spec, job_id, folder)
                _move(row, "waiting")
                session.add(row)
                session.flush()
                return row.record()
        except BaseException:
            shutil.rmtree(folder)  # nothing ran in it, and nobody knows its name
            raise

    def job(self, job_id: str) -> Job:
        with self.database.read() as session:
            return _row(session, job_id).record()

    def jobs(
        self,
        *,
        status: Status | Sequence[Status] | None = None,
        kind: Kind | None = None,
        group: str | None = None,
        trashed: bool = False,
        limit: int | None = None,
    ) -> list[Job]:
        """Jobs, the newest first. ``trashed``: the deleted ones instead of the others."""
        query = select(JobRow).order_by(JobRow.number.desc()).limit(limit)
        query = query.where(
            JobRow.trashed.is_not(None) if trashed else JobRow.trashed.is_(None),
        )
        if status is not None:
            statuses = (status,) if isinstance(status, str) else tuple(status)
            query = query.where(JobRow.status.in_(statuses))
        if kind is not None:
            query = query.where(JobRow.kind == kind)
        if group is not None:
            query = query.where(JobRow.group == group)
        with self.database.read() as session:
            return [row.record() for row in session.scalars(query)]

    def abort(self, job_id: str) -> Job:
        """Stop a job: a waiting one at once, a running one as soon as its process has ended."""
        with self._changed(job_id) as row:
            if row.status == "waiting":
                _move(row, "aborted", "before it started")
            elif row.status == "running":
                row.aborting = True
            else:
                raise JobError(f"job {job_id} has already ended", seen=row.status)
            return row.record()

    def clone(self, job_id: str, *, name: str | None = None) -> Job:
        """Submit the same job again, from the start, in a folder of its own."""
        with self.database.read() as session:
            row = _row(session, job_id)
            old, file_names = row.record(), tuple(row.files)
        prefix = f"{old.folder}/"
        files = {n: (Path(old.folder) / n).read_text(encoding="utf-8") for n in file_names}
        spec = JobSpec(
            name=name or old.name,
            kind=old.kind,
            argv=tuple(
                JOB_FOLDER + a.removeprefix(prefix) if a.startswith(prefix) else a for a in old.argv
            ),
            files=files,
            gpus=old.gpus,
            resumable=old.resumable,
            resume_argv=old.resume_argv,
            priority=old.priority,
            group=old.group,
            notes=old.notes,
        )
        return self.submit(spec)

    def resume(self, job_id: str) -> Job:
        """Let a failed or aborted job go on where it stopped (with its ``resume_argv``)."""
        with self._changed(job_id) as row:
            if row.status not in ("failed", "aborted") or not row.resumable:
                raise JobError(
                    f"job {job_id} cannot go on",
                    seen=f"{row.status}, {'' if row.resumable else 'not '}resumable",
                    fix="submit it again, or clone it",
                )
            row.continues = row.started is not None
            row.aborting = False
            row.attempts = 0
            row.error = row.exit_code = None
            _move(row, "waiting", "to go on")
            return row.record()

    def edit(
        self,
        job_id: str,
        *,
        name: str | None = None,
        notes: str | None = None,
        priority: int | None = None,
    ) -> Job:
        """Change a job's name, its notes, or its place in the queue."""
        with self._changed(job_id) as row:
            if name is not None:
                if not name.strip() or len(name) > 200:
                    raise JobError("a job needs a name of 1 to 200 characters", seen=len(name))
                row.name = name
            if notes is not None:
                row.notes = notes
            if priority is not None:
                row.priority = priority
            return row.record()

    def delete(self, job_id: str) -> Job:
        """Put a job into the trash. Its folder stays, and ``restore`` brings it back."""
        with self._changed(job_id) as row:
            if row.status not in ENDED:
                raise JobError(f"job {job_id} has not ended", seen=row.status, fix="abort it first")
            row.trashed = time.time()
            return row.record()

    def restore(self, job_id: str) -> Job:
        """Take a job out of the trash."""
        with self._changed(job_id) as row:
            row.trashed = None
            return row.record()

    def purge(self, job_id: str) -> None:
        """Remove a job that is in the trash for good, with its folder."""
        with self.database.write() as session:
            row = _row(session, job_id, lock=True)
            if row.trashed is None:
                raise JobError(f"job {job_id} is not in the trash", fix="delete it first")
            session.execute(delete(NeedRow).where(NeedRow.needed_id == job_id))
            folder = Path(row.folder)
            session.delete(row)
        shutil.rmtree(folder, ignore_errors=True)

    # For the scheduler

    def ready(self) -> list[Job]:
        """Waiting jobs whose dependencies are done, in the order in which they may start."""
        query = (
            select(JobRow)
            .where(JobRow.status == "waiting", ~_needs("waiting", "running", "failed", "aborted"))
            .order_by(JobRow.priority.desc(), JobRow.number)
        )
        with self.database.read() as session:
            return [row.record() for row in session.scalars(query)]

    def leases(self) -> dict[int, str]:
        """The id of the job that holds a GPU, by the GPU's index."""
        with self.database.read() as session:
            return {lease.gpu: lease.job_id for lease in session.scalars(select(LeaseRow))}

    def claim(self, job_id: str, gpus: Sequence[int] = ()) -> Job | None:
        """Set a waiting job running and lease these GPUs to it, in one transaction.

        Returns None if the job no longer waits or another job holds one of the GPUs.
        """
        try:
            with self.database.write() as session:
                row = _row(session, job_id, lock=True)
                if row.status != "waiting":
                    return None
                row.leases = [LeaseRow(gpu=gpu) for gpu in gpus]
                row.attempts += 1
                row.started = time.time()
                row.exit_code = row.error = row.pid = None
                _move(row, "running", f"attempt {row.attempts}" if row.attempts > 1 else "")
                session.flush()
                return row.record()
        except IntegrityError:  # a lease's primary key: somebody was faster
            return None

    def attach(self, job_id: str, pid: int) -> None:
        """Note the process id of a running job's executor."""
        with self._changed(job_id) as row:
            row.pid = pid

    def settle(
        self, job_id: str, status: Status, *, exit_code: int | None = None, error: str | None = None
    ) -> None:
        """End an attempt and free its GPUs; a job in ``waiting`` was killed and starts again."""
        with self._changed(job_id) as row:
            row.leases = []
            row.pid = None
            row.exit_code = exit_code
            row.error = error
            row.aborting = False
            row.continues = status == "waiting"
            _move(row, status, error or "")

    def drop_dependents(self) -> None:
        """Fail every waiting job that needs a failed one, abort those that need an aborted one.

        Goes one link down a chain of dependencies at each call.
        """
        query = select(JobRow).where(JobRow.status == "waiting", _needs("failed", "aborted"))
        with self.database.read() as session:
            if not session.scalars(query).first():
                return
        with self.database.write() as session:
            for row in session.scalars(query):
                needed = [_row(session, need.needed_id) for need in row.needs]
                cause = next(n for n in needed if n.status in ("failed", "aborted"))
                verb = "failed" if cause.status == "failed" else "was aborted"
                row.error = f"it needs job {cause.id} ({cause.name}), which {verb}"
                _move(row, cause.status, row.error)

    @contextmanager
    def _changed(self, job_id: str) -> Iterator[JobRow]:
        with self.database.write() as session:
            yield _row(session, job_id, lock=True)


def _needs(*statuses: Status) -> Exists:
    """SQL: the job depends on a job that is in one of these states."""
    needed = aliased(JobRow)
    return (
        select(NeedRow.number)
        .join(needed, needed.id == NeedRow.needed_id)
        .where(NeedRow.job_id == JobRow.id, needed.status.in_(statuses))
        .exists()
    )


def _row(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    query = select(JobRow).where(JobRow.id == job_id)
    row = session.scalars(query.with_for_update() if lock else query).one_or_none()
    if row is None:
        raise JobError("there is no such job", seen=job_id, fix="list the jobs for their ids")
    return row


def _new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _new_row(spec: JobSpec, job_id: str, folder: Path) -> JobRow:
    own = f"{folder}/"
    return JobRow(
        id=job_id,
        name=spec.name,
        kind=spec.kind,
        argv=[
            own + a.removeprefix(JOB_FOLDER) if a.startswith(JOB_FOLDER) else a for a in spec.argv
        ],
        files=list(spec.files),
        folder=str(folder),
        gpus=spec.gpus,
        aborting=False,
        resumable=spec.resumable,
        resume_argv=list(spec.resume_argv),
        continues=False,
        attempts=0,
        priority=spec.priority,
        group=spec.group,
        notes=spec.notes,
        created=time.time(),
        needs=[NeedRow(needed_id=needed) for needed in spec.depends_on],
    )


def _move(row: JobRow, status: Status, text: str = "") -> None:
    now = time.time()
    row.status = status
    row.finished = now if status in ENDED else None
    row.history.append(StatusRow(status=status, time=now, text=text))
