"""plan: the optimized network as one file, data and nothing else.

A ZIP of stored (not compressed), 64-byte-aligned members. ``manifest.json`` vouches for every other
member by SHA-256; nothing is unpickled, evaluated or extracted. A plan is hostile until it is
checked: only the very bytes that ``to_bytes`` writes are a plan. Its compiled kernels are checked
to be such, but what they do on the GPU is their author's: see docs/plans.md.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError, deserialize

from tessella.artifacts.files import Member, from_document, read_file, to_document, write_atomic
from tessella.artifacts.outline import Candidate, Constant, Manifest, Outline, StoredTensor
from tessella.artifacts.program import ALIGNMENT, Program
from tessella.artifacts.program import wrong as impossible
from tessella.core.compiled import CompiledKernel, CompiledKernels
from tessella.core.dtype import PRECISIONS, plain_precision
from tessella.core.errors import ArtifactError, CorruptArtifact
from tessella.core.record import canonical_json, from_plain, parse_json
from tessella.core.spec import DimRange

if TYPE_CHECKING:
    import torch

VERSION = 3
MAX_JSON_BYTES = 64 << 20
MANIFEST = "manifest.json"

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Outline):
    """A plan in memory.

    Attributes:
        golden: ``input.NAME`` and ``output.NAME`` tensors for the self-test on load; samples that
            are repeated up to the smallest batch.
    """

    weights: Mapping[str, torch.Tensor]
    golden: Mapping[str, torch.Tensor]

    def save(self, path: str | Path) -> Path:
        """Write the plan file, atomically. Equal plans give equal bytes."""
        path = Path(path)
        write_atomic(path, to_bytes(self))
        return path


def to_bytes(plan: Plan) -> bytes:
    """The plan file's bytes; the manifest's members are computed here."""
    from safetensors.torch import save as save_tensors

    tensors = {
        f"{name}.safetensors": save_tensors(_apart(held))
        for name, held in (("weights", plan.weights), ("golden", plan.golden))
    }
    held = _texts(plan) | tensors
    members = {name: held[name] for name in _REQUIRED}
    members |= {_cubin(h): plan.compiled.cubins[h] for h in sorted(plan.compiled.cubins)}
    vouched = {
        name: Member(sha256=sha256(content).hexdigest(), nbytes=len(content))
        for name, content in members.items()
    }
    manifest = Manifest(**{**vars(plan.manifest), "members": vouched})
    return archive_of({MANIFEST: to_document("plan", VERSION, manifest), **members})


def _apart(held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Dense tensors that share no memory, as safetensors wants them: a constant may be another's
    copy or part, an output the input itself."""
    taken: set[int] = set()
    apart = {}
    for name, tensor in held.items():
        dense = tensor.contiguous()
        memory = dense.untyped_storage().data_ptr()
        apart[name] = dense.clone() if memory in taken else dense
        taken.add(memory)
    return apart


def _texts(plan: Plan) -> dict[str, bytes]:
    """The members that are text."""
    return {
        "program.json": (canonical_json(plan.program) + "\n").encode(),
        "tuning.jsonl": "".join(canonical_json(c) + "\n" for c in plan.tuning).encode(),
        "graph.txt": plan.graph.encode(),
        "lock.jsonl": plan.lock.encode(),
        "kernels.jsonl": "".join(canonical_json(k) + "\n" for k in plan.compiled.kernels).encode(),
    }


def archive_of(members: Mapping[str, bytes]) -> bytes:
    """The bytes of a ZIP with these members, in their order."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
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
    return from_bytes(read_file(Path(path), "plan"), where=str(path))


def load_outline(path: str | Path) -> Outline:
    """Read and check a plan file as ``load_plan`` does, and keep all but the tensors' values."""
    content = read_file(Path(path), "plan")
    with _memory(str(path), len(content)):
        return _read(content, str(path), _stored)[0]


def from_bytes(content: bytes, *, where: str = "plan") -> Plan:
    """A plan from the file's bytes; see ``load_plan``."""
    with _memory(where, len(content)):
        outline, members = _read(content, where, _tensors)
        golden = _tensors(members["golden.safetensors"], f"{where}:golden.safetensors")
        return Plan(**vars(outline), golden=golden)


@contextmanager
def _memory(where: str, nbytes: int) -> Iterator[None]:
    """Turn the end of the memory into an error of ours."""
    try:
        yield
    except MemoryError as error:
        raise ArtifactError(
            f"there is not enough memory to read {where}",
            seen=f"{nbytes:,} bytes",
            fix="free memory; or build the plan again, if its file was changed",
        ) from error


