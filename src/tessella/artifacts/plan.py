"""plan: the optimized network as one file, data and nothing else.

A ZIP of stored (not compressed), 64-byte-aligned members: tensors, each content once, and a folder
for each target's program. ``manifest.json`` vouches for every other member by SHA-256; nothing is
unpickled, evaluated or extracted. A plan is hostile until all its programs are checked: only the
very bytes that ``to_bytes`` writes are a plan. Its compiled kernels are checked to be such, but
what they do on the GPU is their author's: see docs/plans.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from safetensors import SafetensorError, deserialize

from tessella.artifacts.archive import archive_of, members_of, not_a_plan
from tessella.artifacts.files import Member, from_document, read_file, to_document, write_atomic
from tessella.artifacts.outline import (
    Build,
    Candidate,
    Constant,
    Manifest,
    Outline,
    Shared,
    StoredTensor,
)
from tessella.artifacts.program import Program
from tessella.artifacts.program import wrong as impossible
from tessella.core.architectures import TARGETS
from tessella.core.compiled import CompiledKernel, CompiledKernels
from tessella.core.device import suiting
from tessella.core.dtype import PRECISIONS, plain_precision
from tessella.core.errors import ArtifactError, CorruptArtifact
from tessella.core.record import canonical_json, from_plain, parse_json, records_from_plain
from tessella.core.spec import DimRange

if TYPE_CHECKING:
    import torch

VERSION = 4
MANIFEST, WEIGHTS, GOLDEN = "manifest.json", "weights.safetensors", "golden.safetensors"
_REQUIRED = (  # of each target's folder
    "program.json", "tensors.json", "tuning.jsonl", "graph.txt", "lock.jsonl", "kernels.jsonl",
)  # fmt: skip
_CUBIN = re.compile(r"kernels/([0-9a-f]{64})\.cubin")

R = TypeVar("R")
T = TypeVar("T", bound=Constant)


@dataclass(frozen=True, kw_only=True)
class Contents(Shared):
    """``manifest.json``: what holds of all programs, and what holds of each, by its target."""

    programs: dict[str, Build]


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """``tensors.json`` of a program: the stored name of each of its tensors, by its own name."""

    weights: dict[str, str]
    golden: dict[str, str]


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
    """The plan file's bytes, with all its programs; the manifest's members are computed here.

    Raises:
        ArtifactError: the programs are not of one network.
    """
    from safetensors.torch import save as save_tensors

    programs = [plan.at(target) for target in plan.targets]
    weights, weights_names = _pooled([p.weights for p in programs])
    golden, golden_names = _pooled([p.golden for p in programs])
    members = {WEIGHTS: save_tensors(weights), GOLDEN: save_tensors(golden)}
    for one, *names in zip(programs, weights_names, golden_names, strict=True):
        folder = _folder(one.target)
        held = _texts(one) | {"tensors.json": _text(TensorNames(weights=names[0], golden=names[1]))}
        members |= {f"{folder}{name}": held[name] for name in _REQUIRED}
        cubins = one.compiled.cubins
        members |= {f"{folder}{_cubin(hashed)}": cubins[hashed] for hashed in sorted(cubins)}
    vouched = {
        name: Member(sha256=sha256(content).hexdigest(), nbytes=len(content))
        for name, content in members.items()
    }
    contents = to_document("plan", VERSION, _contents(programs, vouched))
    return archive_of({MANIFEST: contents, **members})


def _contents(programs: Sequence[Plan], members: dict[str, Member]) -> Contents:
    """The manifest of a file with these programs."""
    shared, *others = (_part(Shared, p.manifest) | {"members": members} for p in programs)
    if differ := {n for other in others for n in shared if other[n] != shared[n]}:
        raise ArtifactError(
            "the programs in one plan are those of one network",
            seen=f"not the same: {', '.join(sorted(differ))}",
            fix="build them by one compile, for all targets",
        )
    builds = {p.target: Build(**_part(Build, p.manifest)) for p in programs}
    return Contents(**shared, programs=builds)


def _part(cls: type[Shared | Build], record: Shared | Build) -> dict[str, Any]:
    """The values of those fields of a record that its base class ``cls`` has."""
    return {f.name: getattr(record, f.name) for f in fields(cls)}


def _pooled(
    held: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], list[dict[str, str]]]:
    """The tensors of several programs, each content once, and for each program their stored names.

    They are dense and share no memory, as safetensors wants them: a constant may be a part of
    another, an output the input itself.
    """
    import torch

    stored: dict[str, torch.Tensor] = {}
    known: dict[tuple[object, ...], str] = {}
    taken: set[int] = set()
    names: list[dict[str, str]] = []
    for tensors in held:
        names.append({})
        for name in sorted(tensors):
            dense = tensors[name].detach().contiguous()
            plain = dense.reshape(-1).view(torch.uint8).cpu().numpy().data
            content = dense.dtype, dense.shape, sha256(plain).digest()
            if content not in known:
                free = name
                while free in stored:  # another program's, with other values
                    free += "'"
                memory = dense.untyped_storage().data_ptr()
                stored[free] = dense.clone() if memory in taken else dense
                taken.add(memory)
                known[content] = free
            names[-1][name] = known[content]
    return stored, names


def _texts(plan: Plan) -> dict[str, bytes]:
    """The members of a program that are text."""
    return {
        "program.json": _text(plan.program),
        "tuning.jsonl": b"".join(map(_text, plan.tuning)),
        "graph.txt": plan.graph.encode(),
        "lock.jsonl": plan.lock.encode(),
        "kernels.jsonl": b"".join(map(_text, plan.compiled.kernels)),
    }


def _text(record: object) -> bytes:
    return (canonical_json(record) + "\n").encode()


# --- reading --------------------------------------------------------------------------------------


def load_plan(path: str | Path, *, target: str | None = None) -> Plan:
    """Read and check a plan file. Nothing of it is used before every hash has been verified.

    Args:
        target: of the program to use; by default the one for this machine, where the plan has it.
            The others lie in ``others``.

    Raises:
        ArtifactError: no such file; not a plan; truncated, changed, or of an unknown version.
        UsageError: it has no program for ``target``.
    """
    return from_bytes(read_file(Path(path), "plan"), where=str(path), target=target)


def load_outline(path: str | Path) -> Outline:
    """Read and check a plan file as ``load_plan`` does, and keep all but the tensors' values.

    Nothing is asked of this machine: the file's first program is in use.
    """
    content, where = read_file(Path(path), "plan"), str(path)
    with _memory(where, len(content)):
        contents, members = _opened(content, where)
        read = _programs(contents, members, _stored(members[WEIGHTS], f"{where}:{WEIGHTS}"), where)
        first, *others = (outline for outline, _ in read)
        return replace(first, others=tuple(others))


def from_bytes(content: bytes, *, where: str = "plan", target: str | None = None) -> Plan:
    """A plan from the file's bytes; see ``load_plan``."""
    with _memory(where, len(content)):
        contents, members = _opened(content, where)
        read = _programs(contents, members, _tensors(members[WEIGHTS], f"{where}:{WEIGHTS}"), where)
        golden = _tensors(members[GOLDEN], f"{where}:{GOLDEN}")
        shares = _shares(golden, [names.golden for _, names in read], f"{where}:{GOLDEN}")
        first, *others = (
            Plan(**vars(outline), golden=own)
            for (outline, _), own in zip(read, shares, strict=True)
        )
        plan = replace(first, others=tuple(others))
    if target is None and others:
        target = suiting(plan.targets)
    return plan if target is None else plan.at(target)


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
    programs = [plan.at(target) for target in plan.targets]
    contents = _contents_of(to_document("plan", VERSION, _contents(programs, {})), where)
    back = []
    for one in programs:
        cubins = {_cubin(hashed): code for hashed, code in one.compiled.cubins.items()}
        outline = _parsed(contents, one.target, _texts(one) | cubins, one.weights, where)
        back.append(Plan(**vars(outline), golden=one.golden))
    return replace(back[0], others=tuple(back[1:])).at(plan.target)


