"""Images as encoded files in a request, brought to the network's input by the plan's own record."""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import os
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tessella.core.errors import InputError
from tessella.core.preprocess import Preprocess
from tessella.server.tensors import flatten

MAX_THREADS = 8  # decoding competes with the engine for the same cores


def as_encoded_images(data: Any, shape: tuple[int, ...], *, name: str) -> list[bytes]:
    """The files of a JSON tensor: base64, since a JSON string cannot hold a file's bytes."""
    files = []
    for text in flatten(data, shape, name=name):
        try:
            if not isinstance(text, str):
                raise TypeError(f"{type(text).__name__} instead of a string")
            files.append(base64.b64decode(text, validate=True))
        except (TypeError, ValueError, binascii.Error) as error:
            raise InputError(
                f"input {name!r} holds an image that is not base64",
                seen=str(error)[:80],
                fix="send base64 strings, or the files as binary data",
            ) from error
    return files


class ImageDecoder:
    """Decodes in threads of its own, so that a large picture holds up nobody."""

    def __init__(self, max_pixels: int) -> None:
        self._max_pixels = max_pixels
        threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="image")

    async def decode(
        self, files: list[bytes], record: Preprocess, *, name: str, pixels: bool = False
    ) -> np.ndarray:
        """The network's input [n, channels, height, width], float32.

        Args:
            pixels: [n, height, width, channels], uint8, for a plan that scales them itself.

        Raises:
            DataError: a file is not an image.
            InputError: a picture has too many pixels.
        """
        loop = asyncio.get_running_loop()
        prepare = record.pixels if pixels else record
        titles = [name if len(files) == 1 else f"{name}[{i}]" for i in range(len(files))]
        pending = [
            loop.run_in_executor(self._pool, self._decode_one, file, prepare, title)
            for file, title in zip(files, titles, strict=True)
        ]
        try:
            return np.stack(await asyncio.gather(*pending))
        except BaseException:
            for future in pending:
                future.cancel()
            raise

    def _decode_one(
        self, file: bytes, prepare: Callable[..., np.ndarray], title: str
    ) -> np.ndarray:
        self._check_pixels(file, title)
        return prepare(file, name=title)

    def _check_pixels(self, file: bytes, title: str) -> None:
        """Refuse by the header alone what a client may not make us unfold."""
        try:
            with Image.open(io.BytesIO(file)) as image:
                width, height = image.size
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise self._too_large(title, error) from error
        except (OSError, ValueError, SyntaxError):
            return  # the record's own reader says what is wrong, in its words
        if width * height > self._max_pixels:
            raise self._too_large(title, f"{width}×{height}")

    def _too_large(self, title: str, seen: object) -> InputError:
        return InputError(
            f"{title} has more than {self._max_pixels:,} pixels", seen=seen, fix="shrink it first"
        )

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


async def files_of_form(content_type: str, body: bytes | bytearray) -> list[bytes]:
    """The uploaded files of a multipart body, in order; names and other fields are not looked at.

    Raises:
        InputError: not a well-formed multipart body, or no file in it.
    """

    async def stream() -> AsyncGenerator[bytes, None]:
        yield bytes(body)

    parser = MultiPartParser(Headers({"content-type": content_type}), stream())
    parser.spool_max_size = len(body)  # nothing of a request goes to the disk
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise InputError(
            "the multipart body is not well formed",
            seen=str(error)[:80],
            fix="send each image as a file part, for example curl -F image=@flower.jpg",
        ) from error
    try:
        files = [await v.read() for _, v in form.multi_items() if isinstance(v, UploadFile)]
    finally:
        await form.close()
    if not files:
        raise InputError(
            "the multipart body holds no file",
            fix="send each image as a file part, for example curl -F image=@flower.jpg",
        )
    return files
