"""Small JPEG files, and their planes as nvJPEG would have them."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

from tessella.core.jpeg import Frame, frame_of
from tessella.device.nvjpeg import Planes, places

RNG = np.random.default_rng(0)


def jpeg(height: int, width: int, subsampling: str | None) -> bytes:
    shape = (height, width) if subsampling is None else (height, width, 3)
    out = io.BytesIO()
    how = {} if subsampling is None else {"subsampling": subsampling}
    Image.fromarray(RNG.integers(0, 256, shape, np.uint8)).save(out, "JPEG", quality=80, **how)
    return out.getvalue()


def decoded(content: bytes, shrunk: int) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as picture:
        size = picture.width // shrunk, picture.height // shrunk
        picture.draft("L" if picture.mode == "L" else "YCbCr", size)
        return np.atleast_3d(np.asarray(picture))


def planes_of(files: list[bytes]) -> tuple[Planes, list[Frame]]:
    frames = [frame_of(content) for content in files]
    starts, pitches, nbytes = places(frames)
    memory = np.full(nbytes, 77, np.uint8)
    for content, frame, begins, (of_luma, of_chroma) in zip(
        files, frames, starts, pitches, strict=True
    ):
        parts = [(decoded(content, 1)[:, :, 0], of_luma)]
        if frame.across:
            chroma = decoded(content, frame.down)
            parts += [(chroma[:, :, 1], of_chroma), (chroma[:, :, 2], of_chroma)]
        for begin, (plane, pitch) in zip(begins, parts, strict=False):
            for row, line in enumerate(plane):
                memory[begin + row * pitch :][: len(line)] = line
    return Planes(torch.from_numpy(memory), starts, pitches), frames
