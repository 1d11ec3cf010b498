import subprocess
import sys

import pytest

from tessella.artifacts.run import Run
from tessella.core.errors import UsageError
from tessella.studio.context import Context
from tessella.studio.labels import Label, Labels
from tessella.studio.path_field import MOST_SHOWN, completions
from tessella.studio.workspace import Workspace, readable
from tests.support.studio.workspaces import make_dataset, make_run, make_workspace


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    root = tmp_path_factory.mktemp("space")
    make_workspace(root)
    return Workspace(root)


def test_finds_what_lies_there_whoever_wrote_it(space):
    assert [f.ref for f in space.datasets()] == ["datasets/digits"]
    assert {f.ref for f in space.runs()} == {"runs/first", "runs/second"}
    assert {f.ref for f in space.plans()} == {
        "plans/digits.plan", "plans/small.plan", "plans/broken.plan",
    }  # fmt: skip
    for name in ("imagesTr", "labelsTr"):  # nnU-Net's, which an import reads
        (space.root / "source" / name).mkdir(parents=True)
    (space.root / "source" / "dataset.json").write_text("{}")
    make_dataset(space.root / "elsewhere" / "deep" / "more", hostile=False)
    assert {f.ref for f in space.datasets()} == {"datasets/digits", "elsewhere/deep/more"}


def test_what_cannot_be_read_is_listed_with_its_reason(space):
    broken = next(f for f in space.plans() if f.ref == "plans/broken.plan")
    assert broken.item is None
    assert "not a plan" in broken.problem


@pytest.mark.parametrize("ref", ["../x", "/etc/passwd", "runs/../../x", "", ".", "a\0b"])
def test_never_leaves_its_root(space, ref):
    with pytest.raises(UsageError, match="out of the workspace"):
        space.path(ref)


def test_a_link_out_of_the_workspace_is_no_way_out(space, tmp_path):
    (space.root / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="out of the workspace"):
        space.path("link/x")


@pytest.mark.parametrize("name", ["../x", "a/b", "", "-rf", "a b", "x" * 100, "."])
def test_names_of_new_artifacts_are_plain(space, name):
    with pytest.raises(UsageError, match="name"):
        space.new_path("run", name)


def test_a_file_is_no_workspace(space):
    with pytest.raises(UsageError, match="a workspace is a folder"):
        Workspace(next(path for path in space.root.rglob("*") if path.is_file()))


def test_a_taken_name_is_told(space):
    with pytest.raises(UsageError, match="exists already"):
        space.new_path("run", "first")
    assert space.new_path("plan", "new") == space.root / "plans" / "new.plan"


def test_a_dataset_is_found_by_its_content(space):
    assert space.find_dataset("ab" * 32) is not None
    assert space.find_dataset("cd" * 32) is None


def test_a_run_finds_its_dataset_where_it_was_moved(space, tmp_path):
    assert space.dataset_of(space.run("runs/first")) == "datasets/digits"
    make_run(tmp_path / "run", dataset="datasets/before", epochs=1, steps=2)
    run = Run(tmp_path / "run")
    found = space.dataset_of(run)  # another test may have put a copy beside it
    assert space.dataset(found).info.content_hash == run.info.dataset_hash
    with pytest.raises(UsageError, match="known by its content"):
        Workspace(tmp_path / "empty").dataset_of(Run(tmp_path / "run"))


def test_the_studio_needs_no_torch():
    """Torch alone holds 520 MB in a process that shows pages."""
    program = "import sys, tessella.studio.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_paths_are_completed_as_typed_and_hidden_ones_only_by_their_dot(tmp_path):
    for name in ("my photos/cats", "my photos/.hidden", "mine", ".secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "my net.py").touch()
    (tmp_path / "my.txt").touch()
    assert completions("m", tmp_path) == ["mine/", "my photos/"]
    assert completions("my", tmp_path, (".py",)) == ["my photos/", "my net.py"]
    assert completions("my photos/", tmp_path) == ["my photos/cats/"]
    assert completions(f"{tmp_path}/my p", tmp_path) == [f"{tmp_path}/my photos/"]
    assert completions(".s", tmp_path) == [".secret/"]
    for nothing in ("", "none/x", "a\0b", "~nobody-of-this-name/", f"{tmp_path}/my.txt/"):
        assert completions(nothing, tmp_path) == []
    for number in range(20):
        (tmp_path / f"many{number:02d}").mkdir()
    assert len(completions("many", tmp_path)) == MOST_SHOWN


def test_a_name_that_is_suggested_is_free(tmp_path):
    space = Workspace(tmp_path)
    assert space.free_name("dataset", "größe v1.2 (neu)") == "größe-v1-2-neu"
    (tmp_path / "datasets" / "shapes").mkdir(parents=True)
    (tmp_path / "datasets" / "shapes-2").mkdir()
    assert space.free_name("dataset", "shapes") == "shapes-3"
    assert space.new_path("dataset", space.free_name("dataset", "shapes"))
    assert space.free_name("dataset", "...") == ""


def test_choices_have_titles_and_tell_two_of_one_name_apart(tmp_path):
    make_dataset(tmp_path / "datasets" / "one", hostile=False)
    make_dataset(tmp_path / "datasets" / "two", hostile=False)
    make_run(tmp_path / "runs" / "first", dataset="datasets/one", epochs=1, steps=2)
    space, labels = Workspace(tmp_path), Labels(tmp_path)
    context = Context(
        workspace=space, labels=labels, store=None, uploads=None, answers=None, trash=None
    )
    datasets, runs = readable(space.datasets()), readable(space.runs())
    assert context.dataset_names(datasets) == {"datasets/one": "one", "datasets/two": "two"}
    labels.put("datasets/two", Label(title="one"))
    labels.put("runs/first", Label(title="Best"))
    assert context.dataset_names(datasets) == {r: f"one ({r})" for r in datasets}
    network = runs["runs/first"].recipe.network
    assert context.run_names(runs) == {"runs/first": f"Best ({network})"}
