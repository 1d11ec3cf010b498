"""Files from the browser: in chunks, each with the offset it belongs to, never larger than
announced.

A name from the browser is only shown, never used as a path. A ZIP of class folders is unpacked
member by member, with limits on count, size and ratio, so that neither ``../`` nor a bomb gets
out of it.
"""

from __future__ import annotations

import errno
import json
import lzma
import re
import secrets
import shutil
import stat
import unicodedata
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from tessella.core.errors import DataError, UsageError
from tessella.core.legible import legible
from tessella.studio.workspace import Workspace

MAX_FILE_BYTES = 20 << 30
MAX_FOLDER_FILES = 200_000
MAX_PATH, MAX_DEPTH = 1000, 20  # characters, and folders, of a file in an uploaded folder
FULL = (errno.ENOSPC, errno.EDQUOT)
CONTROL = ("Cc", "Cs")  # categories of characters: controls, and halves of others
BLOCK_BYTES = 4096  # that a file takes on a disk at least
MAX_CHUNK_BYTES = 8 << 20
MAX_MEMBERS = 2_000_000
MAX_UNPACKED_BYTES = 200 << 30
MAX_RATIO = 200  # unpacked to packed; images hardly compress, so honest ZIPs stay near 1
PIECE_BYTES = 1 << 20


