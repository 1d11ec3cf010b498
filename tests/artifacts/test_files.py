"""Writing survives failures: the old artifact stays, and a reader refuses what is not whole."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tessella.artifacts.files import (
    check_member,
    from_document,
    member,
    read_document,
    read_file,
    to_document,
    write_atomic,
    write_folder,
)
from tessella.artifacts.plan import load_plan
from tessella.core.errors import ArtifactError, CorruptArtifact, UnknownVersion


@dataclass(frozen=True, kw_only=True)
class Note:
    text: str


def fill(text: str):
    def write(folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "data").write_text(text)
        (folder / "note.json").write_text(text)

    return write


def tree(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()
    }


OLD = {"note.json": "old", "deep/data": "old"}


def refuse(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_failed_file_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "x.json"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(ArtifactError, match="could not be written"):
            write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(ArtifactError, match=f"{tmp_path.name} could not.*give a file's name"):
        write_atomic(tmp_path, b"new")


@pytest.mark.parametrize("call", ["fsync", "first replace", "second replace"])
def test_a_failed_folder_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "artifact"
    write_folder(path, fill("old"))
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == (1 if call == "first replace" else 2):
            refuse()
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, *(("fsync", refuse) if call == "fsync" else ("replace", replace)))
        with pytest.raises(ArtifactError, match="could not be written"):
            write_folder(path, fill("new"))
    assert tree(path) == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]
    write_folder(path, fill("new"))
    assert set(tree(path).values()) == {"new"}
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


def test_a_failing_fill_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "artifact"
    write_folder(path, fill("old"))

    def broken(folder: Path) -> None:
        fill("new")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(path, broken)
    assert tree(path) == OLD
    assert [p.name for p in tmp_path.iterdir()] == ["artifact"]


_FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tessella.artifacts.files import write_atomic, write_folder
from tessella.core.errors import ArtifactError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
root = Path(sys.argv[1])
for write in (
    lambda: write_atomic(root / "file", b"x" * 10_000),
    lambda: write_folder(root / "folder", lambda f: (f / "a").write_bytes(b"x" * 10_000)),
):
    try:
        write()
    except ArtifactError as error:
        print(error)
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on file sizes fails in ``write`` as a full disk does."""
    write_atomic(tmp_path / "file", b"old")
    write_folder(tmp_path / "folder", fill("old"))
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("could not be written") == 2
    assert done.stdout.count("free some disk space") == 2
    assert (tmp_path / "file").read_bytes() == b"old"
    assert tree(tmp_path / "folder") == OLD
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


_KILLED = """
import sys
from pathlib import Path
from tessella.artifacts.files import write_atomic
path = Path(sys.argv[1])
print("go", flush=True)
for number in range(1_000_000):
    write_atomic(path, str(number).encode() * 2000)
"""


def test_a_killed_writer_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _KILLED, str(path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            until = time.monotonic() + 60
            while not path.exists() and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.05)
            writer.kill()
        content = path.read_text()
        assert content == content[: len(content) // 2000] * 2000


def test_two_threads_write_the_same_file(tmp_path: Path) -> None:
    failures: list[Exception] = []

    def write(letter: bytes) -> None:
        try:
            for _ in range(50):
                write_atomic(tmp_path / "x", letter * 5000)
        except ArtifactError as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (tmp_path / "x").read_bytes() in (b"a" * 5000, b"b" * 5000)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=str(tmp_path / "file")):
        write_atomic(tmp_path / "file" / "x", b"")
    with pytest.raises(ArtifactError, match=str(tmp_path / "file")):
        write_folder(tmp_path / "file" / "x", fill("new"))


# --- documents and members ----------------------------------------------------------------------


def test_documents(tmp_path: Path) -> None:
    content = to_document("note", 1, Note(text="ü"))
    assert from_document(content, Note, kind="note", version=1, where="n") == Note(text="ü")
    for change, error in [
        ((b'"version": 1', b'"version": 2'), UnknownVersion),
        ((b'"version": 1', b'"version": true'), UnknownVersion),
        ((b'"version": 1', b'"version": 1.0'), UnknownVersion),
        ((b'"version": 1,', b""), UnknownVersion),
        ((b"tessella.note", b"tessella.plan"), CorruptArtifact),
        ((b'"text"', b'"test"'), CorruptArtifact),
        ((b"{", b"["), CorruptArtifact),
    ]:
        assert change[0] in content
        with pytest.raises(error):
            from_document(content.replace(*change), Note, kind="note", version=1, where="n")
    with pytest.raises(ArtifactError, match="there is no note here"):
        read_document(tmp_path / "x.json", Note, kind="note", version=1)


def test_members(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"0123")
    vouched = member(path)
    check_member(path, vouched)
    path.write_bytes(b"0124")
    check_member(path, vouched, deep=False)
    with pytest.raises(CorruptArtifact, match="does not match its hash"):
        check_member(path, vouched)
    path.write_bytes(b"012")
    with pytest.raises(CorruptArtifact, match="3 bytes instead of 4"):
        check_member(path, vouched, deep=False)
    path.unlink()
    with pytest.raises(CorruptArtifact, match="missing"):
        check_member(path, vouched)


@pytest.mark.parametrize("path", ["/dev/zero", "/proc/self", "/", "pipe", "missing", "x" * 5000])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, path: str) -> None:
    """Nothing is waited for, and nothing without an end is read."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArtifactError, match=r"no plan here|plan cannot be read"):
        read_file(tmp_path / path, "plan")


def test_files_of_the_system_say_no_length_and_are_empty(tmp_path: Path) -> None:
    """Read to their end, some wait and some fail: /proc/self/mem, /proc/kmsg."""
    (tmp_path / "link").symlink_to("/proc/self/mem")
    assert read_file(tmp_path / "link", "plan") == b""
    with pytest.raises(ArtifactError, match="is not a plan"):
        load_plan(tmp_path / "link")


def test_a_file_larger_than_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ArtifactError, match=r"cannot be read.*of memory"):
        read_file(tmp_path / "sparse", "plan")
