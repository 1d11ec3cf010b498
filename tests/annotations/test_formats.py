"""Annotation files of every format: what is good is kept, what is broken is listed by its file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessella.annotations import coco, files, kitti, read_annotations, rle, voc, yolo
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.core.errors import DataError, UsageError

HEIGHT, WIDTH = 30, 40


def picture(path: Path, size: tuple[int, int] = (WIDTH, HEIGHT)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)
    return path


def document(**over) -> dict:
    """A COCO document of two pictures and two classes."""
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "height": HEIGHT, "width": WIDTH},
            {"id": 9, "file_name": "sub/b.png", "height": HEIGHT, "width": WIDTH},
        ],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": "dog"}],
        "annotations": [],
        **over,
    }


def thing(**over) -> dict:
    return {"id": 1, "image_id": 7, "category_id": 5, "bbox": [1.5, 2, 10, 8], **over}


def read(folder: Path, plain: object) -> Annotations:
    (folder / "a.json").write_text(plain if isinstance(plain, str) else json.dumps(plain))
    return coco.read(folder / "a.json")


# --- COCO -----------------------------------------------------------------------------------------


def test_coco_written_and_read_is_the_same(tmp_path):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[3:9, 5:20] = 1
    counts = rle.compressed(rle.counts_of(mask))
    things = (
        Thing(label=0, x=0.25, y=1.0, width=3.125, height=2.0),
        Thing(label=1, x=5.0, y=3.0, width=15.0, height=6.0, rle=counts, crowd=True),
        Thing(label=1, x=1.0, y=1.0, width=9.0, height=9.0,
              polygons=((1.0, 1.0, 10.0, 1.0, 5.5, 10.0), (2.0, 2.0, 3.0, 2.0, 3.0, 3.0))),
    )  # fmt: skip
    pictures = tuple(
        Picture(file=str(picture(tmp_path / n)), path=n, height=HEIGHT, width=WIDTH, things=t)
        for n, t in (("a.png", things), ("sub/b.png", ()))
    )
    made = Annotations(classes=("cat", "dög"), pictures=pictures)
    coco.write(tmp_path / "a.json", made)
    assert coco.read(tmp_path / "a.json") == made
    areas = [a["area"] for a in json.loads((tmp_path / "a.json").read_text())["annotations"]]
    assert areas[:2] == [6.25, 90.0]
    (tmp_path / "sub/b.png").unlink()
    assert "1 of 2 pictures are not in" in coco.read(tmp_path / "a.json").notes[0]


def test_coco_s_ids_may_be_any(tmp_path):
    got = read(tmp_path, document(annotations=[thing(), thing(image_id=9, category_id=3)]))
    assert got.classes == ("cat", "dog")
    assert [[t.label for t in p.things] for p in got.pictures] == [[1], [0]]
    assert not got.problems


BROKEN = {
    "outside": (thing(bbox=[50, 2, 3, 3]), "outside"),
    "no area": (thing(bbox=[5, 5, 0, 3]), "no area"),
    "negative": (thing(bbox=[5, 5, -1, 3]), "no area"),
    "huge": (thing(bbox=[0, 0, 1e308, 1e308]), "four finite numbers"),
    "integer": (thing(bbox=[0, 0, 10**400, 1]), "four finite numbers"),
    "text": (thing(bbox=["1", 2, 3, 4]), "four finite numbers"),
    "true": (thing(bbox=[True, 2, 3, 4]), "four finite numbers"),
    "three": (thing(bbox=[1, 2, 3]), "four finite numbers"),
    "class": (thing(category_id=4), "class is unknown"),
    "class list": (thing(category_id=[5]), "class is unknown"),
    "picture": (thing(image_id=8), "of no picture"),
    "picture dict": (thing(image_id={}), "of no picture"),
    "no dict": ([1], "no annotation"),
    "no box": ({"id": 1, "image_id": 7, "category_id": 5}, "neither a box"),
    "outline of 400 digits": (
        {"id": 1, "image_id": 7, "category_id": 5, "segmentation": [[1, 2, 10**400, 4, 5, 6]]},
        "neither a box",
    ),
    "mask alone": (
        {"id": 1, "image_id": 7, "category_id": 5,
         "segmentation": {"size": [HEIGHT, WIDTH], "counts": "~~"}},
        "run lengths cannot be read",
    ),
    "mask size": (
        thing(segmentation={"size": [WIDTH, HEIGHT], "counts": [WIDTH * HEIGHT]}), "a mask of",
    ),
    "mask short": (thing(segmentation={"size": [HEIGHT, WIDTH], "counts": [5]}), "a mask is not"),
    "mask text": (thing(segmentation={"size": [HEIGHT, WIDTH], "counts": "~~"}), "a mask is not"),
    "mask long": (
        thing(segmentation={"size": [HEIGHT, WIDTH], "counts": "o" * 4000}), "a mask is not",
    ),
    "mask runs": (
        thing(segmentation={"size": [HEIGHT, WIDTH], "counts": [2**63]}), "run lengths",
    ),
    "two points": (thing(segmentation=[[1, 2, 3, 4]]), "three points"),
    "odd": (thing(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), "pairs of finite"),
    "far": (thing(segmentation=[[0, 0, 1e6, 0, 5, 5]]), "far out"),
    "point text": (thing(segmentation=[[0, 0, "x", 0, 5, 5]]), "pairs of finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_coco_s_broken_things_are_listed_and_the_good_ones_kept(tmp_path, name):
    """Of a thing whose mask is broken its box is good."""
    broken, what = BROKEN[name]
    boxed = isinstance(broken, dict) and "bbox" in broken
    if masked := boxed and "segmentation" in broken:
        broken["bbox"] = [3, 3, 6, 6]
    got = read(tmp_path, document(annotations=[thing(bbox=[1, 1, 5, 5]), broken, thing()]))
    boxes = [(t.x, t.width) for t in got.pictures[0].things]
    assert boxes == [(1.0, 5.0), *([(3.0, 6.0)] if masked else []), (1.5, 10.0)]
    assert not any(t.polygons or t.rle for t in got.pictures[0].things)
    (problem,) = got.problems
    assert what in problem.what
    assert problem.path in ("a.png", "a.json")


def test_what_lies_over_the_edge_is_cut_and_what_is_there_twice_counts_once(tmp_path):
    things = [thing(bbox=[30, 20, 20, 20]), thing(), thing(), thing(category_id=3)]
    things.append(thing(bbox=[0, 0, WIDTH + 1e-5, 5]))  # rounding: cut, and not worth a word
    got = read(tmp_path, document(annotations=things))
    assert [(t.x, t.y, t.width, t.height) for t in got.pictures[0].things] == [
        (30, 20, 10, 10), (1.5, 2, 10, 8), (1.5, 2, 10, 8), (0, 0, WIDTH, 5),
    ]  # fmt: skip
    assert [("cut" in p.what, "twice" in p.what) for p in got.problems] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_a_box_that_is_missing_is_drawn_around_the_mask(tmp_path):
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[4:7, 6:9] = 1
    shape = {"size": [HEIGHT, WIDTH], "counts": rle.counts_of(mask).tolist()}
    outline = [[2.0, 3.0, 8.0, 3.0, 8.0, 9.0]]
    made = [thing(segmentation=shape), thing(segmentation=outline)]
    for entry in made:
        del entry["bbox"]
    boxes = read(tmp_path, document(annotations=made)).pictures[0].things
    assert [(t.x, t.y, t.width, t.height) for t in boxes] == [(6, 4, 3, 3), (2, 3, 6, 6)]


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ({"id": 1, "file_name": "../x.png", "height": 5, "width": 5}, "out of the folder"),
        ({"id": 1, "file_name": "/etc/x.png", "height": 5, "width": 5}, "out of the folder"),
        ({"id": 7, "file_name": "c.png", "height": 5, "width": 5}, "twice"),
        ({"id": 1, "file_name": "./a.png", "height": 5, "width": 5}, "twice"),
        ({"id": 1, "file_name": "c.png", "height": 2**31, "width": 2**31}, "no picture's"),
        ({"id": 1, "file_name": "c.png", "height": 1 << 20, "width": 1 << 20}, "more than"),
        ({"id": 1, "file_name": "c.png", "height": 5.5, "width": 5}, "no picture's"),
        ({"id": 1, "file_name": "c.png", "height": 5}, "no picture's"),
        ({"id": 1, "file_name": "c.png"}, "cannot be read"),
        ({"id": 1.5, "file_name": "c.png", "height": 5, "width": 5}, "no picture"),
        ("a.png", "no picture"),
    ],
)
def test_coco_s_broken_pictures_are_listed(tmp_path, entry, what):
    plain = document(annotations=[thing()])
    plain["images"].append(entry)
    got = read(tmp_path, plain)
    assert [p.path for p in got.pictures] == ["a.png", "sub/b.png"]
    assert len(got.pictures[0].things) == 1
    assert what in got.problems[0].what


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "[" * 100_000, '{"a":' * 100_000, "nul",
        '{"images": [], "categories": [], "annotations": {}}',
        json.dumps(document(annotations=[thing()])).replace("1.5", "9" * 10_000),
        '{"images": [], "images": [], "categories": [], "annotations": []}',
    ],
)  # fmt: skip
def test_a_file_that_is_not_coco_s_is_refused(tmp_path, text):
    with pytest.raises(DataError):
        read(tmp_path, text)


@pytest.mark.parametrize("bound", ["MAX_JSON_LISTS", "MAX_JSON_VALUES", "MAX_JSON_BYTES"])
def test_a_file_that_would_take_much_memory_is_not_parsed(tmp_path, monkeypatch, bound):
    monkeypatch.setattr(files, bound, 5)
    monkeypatch.setattr(files.json, "loads", lambda *a, **k: pytest.fail("it was parsed"))
    with pytest.raises(DataError, match=r"too (much|large)"):
        read(tmp_path, document(annotations=[thing()]))


@pytest.mark.timeout(20)  # 0.3 s; names that were compared one by one took 60
def test_many_categories_take_no_time_and_too_many_are_told(tmp_path):
    many = [{"id": k, "name": f"c{k}"} for k in range(70_000)] + [{"id": 1, "name": "x"}]
    path = tmp_path / "many.json"
    path.write_text(json.dumps({"images": [], "categories": many, "annotations": []}))
    read = coco.read(path)
    assert read.classes == tuple(f"c{k}" for k in range(1 << 16))
    assert [p.what for p in read.problems] == [
        "70,001 categories, of which the first 65,536 are read"
    ]


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400, "NaN"])
def test_a_number_that_is_infinite_costs_its_thing_alone(tmp_path, number):
    """In an outline it costs the outline alone."""
    annotations = [thing(), thing(bbox=[3, 3, 5, 5], segmentation=[[1.5, 2, 7, 3, 4, 9]])]
    for place in ("1.5, 2, 10", "1.5, 2, 7"):
        text = json.dumps(document(annotations=annotations))
        got = read(tmp_path, text.replace(place, place.replace("1.5", number)))
        assert len(got.pictures[0].things) == (1 if place == "1.5, 2, 10" else 2)
        assert len(got.problems) == 1


@pytest.mark.timeout(20)  # a pipe that is opened waits for ever
def test_what_is_no_plain_file_is_not_opened(tmp_path):
    """Whichever format names it, with its size or without, as a picture or as a list."""
    (tmp_path / "images").mkdir()
    for name in ("images/a.png", "train.txt", "a.txt"):
        os.mkfifo(tmp_path / name)
    assert files.size_of(str(tmp_path / "images/a.png")) == "the picture is no plain file"
    assert files.size_of("/dev/zero") == "the picture is no plain file"
    got = read(tmp_path, document(images=[{"id": 7, "file_name": "images/a.png"}]))
    assert [(p.path, p.what) for p in got.problems] == [
        ("images/a.png", "the picture is no plain file")
    ]
    write(tmp_path / "list.txt", "images/a.png\n")
    for names in ("train.txt", "list.txt"):
        yaml = write(tmp_path / "data.yaml", f"names: [cat]\ntrain: {names}\n")
        with pytest.raises(DataError, match=r"no plain file|leads? to no pictures"):
            yolo.read(yaml)


def test_an_id_of_many_characters_is_cut_in_messages(tmp_path):
    twice = [{"id": "k" * 5000, "name": name} for name in ("cat", "dog")]
    (problem,) = read(tmp_path, document(categories=twice)).problems
    assert problem.what == f"category {'k' * 40} is there twice"


def test_coco_as_tables_and_other_tools_write_it(tmp_path):
    """Ids that are texts or 3.0, a picture without a size, CVAT's folder of a subset's pictures."""
    picture(tmp_path / "images/default/a b.png")
    plain = document(
        images=[{"id": "x1", "file_name": "a b.png"}],
        categories=[{"id": 3.0, "name": "cat"}, {"id": "d", "name": "dog"}],
        annotations=[thing(image_id="x1", category_id=3), thing(image_id="x1", category_id="d")],
    )
    write(tmp_path / "annotations/instances_default.json", json.dumps(plain))
    got = read_annotations(tmp_path)
    assert got.classes == ("cat", "dog")
    (one,) = got.pictures
    assert one.file == str(tmp_path / "images/default/a b.png")
    assert (one.height, one.width, [t.label for t in one.things]) == (HEIGHT, WIDTH, [0, 1])
    assert not got.problems


@pytest.mark.parametrize(
    "name",
    [
        "/data/upload/3/%61.png",
        "https://x.example/p/a.png?key=AK/2026/s3",
        f"https://x.example/p/a.png?X-Amz-Signature={'0f' * 150}",  # no file can be called so
        r"..\media\a.png",
        "/data/local-files/?d=a.png",
        "images\\a.png",
    ],
)
def test_pictures_that_label_studio_names_as_it_stores_them_are_found(tmp_path, name):
    picture(tmp_path / "images/a.png")
    write(tmp_path / "result.json", json.dumps(document(images=[{"id": 7, "file_name": name}])))
    for root in (None, tmp_path / "images"):
        got = read_annotations(tmp_path, image_root=root)
        assert [p.file for p in got.pictures] == [str(tmp_path / "images/a.png")]
        assert not got.problems
        assert ("last part" in " ".join(got.notes)) == (root is not None or name[0] != "i")
    twice = [{"id": number, "file_name": f"/{number}/a.png"} for number in (1, 2)]
    write(tmp_path / "result.json", json.dumps(document(images=twice)))
    assert not read_annotations(tmp_path).pictures


def test_what_cvat_s_brush_drew_is_a_thing_each(tmp_path):
    """CVAT gives every run length ``iscrowd`` 1."""
    picture(tmp_path / "images/default/a.png")
    mask = {"size": [HEIGHT, WIDTH], "counts": [5, 3, HEIGHT * WIDTH - 8]}
    drawn = thing(segmentation=mask, iscrowd=1, bbox=[0, 5, 1, 3])
    entries = [
        {**drawn, "attributes": {"occluded": False}},
        {**drawn, "attributes": {"occluded": False, "is_crowd": True}},
        drawn,
    ]
    plain = document(images=[{"id": 7, "file_name": "a.png"}])
    for number, (entry, crowd) in enumerate(zip(entries, [False, True, True], strict=True)):
        path = tmp_path / "annotations/instances_default.json"
        write(path, json.dumps({**plain, "annotations": [{**entry, "id": number}]}))
        got = read_annotations(tmp_path)
        assert [t.crowd for p in got.pictures for t in p.things] == [crowd]
        assert bool(got.notes) != crowd


# --- the other formats ----------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_yolo(tmp_path):
    for name in ("train/images/a.png", "train/images/b.png", "val/images/c.png"):
        picture(tmp_path / name)
    write(tmp_path / "train/labels/a.txt", "1 0.5 0.5 0.5 0.2\n0 0.1 0.1 0.5 0.1 0.5 0.5\n\n")
    write(tmp_path / "val/labels/c.txt", "2 .5 .5 .1 .1\n0 nan .5 .1 .1\n1 .5 .5 .1\n0 2 2 .1 .1")
    yaml = "train: ../train/images\nval: val/images\ntest: nowhere\nnames: {0: cat, 1: dog}\n"
    got = yolo.read(write(tmp_path / "data.yaml", yaml))
    assert got.classes == ("cat", "dog")
    assert [(p.path, p.split) for p in got.pictures] == [
        ("train/images/a.png", "train"), ("train/images/b.png", "train"),
        ("val/images/c.png", "val"),
    ]  # fmt: skip
    box, outline = got.pictures[0].things
    assert (box.label, box.x, box.y, box.width, box.height) == (1, 10, 12, 20, 6)
    assert outline.polygons == ((4.0, 3.0, 20.0, 3.0, 20.0, 15.0),)
    assert [p.path for p in got.problems] == ["val/images/c.png"] * 4 + ["nowhere"]


def test_yolo_s_odd_folders(tmp_path):
    """Key points are no outline, a picture counts once, labels lie beside it, and none is lost."""
    for name in ("images/a.png", "images/b.png", "images/c.png"):
        picture(tmp_path / name)
    write(tmp_path / "labels/a.txt", "0 .5 .5 .2 .2 .4 .4 .6 .6 .5 .5")
    write(tmp_path / "images/b.txt", "1 .5 .5 .2 .2 .1 .1 .6 .6 .5 .5\n0 .5 .5")
    write(tmp_path / "labels/lost.txt", "0 .5 .5 .2 .2")
    long = "x" * 300
    write(tmp_path / "val.txt", f"./images/a.png\nimages/none.png\nimages/{long}.png\n")
    text = "train: images\nval: [val.txt, LONG]\nkpt_shape: [3, 2]\nnames: {'0': cat, '1': dog}"
    got = yolo.read(write(tmp_path / "data.yaml", text.replace("LONG", long)))
    assert [[(t.label, round(t.width), t.polygons) for t in p.things] for p in got.pictures] == [
        [(0, 8, ())], [(1, 8, ())], [],
    ]  # fmt: skip
    assert [(p.path, p.what.split(":")[0]) for p in got.problems] == [
        ("images/b.png", "a line is neither a box nor an outline"),
        (long[:200], "there is no such folder or list"),
        (f"images/{long}"[:200], files.NOWHERE),
        ("images/a.png", "the picture is there twice"),
        ("images/none.png", "the picture cannot be read"),
        ("labels/lost.txt", "there is no picture of this name"),
    ]
    assert got.notes == ("2 pictures have no file of labels: they show nothing",)


@pytest.mark.parametrize("tool", ["Label Studio", "CVAT"])
def test_yolo_without_a_data_yaml(tmp_path, tool):
    """It looks like KITTI's folders: an outline would have been one of its boxes."""
    outline = "1 .1 .1 .5 .1 .5 .5 .1 .5"
    if tool == "CVAT":
        picture(tmp_path / "obj_train_data/a.png")
        write(tmp_path / "obj_train_data/a.txt", outline)
        write(tmp_path / "obj.names", "cat\ndog\n")
        write(tmp_path / "train.txt", "data/obj_train_data/a.png\n")
    else:
        picture(tmp_path / "images/a.png")
        write(tmp_path / "labels/a.txt", outline)
        kitti_s = read_annotations(tmp_path)
        assert "begins with a number" in kitti_s.problems[0].what
        assert not kitti_s.pictures[0].things
        write(tmp_path / "classes.txt", "cat\ndog\n")
    got = read_annotations(tmp_path)
    assert [(t.label, t.x, t.width) for t in got.pictures[0].things] == [(1, 4, 16)]
    assert (got.classes, got.problems) == (("cat", "dog"), ())


