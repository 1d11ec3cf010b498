"""What searches of one kind show each other: fewer candidates, and the same winner."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from tessella.kernels import catalog
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import fewer_images
from tessella.search import find as search
from tessella.search.evidence import Evidence, kind
from tessella.search.find import SearchOptions
from tessella.search.timing import Run, Timing
from tessella.search.tuning import Lock, TimingCache, Trial, Tried
from tests.support.kernels import scratch

Times = dict[str, float]  # by kernel, or by kernel and configuration


def linear(batch: int, features: int = 96, **attrs: object) -> Problem:
    meta = TensorMeta(shape=(batch, features), dtype="float32")
    weight = TensorMeta(shape=(16, features), dtype="float32")
    out = TensorMeta(shape=(batch, 16), dtype="float32")
    return Problem(
        op="linear",
        inputs=(meta, weight, None, None),
        outputs=(out,),
        attrs={"activation": None, **attrs},
        constant=(1,),
    )


class Searches:
    """Searches that find the given times, and what each of them ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: Times = {}
        self.noisy: set[str] = set()
        self.ran: set[str] = set()
        self.evidence = Evidence()
        self.cache = TimingCache()
        self.inspected: list[str] = []
        deviation = search.Search._deviation

        def inspected(self_: search.Search, candidate: search._Runnable) -> object:
            self.inspected.append(candidate.row.id)
            return deviation(self_, candidate)

        libraries = tuple(row for row in catalog.KERNELS if row.id in ALL)
        monkeypatch.setattr(catalog, "KERNELS", (*libraries, scratch.ROW))
        monkeypatch.setattr(search, "time_interleaved", self._race)
        monkeypatch.setattr(search, "glance", lambda runs, device: dict.fromkeys(runs, 1.0))
        monkeypatch.setattr(search.Search, "_deviation", inspected)

    def _race(
        self, runs: Mapping[str, Run], heats: Mapping[str, str], **_: object
    ) -> dict[str, Timing]:
        self.ran = set(runs)
        return {
            name: Timing(
                time_us=self.times.get(name, self.times[kernel]),
                spread_us=0.1,
                noisy=kernel in self.noisy,
            )
            for name, kernel in heats.items()
        }

    def find(self, problem: Problem, evidence: bool = True, **options: object) -> dict[str, Trial]:
        self.ran = set()
        weight = torch.ones(problem.inputs[1].shape)
        found = search.find(
            problem,
            {1: weight},
            target="cpu",
            cache=self.cache,
            options=SearchOptions(budget_s=0.0, **options),
            evidence=self.evidence if evidence else None,
        )
        return {trial.kernel: trial for trial in found}

    @property
    def kernels(self) -> set[str]:
        return {name.partition(" ")[0] for name in self.ran}


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Searches:
    made = Searches(monkeypatch)
    made.times = {"linear.onednn": 10.0, "linear.mkl": 12.0, "linear.aten": 30.0,
                  "linear.scratch": 14.0, "linear.scratch {'pieces': 2}": 10.4}  # fmt: skip
    return made


ALL = {"linear.onednn", "linear.mkl", "linear.aten", "linear.scratch"}


def test_beside_a_searched_batch_only_what_was_near_runs(searches: Searches) -> None:
    first = searches.find(linear(8))
    assert searches.kernels == ALL
    assert "linear.scratch {'pieces': 1}" in searches.ran
    second = searches.find(linear(16))
    assert searches.kernels == ALL - {"linear.aten"}  # it took three times the best's time
    assert "linear.scratch {'pieces': 1}" not in searches.ran  # 1.35 times its kernel's best
    assert next(iter(second)) == next(iter(first)) == "linear.onednn"
    left_out = second["linear.aten"]
    assert left_out.behind == 3.0
    assert "3.0 times the fastest" in str(left_out.refused)
    assert left_out.time_us is None


@pytest.mark.parametrize(
    ("problem", "fewer"),
    [
        (linear(16), True),
        (linear(4), True),
        (linear(8, features=160), True),
        (linear(32), False),  # four times as many
        (linear(8, features=128), False),  # tiles fit otherwise
        (linear(16, activation="relu"), False),
    ],
)
def test_what_a_neighbour_is(searches: Searches, problem: Problem, fewer: bool) -> None:
    searches.find(linear(8))
    searches.find(problem)
    assert (searches.kernels != ALL) == fewer


