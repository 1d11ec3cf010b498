"""A front's folder: what it says is checked before it is believed."""

import json

import pytest

from tessella.artifacts.front import FILE, read_front
from tessella.core.errors import ArtifactError
from tests.support.studio.workspaces import make_front


@pytest.fixture
def folder(tmp_path):
    make_front(tmp_path / "a.front", built_from="runs/first")
    return tmp_path / "a.front"


def test_what_was_written_is_read(folder):
    front = read_front(folder)
    assert [p.plan for p in front.points] == ["0.plan", "1.plan", "2.plan"]
    assert front.points[front.chosen].receipt.flipped == 2
    assert front.exact == front.points[2]
    assert sorted(p.name for p in folder.iterdir()) == ["0.plan", "1.plan", "2.plan", FILE]


@pytest.mark.parametrize(
    "change",
    [
        {"chosen": 3}, {"chosen": -1}, {"points": []}, {"budget": "3"}, {"more": 1},
        {"plan": "../0.plan"}, {"plan": "/etc/passwd"}, {"plan": "0.zip"}, {"plan": ".."},
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_leads_elsewhere_is_refused(folder, change):
    plain = json.loads((folder / FILE).read_text())
    target = plain["points"][0] if "plan" in change else plain
    target.update(change)
    (folder / FILE).write_text(json.dumps(plain))
    with pytest.raises(ArtifactError):
        read_front(folder)


def test_no_front_is_told(tmp_path):
    with pytest.raises(ArtifactError, match="no front here"):
        read_front(tmp_path)