def test_cvat_s_list_for_validation_is_read(tmp_path):
    """CVAT calls it ``valid``: its pictures were lost without a word."""
    for split in ("train", "valid"):
        picture(tmp_path / f"obj_{split}_data/{split}.png")
        write(tmp_path / f"obj_{split}_data/{split}.txt", "1 .5 .5 .2 .2")
        write(tmp_path / f"{split}.txt", f"data/obj_{split}_data/{split}.png\n")
    write(tmp_path / "obj.names", "cat\ndog\n")
    yaml = "train: train.txt\nvalidation: valid.txt\nnames: [cat, dog]"
    for got in (read_annotations(tmp_path), yolo.read(write(tmp_path / "a.yaml", yaml))):
        assert [(p.split, len(p.things)) for p in got.pictures] == [("train", 1), ("val", 1)]
        assert not got.problems


@pytest.mark.parametrize(
    "text",
    [
        "a0: &a [x, y]\n" + "".join(f"a{i}: &a{i} [*a, *a]\n" for i in range(3)) + "names: *a",
        "names: [a, [b]]\ntrain: images", "names: {0: a, ? [1] : b}\ntrain: images",
        "names: [a]\ntrain: [[images], {images: 1}]", 'names: [a]\ntrain: "\\Uffffffff"',
        "", "- a", "names: 3", "names: [a, a]", "names: {0: a, 5: b}", "a: [", "\0",
        "names: [a]\ntrain: ../../../etc", "names: [a]\ntrain: /etc\n",
        "a: " + "[" * 5000,
        "a: &a [x]\n" + "".join(f"b{i}: &b{i} [*a, *a]\n" for i in range(200)),
        "!!python/object/apply:os.system ['true']",
    ],
)  # fmt: skip
def test_a_data_yaml_that_leads_nowhere_is_refused(tmp_path, text):
    with pytest.raises(DataError):
        yolo.read(write(tmp_path / "data.yaml", text))


