"""What an ONNX file says of its images beside the network: labels, task, preprocessing record.

They stand as JSON under one key of the model's ``metadata_props``, which other tools keep. Files of
others have none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tessella.core.errors import CompileError, CorruptArtifact
from tessella.core.preprocess import Preprocess
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.core.task import CLASSIFICATION, TaskRecord

KEY = "tessella"
MAX_CHARACTERS = 16 << 20  # a million labels


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """How images become a network's input, and what its outputs mean and are called."""

    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    task: TaskRecord = CLASSIFICATION

    def __post_init__(self) -> None:
        self.task.check(self.labels)


def add_metadata(model: onnx.ModelProto, metadata: Metadata) -> None:
    """Write it into a model."""
    model.metadata_props.add(key=KEY, value=canonical_json(metadata))


def read_metadata(path: str | Path) -> Metadata:
    """The record that an export has left in a file; an empty one of a file of others.

    Raises:
        CompileError: it is no ONNX file, or what it says is no such record.
    """
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise CompileError(f"{path} is not an ONNX file", seen=error) from error
    text = next((p.value for p in model.metadata_props if p.key == KEY), "{}")
    where = f"the metadata of {path}"
    if len(text) > MAX_CHARACTERS:
        raise CompileError(f"{where} are too long", seen=f"{len(text):,} characters")
    try:
        return from_plain(Metadata, parse_json(text, where=where), where=where)
    except CorruptArtifact as error:
        raise CompileError(
            f"{where} do not say how images become its input",
            seen=error,
            fix=f"export it again, or remove {KEY!r} from its metadata_props",
        ) from error
