"""Large pictures with boxes or masks, cut into tiles that an import reads: aerial views, slides.

A folder is made that ``import_images`` takes as it is: COCO's JSON beside pictures, or pictures and
masks. All tiles of a picture are one group, so that a holdout leaves none of it in training.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tessella.annotations import coco, rle
from tessella.annotations.record import Annotations, Picture, Thing
from tessella.artifacts.dataset import SkippedFile
from tessella.artifacts.files import require_place, write_folder
from tessella.core.errors import DataError, UsageError
from tessella.core.events import Emit, phase, progress, silent
from tessella.core.legible import legible
from tessella.core.pictures import Pixels, read_pixels
from tessella.core.preprocess import encode
from tessella.core.tiles import Tiles
from tessella.data.listing import GROUPS, GROUPS_HEAD, read_groups
from tessella.data.sources import find
from tessella.tasks import Found, Request, Source, named
from tessella.tasks.detection.examples import VISIBLE, inside
from tessella.tasks.moves import Floats
from tessella.tasks.segmentation import examples as masks

ANNOTATIONS = "annotations.json"
BOXED = ("detection", "instances")
Window = tuple[int, int, int, int]  # top, left, height and width
Placed = tuple[str, str, Window]  # group and name of a tile, and where it lies in its picture


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """What was cut.

    Attributes:
        folders: by split (``train``, ``val``, ``test``, or empty: nobody said), what to import.
        pictures, tiles, things: how many; a thing counts in every tile that shows some of it.
        channels, depth: channels and bits of most pictures, as an import is to be told.
    """

    folders: dict[str, Path]
    pictures: int
    tiles: int
    things: int
    skipped: tuple[SkippedFile, ...]
    channels: int = 3
    depth: int = 8


def cut(
    source: str | Path,
    out: str | Path,
    tiles: Tiles,
    *,
    task: str = "detection",
    image_root: str | Path | None = None,
    emit: Emit = silent,
) -> Tiled:
    """Cut annotated pictures, or pictures with masks, into tiles.

    Of a thing a tile has the part that it shows; with less than three tenths of it, it is a crowd,
    in which no answer counts as wrong. A picture that is smaller than a tile is filled up with
    grey, to which no class is given.

    Args:
        source: as an import takes it: COCO, YOLO, Pascal VOC or KITTI, or ``images`` and ``masks``.
        out: the folder to make, which must not exist yet.
        task: ``detection``, ``instances`` or ``segmentation``.

    Raises:
        DataError: the annotations cannot be read, or no picture can.
        UsageError: ``out`` is there already, or the task has no tiles.
    """
    source, out = Path(source), Path(out)
    if task not in (*BOXED, "segmentation"):
        raise UsageError(
            "tiles are for answers that have a place",
            seen=task,
            fix=f"{', '.join(BOXED)} or segmentation",
        )
    if out.exists():
        raise UsageError("the folder of the tiles is there already", seen=out, fix="choose another")
    require_place(out)
    emit(phase("find", f"looking for pictures in {source}"))
    root = None if image_root is None else Path(image_root)
    request = Request(source=source, labels=None, image_root=root, by_folder=find)
    found = named(task).examples.find(request)
    groups = found.groups or read_groups(source)
    made: list[Tiled] = []

    def fill(folder: Path) -> None:
        made.append(_Cutter(found, tiles, folder, groups, emit).cut(task in BOXED))

    write_folder(out, fill)
    (told,) = made
    return replace(told, folders={split: out / split for split in told.folders})


class _Cutter:
    """Writes the tiles of all pictures, by their splits."""

    def __init__(
        self, found: Found, tiles: Tiles, folder: Path, groups: Mapping[str, str], emit: Emit
    ) -> None:
        self._found, self._tiles, self._folder, self._emit = found, tiles, folder, emit
        self._groups = groups
        self._skipped = list(found.skipped)
        self._written: dict[str, list[tuple[str, str]]] = {}  # by split: tile and group
        self._boxed: dict[str, list[Picture]] = {}
        self._pictures = 0
        self._kinds = Counter[tuple[int, int]]()  # channels and bits

    def cut(self, boxed: bool) -> Tiled:
        total = len(self._found.sources)
        for number, source in enumerate(self._found.sources):
            try:  # to read alone: what cannot be written ends it
                pixels = self._read(source)
                mask = None if boxed else _mask_of(source, pixels)
            except (DataError, OSError, ValueError) as error:  # of a name that no file can have
                why = legible(str(error)[:300])
                self._skipped.append(SkippedFile(path=legible(source.path), reason=why))
                continue
            places = self._places(number, source, pixels)
            if mask is None:
                self._boxes(source, pixels, places)
            else:
                self._masks(source, pixels, places, mask)
            self._pictures += 1
            self._kinds[pixels.shape[2], 8 * pixels.itemsize] += 1
            self._emit(progress("tiles", number + 1, total))
        if not self._written:
            first = self._skipped[0]
            raise DataError(
                "no picture could be cut", seen=f"{first.path}: {first.reason}", fix="check them"
            )
        for split, rows in self._written.items():
            self._close(split, rows)
        ((channels, depth), _) = self._kinds.most_common(1)[0]
        return Tiled(
            folders={split: self._folder / split for split in self._written},
            pictures=self._pictures,
            tiles=sum(len(rows) for rows in self._written.values()),
            things=sum(len(p.things) for some in self._boxed.values() for p in some),
            skipped=tuple(self._skipped),
            channels=channels,
            depth=depth,
        )

    @staticmethod
    def _read(source: Source) -> Pixels:
        with open(source.file, "rb") as file:
            pixels = read_pixels(file.read(), name=source.path)
        if isinstance(source.label, Picture):
            _require_size(pixels, source.label.height, source.label.width)
        return pixels

    def _places(self, number: int, source: Source, pixels: Pixels) -> list[Placed]:
        group = self._groups.get(source.path, legible(source.path))
        suffix = ".png" if pixels.shape[2] in (1, 3) else ".tif"
        stem = re.sub(r"[^\w.-]+", "-", Path(source.path).stem)[:80]
        return [
            (group, f"{number:05d}-{stem}-{top}-{left}{suffix}",
             (top, left, self._tiles.height, self._tiles.width))
            for top, left in self._tiles.places(*pixels.shape[:2])
        ]  # fmt: skip

    def _write(self, split: str, name: str, group: str, content: bytes) -> None:
        images = self._folder / split / "images"
        images.mkdir(parents=True, exist_ok=True)
        (images / name).write_bytes(content)
        self._written.setdefault(split, []).append((name, group))

    def _boxes(self, source: Source, pixels: Pixels, places: list[Placed]) -> None:
        picture: Picture = source.label
        boxes = [(t.x, t.y, t.x + t.width, t.y + t.height) for t in picture.things]
        boxes_N4 = np.array(boxes, np.float64).reshape(-1, 4)
        for (group, name, window), part in zip(places, self._parts(pixels), strict=True):
            self._write(source.split, name, group, encode(part))
            made = Picture(
                file="", path=f"images/{name}", height=window[2], width=window[3],
                things=tuple(_seen(picture, boxes_N4, window)),
            )  # fmt: skip
            self._boxed.setdefault(source.split, []).append(made)

    def _masks(
        self, source: Source, pixels: Pixels, places: list[Placed], mask: masks.Mask
    ) -> None:
        for (group, name, (top, left, height, width)), part in zip(
            places, self._parts(pixels), strict=True
        ):
            shown = mask[top : top + height, left : left + width]
            self._write(source.split, name, group, encode(part))
            place = self._folder / source.split / "masks" / name
            place.parent.mkdir(exist_ok=True)
            filled = self._tiles.filled(shown, masks.IGNORED)
            place.with_suffix(".png").write_bytes(masks.encoded(filled))

    def _parts(self, pixels: Pixels) -> Iterator[Pixels]:
        return (part for _, _, part in self._tiles.parts(pixels))

    def _close(self, split: str, rows: list[tuple[str, str]]) -> None:
        """What says the classes, the things and the groups."""
        folder, below = self._folder / split, ""
        if self._boxed:
            below = "images/"  # as the annotations call a picture
            pictures = tuple(self._boxed[split])
            made = Annotations(classes=self._found.classes, pictures=pictures)
            coco.write(folder / ANNOTATIONS, made)
        else:
            (folder / "classes.txt").write_text("".join(f"{c}\n" for c in self._found.classes))
        with open(folder / GROUPS, "w", newline="") as file:
            csv.writer(file).writerows(
                [GROUPS_HEAD, *((below + name, group) for name, group in rows)]
            )


def _mask_of(source: Source, pixels: Pixels) -> masks.Mask:
    mask = masks.mask_in(source.label)
    _require_size(pixels, *mask.shape)
    return mask


def _require_size(pixels: Pixels, height: int, width: int) -> None:
    if pixels.shape[:2] != (height, width):
        raise DataError(
            "the annotations are for another size",
            seen=f"{(height, width)}, the picture {pixels.shape[:2]}",
        )


def _seen(picture: Picture, boxes_N4: Floats, window: Window) -> Iterator[Thing]:
    """What a window shows of a picture's things and their boxes, in its own pixels."""
    top, left, height, width = window
    frame = (left, top, min(left + width, picture.width), min(top + height, picture.height))
    shown_N4, share_N = inside(boxes_N4, frame)
    for number in np.flatnonzero(share_N > 0).tolist():
        thing, share = picture.things[number], float(share_N[number])
        x0, y0, x1, y1 = (shown_N4[number] - [left, top, left, top]).tolist()
        made = replace(thing, x=x0, y=y0, width=x1 - x0, height=y1 - y0, polygons=(), rle=b"")
        counts = coco.mask_counts(thing, picture)
        if counts is not None:
            part = rle.seen_in(counts, picture.height, window)
            if not part[1::2].any():
                continue
            share = part[1::2].sum() / max(1, counts[1::2].sum())
            x, y, wide, high = rle.box_of(part, height)
            made = replace(made, x=x, y=y, width=wide, height=high, rle=rle.compressed(part))
        yield replace(made, crowd=thing.crowd or bool(share < VISIBLE))