def _opened(content: bytes, where: str) -> tuple[Contents, dict[str, bytes]]:
    """What a plan file holds, and its members by name, once every hash was compared.

    The file is byte for byte what ``to_bytes`` writes of its members, so nothing can hide or change
    in the headers, the directory, or between the members.
    """
    members = members_of(content, MANIFEST, where)
    contents = _contents_of(members[MANIFEST], where)
    wanted = _in_order(contents)
    if list(members) != wanted or {MANIFEST, *contents.members} != set(wanted):
        raise CorruptArtifact(
            f"{where} does not hold the members that its manifest names",
            seen=str(sorted({*members, *contents.members} ^ set(wanted)) or wanted)[:300],
            fix="copy or build the plan again",
        )
    for name, expected in contents.members.items():
        seen = Member(sha256=sha256(members[name]).hexdigest(), nbytes=len(members[name]))
        if seen != expected:
            raise CorruptArtifact(
                f"{name} in {where} does not match its hash: some bytes changed",
                fix="copy or build the plan again",
            )
    return contents, members


def _contents_of(document: bytes, where: str) -> Contents:
    """The record in a manifest; its targets are ours, in our order, and its record's hash right."""
    contents = from_document(
        document, Contents, kind="plan", version=VERSION, where=f"{where}:{MANIFEST}"
    )
    named = {target: build.fingerprint.target for target, build in contents.programs.items()}
    ours = [target for target in TARGETS if named.get(target) == target]
    if not named or list(named) != ours:
        raise CorruptArtifact(
            f"the targets in {where} are not valid",
            seen=str(named)[:200],
            fix="build the plan again",
        )
    record = contents.preprocess
    if (None if record is None else record.hash) != contents.preprocess_hash:
        raise CorruptArtifact(
            f"the preprocessing record in {where} does not match its hash",
            fix="build the plan again; a changed record would change every answer",
        )
    return contents


