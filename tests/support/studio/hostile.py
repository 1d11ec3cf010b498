"""A workspace in which every text that somebody else may have written is a script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tessella.artifacts.checkpoint import Checkpoint
from tessella.artifacts.dataset import Dataset
from tessella.core.events import Event, EventLog, phase, warning
from tessella.core.record import digest
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tessella.studio.labels import Label, Labels
from tests.support.studio import workspaces
from tests.support.studio.judgements import judgement_of, scores_of, write_judgement

MARK = "localStorage.ran"
# As HTML, as an attribute, as an address, in Vue's templates, and out of a script's strings.
SCRIPTS = (
    f"<script>{MARK}=1</script>",
    f'"><img src=x onerror="{MARK}=2">',
    f"javascript:{MARK}=3",
    f"<svg onload={MARK}=4>",
    f"{{{{constructor.constructor('{MARK}=5')()}}}}",
    f"';{MARK}=6;'",
    f"`${{{MARK}=7}}",
    f"</script><script>{MARK}=8</script>",
    f"\\u003cimg src=x onerror={MARK}=9\\u003e",
)
ALL = " ".join(SCRIPTS)
NAME = f"<img src=x onerror={MARK}=2>{{{{constructor.constructor('{MARK}=5')()}}}}"  # of a file
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{MARK}=10"><script>{MARK}=11</script></svg>'


def make_hostile_workspace(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make it, and return the addresses of its pages."""
    labels = (SCRIPTS[1], SCRIPTS[4], ALL, SCRIPTS[0] + SCRIPTS[2])
    monkeypatch.setattr(workspaces, "HOSTILE", ALL)
    monkeypatch.setattr(workspaces, "CLASSES", labels)
    data, run, plan = (f"datasets/{NAME}", f"runs/{NAME}", f"plans/{NAME}.plan")
    workspaces.make_dataset(root / data)
    workspaces.make_run(root / run, dataset=data, epochs=2, steps=5, done=False)
    (root / "plans").mkdir()
    made = workspaces.make_plan(root / plan, built_from=run)
    workspaces.make_front(root / "plans" / "small.front", built_from=run)
    (root / "plans" / f"{NAME}-damaged.plan").write_bytes(b"not a plan")
    workspaces.make_sweep(root / "sweeps" / "a", 12)
    _tell(root / run)
    checkpoint = Checkpoint(sorted((root / run / "checkpoints").iterdir())[-1].resolve())
    _reports(root, checkpoint, labels, plan, made.program.buckets[-1].batch)
    val = Dataset(root / data).val
    scores = scores_of(val.labels, len(labels), sharp=0.5, seed=0)
    judged = judgement_of(scores, val.labels, labels, split="val", paths=[ALL] * len(val))
    write_judgement(root, checkpoint, val, judged)
    own = Labels(root / ".studio")
    for ref in (data, run, plan):
        own.put(ref, Label(title=ALL[:200], notes=ALL, tags=(SCRIPTS[0], SCRIPTS[3])))
    job = _jobs(root, plan)
    drawn = root / ".studio" / "networks" / "ab"
    drawn.mkdir(parents=True)
    (drawn / "network.svg").write_text(SVG)
    return [
        "/", f"/?tag={SCRIPTS[0]}", "/data", f"/data?dataset={data}",
        f"/image?dataset={data}&split=val&index=3", f"/train?dataset={data}&run={run}",
        f"/monitor?run={run}", f"/monitor?job={job}", f"/explore?run={run}", f"/plan?plan={plan}",
        "/search?sweep=sweeps/a", "/search?like=sweeps/a", f"/search?sweep={ALL}",
        f"/evaluate?run={run}&split=val", f"/evaluate?run={run}&split={ALL}",
        "/plan?plan=plans/small.plan", f"/compare?run={run}",
        f"/diff?a={plan}&b=plans/small.plan", f"/data?dataset={NAME}", f"/monitor?job={ALL}",
        f"/plan?plan=plans/{NAME}-damaged.plan", "/trash",
    ]  # fmt: skip


def _tell(run: Path) -> None:
    """Events whose every text is a script, the names of metrics, too."""
    with (run / "events.jsonl").open("a") as file:
        for event in (
            phase("train", ALL),
            Event(kind="metric", step=11, epoch=2.1, values={f"{ALL}/loss": 1.0, "loss": 0.5}),
            warning(ALL),
        ):
            file.write(event.to_json() + "\n")


def _reports(
    root: Path, checkpoint: Checkpoint, labels: tuple[str, ...], plan: str, batch: int
) -> None:
    """An evaluation, a verification and a trace, as commands write them."""
    workspaces.write_evaluation(root, checkpoint, labels, np.ones((4, 4), int))
    flip = {"path": ALL, "truth": ALL, "checkpoint": ALL, "plan": ALL}
    report = {"plan_accuracy": 0.5, "agreement": 0.9, "samples": 8, "max_abs_diff": 0.1}
    stat = (root / plan).stat()
    key = digest([plan, stat.st_mtime_ns, stat.st_size])[:24]
    workspaces.write_report(root, "verifications", key, {**report, "flips": [flip]})
    workspaces.write_trace(root, plan, batch, [(ALL, ALL, ALL)])


def _jobs(root: Path, plan: str) -> str:
    """A failed job, one in the trash, and a waiting one; returns the failed one's id."""
    store = Store(root / "jobs.db")
    spec = JobSpec(name=ALL[:200], kind="verify", argv=("verify", plan, ALL), notes=ALL)
    failed = store.submit(spec)
    store.claim(failed.id)
    store.settle(failed.id, "failed", error=ALL)
    log = EventLog(failed.events_path)
    log(phase("verify", ALL))
    log(Event(kind="error", text=ALL))
    log.close()
    failed.log_path.write_text(ALL)
    deleted = store.submit(spec)
    store.abort(deleted.id)
    store.delete(deleted.id)
    store.submit(spec)
    store.close()
    return failed.id
