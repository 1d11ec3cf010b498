import math

import pytest

from tessella.core.events import Event, EventLog, metric, phase, progress, warning
from tessella.studio.feed import Feed, tail, thin


@pytest.fixture
def log(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    yield log
    log.close()


def test_each_look_brings_only_what_is_new(tmp_path, log):
    assert not Feed(tmp_path / "nothing.jsonl").read().anything
    feed = Feed(tmp_path / "events.jsonl")
    for step in range(5):
        log(metric(step, step / 10, loss=1.0 - step / 10))
    assert feed.read().points == {"loss": [(s / 10, 1.0 - s / 10) for s in range(5)]}
    log(metric(5, 0.5, loss=0.5, lr=0.1))
    news = feed.read()
    assert news.points == {"loss": [(0.5, 0.5)], "lr": [(0.5, 0.1)]}
    assert len(feed.points["loss"]) == 6
    assert not feed.read().anything


def test_the_way_of_the_steps_stays_while_stages_change(tmp_path, log):
    feed = Feed(tmp_path / "events.jsonl")
    log(phase("train", "training"))
    log(progress("train", 3, 9))
    log(phase("way", "steps: torch.compile (1 ms a step)"))
    feed.read()
    assert (feed.phase, feed.done, feed.total) == ("training", 3, 9)
    log(phase("race", "the ways of a step are tried"))
    feed.read()
    assert (feed.phase, feed.way) == (
        "the ways of a step are tried",
        "steps: torch.compile (1 ms a step)",
    )


def test_a_line_that_is_being_written_waits(tmp_path):
    path = tmp_path / "events.jsonl"
    whole = metric(0, 0.0, loss=1.0).to_json() + "\n"
    path.write_text(whole + whole[:20])
    feed = Feed(path)
    assert len(feed.read().points["loss"]) == 1
    path.write_text(whole + whole)
    assert len(feed.read().points["loss"]) == 1


def test_a_resumed_run_forgets_the_steps_after_its_checkpoint(tmp_path, log):
    feed = Feed(tmp_path / "events.jsonl")
    for step in range(10):
        log(metric(step, step / 10, loss=float(step)))
    feed.read()
    log(Event(kind="phase", name="resume", step=4))
    log(metric(5, 0.5, loss=50.0))
    assert feed.read().restarted
    assert [v for _, v in feed.points["loss"]] == [0, 1, 2, 3, 4, 50]


def test_progress_becomes_a_remaining_time(tmp_path, log):
    feed = Feed(tmp_path / "events.jsonl")
    log(phase("train", "training"))
    for done in range(1, 6):
        log(
            Event(
                kind="progress",
                name="train",
                values={"done": done, "total": 25},
                time=100 + 2 * done,
            )
        )
    feed.read()
    assert feed.phase == "training"
    assert feed.fraction == 0.2
    assert feed.remaining_s == 40.0
    log(warning("a class has one image"))
    log(progress("train", 25, 25))
    feed.read()
    assert feed.remaining_s is None
    assert list(feed.warnings) == ["a class has one image"]


def test_a_training_that_validates_and_saves_still_says_how_far_it_is(tmp_path, log):
    feed = Feed(tmp_path / "events.jsonl")
    log(phase("train", "lenet, 40 steps"))
    for step, time in ((9, 100.0), (10, 102.0)):
        log(Event(kind="progress", name="train", values={"done": step, "total": 40}, time=time))
    log(Event(kind="progress", name="validate", values={"done": 32, "total": 47}, time=103.0))
    log(phase("snapshot", "step-00000010"))
    feed.read()
    assert feed.phase == "lenet, 40 steps"
    assert (feed.done, feed.total, feed.remaining_s) == (10, 40, 60.0)
    alone = EventLog(tmp_path / "evaluation.jsonl")
    alone(progress("validate", 32, 47))
    alone.close()
    measured = Feed(tmp_path / "evaluation.jsonl")
    measured.read()
    assert (measured.done, measured.total) == (32, 47)


def test_thinning_keeps_peaks_and_order():
    points = [(float(i), math.sin(i / 500)) for i in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    few = thin(points)
    assert len(few) <= 1500
    assert (77_777.0, 9.0) in few
    assert few == sorted(few)
    assert thin(points[:10]) == points[:10]


def test_the_tail_of_a_log_is_whole_lines_without_redrawn_bars(tmp_path):
    path = tmp_path / "output.log"
    assert tail(path) == ""
    path.write_text("".join(f"line {i}\n" for i in range(5000)) + "10 %\r50 %\r100 %\nend\n")
    shown = tail(path, 1000)
    assert len(shown) <= 1000
    assert shown.startswith("line ")
    assert "100 %\nend" in shown
    assert "50 %" not in shown