def test_a_kernel_that_may_have_caught_up_is_run_again(searches: Searches) -> None:
    """Three times the time can be 1.5 times at half the batch, and 0.75 at a quarter."""
    ran = []
    for batch in (8, 16, 32):
        searches.find(linear(batch))
        ran.append("linear.aten" in searches.kernels)
    searches.times["linear.aten"] = 5.0
    best = next(iter(searches.find(linear(64))))
    assert ran == [True, False, False]
    assert best == "linear.aten"


def test_of_long_calls_less_runs_where_all_threads_have_images(searches: Searches) -> None:
    """1.2 times the best at 8 images is far behind at 16, and stays so at 32."""
    threads = torch.get_num_threads()
    searches.times = {name: 200.0 * time_us for name, time_us in searches.times.items()}
    far = {"linear.mkl", "linear.aten", "linear.scratch"}
    searches.find(linear(8 * threads))
    for batch in (16, 32):
        found = searches.find(linear(batch * threads))
        # the best configuration of the scratch kernel took 1.04 times the best
        assert searches.kernels == {"linear.onednn", "linear.scratch"}
        assert {n for n, t in found.items() if t.behind} == far - {"linear.scratch"}
        assert found["linear.mkl"].behind == pytest.approx(1.2)
    few = Evidence()
    searches.evidence, searches.cache = few, TimingCache()
    searches.find(linear(8 * threads, features=32))
    searches.find(linear(8 * threads, features=48))  # another layer is no such neighbour
    assert "linear.mkl" in searches.kernels
    if threads > 1:
        searches.evidence, searches.cache = Evidence(), TimingCache()
        searches.find(linear(threads - 1))
        searches.find(linear(2 * (threads - 1)))  # threads without an image: they may change it
        assert "linear.mkl" in searches.kernels


def test_of_the_same_layer_the_nearest_batch_is_asked() -> None:
    """Farther ones are believed less: a rival may catch up."""
    known = Evidence()
    configs = {row: ({},) for row in catalog.KERNELS if row.id in ("linear.onednn", "linear.aten")}

    def add(batch: int, onednn_us: float, aten_us: float) -> None:
        times = {"linear.onednn": onednn_us, "linear.aten": aten_us}
        known.add(linear(batch), [Trial(kernel=k, time_us=t) for k, t in times.items()])

    def listed(batch: int) -> set[str]:
        found = known.shortlist(linear(batch), configs, images=1)
        assert found.steady
        return {row.id for row, _ in found.candidates}

    add(1, 2000.0, 2300.0)
    assert listed(2) == {"linear.onednn"}
    assert listed(16) == {"linear.onednn", "linear.aten"}
    add(8, 16_000.0, 12_000.0)
    assert listed(16) == listed(64) == {"linear.aten"}
    assert not known.shortlist(linear(16), configs, images=16).steady  # threads without an image


def test_twice_the_images_take_the_best_configuration_alone() -> None:
    """Of long calls that nothing disturbed; half of them are other work for each tile."""
    row = catalog.kernel("linear.onednn")
    near = {"a": 8000.0, "b": 8100.0, "c": 13_000.0}
    configs = {row: tuple({"tile": name} for name in near)}

    def listed(batch: int, *, noisy: bool = False, scale: float = 1.0) -> list[str]:
        known, tried = Evidence(), [Tried(config={"tile": n}, time_us=scale * t)
                                    for n, t in near.items()]  # fmt: skip
        trial = Trial(kernel=row.id, config={"tile": "a"}, time_us=scale * near["a"],
                      tried=tuple(tried), noisy=noisy)  # fmt: skip
        known.add(linear(8), [trial])
        found = known.shortlist(linear(batch), configs, images=1)
        return [config["tile"] for _, config in found.candidates]

    assert listed(16) == ["a"]
    assert listed(16, noisy=True) == listed(4) == listed(32) == ["a", "b"]
    assert listed(16, scale=0.01) == ["a", "b"]


def test_where_an_operand_dies_the_others_take_what_they_took(searches: Searches) -> None:
    searches.times = {name: 200.0 * time_us for name, time_us in searches.times.items()}
    searches.find(linear(8))
    searches.find(replace(linear(8), dying=(0,)))
    assert searches.kernels == {"linear.onednn", "linear.scratch"}


def conv(batch: int) -> Problem:
    meta = TensorMeta(shape=(batch, 16, 8, 8), dtype="float32", format="channels_last")
    weight = TensorMeta(shape=(16, 16, 3, 3), dtype="float32")
    return problems.conv(meta, weight, padding=1, constant=(1,))


