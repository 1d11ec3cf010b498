"""The context of every page: the workspace, the job queue and the uploads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessella.jobs.job import Job
from tessella.jobs.store import Store
from tessella.studio.uploads import Uploads
from tessella.studio.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Context:
    workspace: Workspace
    store: Store
    uploads: Uploads

    def output_of(self, job: Job) -> Path | None:
        """The artifact that a job writes: its ``--out``, which starts at the workspace."""
        if "--out" not in job.argv[:-1]:
            return None
        return self.workspace.root / job.argv[job.argv.index("--out") + 1]

    def job_for(self, path: Path) -> Job | None:
        """The newest job that writes (or wrote) the artifact at ``path``."""
        return next((j for j in self.store.jobs() if self.output_of(j) == path), None)
