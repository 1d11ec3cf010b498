"""Record batches that another process wrote, joined to a shard."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pytest

from tessella.artifacts import shards as module
from tessella.artifacts.dataset import Split
from tessella.artifacts.shards import Example, SplitWriter, record_batch, target_array, write_batch
from tessella.tasks import column_of, named

ROWS = [
    Example(content=os.urandom(900 + n), label=n % 2, path=f"p/{n}\u00e9.png") for n in range(40)
]


def writer_in(folder: Path) -> SplitWriter:
    return SplitWriter(folder, "train", column_of(named("classification"), ("a", "b")))


@pytest.mark.parametrize("copies", [True, False], ids=["in the file system", "by reads"])
def test_parts_are_the_shards_that_one_process_writes(
    tmp_path: Path, copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, over several shards, and behind a place that was come to before."""
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 5)
    monkeypatch.setattr(module, "BYTES_PER_SHARD", 20_000)
    if not copies:

        def cannot(*_: object) -> int:
            raise OSError("not here")

        monkeypatch.setattr(os, "copy_file_range", cannot)
    folders = [tmp_path / name for name in ("alone", "joined")]
    for folder in folders:
        folder.mkdir()
    alone, joined = map(writer_in, folders)
    for row in ROWS:
        alone.add(row)
    hashes = [(hashlib.sha256(row.content).digest(), row.label) for row in ROWS]
    for first in range(0, 40, 5):
        chosen = slice(first, first + 5)
        contents, paths = [r.content for r in ROWS[chosen]], [r.path for r in ROWS[chosen]]
        labels = target_array([r.label for r in ROWS[chosen]], pa.int64())
        write_batch(tmp_path / "part", record_batch(contents, paths, labels))
        if first == 25:  # another process goes on, behind a cut of what it cannot know
            place = joined.place()
            joined.abandon()
            with (folders[1] / "train-00001.arrow").open("ab") as file:
                file.write(b"cut")
            joined = writer_in(folders[1])
            joined.go_on(*place, hashes[:first])
        joined.append(tmp_path / "part", hashes[chosen])
    infos = [w.close() for w in (alone, joined)]
    assert len(infos[0].shards) > 1
    assert infos[0].class_counts == infos[1].class_counts == (20, 20)
    assert list(Split(folders[1], "train", infos[1], deep=True)) == ROWS
    assert alone.row_hashes.digest() == joined.row_hashes.digest()


def test_another_file_is_no_part(tmp_path: Path) -> None:
    writer = writer_in(tmp_path)
    (tmp_path / "part").write_bytes(b"something else" * 100)
    with pytest.raises(OSError, match="no part of the shard"):
        writer.append(tmp_path / "part", [])
    writer.abandon()
