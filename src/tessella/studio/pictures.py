"""Pictures by URL: thumbnails from a dataset's shards, resize previews, layer views, drawn
networks; and traces to download.

Pages name them in ``src`` attributes, so that they are loaded when they come into view and never
travel through the socket. Every reference is checked to lie in the workspace.
"""

from __future__ import annotations

import atexit
import re
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from nicegui.element import Element
from starlette.responses import FileResponse, Response

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment
from tessella.core.decoding import Decoder
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, ResizeMode, centre_crop, encode, to_depth
from tessella.core.record import canonical_json, from_plain, parse_json, to_plain
from tessella.core.volumes import IGNORED, array_in, read_labels
from tessella.data.blocks import Located, seen_block
from tessella.data.joining import check_joins, drawn_pieces, made_of
from tessella.studio import parts
from tessella.studio.boxes import boxed
from tessella.studio.uploads import Uploads
from tessella.studio.workspace import Workspace, open_dataset
from tessella.tasks import Block, Moves, of, targets_of

# An SVG is a program: as an image its scripts do not run, and opened alone this keeps them still.
_STILL = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
_KEEP = {"Cache-Control": "private, max-age=86400"}
MAX_PREVIEW = 2048
THUMB, LARGE = 320, 2048  # pixels of the longer side, on a screen of twice the usual density
MAX_FILE_BYTES = 256 << 20
PAUSE_S = 0.05  # between two looks at a slider that moves through slices
RED = 72  # the number of a class whose color is red: bright voxels are white themselves
PROCESSES = 2  # for pictures that cost much


def router(workspace: Workspace, uploads: Uploads) -> APIRouter:
    """``/pictures/…``; errors of ours become 400 with a JSON body (see ``app``)."""
    routes = APIRouter(prefix="/pictures")
    decoder = Decoder(processes=PROCESSES)
    atexit.register(decoder.close)

    @routes.get("/example")
    def example(
        dataset: str, split: str, index: int, v: str = "", drawn: bool = False, most: int = 0,
        at: int = -1, told: str = "", wrong: bool = False,
    ) -> Response:  # fmt: skip
        """An image of a dataset, ``drawn`` with its target; ``v`` is the dataset's content hash.

        ``most`` are the pixels of its longer side (0: all); ``at`` a volume's slice (-1: the
        middle). With the labels that a network has ``told`` of the volume in place of its own, or
        with what is ``wrong`` in them.
        """
        opened = open_dataset(workspace.path(dataset))
        if told:  # not kept: another answer may come under this name
            shown = _told(opened, split, index, told_file(workspace, told), at=at, wrong=wrong)
        else:
            shown = _stored(opened, split, index, decoder, drawn=drawn, at=at)
        return _png(reduced(shown, most) if most > 0 else shown, None if told else _KEEP)

    @routes.get("/trained")
    def trained(dataset: str, index: int, changes: str, epoch: int = 0, v: str = "") -> Response:
        """An image of the training split as an epoch of a training with these changes shows it."""
        opened = open_dataset(workspace.path(dataset))
        plain = parse_json(changes.encode(), where="changes")
        return _png(reduced(seen_in_training(opened, index, plain, epoch, decoder), THUMB))

    @routes.get("/resize")
    def resize(
        source: str, height: int, width: int, mode: ResizeMode, channels: int = 3, crop: str = ""
    ) -> Response:
        """The image that an import would store of ``source`` (``upload:ID`` or ``path:FILE``)."""
        if not (0 < height <= MAX_PREVIEW and 0 < width <= MAX_PREVIEW):
            raise UsageError("the preview shows sizes up to 2048", seen=f"{height}×{width}")
        sides = parts.size_of(crop) if crop else None
        record = Preprocess(height=height, width=width, channels=channels, resize=mode, crop=sides)
        content = _read(source_path(source, uploads))
        return _png(centre_crop(decoder(content, record, name="the example"), record))

    @routes.get("/upload/{upload}")
    def uploaded(upload: str) -> Response:
        """An uploaded image as the browser can show it; of a large one every n-th pixel."""
        content = _read(uploads.file(upload))
        pixels = decoder(content, None, name=uploads.name(upload))
        step = -(-max(pixels.shape[:2]) // MAX_PREVIEW)
        return _png(pixels[::step, ::step])

    _add_own(routes, workspace)
    return routes


def _add_own(routes: APIRouter, workspace: Workspace) -> None:
    """The routes of what commands wrote into the studio's own folder."""

    @routes.get("/own/{folder}/{key}/{name}")
    def own(folder: str, key: str, name: str) -> Response:
        """A picture that a command drew into the studio's own folder."""
        path = workspace.path(f".studio/{folder}/{key}/{name}")
        if not path.is_relative_to(workspace.own()) or path.suffix not in (".png", ".svg"):
            raise UsageError("there is no such picture", seen=name)
        if not _is_file(path):
            return Response(status_code=404)
        kind = "image/svg+xml" if path.suffix == ".svg" else "image/png"
        return FileResponse(path, media_type=kind, headers=_STILL | {"Cache-Control": "no-cache"})

    @routes.get("/trace/{key}")
    def trace(key: str) -> Response:
        """A trace that ``tessella profile`` wrote, to be kept and opened in Perfetto."""
        path = workspace.own("traces") / f"{key}.json"
        if not re.fullmatch(r"[0-9a-f]{24}", key) or not path.is_file():
            return Response(status_code=404)
        return FileResponse(path, media_type="application/json", filename=f"trace-{key[:8]}.json")


def example_address(dataset: Dataset, ref: str, split: str, index: int, most: int = LARGE) -> str:
    """The URL of an image of a dataset, of which the longer side has at most so many pixels."""
    where: dict[str, str | int] = {"dataset": ref, "split": split, "index": index}
    stamp, record = dataset.info.content_hash[:12], dataset.preprocess
    small = max(record.height, record.width) <= most
    return parts.address("/pictures/example", **where, v=stamp, **({} if small else {"most": most}))


def reduced(pixels: Pixels, most: int) -> Pixels:
    """The same picture with at most so many pixels in a side: a page of thumbnails of 12 million
    pixels each is hundreds of megabytes."""
    height, width = pixels.shape[:2]
    share = most / max(height, width)
    if share >= 1:
        return pixels
    size = max(1, round(width * share)), max(1, round(height * share))
    made: Pixels = np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)
    return made.reshape(size[1], size[0], -1)


