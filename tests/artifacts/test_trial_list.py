"""A sweep's list of trials, read again and again while it grows."""

import pytest

from tessella.artifacts import sweep
from tessella.core.errors import ArtifactError


def trial(number, score):
    return sweep.Trial(
        number=number,
        state="running",
        values={"lr": 0.1},
        score=score,
        validations=1,
        seconds=1.0,
    )


def test_only_what_was_appended_is_parsed(tmp_path, monkeypatch):
    parsed = []
    real = sweep.parse_json
    monkeypatch.setattr(sweep, "parse_json", lambda *a, **k: parsed.append(a) or real(*a, **k))
    known = sweep.TrialList(tmp_path)
    assert known.read() == []
    for number in range(5):
        sweep.note_trial(tmp_path, trial(number, None))
    assert len(known.read()) == len(parsed) == 5
    sweep.note_trial(tmp_path, trial(2, 0.5))
    with (tmp_path / sweep.TRIALS).open("ab") as file:
        file.write(b'{"number": 9')  # half written
    assert known.read()[2] == trial(2, 0.5)
    assert len(parsed) == 6
    assert known.read() == sweep.TrialList(tmp_path).read()
    assert len(parsed) == 12  # of which the other six read all


def test_a_list_that_was_written_anew_is_read_anew(tmp_path):
    known = sweep.TrialList(tmp_path)
    for number in range(3):
        sweep.note_trial(tmp_path, trial(number, 0.1))
    assert len(known.read()) == 3
    sweep.note_all(tmp_path, [trial(0, 0.2)])
    assert known.read() == [trial(0, 0.2)]
    with (tmp_path / sweep.TRIALS).open("ab") as file:
        file.write(b"no\n")
    with pytest.raises(ArtifactError):
        known.read()
    sweep.note_all(tmp_path, [trial(1, 0.3), trial(0, 0.2)])
    assert known.read() == [trial(1, 0.3), trial(0, 0.2)]
