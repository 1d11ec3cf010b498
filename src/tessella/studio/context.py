"""The context of every page: the workspace, the job queue, what people send, write and delete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nicegui import ui

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Run
from tessella.jobs.job import Job
from tessella.jobs.store import Store
from tessella.studio.labels import Labels
from tessella.studio.trash import Trash
from tessella.studio.uploads import Uploads
from tessella.studio.warm import Answers
from tessella.studio.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class Context:
    workspace: Workspace
    store: Store
    uploads: Uploads
    answers: Answers
    labels: Labels
    trash: Trash

    def output_of(self, job: Job) -> Path | None:
        """The artifact that a job writes: its ``--out``, which starts at the workspace."""
        if "--out" not in job.argv[:-1]:
            return None
        return self.workspace.root / job.argv[job.argv.index("--out") + 1]

    def run_names(self, runs: Mapping[str, Run]) -> dict[str, str]:
        """What a field offers to choose a run by: its title, or its folder's name; its network."""
        return {
            ref: f"{self.labels.title(ref, run.path.name)} ({run.recipe.network})"
            for ref, run in runs.items()
        }

    def dataset_names(self, datasets: Mapping[str, Dataset]) -> dict[str, str]:
        """What a field offers to choose a dataset by: its title or name, and where it lies if
        another has the same."""
        names = {ref: self.labels.title(ref, d.info.name) for ref, d in datasets.items()}
        often = Counter(names.values())
        return {r: f"{name} ({r})" if often[name] > 1 else name for r, name in names.items()}

    def follow(
        self,
        job: Job,
        refresh: Callable[[Job], Awaitable[None] | None],
        *,
        interval_s: float = 0.7,
    ) -> None:
        """Call ``refresh`` with the job's present state at intervals, the last time when it ended.

        The calls also end with the element around this one.
        """

        def poll() -> Awaitable[None] | None:
            now = self.store.job(job.id)
            if now.ended:
                timer.cancel()
            return refresh(now)

        timer = ui.timer(interval_s, poll)

    def job_for(self, path: Path) -> Job | None:
        """The newest job that writes (or wrote) the artifact at ``path``."""
        return next((j for j in self.store.jobs() if self.output_of(j) == path), None)