def test_a_data_yaml_s_words_are_texts(tmp_path):
    """Of no type: what YAML says of one is not followed, however it is written."""
    picture(tmp_path / "2001-99-99/images/a.png")
    write(tmp_path / "2001-99-99/labels/a.txt", "1 .5 .5 .2 .2")
    long = "0x" + "f" * 6000
    text = "path: ~\nval: null\ntest:\ntrain: 2001-99-99\nnames: {0: yes, 1: 1.50, '2': %s}\n"
    odd = "a: !!bool abc\nb: !!timestamp abc\nc: !!int ''\nd: !!float x\ne: %s\n? %s\n: 1\n"
    yaml = write(tmp_path / "data.yaml", text % long + odd % (long, long))
    got = read_annotations(yaml)
    assert got.classes == ("yes", "1.50", long)
    assert [[t.label for t in p.things] for p in got.pictures] == [[1]]
    assert not got.problems


def test_labels_that_a_format_cannot_follow_are_refused(tmp_path):
    """YOLO's and COCO's numbers have their names already; KITTI's names take any order."""
    picture(tmp_path / "images/a.png")
    write(tmp_path / "labels/a.txt", "1 .5 .5 .2 .2")
    write(tmp_path / "classes.txt", "cat\ndog\n")
    (tmp_path / "a.json").write_text(json.dumps(document(annotations=[thing()])))
    for source in (tmp_path, tmp_path / "a.json"):
        assert read_annotations(source, labels=("cat", "dog")).classes == ("cat", "dog")
        with pytest.raises(UsageError, match=r"labels given.*dog, cat; .*cat, dog"):
            read_annotations(source, labels=("dog", "cat"))
    write(tmp_path / "labels/a.txt", "\nDontCare 0 0 0 1 1 5 5\ndog 0 0 0 1 1 5 5\n")
    write(tmp_path / "labels/classes.txt", "fox\ndog\ncat\n")
    for labels, classes in ((("dog", "cat"), ("dog", "cat")), (None, ("fox", "dog", "cat"))):
        (tmp_path / "classes.txt").unlink(missing_ok=True)  # the one with the labels counts, too
        got = read_annotations(tmp_path, labels=labels)
        assert (got.classes, got.problems) == (classes, ())
        label = classes.index("dog")
        assert [[(t.label, t.width) for t in p.things] for p in got.pictures] == [[(label, 4)]]


