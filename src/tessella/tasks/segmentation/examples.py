"""Targets of segmentation: a mask of class numbers, in the dataset a PNG of the picture's size.

Pixels of the number 255 have no class: nothing is learned from them, and nothing measured.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from PIL import Image

from tessella.annotations import coco, read_annotations, rle
from tessella.annotations.files import read_bytes, read_text, size_of
from tessella.annotations.record import Picture
from tessella.artifacts.dataset import SkippedFile
from tessella.core.count import counted
from tessella.core.errors import DataError
from tessella.core.pictures import MAX_PIXELS, read_pixels
from tessella.core.preprocess import Preprocess, placement
from tessella.tasks import by_place
from tessella.tasks.found import Found, Request, Source
from tessella.tasks.moves import Moves
from tessella.tasks.pieces import Piece, joined

Mask = npt.NDArray[np.uint8]

NAMES = "classes"
SMOOTHED = True
PLACED = True
JOINED: tuple[str, ...] = ("mosaic",)
IGNORED = 255
BACKGROUND = "background"  # of annotations that name things only
IMAGES = ("images", "image", "JPEGImages")
MASKS = ("masks", "mask", "labels", "annotations", "SegmentationClass")
LISTS = ("classes.txt", "labels.txt")
COLORS = "labelmap.txt"  # CVAT's: a line "name:r,g,b:…" for each class
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MAX_FILE = 1 << 28
WHITE = "masks of 0 and 255 alone, of which 255 is the second class"
NUMBERS = "masks with the numbers of classes, of which 255 is none"


@dataclass(frozen=True)
class MaskFile:
    """A picture's mask as a PNG whose pixels are numbers of so many classes.

    Attributes:
        colors: of the classes in their order, where the pixels are colours.
        binary: 255 is the second of two classes.
        state: size and time of the file: an import knows again whether it has changed.
    """

    file: str
    classes: int
    state: str
    colors: tuple[tuple[int, ...], ...] = ()
    binary: bool = False


def find(request: Request) -> Found:
    """Pictures with their masks, in one of two forms.

    - a folder with ``images`` and ``masks``: PNGs of the same names, whose pixels are numbers of
      classes; ``classes.txt`` names these, a line each. With CVAT's ``labelmap.txt`` they are the
      colours that it names. Masks that hold 0 and 255 alone have two classes, and so must those
      of all parts of a dataset;
    - annotations with outlines or run lengths (``annotations.opening``): their classes follow
      a class ``background``, and later things lie over earlier ones. A class of theirs that is
      called so is the same, and its things lie below all others.
    """
    folders = _folders(request.source)
    if folders is None:
        return _annotated(request)
    images, masks = folders
    files = sorted(p for p in images.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    found, skipped = [], []
    for file in files:
        below = file.relative_to(images)
        mask = (masks / below).with_suffix(".png")
        path = below.as_posix()
        if mask.is_file():
            found.append((file, path, mask))
        else:
            reason = f"there is no mask {mask.name[:100]} of this picture"
            skipped.append(SkippedFile(path=path, reason=reason))
    if not found:
        raise DataError("no picture has a mask", seen=request.source, fix="give both one name")
    colors = _colors(request.source / COLORS)
    classes, written = request.labels or tuple(colors) or _named(request.source), ""
    if not colors and len(classes) in (0, 2):
        counted, written = _counted([m for _, _, m in found])
        classes = classes or counted
    binary = written == WHITE
    if lost := sorted(set(classes) - set(colors)) if colors else []:
        raise DataError(f"{COLORS} has no colour of a class", seen=", ".join(lost)[:200])
    told = tuple(colors[name] for name in classes) if colors else ()
    sources = tuple(
        Source(
            str(file), path,
            MaskFile(str(mask), len(classes), by_place.state_of(mask), colors=told, binary=binary),
        )
        for file, path, mask in found
    )  # fmt: skip
    notes = ("the masks hold 0 and 255 alone: 255 is read as the second class",) if binary else ()
    return Found(
        classes=classes, sources=sources, skipped=tuple(skipped), notes=notes, written=written
    )


def _colors(file: Path) -> dict[str, tuple[int, ...]]:
    """The colour of each class by its name; nothing where there is no such file.

    Raises:
        DataError: a line is no class with a colour, a name or a colour is there twice, or there
            are more than a mask can number.
    """
    known: dict[str, tuple[int, ...]] = {}
    taken: set[tuple[int, ...]] = set()
    for line in read_text(file).splitlines() if file.is_file() else ():
        if not line.strip() or line.startswith("#"):
            continue
        if len(known) == IGNORED:
            raise DataError(f"{COLORS} names more than {IGNORED} classes", seen=line[:80])
        name, *rest = line.split(":")
        words = rest[0].split(",") if rest else []
        color = tuple(int(w) for w in map(str.strip, words) if _is_byte(w))
        if len(color) != 3 or len(words) != 3 or name in known or color in taken:
            raise DataError(
                f"a line of {COLORS} is no class with a colour of its own",
                seen=line[:80],
                fix="write name:red,green,blue:: with numbers up to 255",
            )
        known[name] = color
        taken.add(color)
    return known


def _is_byte(word: str) -> bool:
    return len(word) <= 3 and word.isdecimal() and int(word) < 256


def _folders(source: Path) -> tuple[Path, Path] | None:
    images = next((source / n for n in IMAGES if (source / n).is_dir()), None)
    masks = next((source / n for n in MASKS if (source / n).is_dir()), None)
    if images is None or masks is None or next(masks.rglob("*.png"), None) is None:
        return None
    return images, masks


def _named(source: Path) -> tuple[str, ...]:
    """The classes that a file beside the pictures names."""
    for name in LISTS:
        if (source / name).is_file():
            return by_place.listed(source / name)
    return ()


def _counted(masks: Sequence[Path]) -> tuple[tuple[str, ...], str]:
    """A name for each number up to the largest that occurs, and how the masks are written: nothing
    where all are 0.

    Masks that cannot be read wait.
    """
    highest, white = 0, False
    for mask in masks:
        try:
            numbers = np.unique(read_mask(str(mask)))
        except DataError:
            continue
        highest = max(highest, *(int(n) for n in numbers[numbers != IGNORED]), 0)
        white |= bool((numbers == IGNORED).any())
    # 255 as a mark of no class, beside nothing but 0, would leave nothing to learn.
    written = NUMBERS if highest else WHITE if white else ""
    return tuple(f"class {k}" for k in range(1 + (1 if written == WHITE else highest))), written


def _annotated(request: Request) -> Found:
    found = read_annotations(request.source, labels=request.labels, image_root=request.image_root)
    things = [thing for picture in found.pictures for thing in picture.things]
    lost = sum(not (t.polygons or t.rle) for t in things)
    if lost == len(things) and not found.bare:
        raise DataError(
            "the annotations have no masks",
            seen="; ".join((f"{counted(lost, 'box', 'boxes')} in {request.source}", *found.said())),
            fix="give outlines or run lengths, or a folder with images and masks",
        )
    note = f"{lost:,} things have a box and no mask: nothing is learned in these boxes"
    notes = (note,) if lost else ()
    own = next((k for k, name in enumerate(found.classes) if is_ground(name)), None)
    pictures = found.pictures if own is None else [_on_ground(p, own) for p in found.pictures]
    return Found(
        classes=(BACKGROUND, *(name for k, name in enumerate(found.classes) if k != own)),
        sources=tuple(Source(p.file, p.path, p, p.split) for p in pictures),
        notes=(*found.said(), *notes),
        bare=found.bare,
    )


def is_ground(name: str) -> bool:
    """Whether a class is called as that of pixels on which nothing lies."""
    return name.casefold() == BACKGROUND


def _on_ground(picture: Picture, ground: int) -> Picture:
    """A picture whose things of class ``ground`` have the label -1, and lie below the others."""
    things = [
        replace(t, label=-1 if t.label == ground else t.label - (t.label > ground))
        for t in picture.things
    ]
    return replace(picture, things=tuple(sorted(things, key=lambda t: t.label >= 0)))


def stored(target: MaskFile | Picture, file: str, record: Preprocess) -> dict[str, Any]:
    """The mask in the record's size as PNG: each pixel has the class of the nearest one."""
    size = size_of(file)
    if isinstance(size, str):
        raise DataError(size)
    mask = mask_in(target)
    if mask.shape != size:
        what = "the mask has" if isinstance(target, MaskFile) else "the annotations are for"
        raise DataError(f"{what} another size", seen=f"{mask.shape}, the picture {size}")
    return target_of(fitted(mask, record))


