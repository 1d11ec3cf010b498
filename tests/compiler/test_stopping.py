"""Builds that run out of time or memory, or are killed: the next one has what they measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan
from tessella.core.errors import ArtifactError, BuildStopped
from tessella.core.spec import DimRange
from tessella.kernels.conv.libraries import aten as conv_aten
from tessella.operations.problem import Problem
from tessella.search import find as search
from tessella.search.allowance import Allowance, OutOfTime
from tessella.search.tuning import TimingCache
from tests.support.networks import ABOUT, captured

ROOT = Path(__file__).parents[2]
ENOUGH = 6  # measurements


def build(cache: Path | None, time_limit_s: float | None = None) -> Plan:
    return compiler.compile_graph(
        captured("lenet"),
        target="cpu",
        batch=DimRange(min=1, opt=2, max=4),
        about=ABOUT,
        measuring=compiler.Measuring(cache=cache, budget_s=0.0, time_limit_s=time_limit_s),
    )


def lines(cache: Path) -> int:
    return len(cache.read_text().splitlines()) if cache.exists() else 0


def test_each_build_gets_on_until_one_is_done(tmp_path: Path) -> None:
    cache = tmp_path / "timings.jsonl"
    known, said = [], ""
    for _ in range(40):
        try:
            plan = build(cache, time_limit_s=0.0)  # one measurement a build
        except BuildStopped as error:
            known.append(lines(cache))
            said = str(error)
        else:
            break
    assert known == sorted(set(known))  # more after each
    assert len(known) > 5
    assert "goes on where this build stopped" in said
    assert str(cache) in said
    x = torch.randn(3, 1, 28, 28)
    right = runtime.load(build(None))(image=x)["scores"]
    torch.testing.assert_close(runtime.load(plan)(image=x)["scores"], right, rtol=1e-4, atol=1e-5)


def test_without_a_cache_it_says_that_nothing_is_kept() -> None:
    with pytest.raises(BuildStopped, match="give a cache"):
        build(None, time_limit_s=0.0)


def test_enough_time_is_no_limit(tmp_path: Path) -> None:
    assert build(tmp_path / "a", time_limit_s=100.0).program.buckets


def test_an_allowance_counts_from_the_first_measurement() -> None:
    allowance = Allowance(seconds=0.05)
    time.sleep(0.06)
    allowance.spend()
    time.sleep(0.06)
    with pytest.raises(OutOfTime):
        allowance.spend()


def test_a_killed_build_leaves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 in the middle; the next build measures only the others."""
    cache = tmp_path / "timings.jsonl"
    script = f"from tests.compiler.test_stopping import *\nstop_in_the_middle(Path({str(cache)!r}))"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=_environment())
    while not _waiting(cache).exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = TimingCache(cache)._trials
    assert len(kept) >= ENOUGH
    measured: list[str] = []
    put = TimingCache.put

    def spy(self: TimingCache, device: str, problem: str, version: int, trial: Any, **more: Any):  # type: ignore[no-untyped-def]
        measured.append((device, problem, trial.kernel, version))
        put(self, device, problem, version, trial, **more)

    monkeypatch.setattr(TimingCache, "put", spy)
    build(cache)
    assert measured
    assert not set(measured) & set(kept)


def stop_in_the_middle(cache: Path) -> None:
    """In the process that is killed: a build that goes no further than some whole searches."""
    measured = search.Search._measured

    def wait_or_measure(self: Any, rows: Any) -> Any:
        if lines(cache) >= ENOUGH:
            _waiting(cache).touch()
            time.sleep(200)
        return measured(self, rows)

    search.Search._measured = wait_or_measure  # type: ignore[method-assign]
    build(cache)


def _waiting(cache: Path) -> Path:
    return cache.with_suffix(".waiting")


def _environment() -> Mapping[str, str]:
    paths = [str(ROOT / "src"), str(ROOT)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _no_memory(*_: object) -> None:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes")


def test_a_kernel_that_finds_no_memory_is_refused_for_this_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "timings.jsonl"
    monkeypatch.setattr(conv_aten, "bind", _no_memory)
    plan = build(cache)
    assert any("can't allocate" in (c.refused or "") for c in plan.tuning)
    monkeypatch.undo()
    again = build(cache)
    assert not any("can't allocate" in (c.refused or "") for c in again.tuning)


def test_a_build_without_memory_names_the_batch_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = search.sample_inputs

    def short(problem: Problem, *where: Any, **how: Any) -> list[torch.Tensor]:
        if problem.outputs[0].shape[0] == 4:
            _no_memory()
        return real(problem, *where, **how)

    monkeypatch.setattr(search, "sample_inputs", short)
    with pytest.raises(BuildStopped, match="batches up to 2, which fits"):
        build(tmp_path / "timings.jsonl")


def test_a_plan_that_does_not_fit_names_the_batch_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = build(None)
    small, middle, large = plan.program.buckets
    large = replace(large, peak_bytes=1 << 39)
    program = replace(plan.program, buckets=(small, middle, large))
    monkeypatch.setattr("tessella.runtime.engine.Arena", _no_memory)
    with pytest.raises(ArtifactError, match="batches up to 2: tessella compile a-test"):
        runtime.load(replace(plan, program=program))