def voc_file(name: str, *objects: str, size: str = f"<height>{HEIGHT}</height>") -> str:
    width = f"<width>{WIDTH}</width>"
    inside = f"<filename>{name}</filename><size>{width}{size}</size>{''.join(objects)}"
    return f"<?xml version='1.0'?><annotation>{inside}</annotation>"


def voc_object(name: str, *corners: object) -> str:
    tags = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{t}>{v}</{t}>" for t, v in tags)
    return f"<object><name>{name}</name><bndbox>{box}</bndbox></object>"


def test_voc(tmp_path):
    """What is broken is listed beside its file, a picture that no XML is about (z), too."""
    for stem in "abcz":
        picture(tmp_path / f"JPEGImages/{stem}.png")
    folder = tmp_path / "Annotations"
    good = voc_object("dog", 1, 1, WIDTH, HEIGHT)
    write(folder / "a.xml", voc_file("a.png", good, voc_object("cat", 5, 6, 5, 6)))
    write(folder / "b.xml", voc_file("b.png", good, voc_object("cat", "nan", 1, 2, 3)))
    write(folder / "c.xml", voc_file("c.png", good, size="<height>31</height>"))
    write(folder / "d.xml", voc_file("../../secret.png", good))
    write(folder / "e.xml", voc_file("a.png", "<object>" * 50 + "</object>" * 50))
    bomb = "<!DOCTYPE x [<!ENTITY a 'aaaa'><!ENTITY b '&a;&a;&a;'>]>"
    write(folder / "f.xml", voc_file("a.png").replace("<annotation>", bomb + "<annotation>"))
    write(folder / "g.xml", "<annotation>")
    utf16 = voc_file("a.png").replace("<annotation>", bomb + "<annotation>")
    (folder / "h.xml").write_text(utf16.replace("'1.0'", "'1.0' encoding='utf-16'"), "utf-16")
    write(tmp_path / "ImageSets/Main/val.txt", "b\n")
    got = voc.read(tmp_path)
    assert got.classes == ("cat", "dog")
    assert [(p.path, p.split, len(p.things)) for p in got.pictures] == [
        ("JPEGImages/a.png", "", 2), ("JPEGImages/b.png", "val", 1),
    ]  # fmt: skip
    whole, dot = got.pictures[0].things
    assert (whole.x, whole.y, whole.width, whole.height) == (0, 0, WIDTH, HEIGHT)
    assert (dot.x, dot.y, dot.width, dot.height) == (4, 5, 1, 1)
    listed = {p.path: p.what for p in got.problems}
    assert set(listed) == {*(f"JPEGImages/{s}.png" for s in "bcz"), *(f"{s}.xml" for s in "defgh")}
    assert "no XML for the picture" in listed["JPEGImages/z.png"]
    assert "31" in listed["JPEGImages/c.png"]
    assert "deeper" in listed["e.xml"]
    assert "entities" in listed["f.xml"]
    assert "not UTF-8" in listed["h.xml"]


