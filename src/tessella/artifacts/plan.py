"""plan: the optimized network as one file, data and nothing else.

A ZIP of stored (not compressed), 64-byte-aligned members. ``manifest.json`` vouches for every other
member by SHA-256; nothing is unpickled, evaluated or extracted. A plan is hostile until it is
checked.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tessella.artifacts.files import Member, from_document, to_document, write_atomic
from tessella.core.device import Fingerprint
from tessella.core.dtype import DTYPES
from tessella.core.errors import ArtifactError, CorruptArtifact
from tessella.core.preprocess import Preprocess
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.core.spec import TensorSpec

VERSION = 2
ALIGNMENT = 64
MAX_MEMBERS = 4096
MAX_JSON_BYTES = 256 << 20
MAX_ARENA_BYTES = 1 << 40
MANIFEST = "manifest.json"

# Inside a program there may also be what torch's operators hand to each other (an FFT).
ITEMSIZES = {name: d.itemsize for name, d in DTYPES.items()} | {"complex64": 8, "complex128": 16}

Format = Literal["contiguous", "channels_last", "strided"]


@dataclass(frozen=True, kw_only=True)
class Buffer:
    """A value of the program.

    Attributes:
        shape: concrete, for the bucket's batch.
        format: memory format; strides follow from it, except from ``strided``: a view with any.
        offset: byte offset in the arena, or None if the kernel that makes it allocates it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    format: Format = "contiguous"
    offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One kernel launch.

    Attributes:
        kernel: id in ``kernels.catalog``, for example ``conv2d.onednn``.
        op: the operation it carries out, for example ``conv2d``.
        inputs: names of buffers or constants, in the operation's order; None where one is left out.
        outputs: names of buffers.
        attrs: the operation's attributes, JSON values.
        config: the kernel's configuration (tile sizes and the like), as it won the auction.
        workspace: the buffer that is scratch memory for this step only, if the kernel needs one.
        frees: buffers that are not read again after this step.
        layer: the module path that it came from (``layer1.0.conv1``), for people.
    """

    kernel: str
    op: str
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    workspace: str | None = None
    frees: tuple[str, ...] = ()
    layer: str = ""

    @property
    def title(self) -> str:
        """The kernel, for people; also the operator where it is torch's or the user's own."""
        by_name = self.op in ("fallback", "user")
        return f"{self.kernel} {self.attrs['target']}" if by_name else self.kernel


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The program for one batch size.

    Attributes:
        arena_bytes: size of the arena that the buffers with an offset share.
        peak_bytes: the most that all live buffers take together; no plan can need less.
    """

    batch: int
    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    arena_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """``program.json``: straight-line steps, one list a bucket; buckets share the constants."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A line of ``tuning.jsonl``: one kernel tried for one step.

    Attributes:
        time_us: median, None if the kernel was refused.
        spread_us: half the distance between the quartiles.
        refused: why it was not measured or not taken.
    """

    batch: int
    step: str
    kernel: str
    chosen: bool
    time_us: float | None = None
    spread_us: float | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``manifest.json``: what the plan is, for which device, and what it may be trusted with.

    Attributes:
        imports: operators and kernels of a user's own that it needs → the modules that define them.
            A plan never brings their code, and loading imports nothing.
    """

    fingerprint: Fingerprint
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    precision: str
    preprocess: Preprocess | None
    preprocess_hash: str | None
    labels: tuple[str, ...]
    accuracy: dict[str, float]
    built_from: str
    built_with: dict[str, str]
    rebuild: str
    tolerance: float
    members: dict[str, Member]
    imports: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan in memory.

    Attributes:
        weights: constants by name, packed for their kernels where these want it.
        golden: ``input.NAME`` and ``output.NAME`` tensors for the self-test on load.
        graph: the optimized graph as text, for people.
    """

    manifest: Manifest
    program: Program
    weights: Mapping[str, torch.Tensor]
    golden: Mapping[str, torch.Tensor]
    tuning: tuple[Candidate, ...] = ()
    graph: str = ""

    def save(self, path: str | Path) -> Path:
        """Write the plan file, atomically. Equal plans give equal bytes."""
        path = Path(path)
        write_atomic(path, to_bytes(self))
        return path

    def __str__(self) -> str:
        return table(self)


