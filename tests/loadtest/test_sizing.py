"""The search for how to serve a plan: on servers that a formula makes up, once on a real one."""

from __future__ import annotations

import math
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tessella import api, loadtest
from tessella.api.sizing import Sizing
from tessella.cli.parsing import parse_counts, parse_duration
from tessella.core.errors import ServeError, TessellaError, UsageError
from tessella.core.events import Event, EventLog
from tessella.loadtest import Asked, Found, Outcome, Setting, search, servers, sizing
from tests.support.cli import in_process
from tests.support.plans.linear import linear_plan

SERVICE_S = 1e-3  # one request's mean time, if it waits for nobody


@dataclass
class Queue:
    """A queue of one server with random service times: times in it are distributed exponentially,
    with the mean of one request's over the free share. Beyond its capacity all are late, or what is
    too much is refused. Its clock stands still but for what is asked of it.
    """

    capacity: Callable[[Setting], float]
    refuses: bool = False
    max_batch: int = 8
    start_s: float = 3.0
    now_s: float = 100.0
    opened: list[Setting] = field(default_factory=list)
    is_open: bool = False

    def search(self, p99_ms: float = 20.0, seconds: float = 1e4, **tried: tuple[int, ...]) -> Found:
        tried = {"acceptors": (0, 1, 2, 4), "max_delays_us": (0, 1000, 4000)} | tried
        asked = Asked(p99_ms=p99_ms, seconds=seconds, **tried)
        return search(self.open, asked, now=lambda: self.now_s)

    @contextmanager
    def open(self, setting: Setting) -> Iterator[Queue]:
        assert not self.is_open, "one server at a time"
        self.is_open = True
        self.opened.append(setting)
        self.now_s += self.start_s
        yield self
        self.is_open = False

    def alone(self, seconds: float) -> Outcome:
        return self._outcome(1 / SERVICE_S, SERVICE_S, seconds, {})

    def offered(self, rate: float, seconds: float) -> Outcome:
        capacity = self.capacity(self.opened[-1])
        refused = max(0, math.ceil((rate - capacity) * seconds)) if self.refuses else 0
        free = 1.0 if self.refuses else 1 - rate / capacity
        mean_s = SERVICE_S / free if free > 0 else math.inf
        return self._outcome(rate - refused / seconds, mean_s, seconds, {"429": refused})

    def _outcome(self, rate: float, mean_s: float, seconds: float, failures: dict) -> Outcome:
        self.now_s += seconds
        count = max(1, round(rate * seconds))
        latencies_s = [-math.log1p(-(i + 0.5) / count) * mean_s for i in range(count)]
        return Outcome(latencies_s=latencies_s, failures=failures, late_s=[], seconds=seconds)


def highest(capacity: float, p99_ms: float) -> float:
    """The rate at which the p99 of the queue is the one that is asked for."""
    return capacity * (1 - SERVICE_S * math.log(100) / (p99_ms / 1e3))


def test_the_best_setting_and_its_highest_rate_are_found() -> None:
    def capacity(setting: Setting) -> float:
        of_acceptors = {0: 1000, 1: 900, 2: 4000, 4: 3000}[setting.acceptors]
        return of_acceptors * {0: 1.0, 1000: 1.5, 4000: 1.2}[setting.max_delay_us]

    queue = Queue(capacity=capacity)
    found = queue.search()
    assert found.best.setting == Setting(acceptors=2, max_delay_us=1000)
    limit = highest(6000, 20)
    assert limit / sizing.MARGIN <= found.best.goodput / 0.99 <= limit * 1.02
    assert found.best.meets
    assert found.notes == ()
    behind = [t for t in found.trials if t.setting.acceptors in (1, 4)]
    assert len(behind) == 4, "what is behind is asked alone, and for more than the best, once each"
    assert {s.max_delay_us for s in queue.opened if s.acceptors != 2} == {0}
    for trial in found.trials:
        assert trial.rate is None or trial.requests >= sizing.REQUESTS


def test_instances_are_tried_last_with_the_best_of_the_rest() -> None:
    def capacity(setting: Setting) -> float:
        of_delays = {0: 1.0, 1000: 1.5, 4000: 1.2}[setting.max_delay_us]
        return {0: 1000, 1: 2000}[setting.acceptors] * of_delays * {1: 1, 2: 1.6}[setting.instances]

    queue = Queue(capacity=capacity)
    best = queue.search(acceptors=(0, 1), instances=(1, 2)).best
    assert best.setting == Setting(acceptors=1, max_delay_us=1000, instances=2)
    assert best.setting.words[-2:] == ("--instances", "2")
    assert queue.opened[-1] == best.setting
    assert [s.instances for s in queue.opened[:-1]] == [1] * (len(queue.opened) - 1)


def test_longer_delays_are_left_after_one_that_gains_nothing() -> None:
    queue = Queue(capacity=lambda setting: 1000)
    assert queue.search().best.setting == Setting(acceptors=0, max_delay_us=0)
    assert max(s.max_delay_us for s in queue.opened) == 1000


def test_no_delay_is_tried_where_requests_are_never_joined() -> None:
    queue = Queue(capacity=lambda setting: 1000, max_batch=1)
    (note,) = queue.search().notes
    assert "one sample" in note
    assert {s.max_delay_us for s in queue.opened} == {0}