def test_voc_s_several_roots_and_odd_names(tmp_path):
    """Folders of years, files below files, a name that is wrong, one picture twice, difficult."""
    good = voc_object("dog", 1, 1, 9.5, 9)
    hard = voc_object("cat", 2, 2, 9, 9).replace("</name>", "</name><difficult>1</difficult>")
    for name in ("2007/JPEGImages/x/a.png", "2012/JPEGImages/a.png", "2012/JPEGImages/b.png"):
        picture(tmp_path / name)
    write(tmp_path / "2007/Annotations/x/a.xml", voc_file("a.png", good))
    write(tmp_path / "2012/Annotations/a.xml", voc_file("image.jpg", good, hard))
    write(tmp_path / "2012/Annotations/c.xml", voc_file("a.png", good))
    write(tmp_path / "2012/Annotations/d.xml", voc_file("x" * 300, good))
    got = read_annotations(tmp_path)
    assert [(p.path, [(t.label, t.crowd) for t in p.things]) for p in got.pictures] == [
        ("2007/JPEGImages/x/a.png", [(1, False)]),
        ("2012/JPEGImages/a.png", [(1, False), (0, True)]),
    ]
    assert [(p.path, "another XML" in p.what) for p in got.problems] == [
        ("c.xml", True), ("d.xml", False), ("2012/JPEGImages/b.png", False),
    ]  # fmt: skip
    assert "1 things are marked difficult" in got.notes[0]
    write(tmp_path / "cvat/annotations.xml", "<annotations><image name='a.png'/></annotations>")
    with pytest.raises(DataError, match="CVAT's own XML"):
        read_annotations(tmp_path / "cvat")


