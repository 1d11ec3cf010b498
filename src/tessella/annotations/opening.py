"""Whatever annotations a path leads to: the format is seen from the file or the folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from tessella.annotations import bare, coco, kitti, voc, yolo
from tessella.annotations.record import Annotations, Picture, Problem
from tessella.core.errors import DataError, UsageError

Reader = Callable[[], Annotations]
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
COCO_FILES = (
    "_annotations.coco.json",
    "annotations.json",
    "instances.json",
    "labels.json",
    "result.json",  # Label Studio's
)


def is_annotated(source: Path) -> bool:
    """Whether a file or a folder looks like annotations of boxes or masks."""
    return _reader(source, None, None) is not None


def read_annotations(
    source: Path, *, labels: tuple[str, ...] | None = None, image_root: Path | None = None
) -> Annotations:
    """The annotations at a path.

    Args:
        source: COCO's JSON, a ``data.yaml``, or a folder of COCO, YOLO, Pascal VOC or KITTI; or,
            with ``labels``, of nothing but pictures, on which things will be drawn.
        labels: the classes in their order, where the format only names those that occur: Pascal
            VOC's and KITTI's. COCO and YOLO number their classes: there the same are asked for.
        image_root: what the names of pictures in COCO's JSON are relative to.

    Raises:
        DataError: nothing there, or a file that is none of these.
        UsageError: ``labels`` are not the classes that COCO's or YOLO's file numbers.
    """
    reader = _reader(source, labels, image_root)
    if reader is None and labels and source.is_dir() and bare.is_folder(source):
        return bare.read(source, labels=labels)
    if reader is None:
        raise DataError(
            "there are no annotations here that can be read",
            seen=source,
            fix="give COCO's JSON, a data.yaml, or a folder of COCO, YOLO, Pascal VOC or KITTI; "
            "or a folder of nothing but pictures, and the classes to draw by --labels",
        )
    found = reader()
    if labels is not None and labels != found.classes:
        shown, given = (", ".join(n[:40] for n in names[:10]) for names in (found.classes, labels))
        raise UsageError(
            "the labels given are not the classes of the annotations",
            seen=f"{given}; in {source}: {shown}",
            fix="leave the labels out: the annotations number their classes",
        )
    return found


def _reader(source: Path, labels: tuple[str, ...] | None, image_root: Path | None) -> Reader | None:
    own = _own_reader(source, labels, image_root)
    return _of_folders(source, labels, image_root) if own is None else own


def _own_reader(
    source: Path, labels: tuple[str, ...] | None, image_root: Path | None
) -> Reader | None:
    """Of what lies in a folder itself, and not in folders of splits."""
    suffix = source.suffix.lower()
    if source.is_file() and suffix == ".json":
        return lambda: coco.read(source, image_root=image_root)
    if source.is_file() and suffix in (".yaml", ".yml"):
        return lambda: yolo.read(source)
    if not source.is_dir():
        return None
    if (source / "data.yaml").is_file():
        return lambda: yolo.read(source / "data.yaml")
    for name in COCO_FILES:
        if (source / name).is_file():
            return lambda: coco.read(source / name, image_root=image_root)
    if files := sorted((source / "annotations").glob("*.json")):
        if parts := _by_split(files):
            readers = {s: (f.stem, partial(coco.read, f, image_root=image_root))
                       for s, f in parts.items()}  # fmt: skip
            return lambda: _joined(readers)
        return lambda: coco.read(_only(files), image_root=image_root)
    if voc.roots_of(source) or any(source.glob("*.xml")):
        return lambda: voc.read(source, labels=labels)
    if yolo.is_folder(source) and not kitti.begins_with_names(source):
        return lambda: yolo.read_folder(source)
    # KITTI's own download has training and testing, CVAT calls its first part default
    for folder in (source, source / "training", source / "default"):
        if kitti.is_folder(folder):
            return lambda: kitti.read(folder, labels=labels)
    return None


def _of_folders(
    source: Path, labels: tuple[str, ...] | None, image_root: Path | None
) -> Reader | None:
    """Of a folder train beside valid and test, each with annotations of its own."""
    readers: dict[str, tuple[str, Reader]] = {}
    for split, names in SPLITS.items():
        for name in names:
            reader = _own_reader(source / name, labels, image_root)
            if reader is not None and split not in readers:
                readers[split] = name, reader
    return (lambda: _joined(readers)) if "train" in readers and len(readers) > 1 else None


def _by_split(files: list[Path]) -> dict[str, Path]:
    """The files of the splits, as COCO's own download has them; nothing where names are others."""
    own = [file for file in files if file.name.startswith("instances")] or files
    found: dict[str, Path] = {}
    for file in own:
        splits = [s for s, names in SPLITS.items() if any(n in file.stem for n in (s, *names))]
        if len(splits) != 1 or splits[0] in found:
            return {}
        found[splits[0]] = file
    return found if "train" in found and len(found) > 1 else {}


def _joined(readers: Mapping[str, tuple[str, Reader]]) -> Annotations:
    """The annotations of all splits together, with every class that one of them has.

    Raises:
        DataError: as each of the readers.
    """
    read = {split: (name, reader()) for split, (name, reader) in readers.items()}
    lists = {found.classes for _, found in read.values()}
    classes = (
        lists.pop() if len(lists) == 1 else tuple(sorted({n for names in lists for n in names}))
    )
    numbers = {name: label for label, name in enumerate(classes)}
    pictures: list[Picture] = []
    problems: list[Problem] = []
    notes: list[str] = []
    for split, (name, found) in read.items():
        label = [numbers[n] for n in found.classes]
        pictures += [
            replace(
                picture,
                path=f"{name}/{picture.path}",
                split=split,
                things=tuple(replace(t, label=label[t.label]) for t in picture.things),
            )
            for picture in found.pictures
        ]
        problems += [Problem(path=f"{name}/{p.path}", what=p.what) for p in found.problems]
        notes += [f"{name}: {note}" for note in found.notes]
    return Annotations(
        classes=classes, pictures=tuple(pictures), problems=tuple(problems), notes=tuple(notes)
    )


def _only(files: list[Path]) -> Path:
    if len(files) > 1:
        raise DataError(
            "the folder has several files of annotations",
            seen=", ".join(f.name for f in files[:10]),
            fix="name one of these files, and another for validation",
        )
    return files[0]