def read_back(plan: Plan) -> Plan:
    """The plan as its own file would say it; its tensors are shared, not copied.

    Raises:
        ArtifactError: what would be written is no plan.
    """
    where = "the plan that was built"
    manifest = from_document(
        to_document("plan", VERSION, plan.manifest),
        Manifest,
        kind="plan",
        version=VERSION,
        where=f"{where}:{MANIFEST}",
    )
    cubins = {_cubin(hashed): code for hashed, code in plan.compiled.cubins.items()}
    outline = _parsed(manifest, _texts(plan) | cubins, plan.weights, where)
    return Plan(**vars(outline), golden=plan.golden)


def _read(
    content: bytes, where: str, tensors: Callable[[bytes, str], Mapping[str, Constant]]
) -> tuple[Outline, dict[str, bytes]]:
    """A plan file, checked: its outline with the weights as ``tensors`` reads them, its members."""
    members = _members(content, where)
    manifest = from_document(
        members.pop(MANIFEST), Manifest, kind="plan", version=VERSION, where=f"{where}:{MANIFEST}"
    )
    if set(members) != set(manifest.members):
        raise CorruptArtifact(
            f"{where} does not hold the members that its manifest names",
            seen=sorted(set(members) ^ set(manifest.members)) or sorted(members),
            fix="copy or build the plan again",
        )
    for name, expected in manifest.members.items():
        seen = Member(sha256=sha256(members[name]).hexdigest(), nbytes=len(members[name]))
        if seen != expected:
            raise CorruptArtifact(
                f"{name} in {where} does not match its hash: some bytes changed",
                fix="copy or build the plan again",
            )
    record = manifest.preprocess
    if (None if record is None else record.hash) != manifest.preprocess_hash:
        raise CorruptArtifact(
            f"the preprocessing record in {where} does not match its hash",
            fix="build the plan again; a changed record would change every answer",
        )
    weights = tensors(members["weights.safetensors"], f"{where}:weights.safetensors")
    return _parsed(manifest, members, weights, where), members


def _parsed(
    manifest: Manifest, members: Mapping[str, bytes], weights: Mapping[str, Constant], where: str
) -> Outline:
    """The outline of a plan from its members, whose program is checked."""
    program = _program(members["program.json"], where)
    _check_program(manifest, program, weights, where)
    return Outline(
        manifest=manifest,
        program=program,
        weights=weights,
        tuning=_lines(Candidate, members["tuning.jsonl"], f"{where}:tuning.jsonl"),
        graph=members["graph.txt"].decode("utf-8", "replace"),
        lock=members["lock.jsonl"].decode("utf-8", "replace"),
        compiled=_compiled(manifest, members, where),
    )


_REQUIRED = (
    "program.json", "weights.safetensors", "golden.safetensors", "tuning.jsonl", "graph.txt",
    "lock.jsonl", "kernels.jsonl",
)  # fmt: skip
_CUBIN = re.compile(r"kernels/([0-9a-f]{64})\.cubin")


def _cubin(hashed: str) -> str:
    """The member that holds the machine code with this hash."""
    return f"kernels/{hashed}.cubin"


def _not_a_plan(where: str, seen: object) -> CorruptArtifact:
    return CorruptArtifact(
        f"{where} is not a plan, or it was truncated or changed",
        seen=seen,
        fix="copy or build the plan again",
    )


def _members(content: bytes, where: str) -> dict[str, bytes]:
    """The members by name, of a file that is byte for byte what ``to_bytes`` writes of them.

    So nothing can hide or change in the headers, the directory, or between the members.
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        infos = archive.infolist()
        names = [i.filename for i in infos]
        cubins = names[1 + len(_REQUIRED) :]
        if names != [MANIFEST, *_REQUIRED, *cubins] or not all(map(_CUBIN.fullmatch, cubins)):
            raise _not_a_plan(where, f"{len(names)} members: {str(names)[:120]}")
        for info in infos:  # before anything is read: nothing may unpack to more than it is
            stored = info.compress_type == zipfile.ZIP_STORED
            if not stored or not info.compress_size == info.file_size <= len(content):
                raise _not_a_plan(where, f"member {info.filename!r} is not stored as it is")
            if info.filename.endswith((".json", ".jsonl")) and info.file_size > MAX_JSON_BYTES:
                raise _not_a_plan(where, f"{info.filename} has {info.file_size:,} bytes")
        members = {name: archive.read(name) for name in names}
    except (  # RuntimeError: encrypted, odd flags
        zipfile.BadZipFile, ValueError, EOFError, OSError, struct.error, RuntimeError, KeyError,
    ) as error:  # fmt: skip
        raise _not_a_plan(where, str(error)[:120]) from error
    if archive_of(members) != content:
        raise _not_a_plan(where, "bytes beside the members, or headers that were changed")
    return members


def _program(content: bytes, where: str) -> Program:
    where = f"{where}:program.json"
    return from_plain(Program, parse_json(content, where=where), where=where)


# By safetensors' names; those that a plan cannot use keep theirs.
_TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def _stored(content: bytes, where: str) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, without their values."""
    try:
        return {
            name: StoredTensor(
                dtype=_TORCH_NAMES.get(about["dtype"], about["dtype"]),
                shape=tuple(about["shape"]),
                nbytes=len(about["data"]),
                sha256=sha256(about["data"]).hexdigest(),
            )
            for name, about in deserialize(content)  # type: ignore[no-untyped-call]
        }
    except (SafetensorError, ValueError, KeyError) as error:
        raise _not_a_plan(where, str(error)[:120]) from error


