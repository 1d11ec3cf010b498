"""The queue as data: what can be asked of it, and what a database does to it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateTable

from tessella.core.errors import JobError, UsageError
from tessella.core.record import to_plain
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tessella.jobs.tables import Table
from tests.support.jobs.steps import spec


def test_a_submitted_job_comes_back_as_it_was(store, tmp_path):
    first = store.submit(spec("ok"))
    job = store.submit(
        spec(
            "train", "lenet", "ünï cöde", "--recipe", "{job}/recipe.json",
            name="flowers", files={"recipe.json": '{"é": 1}'}, gpus=2, depends_on=(first.id,),
            resumable=True, resume_argv=("--resume",), priority=3, group="g", notes="n",
        )
    )  # fmt: skip
    assert job == store.job(job.id) == Store(tmp_path / "queue.db").job(job.id)
    folder = tmp_path / "jobs" / job.id
    assert Path(job.folder) == folder
    assert job.argv == ("train", "lenet", "ünï cöde", "--recipe", f"{folder}/recipe.json")
    assert (folder / "recipe.json").read_text(encoding="utf-8") == '{"é": 1}'
    assert (job.status, job.depends_on, job.gpus, job.priority) == ("waiting", (first.id,), 2, 3)
    assert [h.status for h in job.history] == ["waiting"]
    assert job.command.startswith("tessella train lenet 'ünï cöde' --recipe /")
    assert to_plain(job)["name"] == "flowers"  # plain enough for JSON


def test_lists_are_newest_first_and_filtered(store):
    ids = [store.submit(spec("ok", group="ab"[i % 2])).id for i in range(4)]
    other = store.submit(spec("ok", kind="import")).id
    assert [j.id for j in store.jobs()] == [other, *reversed(ids)]
    assert [j.id for j in store.jobs(group="b")] == [ids[3], ids[1]]
    assert [j.id for j in store.jobs(kind="import")] == [other]
    assert [j.id for j in store.jobs(limit=2)] == [other, ids[3]]
    store.claim(ids[0])
    assert [j.id for j in store.jobs(status="running")] == [ids[0]]
    assert len(store.jobs(status=("running", "waiting"))) == 5


def test_a_deleted_job_lies_in_the_trash(store):
    job = store.submit(spec("ok"))
    with pytest.raises(JobError, match="abort it first"):
        store.delete(job.id)
    store.abort(job.id)
    assert store.delete(job.id).trashed is not None
    assert store.jobs() == []
    assert [j.id for j in store.jobs(trashed=True)] == [job.id]
    assert Path(job.folder).is_dir()
    store.restore(job.id)
    assert [j.id for j in store.jobs()] == [job.id]


def test_a_waiting_job_is_aborted_at_once_and_an_ended_one_not_again(store):
    job = store.submit(spec("ok"))
    assert store.abort(job.id).status == "aborted"
    with pytest.raises(JobError, match="already ended"):
        store.abort(job.id)
    assert store.claim(job.id) is None


def test_edit(store):
    job = store.submit(spec("ok"))
    edited = store.edit(job.id, name="<b>new</b>", notes="see 3", priority=-1)
    assert (edited.name, edited.notes, edited.priority) == ("<b>new</b>", "see 3", -1)
    with pytest.raises(JobError, match="1 to 200"):
        store.edit(job.id, name=" ")


def test_a_clone_has_its_own_copy_of_the_input_files(store):
    job = store.submit(spec("train", "--recipe", "{job}/r.json", files={"r.json": "{}"}))
    clone = store.clone(job.id, name="again")
    assert clone.argv == ("train", "--recipe", f"{clone.folder}/r.json")
    assert clone.folder != job.folder
    assert (Path(clone.folder) / "r.json").read_text() == "{}"
    assert clone.name == "again"


def test_only_an_ended_resumable_job_goes_on_by_hand(store):
    job = store.submit(spec("ok", resumable=True))
    with pytest.raises(JobError, match="cannot go on"):
        store.resume(job.id)
    store.claim(job.id)
    store.settle(job.id, "failed", exit_code=1, error="it broke")
    again = store.resume(job.id)
    assert (again.status, again.continues, again.error, again.finished) == (
        "waiting", True, None, None,
    )  # fmt: skip
    plain = store.submit(spec("ok"))
    store.abort(plain.id)
    with pytest.raises(JobError, match="not resumable"):
        store.resume(plain.id)


def test_unknown_ids_and_dependencies(store):
    for ask in (store.job, store.abort, store.clone, store.delete, store.restore, store.resume):
        with pytest.raises(JobError, match="no such job"):
            ask("20260101-000000-aaaaaa")
    with pytest.raises(JobError, match="no such job"):
        store.submit(spec("ok", depends_on=("../../etc",)))
    assert store.jobs() == []
    assert [p for p in store.folder.iterdir() if p.is_dir()] == []  # nothing left behind


@pytest.mark.parametrize(
    "fields",
    [
        {"name": " "},
        {"name": "x" * 201},
        {"argv": ()},
        {"argv": ("--help",)},
        {"argv": ("train", "a\0b")},
        {"gpus": -1},
        {"files": {"../x": ""}},
        {"files": {"..": ""}},
    ],
)
def test_specs_that_cannot_work(fields):
    with pytest.raises(UsageError):
        JobSpec(**{"name": "n", "kind": "train", "argv": ("train",), **fields})


def test_a_gpu_is_leased_to_one_job_whoever_asks(store, tmp_path):
    """Threads with stores of their own want the same GPUs; each GPU is granted exactly once."""
    jobs = [store.submit(spec("ok")) for _ in range(24)]
    granted: list[tuple[str, int]] = []
    start = threading.Barrier(4, timeout=60)

    def ask(part: int) -> None:
        own = Store(tmp_path / "queue.db")
        start.wait()
        for turn, job in enumerate(jobs[part::4]):
            if own.claim(job.id, [turn, turn + 6]) is not None:
                granted.append((job.id, turn))
        own.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))  # the list raises what a thread raised
    assert sorted(turn for _, turn in granted) == [0, 1, 2, 3, 4, 5]
    assert store.leases() == {g: j for j, turn in granted for g in (turn, turn + 6)}
    refused = [j for j in store.jobs() if j.status == "waiting"]
    assert len(refused) == 18
    assert all(j.attempts == 0 and j.leased == () for j in refused)


CLAIM = """
import sys
from tessella.jobs.store import Store
store = Store(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for job in store.ready():
    if store.claim(job.id, [int(job.name)]) is not None:
        print(job.id, flush=True)
"""


def test_two_processes_never_claim_the_same_job_or_gpu(store, tmp_path):
    for i in range(40):  # two jobs for each of 20 GPUs
        store.submit(spec("ok", name=str(i // 2)))
    command = [sys.executable, "-c", CLAIM, str(tmp_path / "queue.db")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    claimers = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for claimer in claimers:
        assert claimer.stdout.readline() == "ready\n"
    for claimer in claimers:
        claimer.stdin.write("go\n")
        claimer.stdin.flush()
    claimed = [claimer.communicate(timeout=90)[0].split() for claimer in claimers]
    assert len(claimed[0]) + len(claimed[1]) == 20
    assert not set(claimed[0]) & set(claimed[1])
    assert sorted(store.leases()) == list(range(20))


def test_the_migrations_make_exactly_the_tables_of_the_models(store):
    found = inspect(store.database._engine)
    names = set(Table.metadata.tables)
    assert set(found.get_table_names()) == names | {"alembic_version"}
    for name, table in Table.metadata.tables.items():
        made = {c["name"]: (str(c["type"]), c["nullable"]) for c in found.get_columns(name)}
        declared = {
            c.name: (c.type.compile(store.database._engine.dialect), c.nullable)
            for c in table.columns
        }
        assert made == declared, name
        assert {i["name"] for i in found.get_indexes(name)} == {i.name for i in table.indexes}
        assert len(found.get_foreign_keys(name)) == len(table.foreign_keys)


def test_down_and_up_again(store):
    store.submit(spec("ok"))
    store.database.migrate("base")
    assert inspect(store.database._engine).get_table_names() == ["alembic_version"]
    store.database.migrate("head")
    assert store.jobs() == []
    assert store.submit(spec("ok")).status == "waiting"


def test_sqlite_is_set_up_for_several_processes(store):
    with store.database.read() as session:
        assert session.scalar(text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(text("PRAGMA foreign_keys")) == 1
        assert session.scalar(text("PRAGMA busy_timeout")) == 10_000


def test_a_reader_is_not_held_up_by_a_writer(store, tmp_path):
    store.submit(spec("ok"))
    other = sqlite3.connect(tmp_path / "queue.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert len(store.jobs()) == 1  # would wait ten seconds and fail
    other.close()


@pytest.mark.parametrize("at", [0, 100, 8192])
def test_a_damaged_file_is_told(tmp_path, at):
    path = tmp_path / "queue.db"
    store = Store(path)
    for _ in range(20):
        store.submit(spec("ok"))
    store.close()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 4096)
    with pytest.raises(JobError, match=r"damaged.*move the file away"):
        Store(path)


def test_a_store_from_a_newer_version_is_left_alone(tmp_path):
    store = Store(tmp_path / "queue.db")
    with store.database.write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    store.close()
    before = (tmp_path / "queue.db").read_bytes()
    with pytest.raises(JobError, match="schema that this Tessella does not know"):
        Store(tmp_path / "queue.db")
    assert (tmp_path / "queue.db").read_bytes() == before


def test_addresses_that_cannot_be_used(tmp_path):
    with pytest.raises(JobError, match="needs a folder"):
        Store("postgresql+psycopg://localhost/queue")
    with pytest.raises(JobError, match="address cannot be used"):
        Store("nosuchdatabase://localhost/queue", folder=tmp_path)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(JobError, match="cannot be read or written"):
        Store(tmp_path / "folder.db")


def test_a_url_works_as_a_path_does(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/100%25.db", folder=tmp_path / "there")
    job = store.submit(spec("ok"))
    assert Path(job.folder).parent == tmp_path / "there"
    store.close()


def test_the_tables_can_be_made_in_postgresql():
    made = [
        str(CreateTable(table).compile(dialect=postgresql.dialect()))
        for table in Table.metadata.sorted_tables
    ]
    assert "DOUBLE PRECISION" in made[0]
    assert "JSON" in made[0]
