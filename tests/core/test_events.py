"""The event log: appended, read while it grows, clean after a kill."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessella.core.errors import CorruptArtifact
from tessella.core.events import (
    Event,
    EventLog,
    both,
    metric,
    phase,
    progress,
    read_events,
    warning,
)


def test_events_come_back_as_they_were(tmp_path: Path) -> None:
    sent = [
        phase("import", "1 image"),
        progress("import", 0, 0),
        metric(0, 0.0, loss=1.5),
        warning("<b>näme</b>\n\u2028", count=2),
    ]
    log = EventLog(tmp_path / "run" / "events.jsonl")
    for event in sent:
        log(event)
    log.close()
    events, _ = read_events(tmp_path / "run" / "events.jsonl")
    assert events == sent


def test_reading_goes_on_where_it_stopped_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == ([], 0)
    log = EventLog(path)
    log(phase("one"))
    first, offset = read_events(path)
    log(phase("two"))
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "pha')
    second, offset = read_events(path, offset)
    assert [e.name for e in first + second] == ["one", "two"]
    assert read_events(path, offset) == ([], offset)


def test_a_killed_writers_half_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(phase("one").to_json().encode() + b'\n{"kind": "metr')
    log = EventLog(path)
    log(phase("two"))
    log.sync()
    log.close()
    assert [e.name for e in read_events(path)[0]] == ["one", "two"]


def test_a_file_name_that_is_not_utf8_can_be_told(tmp_path: Path) -> None:
    name = b"caf\xe9.png".decode("utf-8", "surrogateescape")
    log = EventLog(tmp_path / "e.jsonl")
    log(warning(f"cannot read {name}"))
    log.close()
    assert read_events(tmp_path / "e.jsonl")[0][0].text == f"cannot read {name}"


@pytest.mark.parametrize("line", [b"\0\0\0", b"[1]", b"{}", b"\xff", b'{"kind'])
def test_a_changed_line_is_an_artifact_error(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "e.jsonl"
    path.write_bytes(phase("one").to_json().encode() + b"\n" + line + b"\n")
    with pytest.raises(CorruptArtifact, match="event log"):
        read_events(path)


def test_unknown_fields_of_a_later_version_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text(json.dumps({"kind": "phase", "name": "x", "time": 1.0, "later": 1}) + "\n")
    assert read_events(path)[0] == [Event(kind="phase", name="x", time=1.0)]


def test_both_tells_everyone() -> None:
    one: list[Event] = []
    two: list[Event] = []
    both(one.append, two.append)(phase("x"))
    assert one == two
    assert len(one) == 1
