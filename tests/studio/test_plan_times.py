"""A plan's page says which of its times are to be doubted, and which choices were close."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tessella.artifacts.outline import Candidate
from tessella.studio.pages.plan import _rows, total_time
from tests.support.studio.workspaces import make_plan


def candidate(kernel: str, time_us: float, *, noisy: bool = False) -> Candidate:
    return Candidate(
        batch=1, step="conv1", kernel=kernel, chosen=kernel == "first",
        time_us=time_us, spread_us=1.0, noisy=noisy,
    )  # fmt: skip


def test_what_else_may_be_the_fastest_is_close() -> None:
    tried = [candidate("first", 10.0), candidate("second", 11.9), candidate("third", 12.1)]
    assert [row[-1] for row in _rows(tried)[0]] == ["chosen", "close", "slower"]
    untuned = [replace(c, time_us=None) for c in tried[:2]]
    assert [row[-1] for row in _rows(untuned)[0]] == ["chosen", "estimated slower"]


def test_a_busy_machine_shows(tmp_path: Path) -> None:
    made = make_plan(tmp_path / "a.plan", built_from="a")
    bucket = made.program.buckets[0]
    busy = replace(made, tuning=tuple(replace(c, noisy=c.chosen) for c in made.tuning))
    assert "busy" not in total_time(made, bucket)
    assert total_time(busy, bucket) == f"{total_time(made, bucket)}, on a busy machine"
    (row, _), _ = _rows([candidate("first", 10.0, noisy=True), candidate("second", 20.0)])
    assert row[-1] == "chosen; the machine was busy"