def test_kitti(tmp_path):
    for stem in "abc":
        picture(tmp_path / f"image_2/{stem}.png")
    rest = "1.5 1.6 3.9 1 2 3 0.1"
    write(
        tmp_path / "label_2/a.txt",
        f"Car 0.0 0 1.5 2 3 12.5 9 {rest}\nDontCare -1 -1 -10 1 1 5 5 {rest}\nVan 0 0 0 9 9 4 4",
    )
    write(tmp_path / "label_2/b.txt", f"Car 0 0 0 1 2\nCar 0 0 0 1 2 3 4 {rest} Car 0 0 0 5 6 7 8")
    write(tmp_path / "label_2/x.txt", "Car 0 0 0 1 2 3 4\n")
    got = kitti.read(tmp_path)
    assert got.classes == ("Car", "Van")
    assert [(p.path, len(p.things)) for p in got.pictures] == [
        ("image_2/a.png", 1), ("image_2/b.png", 1),
    ]  # fmt: skip
    car = got.pictures[0].things[0]
    assert (car.x, car.y, car.width, car.height) == (2, 3, 10.5, 6)
    assert got.notes == ("1 regions are called DontCare and were left out",)
    assert [p.path for p in got.problems] == [
        "x.txt", "image_2/a.png", "image_2/b.png", "image_2/b.png", "image_2/c.png",
    ]  # fmt: skip
    assert "of 23 words" in got.problems[3].what  # two lines in one, of which the first is read
    write(tmp_path / "classes.txt", "Van\n\nCar\n")
    (tmp_path / "training").mkdir()
    for name in ("image_2", "label_2", "classes.txt"):  # as KITTI is downloaded
        (tmp_path / name).rename(tmp_path / "training" / name)
    assert read_annotations(tmp_path).classes == ("Van", "Car")
    write(tmp_path / "training/label_2/classes.txt", "Car\nVan\n")  # there, too: no picture's
    assert "classes.txt" not in [p.path for p in read_annotations(tmp_path).problems]
    (tmp_path / "training/classes.txt").unlink()
    assert read_annotations(tmp_path).classes == ("Car", "Van")
    picture(tmp_path / "training/image_2/classes.jpg")
    write(tmp_path / "training/label_2/classes.txt", f"Tram 0 0 0 1 2 3 4 {rest}\n")
    assert read_annotations(tmp_path).classes == ("Car", "Tram", "Van")
    write(tmp_path / "training/classes.txt", "Van\nCar\nVan\n")
    with pytest.raises(DataError, match="named twice"):
        read_annotations(tmp_path)


