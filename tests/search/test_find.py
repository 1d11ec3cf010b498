"""find: fast ones first, refused ones with their reason, and nothing is measured twice."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella.core.errors import CompileError
from tessella.core.spec import TensorSpec
from tessella.kernels import catalog
from tessella.kernels.pool import aten as pool_aten
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import find as search
from tessella.search import timing
from tessella.search.tuning import TimingCache, Trial
from tests.support.kernels import scratch
from tests.support.networks import build

LINEAR = Problem(
    op="linear",
    inputs=(
        TensorMeta(shape=(4, 32), dtype="float32"),
        TensorMeta(shape=(16, 32), dtype="float32"),
        None,
        None,
    ),
    outputs=(TensorMeta(shape=(4, 16), dtype="float32"),),
    attrs={"activation": None},
    constant=(1,),
)
POOL = Problem(
    op="adaptive_avg_pool2d",
    inputs=(TensorMeta(shape=(1, 4, 8, 8), dtype="float32"),),
    outputs=(TensorMeta(shape=(1, 4, 2, 2), dtype="float32"),),
    attrs={"output_size": (2, 2)},
)
WEIGHT = {1: torch.ones(16, 32)}


def test_fastest_first_and_refused_last() -> None:
    metas = (m and TensorMeta(shape=m.shape, dtype="float16") for m in LINEAR.inputs)
    out = TensorMeta(shape=(4, 16), dtype="float16")
    half = replace(LINEAR, inputs=tuple(metas), outputs=(out,))
    trials = search.find(
        half, {1: WEIGHT[1].half()}, target="cpu", options=search.SearchOptions(budget_s=0.0)
    )
    assert [t.kernel for t in trials if t.refused is None] == ["linear.aten"] == [trials[0].kernel]
    assert trials[0].time_us > 0
    refused = {t.kernel: t.refused for t in trials[1:]}
    assert all("float16" in refused[f"linear.{name}"] for name in ("onednn", "onednn_int8", "mkl"))
    trials = search.find(LINEAR, WEIGHT, target="cpu", options=search.SearchOptions(budget_s=0.0))
    ran = [t for t in trials if t.refused is None]
    assert {"linear.onednn", "linear.mkl", "linear.aten"} <= {t.kernel for t in ran}
    assert [t.time_us for t in ran] == sorted(t.time_us for t in ran)
    assert all(t.refused is not None for t in trials[len(ran) :])


def test_a_cache_answers_without_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "timings.jsonl"
    first = search.find(
        LINEAR,
        WEIGHT,
        target="cpu",
        cache=TimingCache(path),
        options=search.SearchOptions(budget_s=0.0),
    )

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(search, "time_interleaved", forbidden)
    again = search.find(LINEAR, WEIGHT, target="cpu", cache=TimingCache(path))
    assert again == first
    # another version of a kernel is another kernel
    rows = tuple(replace(r, version=2) if r.id == "linear.mkl" else r for r in catalog.KERNELS)
    monkeypatch.setattr(catalog, "KERNELS", rows)
    with pytest.raises(AssertionError, match="measured again"):
        search.find(LINEAR, WEIGHT, target="cpu", cache=TimingCache(path))


def test_a_kernel_that_fails_is_refused_and_the_last_resort_takes_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(pool_aten, "bind", lambda p, c, **config: fails)
    trials = search.find(POOL, {}, target="cpu", options=search.SearchOptions(budget_s=0.0))
    assert (trials[0].kernel, trials[0].refused) == ("reference", None)
    assert refused_by_torch(trials) == "failed: no such instruction"


def refused_by_torch(trials: Sequence[Trial]) -> str | None:
    (refused,) = (trial.refused for trial in trials if trial.kernel == "adaptive_avg_pool2d.aten")
    return refused


def test_a_kernel_that_makes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_aten, "bind", lambda p, c, **config: lambda x: x)
    trials = search.find(POOL, {}, target="cpu", options=search.SearchOptions(budget_s=0.0))
    assert trials[0].kernel == "reference"
    assert "instead of" in str(refused_by_torch(trials))


def test_nothing_fits() -> None:
    wrong = replace(POOL, attrs={"output_size": (-1, 2)})
    with pytest.raises(CompileError, match="no kernel on cpu can carry out adaptive_avg_pool2d"):
        search.find(wrong, {}, target="cpu")


def test_the_reference_target_measures_nothing() -> None:
    (trial,) = search.find(LINEAR, WEIGHT, target="reference")
    assert (trial.kernel, trial.time_us) == ("reference", None)


def test_measure_tells_slow_from_fast() -> None:
    runs = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.0002)}
    times = timing.measure(runs, device=torch.device("cpu"), budget_s=0.02)
    assert times["slow"].time_us > 1.5 * times["fast"].time_us
    assert times["slow"].time_us >= 20000


def test_far_kernels_try_their_first_configuration_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))
    monkeypatch.setattr(
        search, "glance", lambda runs, device: {n: 1.0 + i for i, n in enumerate(runs)}
    )

    def scratch_trial(cutoff: float) -> Trial:
        options = search.SearchOptions(budget_s=0.0, cutoff=cutoff)
        trials = search.find(LINEAR, WEIGHT, target="cpu", options=options)
        return next(t for t in trials if t.kernel == "linear.scratch")

    # it is the last one that fits
    fitting = [r for r in catalog.candidates("linear", "cpu") if r.refusal(LINEAR) is None]
    others = len([row for row in fitting if row != scratch.ROW and not row.last_resort])
    assert [t.config["pieces"] for t in scratch_trial(others + 1.0).tried] == [1, 2, 3]
    assert scratch_trial(others + 0.5).tried == ()
    assert scratch_trial(others + 0.5).config == {"pieces": 1}


def test_one_of_ours_that_would_win_with_wrong_numbers_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))
    monkeypatch.setattr(
        scratch,
        "bind",
        lambda problem, constants, pieces: lambda x, *, out, workspace: out.fill_(3),
    )
    monkeypatch.setattr(catalog, "BY_ID", {**catalog.BY_ID, scratch.ROW.id: scratch.ROW})
    monkeypatch.setattr(
        search,
        "time_interleaved",
        lambda runs, heats, **_: {
            name: timing.Timing(time_us=1.0 + 8.0 * (heats[name] != scratch.ROW.id), spread_us=None)
            for name in runs
        },
    )
    cache, options = TimingCache(), search.SearchOptions(budget_s=0.0)
    for _ in range(2):  # and a build that finds it in its cache says so again
        with pytest.warns(UserWarning, match=r"linear.scratch is wrong: deviates.*report it"):
            trials = search.find(LINEAR, WEIGHT, target="cpu", options=options, cache=cache)
        assert trials[0].kernel != "linear.scratch"
        mine = next(t for t in trials if t.kernel == "linear.scratch")
        assert "wrong: deviates from float64" in str(mine.refused)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32)).eval()
    with pytest.warns(UserWarning, match="linear.scratch is wrong"):
        made = build(net, TensorSpec(name="x", dtype="float32", shape=(1, 64)))
    assert "found wrong and not taken, please report: linear.scratch in 2 steps (dev" in str(made)
    only = search.SearchOptions(budget_s=0.0, algorithms=("scratch",))
    with pytest.raises(CompileError, match="deviates from float64"):
        search.find(LINEAR, WEIGHT, target="cpu", options=only)


def test_a_last_resort_runs_though_it_was_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))

    def fails(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(scratch, "bind", fails)
    options = search.SearchOptions(budget_s=0.0, algorithms=("scratch", "reference"))
    candidates = [(scratch.ROW, {"pieces": 1})]
    trials = search.find(LINEAR, WEIGHT, target="cpu", options=options, candidates=candidates)
    assert [t.kernel for t in trials] == ["reference", "linear.scratch"]
    assert trials[0].refused is None


def test_an_unproven_kernel_takes_part_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(scratch.ROW, unproven=True)
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, row))
    options = search.SearchOptions(budget_s=0.0)
    trials = {t.kernel: t for t in search.find(LINEAR, WEIGHT, target="cpu", options=options)}
    assert trials["linear.scratch"].refused == search.UNPROVEN
    asked = search.SearchOptions(budget_s=0.0, algorithms=("scratch",))
    (trial,) = search.find(LINEAR, WEIGHT, target="cpu", options=asked)
    assert (trial.kernel, trial.refused) == ("linear.scratch", None)


def test_an_outclassed_kernel_is_tried_by_name_and_for_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))
    monkeypatch.setattr(scratch, "outclassed", lambda problem: "always last", raising=False)

    def tried(**options: object) -> str | None:
        options = search.SearchOptions(budget_s=0.0, **options)
        trials = search.find(LINEAR, WEIGHT, target="cpu", options=options)
        return next(t.refused for t in trials if t.kernel == "linear.scratch")

    assert tried() == "always last"
    assert tried(algorithms=("scratch",)) is None
    assert tried(inspect=True) is None


@pytest.mark.parametrize(
    ("kernel", "dtype", "side", "groups", "outclassed"),
    [
        ("conv2d.direct", "float16", 3, 1, True),
        ("conv2d.direct", "float16", 3, 32, False),  # depthwise: what it is for
        ("conv2d.direct", "float32", 3, 1, False),
        ("conv2d.fft", "bfloat16", 7, 1, True),
        ("conv2d.fft", "bfloat16", 11, 1, False),
        ("conv2d.fft_tiling", "float16", 3, 1, True),
        ("conv2d.fft_tiling", "float32", 3, 1, False),
        ("conv2d.winograd", "float16", 3, 1, True),
        ("conv2d.winograd", "float32", 3, 1, False),
        ("conv2d.winograd_nonfused", "float16", 3, 1, False),
        ("conv2d.implicit_gemm", "float16", 3, 1, False),
    ],
)
def test_what_was_measured_to_be_far_behind(
    kernel: str, dtype: str, side: int, groups: int, outclassed: bool
) -> None:
    meta = functools.partial(TensorMeta, dtype=dtype, format="channels_last")
    attrs = {"stride": (1, 1), "padding": (side // 2,) * 2, "dilation": (1, 1), "groups": groups}
    problem = Problem(
        op="conv2d",
        inputs=(meta(shape=(8, 32, 28, 28)), meta(shape=(32, 32 // groups, side, side))),
        outputs=(meta(shape=(8, 32, 28, 28)),),
        attrs=attrs,
    )
    assert (catalog.kernel(kernel).outclassed(problem) is not None) == outclassed


def test_a_shortage_of_memory_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = pool_aten.bind

    def short(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    path, options = tmp_path / "timings.jsonl", search.SearchOptions(budget_s=0.0)
    monkeypatch.setattr(pool_aten, "bind", lambda p, c, **config: short)
    trials = search.find(POOL, {}, target="cpu", cache=TimingCache(path), options=options)
    assert trials[0].kernel == "reference"
    assert refused_by_torch(trials) == "failed: none left"
    monkeypatch.setattr(pool_aten, "bind", bind)
    trials = search.find(POOL, {}, target="cpu", cache=TimingCache(path), options=options)
    assert (trials[0].kernel, trials[0].refused) == ("adaptive_avg_pool2d.aten", None)


def test_nobody_writes_a_slice_who_cannot() -> None:
    """Not the last resort either: it is not even run. (Machine code leaves means of float16.)"""
    meta = TensorMeta(shape=(2, 4, 3, 3), dtype="float16", format="channels_last")
    sliced = TensorMeta(shape=(2, 8, 3, 3), dtype="float16", format="channels_last").part(1, 4)
    attrs = {"kernel_size": (1, 1), "stride": (1, 1), "padding": (0, 0), "ceil_mode": False,
             "count_include_pad": True, "divisor_override": None}  # fmt: skip
    asked = Problem(op="avg_pool2d", inputs=(meta,), outputs=(sliced,), attrs=attrs)
    with pytest.raises(CompileError, match="slice"):
        search.find(asked, {}, target="cpu")