def _in_order(contents: Contents) -> list[str]:
    """The names of the members, as a file has them that holds what its manifest says."""
    names = [MANIFEST, WEIGHTS, GOLDEN]
    for target in contents.programs:
        folder = _folder(target)
        cubin = re.compile(re.escape(folder) + _CUBIN.pattern)
        names += (folder + name for name in _REQUIRED)
        names += sorted(filter(cubin.fullmatch, contents.members))
    return names


def _programs(
    contents: Contents, members: Mapping[str, bytes], weights: Mapping[str, T], where: str
) -> list[tuple[Outline, TensorNames]]:
    """The programs of a plan file, checked, each with the names of its tensors."""
    own, names = {}, {}
    for target in contents.programs:
        folder = _folder(target)
        own[target] = {
            n.removeprefix(folder): c for n, c in members.items() if n.startswith(folder)
        }
        at = f"{where}:{folder}tensors.json"
        names[target] = from_plain(
            TensorNames, parse_json(own[target]["tensors.json"], where=at), where=at
        )
    shares = _shares(weights, [n.weights for n in names.values()], f"{where}:{WEIGHTS}")
    return [
        (_parsed(contents, target, own[target], share, where), names[target])
        for target, share in zip(contents.programs, shares, strict=True)
    ]


def _shares(
    stored: Mapping[str, T], names: Sequence[Mapping[str, str]], where: str
) -> list[dict[str, T]]:
    """The tensors of each program by the program's own names; every tensor has to be named."""
    used = {name for own in names for name in own.values()}
    if used != set(stored):
        raise CorruptArtifact(
            f"{where} does not hold the tensors that the programs name",
            seen=str(sorted(used ^ set(stored)))[:300],
            fix="build the plan again",
        )
    return [{name: stored[key] for name, key in own.items()} for own in names]


def _parsed(
    contents: Contents,
    target: str,
    members: Mapping[str, bytes],
    weights: Mapping[str, Constant],
    where: str,
) -> Outline:
    """The outline of the program for a target, from its own members; the program is checked."""
    manifest = Manifest(**_part(Shared, contents), **_part(Build, contents.programs[target]))
    where = f"{where}:{_folder(target)}".removesuffix("/")
    program = _program(members["program.json"], where)
    _check_program(manifest, program, weights, where)
    return Outline(
        manifest=manifest,
        program=program,
        weights=weights,
        tuning=_lines(Candidate, members["tuning.jsonl"], f"{where}/tuning.jsonl"),
        graph=members["graph.txt"].decode("utf-8", "replace"),
        lock=members["lock.jsonl"].decode("utf-8", "replace"),
        compiled=_compiled(manifest, members, where),
    )


def _folder(target: str) -> str:
    """Where the members of a target's program lie."""
    return f"targets/{target}/"


def _cubin(hashed: str) -> str:
    """The member that holds the machine code with this hash."""
    return f"kernels/{hashed}.cubin"


def _program(content: bytes, where: str) -> Program:
    where = f"{where}/program.json"
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
        raise not_a_plan(where, str(error)[:120]) from error


def _tensors(content: bytes, where: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load as load_tensors

    try:
        return load_tensors(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise not_a_plan(where, str(error)[:120]) from error


def _lines(cls: type[R], content: bytes, where: str) -> tuple[R, ...]:
    """The records of a file of JSON lines, parsed at once: a line each takes twice as long."""
    lines = [line for line in content.splitlines() if line]
    records = parse_json(b"[" + b",".join(lines) + b"]", where=where)
    if len(records) != len(lines):
        raise CorruptArtifact(
            f"{where} does not hold a record a line",
            seen=f"{len(records)} in {len(lines)}",
            fix="build the plan again",
        )
    return records_from_plain(cls, records, where=where)


def _compiled(manifest: Manifest, members: Mapping[str, bytes], where: str) -> CompiledKernels:
    kernels = _lines(CompiledKernel, members["kernels.jsonl"], f"{where}/kernels.jsonl")
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
        target = manifest.fingerprint.target
        if reason := impossible(program, bucket, specs, weights, target):
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
