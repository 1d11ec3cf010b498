"""What is found in folders and lists, whatever links, names and lines they hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tessella.core.errors import DataError, UsageError
from tessella.data.importing import ImportSettings, import_images
from tessella.data.sources import Found, find, read_labels


def touch(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def listed(found: Found) -> list[tuple[str, str]]:
    return [(s.path, found.classes[s.label]) for s in found.sources]


# --- folders ------------------------------------------------------------------------------------


def test_first_subfolder_is_the_class_and_all_below_belongs_to_it(tmp_path: Path) -> None:
    touch(
        tmp_path, "dog/b.JPG", "cat/2024/may/a.png", "cat/a.tiff", "cat/.hidden.png", ".git/x.png"
    )
    found = find(tmp_path)
    assert found.classes == ("cat", "dog")
    assert listed(found) == [
        ("cat/2024/may/a.png", "cat"),
        ("cat/a.tiff", "cat"),
        ("dog/b.JPG", "dog"),
    ]
    assert [Path(s.file) for s in found.sources] == [tmp_path / s.path for s in found.sources]


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png", "b/notes.txt", "stray.png")
    (tmp_path / "empty").mkdir()
    notes = " | ".join(find(tmp_path).notes)
    assert "1 image left out, in no class folder" in notes
    assert "1 file left out, not named like an image" in notes
    assert "'empty' holds no image" in notes


def test_links_that_loop_end_and_count_nothing_twice(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "a/deep/2.png", "b/3.png")
    (tmp_path / "a" / "up").symlink_to("..")  # an ancestor
    (tmp_path / "a" / "self").symlink_to(".")
    (tmp_path / "a" / "aside").symlink_to("../b")  # b's pictures must stay b's
    (tmp_path / "b" / "back").symlink_to("../a")
    (tmp_path / "b" / "again.png").symlink_to("../a/1.png")
    found = find(tmp_path)
    assert listed(found) == [("a/1.png", "a"), ("a/deep/2.png", "a"), ("b/3.png", "b")]
    assert "5 links to what is already there, not followed" in found.notes


def test_links_to_other_places_are_followed_once(tmp_path: Path) -> None:
    outside = touch(tmp_path / "outside", "x.png", "deep/y.png", "single.png")
    (outside / "deep" / "loop").symlink_to(outside)
    root = touch(tmp_path / "root", "a/1.png")
    (root / "b").symlink_to(outside)
    (root / "c").symlink_to(outside)
    (root / "a" / "one.png").symlink_to(outside / "single.png")
    (root / "a" / "broken.png").symlink_to("nowhere.png")
    found = find(root)
    places = [os.path.realpath(s.file) for s in found.sources]
    assert len(places) == len(set(places)) == 4
    assert found.classes == ("a", "b")
    assert [f.path for f in found.skipped] == ["a/broken.png"]
    assert "leads nowhere" in found.skipped[0].reason


def test_a_pipe_named_like_an_image_is_not_opened(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.png", "b/1.png")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    assert len(find(tmp_path).sources) == 2


def test_odd_names_are_kept_as_they_are(tmp_path: Path) -> None:
    names = ["<script>alert(1)<", "a b", "ü", "..x", "quote\"'"]
    touch(tmp_path, *(f"{name}/1.png" for name in names if not name.startswith(".")))
    assert set(find(tmp_path).classes) == set(names) - {"..x"}


def test_a_name_that_is_not_utf8_is_told_in_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    with open(folder + b"/\xff.png", "wb") as file:
        file.write(b"x")
    touch(tmp_path, "a/1.png")
    found = find(tmp_path)
    assert found.classes == ("a", "caf\\xe9")
    assert found.sources[1].path == "caf\\xe9/\\xff.png"
    assert Path(found.sources[1].file).read_bytes() == b"x"


def test_folders_without_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder or list"):
        find(tmp_path / "missing")
    with pytest.raises(DataError, match="no images in class folders"):
        find(tmp_path)
    touch(tmp_path, "1.png", "2.png")
    with pytest.raises(DataError, match="2 images directly in"):
        find(tmp_path)
    with pytest.raises(UsageError, match="text list"):
        find(tmp_path, labels=("a", "b"))


# --- lists --------------------------------------------------------------------------------------


def write_list(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


def test_numbers_are_classes_in_numerical_order(tmp_path: Path) -> None:
    found = find(write_list(tmp_path / "l.txt", "a.png 10\n\nb c.png 2\r\n sub/d.png\t7 \n"))
    assert found.classes == ("2", "7", "10")
    assert listed(found) == [("a.png", "10"), ("b c.png", "2"), ("sub/d.png", "7")]
    assert found.sources[1].file == str(tmp_path / "b c.png")


def test_numbers_count_the_given_labels(tmp_path: Path) -> None:
    labels = read_labels(write_list(tmp_path / "labels.txt", "\ufeffred fox\nhare\n\n"))
    assert labels == ("red fox", "hare")
    found = find(
        write_list(tmp_path / "l.txt", "a.png 1\nb.png\tred fox\nc.png hare\n"), labels=labels
    )
    assert [s.label for s in found.sources] == [1, 0, 1]


def test_names_are_data_and_paths_are_relative(tmp_path: Path) -> None:
    root = tmp_path / "images"
    text = f"../x.png ../../etc\n{root}/y.png <b>\n"
    found = find(write_list(tmp_path / "l.txt", text), image_root=root)
    assert found.classes == ("../../etc", "<b>")
    assert [s.path for s in found.sources] == ["../x.png", "y.png"]
    assert [Path(s.file) for s in found.sources] == [root / "../x.png", root / "y.png"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the list is empty"),
        (" \n\n", "the list is empty"),
        ("a.png 0\nb.png\n", "line 2"),
        ("a.png 0\nb.png 2\n", "line 2 of the list has an unknown label"),
        ("a.png -1\n", "line 1 of the list has an unknown label"),
        ("a.png 0\0\n", "not a text list"),
    ],
)
def test_lists_that_cannot_be_understood(tmp_path: Path, text: str, told: str) -> None:
    path = write_list(tmp_path / "l.txt", text)
    with pytest.raises(DataError, match=told) as caught:
        find(path, labels=("a", "b"))
    assert caught.value.fix


def test_labels_named_twice_or_missing(tmp_path: Path) -> None:
    path = write_list(tmp_path / "l.txt", "a.png a\n")
    with pytest.raises(DataError, match="named twice"):
        find(path, labels=("a", "a"))
    with pytest.raises(DataError, match="no such labels file"):
        read_labels(tmp_path / "missing")


@pytest.mark.parametrize(
    ("files", "task"),
    [
        (("images/a.png", "annotations/a.json"), "detection"),
        (
            ("train/a.png", "train/_annotations.coco.json", "valid/_annotations.coco.json"),
            "instances",
        ),
        (("images/a.png", "labels/a.txt", "data.yaml"), "detection"),
        (("JPEGImages/a.png", "Annotations/a.xml"), "detection"),
        (("images/a.png", "masks/a.png"), "segmentation"),
        (("imagesTr/a.npy", "labelsTr/a.npy"), "volumes"),
        (("images/a.nii.gz", "labels/a.nii.gz"), "volumes"),
        (("instances.json",), "multilabel"),
    ],
)
def test_what_other_tasks_learn_from_is_no_folder_of_classes(files, task, tmp_path):
    """Whose folders were taken for classes where nobody said a task."""
    root = touch(tmp_path / "in", *files)
    source = root / files[0] if len(files) == 1 else root
    with pytest.raises(DataError, match=rf"no folder or list of classes.*--task.*{task}"):
        import_images(source, tmp_path / "out", ImportSettings())