def to_bytes(plan: Plan) -> bytes:
    """The plan file's bytes; the manifest's members are computed here."""
    members = {
        "program.json": (canonical_json(plan.program) + "\n").encode(),
        "weights.safetensors": save_tensors({k: v.contiguous() for k, v in plan.weights.items()}),
        "golden.safetensors": save_tensors({k: v.contiguous() for k, v in plan.golden.items()}),
        "tuning.jsonl": "".join(canonical_json(c) + "\n" for c in plan.tuning).encode(),
        "graph.txt": plan.graph.encode(),
    }
    vouched = {
        name: Member(sha256=sha256(content).hexdigest(), nbytes=len(content))
        for name, content in members.items()
    }
    manifest = Manifest(**{**vars(plan.manifest), "members": vouched})
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        _add_aligned(archive, out, MANIFEST, to_document("plan", VERSION, manifest))
        for name, content in members.items():
            _add_aligned(archive, out, name, content)
    return out.getvalue()


def _add_aligned(archive: zipfile.ZipFile, out: io.BytesIO, name: str, content: bytes) -> None:
    """Add a member whose content starts at a multiple of ``ALIGNMENT``, with a fixed date."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    header = 30 + len(name.encode())
    padding = -(out.tell() + header + 4) % ALIGNMENT
    info.extra = struct.pack("<HH", 0x5450, padding) + b"\0" * padding
    archive.writestr(info, content)


# --- reading --------------------------------------------------------------------------------------


def load_plan(path: str | Path) -> Plan:
    """Read and check a plan file. Nothing of it is used before every hash has been verified.

    Raises:
        ArtifactError: no such file; not a plan; truncated, changed, or of an unknown version.
    """
    path = Path(path)
    if not path.is_file():
        raise ArtifactError("there is no plan here", seen=path, fix="give the path of a plan file")
    return from_bytes(path.read_bytes(), where=str(path))


def from_bytes(content: bytes, *, where: str = "plan") -> Plan:
    """A plan from the file's bytes; see ``load_plan``."""
    members = _members(content, where)
    manifest = from_document(
        members.pop(MANIFEST), Manifest, kind="plan", version=VERSION, where=f"{where}:{MANIFEST}"
    )
    if set(members) != set(manifest.members) or not set(_REQUIRED) <= set(members):
        raise CorruptArtifact(
            f"{where} does not hold the members that its manifest names",
            seen=sorted(set(members) ^ set(manifest.members)) or sorted(members),
            fix="copy or build the plan again",
        )
    for name, expected in manifest.members.items():
        if sha256(members[name]).hexdigest() != expected.sha256:
            raise CorruptArtifact(
                f"{name} in {where} does not match its hash: some bytes changed",
                fix="copy or build the plan again",
            )
    if manifest.preprocess is not None and manifest.preprocess.hash != manifest.preprocess_hash:
        raise CorruptArtifact(
            f"the preprocessing record in {where} does not match its hash",
            fix="build the plan again; a changed record would change every answer",
        )
    program = _program(members["program.json"], where)
    weights = _tensors(members["weights.safetensors"], f"{where}:weights.safetensors")
    _check_program(manifest, program, set(weights), where)
    return Plan(
        manifest=manifest,
        program=program,
        weights=weights,
        golden=_tensors(members["golden.safetensors"], f"{where}:golden.safetensors"),
        tuning=_tuning(members["tuning.jsonl"], where),
        graph=members["graph.txt"].decode("utf-8", "replace"),
    )


_REQUIRED = (
    "program.json", "weights.safetensors", "golden.safetensors", "tuning.jsonl", "graph.txt",
)  # fmt: skip


def _not_a_plan(where: str, seen: object) -> CorruptArtifact:
    return CorruptArtifact(
        f"{where} is not a plan, or it was truncated or changed",
        seen=seen,
        fix="copy or build the plan again",
    )


