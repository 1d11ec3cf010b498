"""The tables of the job store. ``migrations/`` makes them; a change here needs a revision there."""

from __future__ import annotations

from sqlalchemy import JSON, Double, ForeignKey, Index, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from tessella.jobs.job import Job, Kind, Status, StatusChange


class Table(DeclarativeBase):
    type_annotation_map = {list[str]: JSON, float: Double}  # noqa: RUF012 (read by SQLAlchemy)


class JobRow(Table):
    __tablename__ = "job"
    __table_args__ = (Index("job_by_status", "status"),)

    number: Mapped[int] = mapped_column(primary_key=True)  # the order in which jobs came
    id: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    kind: Mapped[Kind] = mapped_column(String)
    argv: Mapped[list[str]]
    files: Mapped[list[str]]  # names of the input files in the folder
    folder: Mapped[str]
    gpus: Mapped[int]
    status: Mapped[Status] = mapped_column(String)
    aborting: Mapped[bool] = mapped_column(default=False)
    resumable: Mapped[bool]
    resume_argv: Mapped[list[str]]
    continues: Mapped[bool] = mapped_column(default=False)
    attempts: Mapped[int] = mapped_column(default=0)
    pid: Mapped[int | None]
    exit_code: Mapped[int | None]
    error: Mapped[str | None]
    priority: Mapped[int]
    group: Mapped[str | None]
    notes: Mapped[str]
    created: Mapped[float]
    started: Mapped[float | None]
    finished: Mapped[float | None]
    trashed: Mapped[float | None]

    history: Mapped[list[StatusRow]] = relationship(
        order_by="StatusRow.number", lazy="selectin", cascade="all, delete-orphan"
    )
    needs: Mapped[list[NeedRow]] = relationship(
        order_by="NeedRow.number",
        foreign_keys="NeedRow.job_id",
        lazy="selectin",
        cascade="all, delete-orphan",
    )
    leases: Mapped[list[LeaseRow]] = relationship(
        order_by="LeaseRow.gpu", lazy="selectin", cascade="all, delete-orphan"
    )

    def record(self) -> Job:
        return Job(
            id=self.id,
            name=self.name,
            kind=self.kind,
            argv=tuple(self.argv),
            folder=self.folder,
            gpus=self.gpus,
            leased=tuple(lease.gpu for lease in self.leases),
            depends_on=tuple(need.needed_id for need in self.needs),
            status=self.status,
            history=tuple(
                StatusChange(status=h.status, time=h.time, text=h.text) for h in self.history
            ),
            aborting=self.aborting,
            resumable=self.resumable,
            resume_argv=tuple(self.resume_argv),
            continues=self.continues,
            attempts=self.attempts,
            pid=self.pid,
            exit_code=self.exit_code,
            error=self.error,
            priority=self.priority,
            group=self.group,
            notes=self.notes,
            created=self.created,
            started=self.started,
            finished=self.finished,
            trashed=self.trashed,
        )


class StatusRow(Table):
    """A change of a job's status."""

    __tablename__ = "status_change"

    number: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"), index=True)
    status: Mapped[Status] = mapped_column(String)
    time: Mapped[float]
    text: Mapped[str]


class NeedRow(Table):
    """A dependency of a job on another."""

    __tablename__ = "need"

    number: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"), index=True)
    needed_id: Mapped[str] = mapped_column(ForeignKey("job.id"), index=True)


class LeaseRow(Table):
    """A GPU that a running job holds; the primary key makes the lease exclusive."""

    __tablename__ = "gpu_lease"

    gpu: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"), index=True)
