"""A dataset on disk: it comes back as written, or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tessella.artifacts import dataset as datasets
from tessella.artifacts import shards as module
from tessella.artifacts.dataset import Dataset, DatasetInfo, Split, write_info
from tessella.artifacts.files import member, write_folder
from tessella.artifacts.shards import Example, SplitWriter
from tessella.core.errors import (
    ArtifactError,
    CorruptArtifact,
    DataError,
    UnknownVersion,
    UsageError,
)
from tessella.core.preprocess import Preprocess
from tessella.tasks import column_of, named

EXAMPLES = [
    Example(content=bytes([i]) * (i + 1), label=i % 2, path=f"{i % 2}/{i}.png") for i in range(40)
]


def write(
    path: Path, examples: list[Example] = EXAMPLES, classes: tuple[str, ...] = ("a", "b")
) -> Dataset:
    def fill(folder: Path) -> None:
        writer = SplitWriter(folder, "train", column_of(named("classification"), classes))
        for example in examples:
            writer.add(example)
        info = DatasetInfo(
            name="n",
            classes=classes,
            preprocess=Preprocess(height=2, width=2),
            splits={"train": writer.close()},
            source="s",
            content_hash=writer.row_hashes.hexdigest(),
            created="now",
        )
        write_info(folder, info)

    write_folder(path, fill)
    return Dataset(path)


def test_examples_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 3)
    monkeypatch.setattr(module, "BYTES_PER_SHARD", 100)
    dataset = write(tmp_path / "d")
    assert len(dataset.info.splits["train"].shards) > 3
    assert list(dataset.train) == EXAMPLES
    assert dataset.train.labels.tolist() == [e.label for e in EXAMPLES]
    assert dataset.info.splits["train"].class_counts == (20, 20)
    for index in (-1, 40):
        with pytest.raises(IndexError):
            dataset.train[index]
    assert (
        list(pickle.loads(pickle.dumps(dataset.train))) == EXAMPLES
    )  # as a worker process gets it


def test_large_images_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BYTES_PER_BATCH", 50)
    dataset = write(tmp_path / "d")
    (shard,) = dataset.info.splits["train"].shards
    with pa.OSFile(str(dataset.path / shard)) as file:
        sizes = [
            sum(len(row["bytes"]) for row in batch.column("image").to_pylist())
            for batch in pa.ipc.open_stream(file)
        ]
    assert len(sizes) > 10
    assert max(sizes) < 50 + 40  # at most one image more than the limit


def test_content_hash_tells_examples_apart(tmp_path: Path) -> None:
    hashes = {
        write(tmp_path / str(i), examples).info.content_hash
        for i, examples in enumerate(
            [
                EXAMPLES,
                EXAMPLES[::-1],
                EXAMPLES[1:],
                [*EXAMPLES[:-1], Example(content=b"x", label=1, path="")],
            ]
        )
    }
    assert len(hashes) == 4
    renamed = [
        Example(content=e.content, label=e.label, path=f"elsewhere/{e.path}") for e in EXAMPLES
    ]
    assert write(tmp_path / "renamed", renamed).info.content_hash in hashes


def test_an_unknown_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no split 'val'"):
        _ = write(tmp_path / "d").val


def test_a_dataset_needs_classes(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least one class"):
        write(tmp_path / "d", [], ())
    assert not (tmp_path / "d").exists()


# --- damage -------------------------------------------------------------------------------------


def read_all(path: Path, *, deep: bool = True) -> list[Example]:
    return list(Dataset(path, deep=deep).train)


def test_every_flipped_byte_of_a_shard_is_noticed(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d")
    shard = dataset.path / "train-00000.arrow"
    content = shard.read_bytes()
    for place in range(0, len(content), 7):
        changed = bytearray(content)
        changed[place] ^= 0x10
        shard.write_bytes(changed)
        with pytest.raises(CorruptArtifact, match="hash"):
            read_all(dataset.path)


def test_a_shallow_reader_never_crashes_and_never_gives_a_label_that_is_none(
    tmp_path: Path,
) -> None:
    dataset = write(tmp_path / "d")
    shard = dataset.path / "train-00000.arrow"
    content = shard.read_bytes()
    refused = 0
    for place in range(0, len(content), 11):
        changed = bytearray(content)
        changed[place] ^= 0x81
        shard.write_bytes(changed)
        try:
            split = Dataset(dataset.path, deep=False).train
        except CorruptArtifact:
            refused += 1
            continue
        assert len(split) == 40
        assert set(split.labels.tolist()) <= {0, 1}
    assert refused > 20


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("keep", [0, 100, -1])
def test_a_truncated_shard(tmp_path: Path, keep: int, deep: bool) -> None:
    dataset = write(tmp_path / "d")
    shard = dataset.path / "train-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:keep])
    with pytest.raises(CorruptArtifact, match="truncated"):
        read_all(dataset.path, deep=deep)
    shard.unlink()
    with pytest.raises(CorruptArtifact, match="missing"):
        read_all(dataset.path, deep=deep)


CHANGES: dict[str, Callable[[dict], object]] = {
    "later version": lambda d: d.update(version=2),
    "another kind": lambda d: d.update(kind="tessella.plan"),
    "no classes field": lambda d: d.pop("classes"),
    "std of zero": lambda d: d["preprocess"].update(std=[0, 0, 0]),
    "huge number": lambda d: d["preprocess"].update(mean=[10**400] * 3),
    "size of zero": lambda d: d["preprocess"].update(height=0),
    "count as text": lambda d: d["splits"]["train"].update(count="40"),
    "fewer classes than counts": lambda d: d.update(classes=["a"]),
    "numbers of a task": lambda d: d.update(
        task={"name": "regression", "score": "r2", "numbers": {"std": [1.0]}}
    ),
    "a path for a task": lambda d: d.update(task={"name": "../x", "score": "r2", "numbers": {}}),
    "unknown field": lambda d: d.update(code="import os"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_document(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "d").path / "dataset.json"
    plain = json.loads(path.read_text())
    CHANGES[name](plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(UnknownVersion if name == "later version" else CorruptArtifact):
        Dataset(tmp_path / "d")


def test_labels_that_contradict_the_document(tmp_path: Path) -> None:
    path = write(tmp_path / "d").path / "dataset.json"
    path.write_text(path.read_text().replace("20,", "21,", 1))
    with pytest.raises(CorruptArtifact, match="labels"):
        read_all(tmp_path / "d", deep=False)


def test_a_truncated_document_and_no_document(tmp_path: Path) -> None:
    path = write(tmp_path / "d").path / "dataset.json"
    content = path.read_bytes()
    for keep in range(0, len(content) - 2, 97):
        path.write_bytes(content[:keep])
        with pytest.raises(ArtifactError):
            Dataset(tmp_path / "d")
    path.unlink()
    with pytest.raises(ArtifactError, match="no dataset here"):
        Dataset(tmp_path / "d")


@pytest.mark.parametrize("way", ["as written", "compressed", "too many files"])
def test_stored_bytes_are_read_into_memory(way: str, tmp_path: Path, monkeypatch) -> None:
    """From the shard's file, wherever its batches lie; where that cannot be, from the mapping."""
    monkeypatch.setattr(module, "ROWS_PER_BATCH", 7)
    if way == "too many files":
        monkeypatch.setattr(datasets, "MOST_FILES", 0)
    rows = [bytes([i]) * (1000 + i) for i in range(40)]
    writer = SplitWriter(tmp_path, "train", column_of(named("classification"), ("a", "b")))
    for number, content in enumerate(rows):
        writer.add(Example(content=content, label=number % 2, path=f"{number}.png"))
    info = writer.close()
    if way == "compressed":  # as another program may write it
        (name,) = info.shards
        table = pa.ipc.open_stream((tmp_path / name).read_bytes()).read_all()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_stream(str(tmp_path / name), table.schema, options=options) as stream:
            stream.write_table(table)
        info = replace(info, shards={name: member(tmp_path / name)})
    split = Split(tmp_path, "train", info, deep=True)
    for number, content in enumerate(rows):
        assert split.content(number) == split[number].content == content
        head, rest = bytearray(10), bytearray(len(content) - 10)
        assert split.read(number, head, rest) == (way == "as written")
        assert not split.read(number, rest)
        if way == "as written":
            assert head + rest == content
