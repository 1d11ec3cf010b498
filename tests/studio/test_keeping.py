"""What people add to artifacts, and what they delete: it comes back, or frees what it says."""

import json

import pytest

from tessella.core.errors import ArtifactError, JobError, UsageError
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tessella.studio.labels import MOST_NOTES, Label, Labels
from tessella.studio.trash import Trash, size_of
from tessella.studio.workspace import Workspace
from tests.support.studio.workspaces import make_front, make_run


@pytest.fixture
def space(tmp_path):
    make_run(tmp_path / "runs" / "one", dataset="datasets/digits", epochs=1, steps=2)
    make_front(tmp_path / "plans" / "small.front", built_from="runs/one")
    return Workspace(tmp_path)


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "jobs.db")
    yield store
    store.close()


def test_labels_are_kept_bounded_and_gone_when_empty(tmp_path):
    labels = Labels(tmp_path)
    labels.put("runs/one", Label(title=" Best ", notes="<script>", tags=("a  b", "", "c", "a b")))
    again = Labels(tmp_path)  # as after a restart
    assert again.of("runs/one") == Label(title="Best", notes="<script>", tags=("a b", "c"))
    assert again.title("runs/one", "one") == "Best"
    assert again.title("runs/two", "two") == "two"
    assert again.tags() == ["a b", "c"]
    for label in (
        Label(title="x" * 201), Label(notes="x" * (MOST_NOTES + 1)), Label(tags=("x" * 41,)),
        Label(tags=tuple(map(str, range(21)))),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="at most"):
            labels.put("runs/one", label)
    again.put("runs/one", Label())
    assert labels.of("runs/one") == Label()
    assert json.loads((tmp_path / "labels.json").read_text())["by_ref"] == {}


def test_what_is_deleted_comes_back_or_frees_what_it_said(space, store):
    trash = Trash(space, store)
    nbytes = size_of(space.root / "runs" / "one")
    content = (space.root / "runs" / "one" / "events.jsonl").read_bytes()
    run, plan = trash.delete("run", "runs/one"), trash.delete("plan", "plans/small.plan")
    assert [f.ref for f in (*space.runs(), *space.plans())] == []
    assert plan.refs == ("plans/small.plan", "plans/small.front")
    assert {d.key: d.nbytes for d in trash.content()}[run.key] == nbytes
    trash.restore(run.key)
    assert (space.root / "runs" / "one" / "events.jsonl").read_bytes() == content
    trash.restore(plan.key)
    assert (space.root / "plans" / "small.front" / "front.json").is_file()

    again = trash.delete("run", "runs/one")
    make_run(space.root / "runs" / "one", dataset="d", epochs=1, steps=2)
    with pytest.raises(UsageError, match="something else has this name"):
        trash.restore(again.key)
    assert trash.empty() == nbytes
    assert trash.content() == []
    with pytest.raises(ArtifactError, match="no deleted here"):
        trash.restore(again.key)


@pytest.mark.parametrize("ref", ["../one", "/etc", "runs/none", ".", "runs/../../x"])
def test_only_what_lies_in_the_workspace_is_deleted(space, store, ref):
    with pytest.raises(UsageError):
        Trash(space, store).delete("run", ref)
    with pytest.raises(UsageError, match="no such thing"):
        Trash(space, store).restore(f"../{ref}")


@pytest.mark.parametrize("word", ["runs/one", "./runs/one/checkpoints/step-1", "m=runs/one"])
def test_what_a_job_uses_is_not_deleted_under_it(space, store, word):
    job = store.submit(JobSpec(name="verify", kind="verify", argv=("verify", word)))
    with pytest.raises(UsageError, match="uses this run"):
        Trash(space, store).delete("run", "runs/one")
    store.abort(job.id)
    Trash(space, store).delete("run", "runs/one")


def test_a_job_in_the_trash_is_purged_with_its_folder_and_a_server_is_stopped(space, store):
    served = store.submit(JobSpec(name="s", kind="serve", argv=("serve", "m=plans/small.plan")))
    needs = store.submit(
        JobSpec(name="n", kind="train", argv=("train",), depends_on=(served.id,), notes="mine")
    )
    assert store.claim(served.id).state == "running"
    assert store.abort(served.id).state == "stopping"
    store.settle(served.id, "aborted")
    assert store.job(served.id).state == "stopped"
    assert store.abort(needs.id).state == "aborted"
    with pytest.raises(JobError, match="not in the trash"):
        store.purge(served.id)
    store.delete(served.id)
    assert [j.id for j in store.jobs()] == [needs.id]
    Trash(space, store).empty()
    assert store.jobs(trashed=True) == []
    assert not (store.folder / served.id).exists()
    assert store.job(needs.id).depends_on == ()