def test_many_images_are_searched_with_few_before(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, cache, evidence, ran = torch.get_num_threads(), Lock(), Evidence(), []
    work = conv(1).flops
    assert work
    monkeypatch.setattr(fewer_images, "ENOUGH_FLOPS", 2.0 * work)
    assert fewer_images.with_fewer_images(conv(8 * threads), threads) == conv(2 * threads)
    assert fewer_images.with_fewer_images(conv(2 * threads), threads) is None
    assert fewer_images.with_fewer_images(linear(1 << 20), threads) is None

    def race(runs: Mapping[str, Run], heats: Mapping[str, str], **_: object) -> dict[str, Timing]:
        ran.append(set(heats.values()))
        return {n: Timing(time_us=5000.0 if "onednn" in n else 9000.0, spread_us=1.0) for n in runs}

    monkeypatch.setattr(search, "time_interleaved", race)
    constants = {1: torch.randn(16, 16, 3, 3)}
    found = search.find(
        conv(8 * threads), constants, target="cpu", cache=cache, evidence=evidence,
        options=SearchOptions(budget_s=0.0),
    )  # fmt: skip
    few, many = ran
    assert "conv2d.aten" in few
    assert many
    assert all("onednn" in kernel for kernel in many), (few, many)
    assert found[0].kernel in many
    # the lock holds what was asked for, not what made the asking shorter
    lines = [json.loads(line) for line in cache.used.splitlines()]
    assert {line["problem"] for line in lines} == {conv(8 * threads).key}
    ran.clear()
    search.find(conv(2 * threads), constants, target="cpu", cache=cache, evidence=evidence)
    assert not ran  # known by now


def test_a_noisy_timing_leaves_more_in(searches: Searches) -> None:
    searches.times["linear.mkl"] = 18.0
    searches.noisy = {"linear.mkl"}
    searches.find(linear(8))
    searches.find(linear(16))
    assert "linear.mkl" in searches.kernels


def test_what_was_left_out_runs_where_the_others_turn_out_wrong(searches: Searches) -> None:
    searches.find(linear(8))
    fails = replace(linear(16), attrs={"activation": None})
    near = ALL - {"linear.aten"}
    with pytest.MonkeyPatch.context() as patch:
        prepare = search.Search._prepare

        def failing(self: search.Search, row: catalog.Kernel, config: catalog.Config) -> object:
            if row.id in near:
                return search.Tried(config=config, refused="failed: no")
            return prepare(self, row, config)

        patch.setattr(search.Search, "_prepare", failing)
        found = searches.find(fails)
    assert next(iter(found)) == "linear.aten"
    assert found["linear.aten"].refused is None


def test_who_asks_alone_gets_all(searches: Searches) -> None:
    """Reports, and searches beside no build, do not believe that a kernel is far behind."""
    for batch in (8, 16):
        searches.find(linear(batch))
    assert searches.find(linear(16), evidence=False)["linear.aten"].time_us == 30.0
    searches.find(linear(8))
    searches.find(linear(16), inspect=True)
    assert searches.kernels == ALL


def test_a_configuration_is_compared_with_float64_once_a_kind(searches: Searches) -> None:
    searches.times["linear.scratch"] = 1.0
    searches.times["linear.scratch {'pieces': 2}"] = 2.0
    searches.find(linear(8))
    assert searches.inspected == ["linear.scratch"]
    searches.find(linear(16))
    assert searches.inspected == ["linear.scratch"]
    searches.find(linear(16, activation="relu"))
    assert searches.inspected == ["linear.scratch"] * 2


def test_a_lock_has_what_was_left_out(searches: Searches) -> None:
    searches.cache = Lock()
    made = [searches.find(linear(batch)) for batch in (8, 16)]
    searches.cache, searches.evidence = Lock(lines=searches.cache.used), Evidence()
    searches.times = {}
    again = [searches.find(linear(batch)) for batch in (8, 16)]
    plain: Callable[[Trial], Trial] = lambda trial: replace(trial, tried=())  # noqa: E731
    for one, other in zip(made, again, strict=True):
        assert list(map(plain, one.values())) == list(other.values())


def test_the_kind_of_a_problem() -> None:
    assert kind(linear(3))[0] == kind(linear(5))[0]
    assert kind(linear(3, 64))[0] == kind(linear(3, 128))[0] != kind(linear(3, 96))[0]
    assert kind(linear(3, 64), 0)[0] != kind(linear(3, 128), 0)[0]
    assert kind(linear(3, 64), 0)[0] == kind(linear(8, 64), 0)[0]
