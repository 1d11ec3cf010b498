"""Pictures by URL: thumbnails from a dataset's shards, resize previews, layer views, drawn
networks; and traces to download.

Pages name them in ``src`` attributes, so that they are loaded when they come into view and never
travel through the socket. Every reference is checked to lie in the workspace.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
from fastapi import APIRouter
from starlette.responses import FileResponse, Response

from tessella.artifacts.dataset import Dataset
from tessella.core.errors import UsageError
from tessella.core.preprocess import (
    Pixels,
    Preprocess,
    ResizeMode,
    centre_crop,
    encode,
    fit,
    read_pixels,
    to_channels,
    to_depth,
)
from tessella.studio.uploads import Uploads
from tessella.studio.workspace import Workspace, open_dataset

# An SVG is a program: as an image its scripts do not run, and opened alone this keeps them still.
_STILL = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; sandbox"}
_KEEP = {"Cache-Control": "private, max-age=86400"}
MAX_PREVIEW = 2048


def router(workspace: Workspace, uploads: Uploads) -> APIRouter:
    """``/pictures/…``; errors of ours become 400 with a JSON body (see ``app``)."""
    routes = APIRouter(prefix="/pictures")

    @routes.get("/example")
    def example(dataset: str, split: str, index: int, v: str = "") -> Response:
        """An image of a dataset. ``v`` is the dataset's content hash, so that it may be cached."""
        opened = open_dataset(workspace.path(dataset))
        return _png(stored_pixels(opened, split, index), _KEEP)

    @routes.get("/resize")
    def resize(
        source: str, height: int, width: int, mode: ResizeMode, channels: int = 3, crop: str = ""
    ) -> Response:
        """What an import would store of ``source`` (``upload:ID`` or ``path:FILE``)."""
        if not (0 < height <= MAX_PREVIEW and 0 < width <= MAX_PREVIEW):
            raise UsageError("the preview shows sizes up to 2048", seen=f"{height}×{width}")
        content = source_path(source, uploads).read_bytes()
        cut = tuple(int(n) for n in crop.split("x")) if crop else None
        record = Preprocess(height=height, width=width, channels=channels, resize=mode)
        if cut is not None:
            record = dataclasses.replace(record, crop=(cut[0], cut[-1]))
        pixels = fit(_for_preview(read_pixels(content, name="the example"), channels), record)
        return _png(centre_crop(pixels, record))

    @routes.get("/upload/{upload}")
    def uploaded(upload: str) -> Response:
        """An uploaded image as the browser can show it."""
        content = uploads.file(upload).read_bytes()
        return _png(to_depth(read_pixels(content, name=uploads.name(upload)), 8))

    @routes.get("/own/{folder}/{key}/{name}")
    def own(folder: str, key: str, name: str) -> Response:
        """A picture that a command drew into the studio's own folder."""
        path = workspace.path(f".studio/{folder}/{key}/{name}")
        if not path.is_relative_to(workspace.own()) or path.suffix not in (".png", ".svg"):
            raise UsageError("there is no such picture", seen=name)
        if not path.is_file():
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

    return routes


def stored_pixels(dataset: Dataset, split: str, index: int) -> Pixels:
    """Image ``index`` of a split as HWC at 8 bits."""
    examples = dataset.split(split)
    if not 0 <= index < len(examples):
        raise UsageError("the split has no such image", seen=index, fix=f"0 to {len(examples) - 1}")
    return to_depth(read_pixels(examples[index].content), 8)


def source_path(source: str, uploads: Uploads) -> Path:
    """The file that a preview is made of: ``upload:ID`` or ``path:FILE`` on the server."""
    kind, _, rest = source.partition(":")
    if kind == "upload":
        return uploads.file(rest)
    path = Path(rest)
    if kind != "path" or not path.is_file():
        raise UsageError("there is no such example image", seen=source[:120])
    return path


def _for_preview(pixels: Pixels, channels: int) -> Pixels:
    record = Preprocess(height=1, width=1, channels=channels)
    return to_depth(to_channels(pixels, record, name="the example"), 8)


def _png(pixels: Pixels, headers: dict[str, str] | None = None) -> Response:
    """HWC 8-bit as PNG; of many channels the first three are shown, of two the first."""
    if pixels.shape[2] not in (1, 3):
        pixels = pixels[:, :, :3] if pixels.shape[2] > 3 else pixels[:, :, :1]
    content = encode(np.ascontiguousarray(pixels))
    return Response(content, media_type="image/png", headers=headers)
