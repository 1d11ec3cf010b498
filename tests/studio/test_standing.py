"""What the pages say of a job in each phase of its life, from the queue and from its events."""

import pytest

from tessella.core.events import EventLog, metric, phase, progress
from tessella.jobs.job import JobSpec
from tessella.jobs.store import Store
from tessella.studio.feed import Feed
from tessella.studio.standing import log_line, standing, training_line


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "jobs.db")
    yield store
    store.close()


def spec(name, **more):
    return JobSpec(name=name, kind="train", argv=("train",), resumable=True, **more)


def test_a_training_from_the_queue_to_its_first_step(store, tmp_path):
    first = store.submit(spec("first"))
    job = store.submit(spec("mine"))
    feed = Feed(tmp_path / "events.jsonl")
    assert standing(store, job, feed) == "Waiting for its turn: 1 job before it."
    assert "not started" in log_line(job)
    store.claim(first.id)
    assert standing(store, job, feed) == "Next in the queue: 1 job at work."
    store.settle(first.id, "done")
    assert standing(store, job, feed) == "Next in the queue: it starts in a moment."

    job = store.claim(job.id)
    assert standing(store, job, feed).startswith("Starting: the command loads its libraries · 0 s")
    assert training_line(store, job, feed, job.status).startswith("Loading the data")
    assert log_line(job) == "Nothing is printed yet."
    log = EventLog(feed.path)
    log(phase("train", "lenet, 40 steps"))
    feed.read()
    assert training_line(store, job, feed, job.status).startswith(
        "lenet, 40 steps · the first step is on its way"
    )
    log(metric(0, 0.1, loss=1.0, lr=0.1))
    log(progress("train", 1, 40))
    feed.read()
    assert training_line(store, job, feed, job.status).startswith("lenet, 40 steps · 1 of 40")
    log.close()

    store.settle(job.id, "failed")
    store.resume(job.id)
    job = store.claim(job.id)
    line = training_line(store, job, feed, job.status)
    assert line.startswith("Starting again from its last checkpoint")


def test_a_job_says_whom_it_waits_for_and_a_terminals_run_is_no_job(store, tmp_path):
    feed = Feed(tmp_path / "events.jsonl")
    needed = store.submit(spec("the data"))
    job = store.submit(spec("mine", depends_on=(needed.id,)))
    assert standing(store, job, feed) == "Waiting for the data."
    assert "its log is in its terminal" in log_line(None)
    aborted = store.abort(needed.id)
    assert standing(store, aborted, feed) == "aborted"
    assert log_line(aborted) == "It printed nothing."


def test_what_has_ended_says_how_long_it_took_and_a_server_since_when_it_serves(store, tmp_path):
    feed = Feed(tmp_path / "events.jsonl")
    job = store.claim(store.submit(JobSpec(name="s", kind="serve", argv=("serve",))).id)
    log = EventLog(feed.path)
    log(phase("serving", "http://127.0.0.1:8000"))
    feed.read()
    assert standing(store, job, feed) == "http://127.0.0.1:8000 · for 0 s"
    store.abort(job.id)
    store.settle(job.id, "aborted")
    assert standing(store, store.job(job.id), feed) == "http://127.0.0.1:8000 · stopped after 0 s"
    trained = store.claim(store.submit(spec("mine")).id)
    store.settle(trained.id, "aborted")
    line = training_line(store, store.job(trained.id), feed, "aborted")
    assert line.endswith("aborted after 0 s")
    log.close()
