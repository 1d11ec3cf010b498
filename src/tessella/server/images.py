"""Images as encoded files in a request, brought to the network's input by the plan's own record."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tessella.core.confined import Budget
from tessella.core.decoding import Decoder
from tessella.core.errors import InputError
from tessella.core.headers import is_plain
from tessella.core.pictures import Pixels
from tessella.core.preprocess import Preprocess, centre_crop, in_rgb, normalize
from tessella.server.tensors import flatten

MAX_THREADS = 8  # decoding competes with the engine for the same cores
MAX_PROCESSES = 4  # each may take the budget's memory


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
    """Decodes images in threads of its own, so that a large picture delays no other request.

    Plain pictures have threads to themselves. Pictures that need a process with a budget are
    waited for in other threads, and may all run until their time is over.
    """

    def __init__(self, budget: Budget, *, threads: int = MAX_THREADS) -> None:
        cores = min(threads, len(os.sched_getaffinity(0)))
        processes = min(MAX_PROCESSES, cores)
        self._decoder = Decoder(budget, processes=processes)
        self._plain = ThreadPoolExecutor(cores, thread_name_prefix="image")
        self._costly = ThreadPoolExecutor(processes, thread_name_prefix="costly image")

    async def decode(
        self, files: list[bytes], record: Preprocess, *, name: str, pixels: bool = False
    ) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """The network's input [n, channels, height, width], float32; and each picture's own size.

        Args:
            pixels: [n, height, width, channels], uint8, for a plan that scales them itself.

        Raises:
            DataError: a file is not an image, or decoding it takes more than the budget.
        """
        titles = [name if len(files) == 1 else f"{name}[{i}]" for i in range(len(files))]
        pending = [
            self._submit(file, record, title, pixels)
            for file, title in zip(files, titles, strict=True)
        ]
        try:
            made = await asyncio.gather(*map(asyncio.wrap_future, pending))
        except BaseException:
            for future in pending:
                future.cancel()
            raise
        return np.stack([seen for seen, _ in made]), [size for _, size in made]

    def _submit(
        self, file: bytes, record: Preprocess, title: str, pixels: bool
    ) -> Future[tuple[np.ndarray, tuple[int, int]]]:
        plain = is_plain(file, record)
        decode = self._decoder.decode_here if plain else self._decoder.decode_apart

        def prepare() -> tuple[np.ndarray, tuple[int, int]]:
            fitted, size = decode(file, record, name=title)
            seen = centre_crop(fitted, record)
            return seen if pixels else normalize(seen, record), size

        return (self._plain if plain else self._costly).submit(prepare)

    async def in_rgb(self, file: bytes, *, name: str) -> Pixels:
        """A picture in its own size, HWC RGB of 8 bits.

        Raises:
            DataError: as ``decode``.
        """
        pool = self._plain if is_plain(file) else self._costly
        decoded = pool.submit(self._decoder, file, None, name=name)
        return in_rgb(await asyncio.wrap_future(decoded))

    def close(self) -> None:
        for pool in (self._plain, self._costly):
            pool.shutdown(wait=False, cancel_futures=True)
        self._decoder.close()


async def files_of_form(content_type: str, body: bytes | bytearray) -> list[bytes]:
    """The uploaded files of a multipart body, in order; names and other fields are ignored.

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