def _tensors(content: bytes, where: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load as load_tensors

    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise _not_a_plan(where, str(error)[:120]) from error


def _lines(cls: type[R], content: bytes, where: str) -> tuple[R, ...]:
    """The records of a file of JSON lines."""
    lines = [parse_json(line, where=where) for line in content.splitlines() if line]
    return tuple(from_plain(cls, line, where=where) for line in lines)


def _compiled(manifest: Manifest, members: Mapping[str, bytes], where: str) -> CompiledKernels:
    kernels = _lines(CompiledKernel, members["kernels.jsonl"], f"{where}:kernels.jsonl")
    cubins = {found[1]: members[n] for n in members if (found := _CUBIN.fullmatch(n))}
    compiled = CompiledKernels(kernels=kernels, cubins=cubins)
    if reason := compiled.wrong(manifest.fingerprint.target):
        raise CorruptArtifact(
            f"the compiled kernels in {where} are not valid",
            seen=reason,
            fix="build it again",
        )
    return compiled


def _check_program(
    manifest: Manifest, program: Program, weights: Mapping[str, object], where: str
) -> None:
    """Check that the program is a straight line within bounds and agrees with the manifest.

    Shapes and views, which only kernels know, are checked when the kernels are bound.
    """

    def wrong(batch: int, what: str) -> CorruptArtifact:
        return CorruptArtifact(
            f"the program in {where} is not valid (batch {batch})",
            seen=what[:300],
            fix="build it again",
        )

    if program.inputs != tuple(s.name for s in manifest.inputs) or not program.buckets:
        raise wrong(0, f"inputs {program.inputs}, {len(program.buckets)} buckets")
    if program.outputs != tuple(s.name for s in manifest.outputs):
        raise wrong(0, f"outputs {program.outputs}")
    for names in (program.inputs, program.outputs):
        if not names or len(set(names)) != len(names):
            raise wrong(0, f"inputs or outputs {names}")
    if unknown := sorted({*map(plain_precision, manifest.precisions.values())} - set(PRECISIONS)):
        raise wrong(0, f"precisions {unknown}")
    if not 0 <= manifest.tolerance <= 1:
        raise wrong(0, f"a self-test with the tolerance {manifest.tolerance}")
    for spec in (*manifest.inputs, *manifest.outputs):
        if not spec.shape or any(isinstance(d, DimRange) for d in spec.shape[1:]):
            raise wrong(0, f"{spec}: only the batch may vary")
    batches = [b.batch for b in program.buckets]
    if batches != sorted(set(batches)):
        raise wrong(0, f"batches {batches[:20]}")
    for bucket in program.buckets:
        specs = (*manifest.inputs, *manifest.outputs)
        if reason := impossible(program, bucket, specs, weights):
            raise wrong(bucket.batch, reason)
    _check_imports(manifest, program, where)


def _check_imports(manifest: Manifest, program: Program, where: str) -> None:
    """Check that every import names a module, and is needed by a step."""
    steps = [step for bucket in program.buckets for step in bucket.steps]
    run = {str(s.attrs.get("target")) if s.op == "user" else s.kernel for s in steps}
    for name, module in manifest.imports.items():
        plain = module.isprintable() and 0 < len(module) <= 200 and not set(module) & set(" ;,")
        if name not in run or not plain:
            raise CorruptArtifact(
                f"{where} asks for an import that no step needs",
                seen=f"{name[:80]!r} from {module[:80]!r}",
                fix="build it again",
            )