def trained_address(dataset: Dataset, ref: str, index: int, changes: Augment) -> str:
    """The URL of a training image as a training with these changes shows it."""
    told = canonical_json(to_plain(changes))
    stamp = dataset.info.content_hash[:12]
    return parts.address("/pictures/trained", dataset=ref, index=index, changes=told, v=stamp)


def seen_in_training(
    dataset: Dataset, index: int, plain: Any, epoch: int, decoder: Decoder
) -> Pixels:
    """A training image after the changes of an epoch, HWC of 8 bits, its target drawn over it.

    Raises:
        UsageError: changes that are none, or that the dataset's task does not know.
    """
    try:
        settings = from_plain(Augment, plain, where="changes")
    except ArtifactError as error:
        raise UsageError(error.wrong, seen=error.seen) from error
    if not 0 <= epoch < 1 << 32:
        raise UsageError("an epoch is a number from 0", seen=epoch)
    task, record, split = of(dataset.info.task), dataset.preprocess, dataset.split("train")
    check_joins(settings, task)
    stored_file(dataset, "train", index)  # says which images there are
    targets, drawn_from = targets_of(split), (0, epoch)

    def pixels_of(number: int) -> Pixels:
        return decoder(split[number].content, record, name=f"image {number}")

    moves: Moves | Block
    if record.volume is not None:
        located = cast(Located, targets)
        pixels, moves = seen_block(split.view(index), located, index, record, settings, drawn_from)
        pixels = pixels[len(pixels) // 2]
    else:
        pieces = drawn_pieces(settings, record, drawn_from, index, targets)
        pixels, moves = made_of(index, pieces, pixels_of, settings, record, drawn_from)
    shown = _in_rgb(to_depth(pixels, 8))
    target = targets.batch(np.array([index], np.int64), cast("list[Moves]", [moves]))[0]
    return task.answers.taught(shown, target, dataset.classes)


def _stored(
    dataset: Dataset, split: str, index: int, decoder: Decoder, *, drawn: bool, at: int
) -> Pixels:
    """An image as it is stored, of 8 bits; or with its target drawn over it. Of a volume a slice:
    ``at``, or the one in the middle."""
    content, record = stored_file(dataset, split, index), dataset.preprocess
    if record.volume is not None:
        shown, at = _slice(content, at)
    else:
        shown = to_depth(decoder(content, record, name=f"image {index}"), 8)
    if not drawn:
        return shown
    target = truth_of(dataset, split, index)
    if record.volume is not None:
        target = target[at]
    return of(dataset.info.task).answers.taught(_in_rgb(shown), target, dataset.classes)


def _slice(content: bytes, at: int) -> tuple[Pixels, int]:
    """A slice of a stored volume, of 8 bits, and its number: ``at``, or that of the middle one."""
    volume = array_in(content, "uint16")
    at = at if 0 <= at < len(volume) else len(volume) // 2
    return to_depth(np.array(volume[at]), 8), at


def _told(dataset: Dataset, split: str, index: int, told: Path, *, at: int, wrong: bool) -> Pixels:
    """A slice of a volume with what a network says of it, or red where that is wrong."""
    shown, at = _slice(stored_file(dataset, split, index), at)
    truth = truth_of(dataset, split, index)
    said = told_of(told, truth, dataset)[at]
    target = np.where(differing(said, truth[at]), RED, 0) if wrong else said
    return of(dataset.info.task).answers.taught(_in_rgb(shown), target, dataset.classes)


def truth_of(dataset: Dataset, split: str, index: int) -> Any:
    """The target of an image as a training has it."""
    return targets_of(dataset.split(split)).batch(np.array([index], np.int64))[0]


def told_file(workspace: Workspace, key: str) -> Path:
    """Where a network's labels of a volume lie.

    Raises:
        UsageError: the key is none.
    """
    if not re.fullmatch(r"[0-9a-f]{24}", key):
        raise UsageError("there are no such labels", seen=key[:120])
    return workspace.own("segmented") / f"{key}.npy"


def told_of(file: Path, truth: Pixels, dataset: Dataset) -> Pixels:
    """The labels in a file, which are those of a volume with this truth, uint8 [D, H, W].

    Raises:
        DataError: they are not.
    """
    return read_labels(file, truth.shape, len(dataset.classes))[0]


def differing(said: Pixels, truth: Pixels) -> npt.NDArray[np.bool_]:
    """Where labels are wrong; where no class is known, nothing is."""
    return np.asarray((said != truth) & (truth != IGNORED))


def _in_rgb(shown: Pixels) -> Pixels:
    return np.repeat(shown[:, :, :1], 3, axis=2) if shown.shape[2] < 3 else shown[:, :, :3]


def thumb(dataset: Dataset, ref: str, split: str, index: int, title: str = "") -> Element:
    """A small picture of a dataset's image that leads to its page; for ``with``."""
    link = parts.link("/image", "thumb", dataset=ref, split=split, index=str(index))
    with link:
        example_picture(dataset, ref, split, index, title)
    return link


def example_picture(
    dataset: Dataset, ref: str, split: str, index: int, title: str, *, large: bool = False
) -> Element:
    """An image of a dataset, with what its target marks in it; on a ``large`` one the names are
    written beside."""
    task, record = of(dataset.info.task), dataset.preprocess
    things = task.answers.marked(dataset.split(split)[index].label, dataset.classes)
    source = example_address(dataset, ref, split, index, LARGE if large else THUMB)
    if task.examples.PLACED and not things:  # a mask: the page draws boxes itself
        source += "&drawn=true"
    return boxed(source, title, things, (record.height, record.width), names=large)


def stored_file(dataset: Dataset, split: str, index: int) -> bytes:
    """Image ``index`` of a split as it is stored."""
    examples = dataset.split(split)
    if not 0 <= index < len(examples):
        raise UsageError("the split has no such image", seen=index, fix=f"0 to {len(examples) - 1}")
    return examples[index].content


def source_path(source: str, uploads: Uploads) -> Path:
    """The file that a preview is made of: ``upload:ID`` or ``path:FILE`` on the server."""
    kind, _, rest = source.partition(":")
    if kind == "upload":
        return uploads.file(rest)
    path = Path(rest)
    if kind != "path" or not _is_file(path):
        raise UsageError("there is no such example image", seen=source[:120])
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or one with a NUL
        return False


def _read(path: Path) -> bytes:
    nbytes = path.stat().st_size
    if nbytes > MAX_FILE_BYTES:
        raise UsageError(
            f"an example image has at most {MAX_FILE_BYTES:,} bytes", seen=f"{nbytes:,} bytes"
        )
    with path.open("rb") as file:  # one of /proc says that it is empty, and never ends
        return file.read(MAX_FILE_BYTES)


def _png(pixels: Pixels, headers: dict[str, str] | None = None) -> Response:
    """8-bit pixels (HWC) as PNG: one channel or three, the first of those that there are."""
    if pixels.shape[2] not in (1, 3):
        pixels = pixels[:, :, :3] if pixels.shape[2] > 3 else pixels[:, :, :1]
    content = encode(np.ascontiguousarray(pixels))
    return Response(content, media_type="image/png", headers=headers)