def test_every_format_says_the_same_of_the_same_pictures(tmp_path):
    """Boxes on whole pixels, written by hand in the four ways."""
    picture(tmp_path / "images/a.png")
    boxes = [(0, 4, 5, 10, 8), (1, 20, 0, 20, 30)]
    entries = [thing(category_id=(3, 5)[k], bbox=list(b)) for k, *b in boxes]
    images = [{"id": 7, "file_name": "images/a.png", "height": HEIGHT, "width": WIDTH}]
    plain = document(images=images, annotations=entries)
    lines = [
        f"{k} {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}"
        for k, x, y, w, h in boxes
    ]
    write(tmp_path / "labels/a.txt", "\n".join(lines))
    yaml = write(tmp_path / "data.yaml", "train: images\nnames: [cat, dog]")
    names = ("cat", "dog")
    objects = [voc_object(names[k], x + 1, y + 1, x + w, y + h) for k, x, y, w, h in boxes]
    write(tmp_path / "Annotations/a.xml", voc_file("a.png", *objects))
    found = [read(tmp_path, plain), yolo.read(yaml), voc.read(tmp_path)]
    text = "\n".join(f"{names[k]} 0 0 0 {x} {y} {x + w} {y + h}" for k, x, y, w, h in boxes)
    write(tmp_path / "labels/a.txt", text)
    found.append(kitti.read(tmp_path))
    for got in found:
        assert not got.problems
        assert got.classes == names
        (one,) = got.pictures
        rounded = [
            dataclasses.replace(
                t, **{f: round(getattr(t, f), 9) for f in ("x", "y", "width", "height")}
            )
            for t in one.things
        ]
        assert [(t.label, t.x, t.y, t.width, t.height) for t in rounded] == boxes


