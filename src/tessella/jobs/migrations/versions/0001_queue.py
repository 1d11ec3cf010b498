"""The queue: jobs, how their status changed, what they wait for, and which GPUs they hold."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "job",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("id", sa.String, nullable=False, unique=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("argv", sa.JSON, nullable=False),
        sa.Column("files", sa.JSON, nullable=False),
        sa.Column("folder", sa.String, nullable=False),
        sa.Column("gpus", sa.Integer, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("aborting", sa.Boolean, nullable=False),
        sa.Column("resumable", sa.Boolean, nullable=False),
        sa.Column("resume_argv", sa.JSON, nullable=False),
        sa.Column("continues", sa.Boolean, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("pid", sa.Integer),
        sa.Column("exit_code", sa.Integer),
        sa.Column("error", sa.String),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("group", sa.String),
        sa.Column("notes", sa.String, nullable=False),
        sa.Column("created", sa.Double, nullable=False),
        sa.Column("started", sa.Double),
        sa.Column("finished", sa.Double),
        sa.Column("trashed", sa.Double),
    )
    op.create_index("job_by_status", "job", ["status"])
    op.create_table(
        "status_change",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String, sa.ForeignKey("job.id"), nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_index("ix_status_change_job_id", "status_change", ["job_id"])
    op.create_table(
        "need",
        sa.Column("number", sa.Integer, primary_key=True),
        sa.Column("job_id", sa.String, sa.ForeignKey("job.id"), nullable=False),
        sa.Column("needed_id", sa.String, sa.ForeignKey("job.id"), nullable=False),
    )
    op.create_index("ix_need_job_id", "need", ["job_id"])
    op.create_index("ix_need_needed_id", "need", ["needed_id"])
    op.create_table(
        "gpu_lease",
        sa.Column("gpu", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("job_id", sa.String, sa.ForeignKey("job.id"), nullable=False),
    )
    op.create_index("ix_gpu_lease_job_id", "gpu_lease", ["job_id"])


def downgrade() -> None:
    for table in ("gpu_lease", "need", "status_change", "job"):
        op.drop_table(table)
