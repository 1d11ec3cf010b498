"""Who runs when, on which GPU, and what comes of it. Commands are ``fake.py``'s verbs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tessella.core.errors import JobError
from tessella.jobs import outcome, processes
from tessella.jobs import scheduler as scheduler_module
from tessella.jobs.processes import executors_in
from tessella.jobs.store import Store
from tests.support.jobs.steps import PROGRAM, drive, finish, spec, wait_for


def statuses(store: Store) -> dict[str, str]:
    return {job.name: job.status for job in store.jobs()}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_job_runs_in_its_own_process_and_is_done(store, make):
    job = finish(make(), store.submit(spec("ok")))
    assert (job.status, job.exit_code, job.error, job.attempts) == ("done", 0, None, 1)
    assert [h.status for h in job.history] == ["waiting", "running", "done"]
    assert job.created <= job.started <= job.finished
    assert job.log_path.read_text() == "fine\n"
    assert job.pid is None


def test_a_failed_job_tells_its_last_error_event(store, make):
    job = finish(make(), store.submit(spec("fail")))
    assert (job.status, job.exit_code) == ("failed", 3)
    assert job.error == "no classes. To do: add a folder."


def test_without_an_error_event_the_end_of_the_output_has_to_do(store, make):
    job = finish(make(), store.submit(spec("crash")))
    assert (job.status, job.exit_code) == ("failed", 1)
    assert job.error.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("line", [b"\xff\xfe", b"5", b"{}", b"not json"])
def test_an_event_file_that_is_none_does_not_stop_the_queue(store, make, line):
    scheduler = make()
    job = store.submit(spec("crash", files={"events.jsonl": ""}))
    job.events_path.write_bytes(line + b"\n")
    assert finish(scheduler, job).error.endswith("division by zero")


def test_a_command_killed_by_the_system_says_so(store, make):
    job = finish(make(), store.submit(spec("die", resumable=True)))
    assert (job.status, job.exit_code, job.attempts) == ("failed", -9, 1)
    assert "SIGKILL" in job.error
    assert "memory" in job.error


def test_a_program_that_is_not_there(store, make):
    scheduler = make()
    scheduler.program = ("/no/such/program",)
    job = finish(scheduler, store.submit(spec("ok")))
    assert (job.status, job.exit_code) == ("failed", 127)
    assert "/no/such/program cannot be started: No such file" in job.error


def test_a_job_whose_folder_is_gone_fails_and_the_next_one_runs(store, make):
    scheduler = make()
    lost, kept = store.submit(spec("ok", name="lost")), store.submit(spec("ok", name="kept"))
    shutil.rmtree(lost.folder)
    assert finish(scheduler, kept).status == "done"
    assert store.job(lost.id).status == "failed"
    assert "could not be started" in store.job(lost.id).error


def test_cpu_slots(store, make):
    scheduler = make(cpu_slots=2)
    for i in range(3):
        store.submit(spec("sleep", "60", name=str(i)))
    serving = store.submit(spec("sleep", "60", name="server", kind="serve"))
    scheduler.step()
    assert statuses(store) == {
        "0": "running", "1": "running", "2": "waiting", "server": "running",
    }  # fmt: skip
    store.abort(serving.id)
    store.abort(store.jobs()[-1].id)
    drive(scheduler, until=lambda: statuses(store)["2"] == "running")


def test_priority_goes_first_and_equals_go_as_they_came(store, make):
    scheduler = make(cpu_slots=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 0)):
        job = store.submit(spec("ok", name=name, priority=priority))
    store.edit(job.id, priority=3)  # as the studio's form does while it waits
    drive(scheduler, until=lambda: all(j.ended for j in store.jobs()))
    assert [j.name for j in sorted(store.jobs(), key=lambda j: j.started)] == ["c", "d", "a", "b"]


def test_a_job_of_higher_priority_overtakes_an_older_one_that_waits(store, make):
    """Behind one that runs, which it does not end."""
    scheduler = make(cpu_slots=1)
    first = store.submit(spec("sleep", "60", name="runs"))
    scheduler.step()
    for name, priority in (("older", 0), ("urgent", 9)):
        store.submit(spec("ok", name=name, priority=priority))
    scheduler.step()
    assert statuses(store) == {"runs": "running", "older": "waiting", "urgent": "waiting"}
    store.abort(first.id)
    drive(scheduler, until=lambda: all(j.ended for j in store.jobs()))
    older, urgent = (next(j for j in store.jobs() if j.name == n) for n in ("older", "urgent"))
    assert urgent.started < older.started


def test_each_gpu_job_sees_its_own_gpus_only(store, make, tmp_path):
    scheduler = make(gpus=(2, 3, 5))
    two = store.submit(spec("environment", str(tmp_path / "two"), gpus=2))
    one = store.submit(spec("environment", str(tmp_path / "one"), gpus=1))
    none = store.submit(spec("environment", str(tmp_path / "none")))
    scheduler.step()
    assert store.leases() == {2: two.id, 3: two.id, 5: one.id}
    assert store.job(two.id).leased == (2, 3)
    drive(scheduler, until=lambda: all(j.ended for j in store.jobs()))
    assert store.leases() == {}
    for job, name, seen in ((two, "two", "2,3"), (one, "one", "5"), (none, "none", "")):
        assert store.job(job.id).status == "done"
        found = json.loads((tmp_path / name).read_text())
        assert found == {"CUDA_VISIBLE_DEVICES": seen, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_gpu_jobs_run_on_cpu_slots_where_there_is_no_gpu(store, make, tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    job = store.submit(spec("environment", str(tmp_path / "seen"), gpus=4))
    assert finish(make(gpus=()), job).status == "done"
    assert json.loads((tmp_path / "seen").read_text())["CUDA_VISIBLE_DEVICES"] is None


def test_more_gpus_than_there_are_is_refused(store, make):
    job = finish(make(gpus=(0, 1)), store.submit(spec("ok", gpus=3)))
    assert job.status == "failed"
    assert job.error == "it asks for 3 GPUs and this machine has 2: ask for fewer"


def test_a_large_job_does_not_starve_behind_small_ones(store, make):
    """Two GPUs; small jobs keep coming. The job for both gets them as soon as both fall free."""
    scheduler = make(gpus=(0, 1))
    small = [store.submit(spec("sleep", "60", name=f"small{i}", gpus=1)) for i in range(2)]
    scheduler.step()
    large = store.submit(spec("sleep", "60", name="large", gpus=2))
    late = [store.submit(spec("sleep", "60", name=f"late{i}", gpus=1)) for i in range(3)]
    on_cpu = store.submit(spec("ok", name="no gpu"))

    store.abort(small[0].id)
    drive(scheduler, until=lambda: store.job(small[0].id).ended)
    scheduler.step()
    assert store.leases() == {1: small[1].id}  # a GPU is free, and kept for the large job
    assert {store.job(j.id).status for j in (large, *late)} == {"waiting"}
    assert finish(scheduler, on_cpu).status == "done"  # who needs no GPU is not held up

    store.abort(small[1].id)
    drive(scheduler, until=lambda: store.job(large.id).status == "running")
    assert store.leases() == {0: large.id, 1: large.id}
    store.abort(large.id)
    drive(
        scheduler,
        until=lambda: len(store.leases()) == 2 and large.id not in store.leases().values(),
    )
    assert [store.job(j.id).status for j in late] == ["running", "running", "waiting"]


def test_dependencies_run_first(store, make, tmp_path):
    scheduler = make(cpu_slots=4)
    first = store.submit(spec("until", str(tmp_path / "enough"), name="first"))
    second = store.submit(spec("ok", name="second", depends_on=(first.id,)))
    scheduler.step()
    assert statuses(store) == {"first": "running", "second": "waiting"}
    (tmp_path / "enough").touch()
    assert finish(scheduler, second).status == "done"
    assert store.job(second.id).started >= store.job(first.id).finished


def test_failure_and_abort_go_down_the_chain(store, make):
    scheduler = make()
    root = store.submit(spec("fail", name="root"))
    middle = store.submit(spec("ok", name="middle", depends_on=(root.id,)))
    leaf = store.submit(spec("ok", name="leaf", depends_on=(middle.id,)))
    other = store.submit(spec("ok", name="other"))
    assert finish(scheduler, leaf).status == "failed"
    assert store.job(middle.id).error == f"it needs job {root.id} (root), which failed"
    assert store.job(leaf.id).error == f"it needs job {middle.id} (middle), which failed"
    assert store.job(leaf.id).started is None
    assert finish(scheduler, other).status == "done"

    root = store.submit(spec("sleep", "60"))
    leaf = store.submit(spec("ok", depends_on=(root.id,)))
    scheduler.step()
    store.abort(root.id)
    assert finish(scheduler, leaf).status == "aborted"


def test_abort_ends_the_whole_tree(store, make, tmp_path):
    """A grandchild that ignores SIGTERM in a session of its own is found and killed too."""
    scheduler = make()
    job = store.submit(spec("tree", str(tmp_path / "pid"), resumable=True))
    drive(scheduler, until=lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    grandchild = int((tmp_path / "pid").read_text())
    assert alive(grandchild)
    assert store.abort(job.id).aborting
    job = finish(scheduler, job)
    assert (job.status, job.exit_code, job.aborting) == ("aborted", -15, False)
    assert not alive(grandchild)


def test_a_command_that_ignores_the_abort_is_killed_after_the_grace(store, make, tmp_path):
    scheduler = make(grace_s=0.3)
    job = store.submit(spec("stubborn", str(tmp_path / "ready"), gpus=0))
    drive(scheduler, until=(tmp_path / "ready").exists)
    store.abort(job.id)
    begin = time.monotonic()
    job = finish(scheduler, job)
    assert (job.status, job.exit_code) == ("aborted", -9)
    assert time.monotonic() - begin >= 0.3


def test_even_a_stopped_executor_can_be_aborted(store, make, monkeypatch):
    monkeypatch.setattr("tessella.jobs.scheduler.RECORD_S", 0.2)
    scheduler = make(grace_s=0.2)
    job = store.submit(spec("sleep", "600"))
    drive(scheduler, until=lambda: store.job(job.id).pid is not None)
    os.kill(store.job(job.id).pid, signal.SIGSTOP)
    store.abort(job.id)
    assert finish(scheduler, job).status == "aborted"


def test_one_scheduler_a_store(store, make, tmp_path):
    first, second = make(), make()
    first.start()
    with pytest.raises(JobError, match=f"another scheduler.*process {os.getpid()}"):
        second.start()
    job = store.submit(spec("ok"))
    wait_for(lambda: store.job(job.id).ended)
    first.stop()
    second.start()
    again = store.submit(spec("ok"))
    wait_for(lambda: store.job(again.id).ended)
    second.stop()


def test_the_queue_waits_for_a_database_that_is_away(store, make, monkeypatch, caplog):
    scheduler = make(interval_s=0.02)
    broken = iter([True, True])

    def sometimes(*args, real=Store.ready, **kwargs):
        if next(broken, False):
            raise JobError("the job store cannot be read or written", seen="disk I/O error")
        return real(store)

    monkeypatch.setattr(store, "ready", sometimes)
    job = store.submit(spec("ok"))
    scheduler.start()
    wait_for(lambda: store.job(job.id).ended)
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR"]
    assert "disk I/O error" in caplog.text


# Survival: the scheduler is a process of its own here, and dies by kill -9.

SCHEDULER = """
import sys
from tessella.jobs.scheduler import Scheduler
from tessella.jobs.store import Store
Scheduler(Store(sys.argv[1]), sys.argv[2], (0, 1), program=sys.argv[3:]).run_forever()
"""


@pytest.fixture
def killed(store, tmp_path):
    """``killed(job)``: a scheduler process started it and was killed by SIGKILL."""
    command = [sys.executable, "-c", SCHEDULER, str(tmp_path / "queue.db"), str(tmp_path), *PROGRAM]

    def killed(*jobs):
        with subprocess.Popen(command) as process:
            try:
                wait_for(lambda: all(store.job(j.id).pid is not None for j in jobs))
            finally:
                process.kill()
        return [store.job(j.id) for j in jobs]

    return killed


def test_a_job_that_outlives_the_scheduler_is_adopted(store, make, killed, tmp_path):
    job = store.submit(spec("until", str(tmp_path / "enough"), gpus=1))
    (running,) = killed(job)
    scheduler = make(gpus=(0, 1))
    other = store.submit(spec("ok", gpus=2))
    scheduler.step()
    assert store.job(job.id) == running  # the same process, the same lease
    assert store.leases() == {0: job.id}
    assert store.job(other.id).status == "waiting"
    (tmp_path / "enough").touch()
    job = finish(scheduler, job)
    assert (job.status, job.exit_code, job.attempts) == ("done", 0, 1)
    assert finish(scheduler, other).status == "done"


def test_an_adopted_job_can_be_aborted(store, make, killed, tmp_path):
    (job,) = killed(store.submit(spec("tree", str(tmp_path / "pid"))))
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    store.abort(job.id)
    assert finish(make(), job).status == "aborted"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_jobs_that_ended_meanwhile_are_settled_by_their_exit_code(store, make, killed, tmp_path):
    (done,) = killed(store.submit(spec("until", str(tmp_path / "enough"))))
    (tmp_path / "enough").touch()
    failed = store.submit(spec("fail"))  # before, the kill could have met its start
    wait_for(lambda: not alive(done.pid))
    assert store.job(done.id).status == "running"  # nobody was there to see it
    scheduler = make()
    scheduler.step()
    assert store.job(done.id).status == "done"
    assert finish(scheduler, failed).error == "no classes. To do: add a folder."


def kill_job(job) -> None:
    """As a power cut does: executor and command at once."""
    os.killpg(job.pid, signal.SIGKILL)
    for process in psutil.process_iter():
        try:
            if process.environ().get("TESSELLA_JOB") == job.folder:
                process.kill()
        except psutil.Error:
            continue
    wait_for(lambda: not alive(job.pid))


def test_a_job_killed_with_the_scheduler_goes_on_where_it_was(store, make, killed, tmp_path):
    job = store.submit(
        spec("stick", str(tmp_path / "lines"), resumable=True, resume_argv=("--resume",), gpus=1)
    )
    (running,) = killed(job)
    wait_for(lambda: (tmp_path / "lines").exists() and (tmp_path / "lines").stat().st_size > 4)
    kill_job(running)
    counted = len((tmp_path / "lines").read_text().splitlines())
    assert counted < 10
    job = finish(make(gpus=(0, 1)), job)
    assert (job.status, job.attempts) == ("done", 2)
    assert job.log_path.read_text() == f"fresh at 0\nresumed at {counted}\n"
    assert (tmp_path / "lines").read_text().split() == [str(i) for i in range(10)]
    assert [h.status for h in job.history] == ["waiting", "running", "waiting", "running", "done"]
    assert "killed" in job.history[2].text


def test_a_job_that_cannot_resume_fails_with_a_clear_text(store, make, killed):
    (job,) = killed(store.submit(spec("sleep", "600", gpus=1)))
    kill_job(job)
    scheduler = make(gpus=(0, 1))
    scheduler.step()
    job = store.job(job.id)
    assert job.status == "failed"
    assert job.error.startswith("the machine or the process was killed")
    assert store.leases() == {}


def test_after_three_kills_a_job_is_not_started_again(store, make):
    scheduler = make()
    job = store.submit(spec("sleep", "600", resumable=True))
    for attempt in range(1, scheduler_module.MAX_ATTEMPTS + 1):
        drive(scheduler, until=lambda n=attempt: store.job(job.id).attempts == n)
        kill_job(store.job(job.id))
        scheduler.step()
    assert (store.job(job.id).status, store.job(job.id).attempts) == ("failed", 3)


def test_what_a_killed_executor_leaves_is_killed_before_a_restart(store, make, tmp_path):
    """Two trainings must never write one run: the first command is gone when the second starts."""
    scheduler = make()
    job = store.submit(spec("tree", str(tmp_path / "pid"), resumable=True))
    drive(scheduler, until=lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    first = int((tmp_path / "pid").read_text())
    os.kill(store.job(job.id).pid, signal.SIGKILL)  # only the executor
    drive(scheduler, until=lambda: store.job(job.id).attempts == 2)
    assert not alive(first)


def test_an_abort_asked_for_while_nobody_scheduled(store, make, killed):
    (job,) = killed(store.submit(spec("sleep", "600", resumable=True)))
    store.abort(job.id)
    kill_job(job)
    assert finish(make(), job).status == "aborted"


def test_a_crash_between_the_claim_and_the_start(store, make):
    """The row says running and nothing ever ran: the same as a kill."""
    again, never = store.submit(spec("ok", resumable=True)), store.submit(spec("ok"))
    assert store.claim(again.id)
    assert store.claim(never.id)
    scheduler = make()
    assert finish(scheduler, again).status == "done"
    assert store.job(never.id).status == "failed"


def test_an_executor_is_found_without_its_number(store, make, killed):
    """The scheduler was killed after the start and before it noted the process."""
    (job,) = killed(store.submit(spec("sleep", "600")))
    store.attach(job.id, None)
    scheduler = make()
    scheduler.step()
    assert store.job(job.id).pid == job.pid


def test_a_stopped_scheduler_leaves_its_jobs_running(store, make, tmp_path):
    scheduler = make()
    job = store.submit(spec("until", str(tmp_path / "enough")))
    scheduler.start()
    wait_for(lambda: store.job(job.id).pid is not None)
    scheduler.stop()
    assert alive(store.job(job.id).pid)
    (tmp_path / "enough").touch()
    assert finish(make(), job).status == "done"


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
def test_a_store_restored_from_an_older_copy_starts_no_job_again(
    store, make, tmp_path, caplog, ended
):
    """In the copy the job still waits, and a later one is not there at all."""
    job = store.submit(spec("count", str(tmp_path / "ticks")))
    store.close()  # so that all of it lies in the file
    shutil.copy(tmp_path / "queue.db", tmp_path / "older.db")
    first = make()
    first.step()
    later = store.submit(spec("sleep", "600"))
    if ended:
        finish(first, job)
    first.step()
    first.stop()
    store.close()
    for end in ("", "-wal", "-shm"):
        (tmp_path / f"queue.db{end}").unlink(missing_ok=True)
    shutil.copy(tmp_path / "older.db", tmp_path / "queue.db")
    assert statuses(store) == {"count": "waiting"}
    second = make()
    try:
        assert finish(second, job).status == "done"
        assert job.log_path.read_text() == "fresh at 0\n"  # once
        assert "was started before" in caplog.text
        (stranger,) = executors_in(store.folder)
        assert stranger.folder == Path(later.folder)
        assert (
            f"a job runs that this queue does not know, and may hold GPUs: process {stranger.pid}"
            in caplog.text
        )
    finally:
        processes.kill_marked(Path(later.folder))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"exit_code": "x"}', b"\xff"])
def test_an_exit_code_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "exit.json").write_bytes(content)
    assert outcome.exit_code(tmp_path) is None