def test_what_is_refused_counts_as_late() -> None:
    """Of such a server every answer is in time: only what it refuses bounds the rate."""
    best = Queue(capacity=lambda setting: 700, refuses=True).search().best
    assert best.rate is not None
    assert 700 / sizing.MARGIN <= best.rate <= 700 / 0.99 + 1
    assert best.refused <= 0.01 * best.requests


@pytest.mark.parametrize("seconds", [5, 20, 60])
def test_the_time_is_bounded_and_what_it_did_not_suffice_for_is_told(seconds: float) -> None:
    queue = Queue(capacity=lambda setting: 1000)
    found = queue.search(seconds=seconds, acceptors=tuple(range(30)))
    assert queue.now_s <= 100 + queue.start_s + seconds
    assert any("no time for" in note for note in found.notes)


def test_a_p99_that_one_request_alone_misses_is_told_with_the_time() -> None:
    with pytest.raises(UsageError, match=r"even by one request at a time.*p99 4\.\d+ ms"):
        Queue(capacity=lambda setting: 1000).search(p99_ms=2)


def test_other_ends_say_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"by no rate.*give more seconds"):
        Queue(capacity=lambda setting: 1).search(seconds=100)
    with pytest.raises(UsageError, match=r"no time to try a rate.*give 8 seconds"):
        Queue(capacity=lambda setting: 1000).search(p99_ms=100, seconds=0.5)
    queue = Queue(capacity=lambda setting: 1000)
    assert queue.search(p99_ms=100, seconds=8).best.meets
    dead = Queue(capacity=lambda setting: 1000)
    nothing = Outcome(latencies_s=[], failures={"400": 7}, late_s=[], seconds=1)
    dead.alone = lambda seconds: nothing  # type: ignore[method-assign]
    with pytest.raises(ServeError, match="400"):
        dead.search()
    for wrong in ({"p99_ms": 0}, {"seconds": math.nan}, {"acceptors": ()}):
        with pytest.raises(UsageError):
            queue.search(**wrong)  # type: ignore[arg-type]


def test_times_and_numbers_as_they_are_written() -> None:
    assert [parse_duration(t) for t in ("20ms", "1.5s", "800us", "800 µs")] == pytest.approx(
        [0.02, 1.5, 8e-4, 8e-4]
    )
    assert parse_counts("0, 2,4") == (0, 2, 4)
    for text in ("20", "ms", "-1ms", "1e3s", "nan s"):
        with pytest.raises(UsageError, match="20ms"):
            parse_duration(text)
    with pytest.raises(UsageError, match="0,2,4"):
        parse_counts("1,-2")


def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(ServeError, match=r"did not start.*serv"), loadtest.started(("serv",)):
        pass


def test_what_a_server_said_of_its_failure_is_told(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    error = UsageError("the port is taken", seen=8000, fix="choose another")
    log(Event(kind="error", text=str(error), values=error.to_json()))
    log.close()
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        with pytest.raises(ServeError, match=r"the port is taken.*8000.*choose another"):
            servers.url_of(ended, tmp_path / "events.jsonl", tmp_path / "said")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, object] = {}

    def size(path: Path, **settings: object) -> Sizing:
        asked.update(settings)
        found = Queue(capacity=lambda setting: 1000).search()
        words = ("serve", f"b={path}", *found.best.setting.words)
        return Sizing(words=words, p99_ms=20.0, best=found.best, trials=found.trials)

    monkeypatch.setattr(api, "size", size, raising=False)
    tessella = in_process(monkeypatch, capsys)
    ran = tessella("size", "b=a b.plan", "--p99", "20ms", "--acceptors", "0,1", "--json")
    assert ran.code == 0, ran.err
    command = "tessella serve 'b=a b.plan' --acceptors 0 --max-delay-us 0"
    assert ran.json["command"] == command
    assert ran.json["best"] in ran.json["trials"]
    assert ran.json["best"]["setting"] == {"acceptors": 0, "max_delay_us": 0, "instances": 1}
    assert (asked["p99_ms"], asked["acceptors"]) == (20.0, (0, 1))
    ran = tessella("size", "nothing.plan", "--p99", "20", "--json")
    assert (ran.code, ran.json["fix"]) == (2, "write 20ms, 1.5s or 800us")
    monkeypatch.undo()
    with pytest.raises(TessellaError, match="no plan here"):
        api.size("nothing.plan", p99_ms=20)


@pytest.mark.timeout(280)
def test_the_command_that_is_printed_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ran here and answered, but for its port: the usual one may be taken."""
    ran_words: list[tuple[str, ...]] = []
    start = loadtest.started

    def started(words: tuple[str, ...]) -> AbstractContextManager[str]:
        ran_words.append(words)
        return start(words)

    monkeypatch.setattr(loadtest, "started", started)
    # No machine is too busy for a p99 of 5 s, with so short trials.
    for name, value in {"STEADY": 0.02, "REQUESTS": 1, "LEAST_S": 0.1}.items():
        monkeypatch.setattr(sizing, name, value)
    plan = linear_plan().save(tmp_path / "flowers of a garden.plan")
    ran = in_process(monkeypatch, capsys)(
        "size", f"flowers={plan}", "--p99", "5s", "--seconds", "1.2",
        "--acceptors", "0", "--max-delay-us", "0", "--instances", "1",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    *table, command = ran.out.splitlines()
    assert any("best" in line for line in table)
    program, *words = shlex.split(command)
    assert program == "tessella"
    assert ran_words == [tuple(words)]