class Uploads:
    """Uploaded files, each in a folder of its own in the workspace's ``.studio/uploads``."""

    def __init__(self, workspace: Workspace) -> None:
        self._root = workspace.own("uploads")
        self._received: dict[str, tuple[int, int]] = {}  # files and bytes of unfinished folders

    def begin(self, name: str, nbytes: int) -> str:
        """Announce a file; returns the id for sending the chunks."""
        upload = self._begin(name, nbytes, 1)
        (self._root / upload / "content").touch()
        return upload

    def begin_folder(self, name: str, files: int, nbytes: int) -> str:
        """Announce a folder of so many files; returns the id for sending them."""
        if not 0 < files <= MAX_FOLDER_FILES:
            raise UsageError(
                f"an uploaded folder has 1 to {MAX_FOLDER_FILES:,} files",
                seen=files,
                fix="copy larger sets to the server and give their folder",
            )
        upload = self._begin(name, nbytes, files)
        (self._root / upload / "images.part").mkdir()
        self._received[upload] = (0, 0)
        return upload

    def _begin(self, name: str, nbytes: int, files: int) -> str:
        if not 0 < nbytes <= MAX_FILE_BYTES:
            raise UsageError(
                f"an upload has 1 to {MAX_FILE_BYTES:,} bytes",
                seen=nbytes,
                fix="copy larger sets to the server and give their folder",
            )
        needed = 2 * nbytes + files * BLOCK_BYTES
        if shutil.disk_usage(self._root).free < needed:
            raise UsageError("the disk is too full for this upload", seen=f"{needed:,} bytes")
        upload = secrets.token_hex(16)
        folder = self._root / upload
        folder.mkdir()
        about = {"name": name[-200:], "nbytes": nbytes, "files": files}
        (folder / "about.json").write_text(json.dumps(about))
        return upload

    def add_file(self, upload: str, path: str, offset: int, chunk: bytes) -> int:
        """Append a chunk to a file of a folder; returns how many bytes of the folder are there.

        Raises:
            UsageError: the path leads out of the folder, or there is more than was announced.
        """
        about = json.loads((self._folder(upload) / "about.json").read_text())
        if upload not in self._received:  # finished, no folder, or begun before a restart
            raise UsageError("this folder takes no files", seen=upload, fix="send it again")
        if why := _refusal(path):
            raise UsageError(f"a file's path {why}", seen=path[:120])
        files, nbytes = self._received[upload]
        files += offset == 0
        nbytes += len(chunk)
        if files > about["files"] or nbytes > about["nbytes"] or len(chunk) > MAX_CHUNK_BYTES:
            raise UsageError(
                "a folder is larger than announced", seen=f"{files:,} files, {nbytes:,} bytes"
            )
        target = self._root / upload / "images.part" / PurePosixPath(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb" if offset == 0 else "ab") as file:
                if file.tell() != offset:
                    raise UsageError("a chunk came out of order", seen=f"offset {offset}")
                file.write(chunk)
        except OSError as error:  # two files of one path, a name that is too long, a full disk
            raise UsageError(
                "a file cannot be written",
                seen=f"{path[:120]}: {error.strerror}",
                fix="rename it, or copy the folder to the server",
            ) from error
        self._received[upload] = (files, nbytes)
        return nbytes

    def finish_folder(self, upload: str) -> None:
        """End a folder's upload; what was announced must be there."""
        folder = self._folder(upload)
        about = json.loads((folder / "about.json").read_text())
        received = self._received.pop(upload, (0, 0))
        if received != (about["files"], about["nbytes"]):
            raise UsageError(
                "the upload is not complete",
                seen=f"{received[0]:,} of {about['files']:,} files, {received[1]:,} bytes",
                fix="send the folder again",
            )
        (folder / "images.part").rename(folder / "images")

    def add(self, upload: str, offset: int, chunk: bytes) -> int:
        """Append a chunk; returns how many bytes are there. A chunk sent twice is taken once."""
        content, nbytes = self._content(upload)
        have = content.stat().st_size
        if offset != have:
            raise UsageError("a chunk came out of order", seen=f"offset {offset}, have {have}")
        if len(chunk) > MAX_CHUNK_BYTES or have + len(chunk) > nbytes:
            raise UsageError(
                "a chunk is larger than announced", seen=f"{have} + {len(chunk)} of {nbytes} bytes"
            )
        with content.open("ab") as file:
            file.write(chunk)
        return have + len(chunk)

    def file(self, upload: str) -> Path:
        """The complete file, under a name with the suffix that its first bytes deserve.

        Raises:
            UsageError: some of it has not arrived.
        """
        content, nbytes = self._content(upload)
        if not content.exists() or content.stat().st_size != nbytes:
            raise UsageError(
                "the upload is not complete", seen=f"not yet {nbytes:,} bytes", fix="send it again"
            )
        return content

    def name(self, upload: str) -> str:
        """The file's name in the browser, for people."""
        folder = self._folder(upload)
        return str(json.loads((folder / "about.json").read_text())["name"])

    def images(self, upload: str) -> Path:
        """The folder of images that was uploaded, or that a ZIP holds (unpacked at first)."""
        folder = self._folder(upload) / "images"
        if not folder.exists():
            archive = self.file(upload)
            beside = archive.parent / "images.part"
            shutil.rmtree(beside, ignore_errors=True)
            unpack(archive, beside)
            beside.rename(folder)
        return _single_root(folder)

    def _folder(self, upload: str) -> Path:
        folder = self._root / upload
        if not re.fullmatch("[0-9a-f]{32}", upload) or not folder.is_dir():
            raise UsageError("there is no such upload", seen=upload[:40])
        return folder

    def _content(self, upload: str) -> tuple[Path, int]:
        folder = self._folder(upload)
        about = json.loads((folder / "about.json").read_text())
        return folder / "content", int(about["nbytes"])


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a ZIP of images into ``folder``.

    Raises:
        DataError: not a ZIP, or a damaged one, or one of no files; a member has a path that is
            refused, or is a link; it unpacks to too much.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            members = [
                m for m in opened.infolist() if not m.is_dir() and not _is_litter(m.filename)
            ]
            _check_members(members, archive.stat().st_size)
            for member in members:
                _unpack_member(opened, member, folder)
    # what zipfile and its decompressors raise: of damage, a way to pack, a password, an early end,
    # a name that is no UTF-8; and the disk, of two members of one path, or a name that is too long
    except (
        zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, lzma.LZMAError,
        OSError, ValueError,
    ) as error:  # fmt: skip
        if isinstance(error, OSError) and error.errno in FULL:
            raise DataError("the disk is too full for what the ZIP holds", seen=error) from error
        raise DataError(
            "this is not a ZIP that can be read",
            seen=str(error)[:120],
            fix="make a ZIP with a subfolder for each class",
        ) from error


def _check_members(members: list[zipfile.ZipInfo], packed: int) -> None:
    if not members:
        raise DataError("the ZIP has no files", fix="make a ZIP with a subfolder for each class")
    total = sum(m.file_size for m in members)
    if len(members) > MAX_MEMBERS or total > MAX_UNPACKED_BYTES or total > MAX_RATIO * packed:
        raise DataError(
            "the ZIP unpacks to too much",
            seen=f"{len(members):,} files, {total:,} bytes from {packed:,}",
            fix="copy the folder to the server and import it from there",
        )
    for member in members:
        link = stat.S_ISLNK(member.external_attr >> 16)
        why = "leads out of it" if link else _refusal(member.filename)
        if why:
            raise DataError(
                f"the ZIP has a member whose path {why}",
                seen=legible(member.filename[:120]),
                fix="pack the class folders themselves, without links or absolute paths",
            )


def _refusal(path: str) -> str | None:
    """Why a path from outside is not taken; None where it is."""
    if _leads_out(path):
        return "leads out of its folder"
    # other than str.isprintable: macOS writes U+202F into the names of its screenshots
    if len(path) > MAX_PATH or any(unicodedata.category(c) in CONTROL for c in path):
        return f"has more than {MAX_PATH} characters, or control characters"
    deep = len(PurePosixPath(path.replace("\\", "/")).parts)
    return f"is more than {MAX_DEPTH} folders deep" if deep > MAX_DEPTH else None


def _leads_out(path: str) -> bool:
    """Whether a path from outside is none under the folder that it is meant for."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    return not parts or ".." in parts or parts[0].startswith("/") or ":" in parts[0]


def _unpack_member(opened: zipfile.ZipFile, member: zipfile.ZipInfo, folder: Path) -> None:
    target = folder / PurePosixPath(member.filename.replace("\\", "/"))
    target.parent.mkdir(parents=True, exist_ok=True)
    left = member.file_size  # the header may lie: never write more than it said
    with opened.open(member) as source, target.open("wb") as file:
        while piece := source.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise DataError("a member of the ZIP is larger than it says", seen=member.filename)
            file.write(piece)


def _is_litter(name: str) -> bool:
    """Whether a member is one of the files that file managers add to ZIPs."""
    return name.startswith("__MACOSX/") or name.rsplit("/", 1)[-1] in (".DS_Store", "Thumbs.db")


def _single_root(folder: Path) -> Path:
    """The folder with the class folders: many ZIPs wrap one more folder around them."""
    while len(inside := list(folder.iterdir())) == 1 and inside[0].is_dir():
        if not any(p.is_dir() for p in inside[0].iterdir()):
            break
        folder = inside[0]
    return folder


def router(uploads: Uploads) -> APIRouter:
    """``POST /api/uploads?name=&nbytes=`` and ``PUT /api/uploads/ID?offset=`` for a file;
    ``POST /api/uploads/folders?name=&files=&nbytes=``, ``PUT /api/uploads/ID/files?path=&offset=``
    and ``POST /api/uploads/ID/done`` for a folder.
    """
    routes = APIRouter(prefix="/api/uploads")

    @routes.post("")
    def begin(name: str, nbytes: int) -> dict[str, str]:
        return {"id": uploads.begin(name, nbytes)}

    @routes.put("/{upload}", response_model=None)
    async def add(upload: str, offset: int, request: Request) -> dict[str, int] | JSONResponse:
        chunk = await _chunk(request)
        return _TOO_LARGE if chunk is None else {"received": uploads.add(upload, offset, chunk)}

    @routes.post("/folders")
    def begin_folder(name: str, files: int, nbytes: int) -> dict[str, str]:
        return {"id": uploads.begin_folder(name, files, nbytes)}

    @routes.put("/{upload}/files", response_model=None)
    async def add_file(
        upload: str, path: str, offset: int, request: Request
    ) -> dict[str, int] | JSONResponse:
        chunk = await _chunk(request)
        if chunk is None:
            return _TOO_LARGE
        return {"received": uploads.add_file(upload, path, offset, chunk)}

    @routes.post("/{upload}/done")
    def done(upload: str) -> dict[str, str]:
        uploads.finish_folder(upload)
        return {"id": upload}

    return routes


_TOO_LARGE = JSONResponse({"error": "a chunk is too large"}, status_code=413)


async def _chunk(request: Request) -> bytes | None:
    """The body of a request; None if it is larger than a chunk may be."""
    chunk = bytearray()
    async for piece in request.stream():
        chunk += piece
        if len(chunk) > MAX_CHUNK_BYTES:
            return None
    return bytes(chunk)