def mask_in(target: MaskFile | Picture) -> Mask:
    """The class of each pixel of a picture, in its own size.

    Raises:
        DataError: the file is no mask, or has the number of no class.
    """
    if isinstance(target, Picture):
        return painted(target)
    mask = read_mask(target.file, target.colors)
    mask = np.where(mask == IGNORED, np.uint8(1), mask) if target.binary else mask
    wrong = mask[(mask >= target.classes) & (mask != IGNORED)]
    if len(wrong):
        seen = f"{wrong[0]}, {target.classes} classes"
        raise DataError("the mask has the number of no class", seen=seen)
    return mask


def target_of(mask: Mask) -> dict[str, Any]:
    """A mask as the dataset holds it: PNG, and which classes it has."""
    numbers = np.unique(mask)
    return {"mask": encoded(mask), "classes": numbers[numbers != IGNORED].tolist()}


def painted(picture: Picture) -> Mask:
    """The mask of a picture's things: class k is number k + 1, what is a crowd is ignored, and so
    is the box of a thing that has no mask."""
    mask = np.zeros((picture.height, picture.width), np.uint8)
    for thing in picture.things:
        if not (thing.polygons or thing.rle):
            rows, columns = (
                slice(int(first), math.ceil(first + side))
                for first, side in ((thing.y, thing.height), (thing.x, thing.width))
            )
            mask[rows, columns] = IGNORED
    for thing in picture.things:
        counts = coco.mask_counts(thing, picture)
        if counts is not None:
            x, y, width, height = map(int, rle.box_of(counts, picture.height))
            seen = rle.seen_in(counts, picture.height, (y, x, height, width))
            inside = rle.mask_of(seen, height, width).astype(bool)  # not of a whole large picture
            mask[y : y + height, x : x + width][inside] = (
                IGNORED if thing.crowd else thing.label + 1
            )
    return mask


