"""Whatever annotations a path leads to: the format is seen from the file or the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tessella.annotations import coco, kitti, voc, yolo
from tessella.annotations.record import Annotations
from tessella.core.errors import DataError, UsageError

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
        source: COCO's JSON, a ``data.yaml``, or a folder of COCO, YOLO, Pascal VOC or KITTI.
        labels: the classes in their order, where the format only names those that occur: Pascal
            VOC's and KITTI's. COCO and YOLO number their classes: there the same are asked for.
        image_root: what the names of pictures in COCO's JSON are relative to.

    Raises:
        DataError: nothing there, or a file that is none of these.
        UsageError: ``labels`` are not the classes that COCO's or YOLO's file numbers.
    """
    reader = _reader(source, labels, image_root)
    if reader is None:
        raise DataError(
            "there are no annotations here that can be read",
            seen=source,
            fix="give COCO's JSON, a data.yaml, or a folder of COCO, YOLO, Pascal VOC or KITTI",
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


def _reader(
    source: Path, labels: tuple[str, ...] | None, image_root: Path | None
) -> Callable[[], Annotations] | None:
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
        return lambda: coco.read(_only(files), image_root=image_root)
    if voc.roots_of(source) or any(source.glob("*.xml")):
        return lambda: voc.read(source, labels=labels)
    if yolo.is_folder(source) and not kitti.begins_with_names(source):
        return lambda: yolo.read_folder(source)
    for folder in (source, source / "training"):  # KITTI's own download has training and testing
        if kitti.is_folder(folder):
            return lambda: kitti.read(folder, labels=labels)
    return None


def _only(files: list[Path]) -> Path:
    if len(files) > 1:
        raise DataError(
            "the folder has several files of annotations",
            seen=", ".join(f.name for f in files[:10]),
            fix="name one of these files, and another for validation",
        )
    return files[0]