def _members(content: bytes, where: str) -> dict[str, bytes]:
    """The members by name: only stored ones, each once, plainly named, of honest size."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        infos = archive.infolist()
        if len(infos) > MAX_MEMBERS or sum(i.file_size for i in infos) > len(content):
            raise _not_a_plan(where, f"{len(infos)} members, larger than the file")
        names = [i.filename for i in infos]
        if len(set(names)) != len(names):
            raise _not_a_plan(where, "a member is there twice")
        for info in infos:
            parts = info.filename.split("/")
            plain = all(p not in ("", ".", "..") for p in parts) and "\\" not in info.filename
            stored = info.compress_type == zipfile.ZIP_STORED
            if not stored or info.compress_size != info.file_size:
                raise _not_a_plan(where, f"member {info.filename!r} is not stored as it is")
            if not plain or "\0" in info.filename:
                raise _not_a_plan(where, f"member {info.filename!r}")
            if info.filename.endswith((".json", ".jsonl")) and info.file_size > MAX_JSON_BYTES:
                raise _not_a_plan(where, f"{info.filename} has {info.file_size:,} bytes")
        if MANIFEST not in names:
            raise _not_a_plan(where, f"no {MANIFEST}")
        return {name: archive.read(name) for name in names}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, struct.error) as error:
        raise _not_a_plan(where, str(error)[:120]) from error
    except (NotImplementedError, RuntimeError, KeyError) as error:  # encrypted, odd flags
        raise _not_a_plan(where, str(error)[:120]) from error


def _program(content: bytes, where: str) -> Program:
    where = f"{where}:program.json"
    return from_plain(Program, parse_json(content, where=where), where=where)


def _tensors(content: bytes, where: str) -> dict[str, torch.Tensor]:
    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _not_a_plan(where, str(error)[:120]) from error


def _tuning(content: bytes, where: str) -> tuple[Candidate, ...]:
    where = f"{where}:tuning.jsonl"
    lines = [parse_json(line, where=where) for line in content.splitlines() if line]
    return tuple(from_plain(Candidate, line, where=where) for line in lines)


def _check_program(manifest: Manifest, program: Program, weights: set[str], where: str) -> None:
    """Straight-line: every name is made before it is read, buffers lie inside the arena."""

    def wrong(batch: int, what: str) -> CorruptArtifact:
        return CorruptArtifact(
            f"the program in {where} is not valid (batch {batch})", seen=what, fix="build it again"
        )

    if program.inputs != tuple(s.name for s in manifest.inputs) or not program.buckets:
        raise wrong(0, f"inputs {program.inputs}, {len(program.buckets)} buckets")
    if program.outputs != tuple(s.name for s in manifest.outputs):
        raise wrong(0, f"outputs {program.outputs}")
    for bucket in program.buckets:
        buffers = {b.name: b for b in bucket.buffers}
        if len(buffers) != len(bucket.buffers) or set(buffers) & weights:
            raise wrong(bucket.batch, "a buffer's name is used twice")
        if bucket.batch < 1 or not 0 <= bucket.arena_bytes <= MAX_ARENA_BYTES:
            raise wrong(bucket.batch, f"an arena of {bucket.arena_bytes} bytes")
        for buffer in bucket.buffers:
            if buffer.dtype not in ITEMSIZES:
                raise wrong(bucket.batch, f"element type {buffer.dtype!r} of {buffer.name}")
            size = ITEMSIZES[buffer.dtype]
            for dim in buffer.shape:
                if dim < 0:
                    raise wrong(bucket.batch, f"shape of {buffer.name}: {buffer.shape}")
                size *= dim
            offset = buffer.offset
            if offset is not None and not (
                offset % ALIGNMENT == 0 and offset >= 0 and offset + size <= bucket.arena_bytes
            ):
                raise wrong(bucket.batch, f"buffer {buffer.name} lies outside the arena")
        live = set(program.inputs)
        for step in bucket.steps:
            if not step.outputs:
                raise wrong(bucket.batch, f"{step.kernel} makes nothing")
            read = {n for n in step.inputs if n is not None}
            if missing := read - live - weights:
                raise wrong(
                    bucket.batch, f"{step.kernel} reads {sorted(missing)} before it is made"
                )
            scratch = buffers.get(step.workspace or "")
            if step.workspace and (scratch is None or scratch.offset is None):
                raise wrong(bucket.batch, f"{step.kernel} works in {step.workspace}, not a buffer")
            if unknown := set(step.outputs) - set(buffers):
                raise wrong(bucket.batch, f"{step.kernel} writes {sorted(unknown)}, not a buffer")
            live |= set(step.outputs)
            live -= set(step.frees)
        if missing := set(program.outputs) - live:
            raise wrong(bucket.batch, f"outputs {sorted(missing)} are never made")


def table(plan: Plan) -> str:
    """The program of the largest bucket as a table for people: step, kernel, layer, time."""
    bucket = plan.program.buckets[-1]
    times = {(c.batch, c.step): c.time_us for c in plan.tuning if c.chosen}
    rows = [("step", "kernel", "output", "layer", "time_us")]
    buffers = {b.name: b for b in bucket.buffers}
    for index, step in enumerate(bucket.steps):
        out = buffers[step.outputs[0]]
        time_us = times.get((bucket.batch, step.outputs[0]))
        shape = "×".join(str(d) for d in out.shape)
        shown = "" if time_us is None else f"{time_us:.1f}"
        rows.append((str(index), step.title, f"{out.dtype} {shape}", step.layer, shown))
    widths = [max(len(r[c]) for r in rows) for c in range(5)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) for r in rows]
    manifest = plan.manifest
    head = (
        f"plan of {manifest.built_from} for {manifest.fingerprint.target}"
        f" ({manifest.fingerprint.name}), {manifest.precision},"
        f" batches {', '.join(str(b.batch) for b in plan.program.buckets)}"
    )
    return "\n".join([head, f"batch {bucket.batch}:", *(line.rstrip() for line in lines)])