def read_mask(file: str, colors: Sequence[tuple[int, ...]] = ()) -> Mask:
    """The class numbers in a PNG: of a grey one its values, of one with a palette its indices.

    Args:
        colors: of the classes: then each pixel's colour says its class.
    """
    content = read_bytes(Path(file), MAX_FILE)
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError("the mask has too many pixels", seen=image.size)
            if colors:
                return _classes_of(np.asarray(image.convert("RGB")), colors)
            if image.mode in ("RGB", "RGBA"):  # grey, saved as colour
                pixels = np.asarray(image)
                if (pixels[:, :, :1] == pixels[:, :, 1:3]).all():
                    return np.ascontiguousarray(pixels[:, :, 0])
            if image.mode == "I;16" or image.mode == "I":
                deep = np.asarray(image)
                if deep.max(initial=0) > IGNORED:
                    raise DataError("the mask has the number of no class", seen=int(deep.max()))
                return deep.astype(np.uint8)
            if image.mode not in ("1", "L", "P"):
                raise DataError(
                    "the mask is not one channel of 8 bits",
                    seen=image.mode,
                    fix="save class numbers as a grey or palette PNG, or name the colours in a "
                    f"{COLORS}: name:red,green,blue",
                )
            return np.asarray(image, np.uint8)
    except DataError:
        raise
    except Exception as error:  # readers of headers raise SyntaxError, struct.error and others
        raise DataError("the mask is no PNG that can be read", seen=str(error)[:80]) from error


def _classes_of(pixels: npt.NDArray[np.uint8], colors: Sequence[tuple[int, ...]]) -> Mask:
    """The class of each pixel by its colour.

    Raises:
        DataError: a colour is that of no class.
    """
    weights = np.array([1 << 16, 1 << 8, 1])
    seen, known = pixels.astype(np.int64) @ weights, np.array(colors) @ weights
    order = known.argsort()
    place = np.searchsorted(known[order], seen).clip(max=len(known) - 1)
    wrong = known[order][place] != seen
    if wrong.any():
        color = pixels[wrong][0].tolist()
        raise DataError("the mask has a colour of no class", seen=color)
    return np.asarray(order[place], np.uint8)


