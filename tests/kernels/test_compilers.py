"""Configurations compile in other processes, into Triton's cache; nobody waits for a dead one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tessella.kernels import catalog, compilers
from tests.kernels.convolutions import Case

ROW = catalog.kernel("conv2d.implicit_gemm")
CASE = Case(x=(1, 16, 8, 8), w=(16, 16, 3, 3), padding=1, dtype="float16", x_format="channels_last")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As in a process that has asked for nothing yet, with an empty cache."""
    monkeypatch.setattr(compilers, "_asked", set())
    running: list[compilers._Compilers] = []
    monkeypatch.setattr(compilers, "_running", running)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    for process in (one._process for one in running):
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def bids(count: int) -> list[compilers.Bid]:
    problem = CASE.problem
    return [(problem, ROW, config) for config in ROW.configs(problem)[:count]]


def test_the_cache_is_filled(tmp_path: Path) -> None:
    """Though one of the configurations crashes Triton's compiler."""
    wanted = bids(4)
    crash = (wanted[0][0], ROW, {**wanted[0][2], "depth": 3})
    assert compilers.compile_ahead([*wanted, crash], "sm_90").wait(120)
    assert len(list(tmp_path.rglob("implicit_gemm.cubin"))) == 4
    assert compilers.compile_ahead(wanted, "sm_90").is_set()  # not asked for again


def test_few_are_left_to_the_one_who_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_Compilers", None)
    assert compilers.compile_ahead(bids(compilers.FEW - 1), "sm_90").is_set()


def test_kernels_of_users_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "_Compilers", None)
    theirs = replace(ROW, id="conv2d.mine", source="user")
    wanted = [(problem, theirs, config) for problem, _, config in bids(8)]
    assert compilers.compile_ahead(wanted, "sm_90").is_set()


def test_nobody_waits_for_a_process_that_died() -> None:
    done = compilers.compile_ahead(bids(5), "sm_90")
    compilers._running[0]._process.kill()
    assert done.wait(30)
    compilers._running[0]._process.wait()
    assert compilers._running[0].has_ended
