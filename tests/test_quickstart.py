"""The quick start keeps what the README promises: accuracy, agreement, the report's keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessella.core.errors import UsageError
from tessella.core.events import Event, silent
from tessella.quickstart import quickstart

KEYS = {
    "val_accuracy", "http_accuracy", "top1_agreement", "max_abs_diff", "eager_ms", "plan_ms",
    "plan_bytes", "seconds",
}  # fmt: skip


def test_real_digits_from_folder_to_http(tmp_path: Path) -> None:
    events: list[Event] = []
    report = quickstart(tmp_path / "quickstart", emit=events.append)
    assert report.val_accuracy >= 0.98
    assert report.http_accuracy == report.val_accuracy
    assert report.top1_agreement == 1.0
    assert report.max_abs_diff < 1e-4
    assert report.plan_ms < 1.5 * report.eager_ms  # other tests run beside: the bar itself is 1.0
    written = json.loads((tmp_path / "quickstart" / "report.json").read_text())
    assert written.keys() >= KEYS
    assert len(list((tmp_path / "quickstart" / "digits").rglob("*.png"))) == 1797
    phases = [e.name for e in events if e.kind == "phase"]
    assert phases.index("import") < phases.index("train") < phases.index("serve")


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not empty"):
        quickstart(tmp_path, emit=silent)
    assert (tmp_path / "thesis.tex").exists()