def fitted(mask: Mask, record: Preprocess) -> Mask:
    """The mask where ``core.preprocess.fit`` places its picture; padding has no class."""
    place = placement(mask.shape[0], mask.shape[1], record)
    left, top, right, bottom = place.box
    box = (left, top, min(right, mask.shape[1]), min(bottom, mask.shape[0]))
    size = (place.width, place.height)
    shown = np.asarray(Image.fromarray(mask).resize(size, Image.Resampling.NEAREST, box))
    out = np.full((record.height, record.width), IGNORED, np.uint8)
    out[place.top : place.top + place.height, place.left : place.left + place.width] = shown
    return out


def encoded(mask: Mask) -> bytes:
    """A mask as PNG."""
    done, content = cv2.imencode(".png", mask)
    assert done, "OpenCV writes every array of bytes"
    return content.tobytes()


def decoded(content: bytes) -> Mask:
    """The mask in a dataset's PNG.

    Raises:
        DataError: it is none.
    """
    pixels = read_pixels(content, name="a mask")
    if pixels.dtype != np.uint8 or pixels.shape[2] != 1:
        raise DataError("a mask is not one channel of 8 bits", seen=pixels.shape)
    return pixels[:, :, 0]


def lacking(classes: Sequence[str]) -> str | None:
    if len(classes) >= IGNORED:
        return f"a mask of 8 bits has at most {IGNORED} classes"
    return None if len(classes) > 1 else "segmentation needs at least two classes"


def column() -> pa.DataType:
    return pa.struct([("mask", pa.binary()), ("classes", pa.list_(pa.int64()))])


def feature(classes: tuple[str, ...]) -> dict[str, Any]:
    names = {"_type": "List", "feature": {"_type": "ClassLabel", "names": list(classes)}}
    return {"mask": {"_type": "Value", "dtype": "binary"}, "classes": names}


occurs, renumbered, strata = by_place.occurs, by_place.renumbered, by_place.strata
contradiction = by_place.contradiction_of(decoded)


class Masks:
    """The masks of a split, decoded when they are asked for."""

    def __init__(self, masks: pa.ChunkedArray, labels: pa.ListArray, classes: int) -> None:
        self._masks, self._labels, self._classes = masks, labels, classes

    def __len__(self) -> int:
        return len(self._masks)

    def having(self, label: int) -> npt.NDArray[np.int64]:
        return by_place.having(self._labels, label)

    def batch(self, indices: npt.NDArray[np.int64], moves: Sequence[Moves] | None = None) -> Mask:
        """Class numbers uint8 [B, H, W], 255 where there is none.

        Raises:
            DataError: a mask holds the number of no class, or has another size than the others.
        """
        if moves is None:
            masks = [self._mask(i) for i in indices.tolist()]
        else:
            pairs = zip(indices.tolist(), moves, strict=True)
            masks = [
                move.mask(self._joined(move.pieces) if move.pieces else self._mask(i))
                for i, move in pairs
            ]
        if len({mask.shape for mask in masks}) > 1:
            raise DataError("the masks of a batch differ in size", fix="import the dataset again")
        return np.stack(masks)

    def _joined(self, pieces: Sequence[Piece]) -> Mask:
        masks = [self._mask(piece.index) for piece in pieces]
        if len({mask.shape for mask in masks}) > 1:
            raise DataError("the masks of a split differ in size", fix="import the dataset again")
        parts = [mask[:, :, None] for mask in masks]
        return np.asarray(joined(pieces, parts, nearest=True)[:, :, 0], np.uint8)

    def _mask(self, index: int) -> Mask:
        mask = decoded(self._masks[index].as_py())
        wrong = mask[(mask >= self._classes) & (mask != IGNORED)]
        if len(wrong):
            raise DataError(
                f"mask {index} has the number of no class",
                seen=f"{int(wrong[0])}, {self._classes} classes",
                fix="name all classes, and import the dataset again",
            )
        return mask


def targets(column: pa.ChunkedArray, classes: int) -> Masks:
    # Masks stay in their chunks: one array of them all could be larger than Arrow's 2 GiB.
    masks = pa.compute.struct_field(column, "mask")
    labels = pa.compute.struct_field(column, "classes").combine_chunks()
    if masks.null_count or labels.null_count:
        raise ValueError("a row without a mask")
    return Masks(masks, labels, classes)


def blank(count: int, classes: int, size: Sequence[int]) -> Mask:
    return np.zeros((count, *size), np.uint8)