def test_folders_of_splits_each_with_annotations_of_its_own(tmp_path):
    """As Roboflow exports COCO and Pascal VOC: a class that one split alone has moves the others'
    numbers."""
    for split, names in (("train", ("ape", "dog")), ("valid", ("cat", "dog"))):
        objects = [voc_object(name, 1, 1, 9, 9) for name in names]
        picture(tmp_path / f"voc/{split}/a b.png")
        write(tmp_path / f"voc/{split}/a b.xml", voc_file("a b.png", *objects))
        picture(tmp_path / f"coco/{split}/a.png")
        entries = [thing(), thing(bbox=[1, 1, 0, 1])]
        plain = document(images=document()["images"][:1], annotations=entries)
        write(tmp_path / f"coco/{split}/_annotations.coco.json", json.dumps(plain))
    got = read_annotations(tmp_path / "voc")
    assert got.classes == ("ape", "cat", "dog")
    assert [(p.path, p.split, [t.label for t in p.things]) for p in got.pictures] == [
        ("train/a b.png", "train", [0, 2]), ("valid/a b.png", "val", [1, 2]),
    ]  # fmt: skip
    got = read_annotations(tmp_path / "coco")
    assert got.classes == ("cat", "dog")
    assert [(p.path, p.split, len(p.things)) for p in got.pictures] == [
        ("train/a.png", "train", 1), ("valid/a.png", "val", 1),
    ]  # fmt: skip
    assert [p.path for p in got.problems] == ["train/a.png", "valid/a.png"]
    # as COCO itself comes: files of splits in one folder, with others that say something else
    for split in ("train", "val"):
        picture(tmp_path / f"own/{split}2017/a.png")
        file = tmp_path / f"own/annotations/instances_{split}2017.json"
        write(file, json.dumps(plain))
        write(file.with_name(f"captions_{split}2017.json"), "{}")
    got = read_annotations(tmp_path / "own")
    assert [(p.split, Path(p.file).parent.name) for p in got.pictures] == [
        ("train", "train2017"), ("val", "val2017"),
    ]  # fmt: skip
    (tmp_path / "ring").mkdir()
    for name in ("train", "val", "test"):  # folders without an end
        (tmp_path / "ring" / name).symlink_to(".")
    with pytest.raises(DataError, match="no annotations here"):
        read_annotations(tmp_path / "ring")
    write(tmp_path / "own/annotations/instances_val_small.json", json.dumps(plain))
    with pytest.raises(DataError, match="several files"):
        read_annotations(tmp_path / "own")


def test_voc_s_splits_of_names_with_blanks_and_cvat_s_kitti(tmp_path):
    picture(tmp_path / "voc/JPEGImages/a b.png")
    write(tmp_path / "voc/Annotations/a b.xml", voc_file("a b.png", voc_object("x", 1, 1, 9, 9)))
    write(tmp_path / "voc/ImageSets/Main/val.txt", "a b \n")
    assert [p.split for p in read_annotations(tmp_path / "voc").pictures] == ["val"]
    picture(tmp_path / "kitti/default/image_2/a.png")
    write(tmp_path / "kitti/default/label_2/a.txt", "Car 0 0 0 2 3 12 9 0 0 0 0 0 0 0")
    assert [len(p.things) for p in read_annotations(tmp_path / "kitti").pictures] == [1]
