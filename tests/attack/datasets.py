"""Attacks on datasets: a dataset by a stranger with other words or bytes, and hashes that vouch.

Also lists of images, as ``tessella data import`` reads them, with lines that are none.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pyarrow as pa

from tessella.artifacts.dataset import Dataset, Split
from tessella.core.errors import TessellaError
from tessella.data.importing import ImportSettings, import_images
from tessella.data.loading import batches
from tests.support.pictures.folders import write_folder_of
from tests.support.pictures.hostile import mutated
from tests.support.plans import fuzz_fields

SHARD, INFO = "train-00000.arrow", "dataset.json"
LINES = (
    b"\n", b"\0", b"x", b"a b c d", b"\xff\xfe 1", b"../../etc/passwd 0", b"/etc/passwd 0",
    b"/proc/self/mem 1", b"/dev/zero 1", b"a/000.png 99999999999999999999", b"a/000.png -1",
    b"a/000.png " + b"9" * 5000, b"a" * 5000 + b" 1", b"a/000.png \x1b[2J", b". 0", b" 0",
    b"a/000.png\t\t", b"a/000.png \xd9\xa3", b"pipe.png 0", b"loop.png 0",
)  # fmt: skip


@functools.cache
def _good() -> tuple[bytes, bytes]:
    """``dataset.json`` and the shard of a dataset of two classes."""
    with tempfile.TemporaryDirectory() as folder:
        images = write_folder_of(Path(folder) / "images", {"a": 3, "b": 4})
        settings = ImportSettings(size=8, holdout=0.0, workers=1)
        made = import_images(images, Path(folder) / "made", settings)
        return (made.path / INFO).read_bytes(), (made.path / SHARD).read_bytes()


def prepare() -> None:
    assert outcome(*_good()) == "answered"


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The dataset or list of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    kind = ("words", "bytes", "columns", "list")[index % 4]
    info, shard = _good()
    if kind == "list":
        lines = [b"a/%03d.png a" % i for i in range(3)] + [b"b/%03d.png b" % i for i in range(3)]
        for _ in range(rng.choice((1, 1, 2, 5))):
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(LINES))
        labels = rng.choice((None, ("a", "b"), ("a", "a"), ()))
        return f"list {labels}", functools.partial(_imported, b"\n".join(lines), labels)
    data = json.loads(info)
    if kind == "words":
        for _ in range(rng.choice((1, 1, 2))):
            fuzz_fields.lie_about(rng, data)
        return "words", functools.partial(outcome, fuzz_fields.dumped(data), shard)
    changed = mutated(shard, rng.getrandbits(60)) if kind == "bytes" else _columns(rng, shard)
    if kind == "bytes" and rng.random() < 0.5:
        place, value = rng.randrange(len(shard) - 8), rng.choice(fuzz_fields.INTEGERS)
        changed = shard[:place] + (value & 2**64 - 1).to_bytes(8, "little") + shard[place + 8 :]
    member = data["splits"]["train"]["shards"][SHARD]
    member["sha256"], member["nbytes"] = sha256(changed).hexdigest(), len(changed)
    return kind, functools.partial(outcome, json.dumps(data).encode(), changed)


def _columns(rng: random.Random, shard: bytes) -> bytes:
    """The same table with other columns, types, batches, or nothing where something was."""
    table = pa.ipc.open_stream(shard).read_all()
    rows = table.to_pylist()
    row = rng.choice(rows)
    schema = table.schema
    kind = rng.randrange(8)
    if kind == 0:
        row["label"] = rng.choice((-1, 2, 2**40, None))
    elif kind == 1:
        row["image"] = rng.choice(
            (None, {"bytes": None, "path": "x"}, {"bytes": b"", "path": None})
        )
    elif kind == 2:
        row["image"]["bytes"] = mutated(row["image"]["bytes"], rng.getrandbits(60))
    elif kind == 3:
        rows = rows * rng.choice((0, 2, 3))
    elif kind == 4:
        schema = pa.schema([*schema, ("more", pa.int8())])
    elif kind == 5:
        names = [("label", pa.int32()), ("label", pa.float64()), ("label", pa.dictionary(
            pa.int8(), pa.int64()))]  # fmt: skip
        schema = pa.schema([schema.field(0), rng.choice(names)])
    elif kind == 6:
        schema = pa.schema([schema.field(1), schema.field(0)])
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, "zstd", "lz4")))
    with pa.ipc.new_stream(out, schema, options=options) as writer:
        made = pa.Table.from_pylist(rows, schema)
        writer.write_table(made, max_chunksize=rng.choice((1, 3, 100)))
    return bytes(out.getvalue())


def outcome(info: bytes, shard: bytes) -> str:
    """``refused``, or ``answered`` where every example can be read and decoded or is refused."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / INFO).write_bytes(info)
        (Path(folder) / SHARD).write_bytes(shard)
        try:
            made = Dataset(folder)
            str(made).encode()
            for name in made.info.splits:
                _read(made, made.split(name))
        except TessellaError as error:
            str(error).encode("utf-8", "surrogatepass")
            return "refused"
    return "answered"


def _read(made: Dataset, split: Split) -> None:
    """What training does with each example."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of damaged tags
        for training in (False, True):
            asked = {"seed": 0, "epoch": 0, "augment": None, "training": training}
            for batch in batches(split, made.preprocess, batch_size=4, **asked):
                assert 0 <= int(batch.labels.min()) <= int(batch.labels.max()) < len(made.classes)
        str([example.path for example in split]).encode()


def _imported(lines: bytes, labels: tuple[str, ...] | None) -> str:
    """What becomes of a list: imported with the bad lines skipped, or refused."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_folder_of(root, {"a": 3, "b": 3})
        (root / "loop.png").symlink_to("loop.png")
        os.mkfifo(root / "pipe.png")
        (root / "list.txt").write_bytes(lines)
        settings = ImportSettings(size=8, holdout=0.0, workers=1, labels=labels)
        try:
            made = import_images(root / "list.txt", root / "made", settings)
            _read(made, made.train)
        except TessellaError as error:
            str(error).encode("utf-8", "surrogatepass")
            return "refused"
        finally:
            shutil.rmtree(root / "made", ignore_errors=True)
    return "answered"
