"""A plan file is hostile until it is checked: whatever was changed in it, it is refused."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as deserialized

from tessella.artifacts.archive import archive_of
from tessella.artifacts.files import Member
from tessella.artifacts.outline import Candidate, Manifest
from tessella.artifacts.plan import MANIFEST, Plan, from_bytes, load_plan, to_bytes
from tessella.artifacts.program import ALIGNMENT, Bucket, Buffer, Program, Step
from tessella.core.device import Fingerprint
from tessella.core.errors import ArtifactError, CorruptArtifact, UnknownVersion
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tests.support.plans.fuzz_plans import members_of

RECORD = Preprocess(height=4, width=4, channels=1)
GRAPH = "targets/cpu/graph.txt"


def linear_plan() -> Plan:
    """One layer, two batch sizes."""
    batch = DimRange(min=1, opt=2, max=2)
    buckets = tuple(
        Bucket(
            batch=n,
            buffers=(
                Buffer(name="image", dtype="float32", shape=(n, 16)),
                Buffer(name="hidden", dtype="float32", shape=(n, 3), offset=0),
                Buffer(name="scores", dtype="float32", shape=(n, 3), offset=64),
            ),
            steps=(
                Step(
                    kernel="linear.torch",
                    op="linear",
                    inputs=("image", "w", None),
                    outputs=("hidden",),
                    attrs={"bias": False},
                    layer="fc",
                ),
                Step(
                    kernel="relu.torch",
                    op="relu",
                    inputs=("hidden",),
                    outputs=("scores",),
                    attrs={},
                    frees=("hidden",),
                ),
            ),
            arena_bytes=128,
            held_bytes=128,
            peak_bytes=128,
        )
        for n in (1, 2)
    )
    manifest = Manifest(
        fingerprint=Fingerprint(
            target="cpu", arch="x86_64-avx2", name="a CPU", units=2, memory_bytes=0, libraries={}
        ),
        inputs=(TensorSpec(name="image", dtype="float32", shape=(batch, 16)),),
        outputs=(TensorSpec(name="scores", dtype="float32", shape=(batch, 3)),),
        precision="fp32",
        preprocess=RECORD,
        preprocess_hash=RECORD.hash,
        labels=("a", "<b>", "../c"),
        accuracy={"val/accuracy": 0.5},
        built_from="a checkpoint",
        built_with={"torch": "2"},
        rebuild="tessella compile x",
        tolerance=1e-4,
        members={},
    )
    return Plan(
        manifest=manifest,
        program=Program(inputs=("image",), outputs=("scores",), buckets=buckets),
        weights={"w": torch.arange(48.0).reshape(3, 16)},
        golden={"input.image": torch.ones(1, 16), "output.scores": torch.ones(1, 3)},
        tuning=(
            Candidate(batch=1, step="hidden", kernel="linear.torch", chosen=True, time_us=1.5),
            Candidate(batch=1, step="hidden", kernel="x", chosen=False, refused="too slow"),
        ),
        graph="image → scores\n",
    )


CONTENT = to_bytes(linear_plan())


def equal(one: Plan, two: Plan) -> bool:
    tensors = [(one.weights, two.weights), (one.golden, two.golden)]
    return (
        (one.manifest, one.program, one.tuning, one.graph)
        == (two.manifest, two.program, two.tuning, two.graph)
        and all(a.keys() == b.keys() for a, b in tensors)
        and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for a, b in tensors for k in a)
    )


GOOD = from_bytes(CONTENT)


def refused(content: bytes) -> None:
    with pytest.raises(ArtifactError):
        from_bytes(content)


# --- what is written comes back -----------------------------------------------------------------


def test_a_plan_comes_back(tmp_path: Path) -> None:
    plan = linear_plan()
    back = load_plan(plan.save(tmp_path / "x.plan"))
    assert equal(back, replace(plan, manifest=back.manifest))
    assert replace(back.manifest, members={}) == plan.manifest
    assert to_bytes(back) == CONTENT  # byte for byte


def test_members_are_stored_and_aligned() -> None:
    with zipfile.ZipFile(io.BytesIO(CONTENT)) as archive:
        assert archive.testzip() is None
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            name, extra = struct.unpack_from("<HH", CONTENT, info.header_offset + 26)
            assert (info.header_offset + 30 + name + extra) % ALIGNMENT == 0


def test_the_table_for_people() -> None:
    text = str(GOOD)
    assert "linear.torch" in text
    assert "a CPU" in text
    assert "memory: 128 bytes (128 of them the arena), 1.00 × the 128 that live at once" in text


def test_the_table_names_the_batch_and_once_each_layer_in_another_precision() -> None:
    text = str(replace(GOOD, manifest=replace(GOOD.manifest, precisions={"fc": "fp32"})))
    batch = GOOD.program.buckets[-1].batch
    assert text.splitlines()[1] == f"batch {batch}:"
    assert text.count("fc fp32") == 1


def timed(**kernels: tuple[float, float | None, bool]) -> Plan:
    """The plan with times, spreads and noise of the kernels of its first step; the first won."""
    batch = GOOD.program.buckets[-1].batch
    tuning = tuple(
        Candidate(batch=batch, step="hidden", kernel=f"linear.{name}", chosen=i == 0,
                  time_us=time_us, spread_us=spread_us, noisy=noisy)
        for i, (name, (time_us, spread_us, noisy)) in enumerate(kernels.items())
    )  # fmt: skip
    return replace(GOOD, tuning=tuning)


def row_of(plan: Plan) -> str:
    return next(line for line in str(plan).splitlines() if line.startswith("0 "))


def test_the_table_says_how_sure_a_choice_is() -> None:
    one = timed(a=(10.0, 0.5, False), b=(10.9, 0.5, False), c=(11.1, 0.5, False))
    assert "10.0 ± 0.5  linear.b" in row_of(one)
    assert "linear.c" not in row_of(one)
    assert "±" not in row_of(timed(a=(10.0, None, False)))  # one sample: no spread is known


def test_a_plan_timed_on_a_busy_machine_says_so() -> None:
    noisy = timed(a=(10.0, 2.0, True), b=(30.0, 0.5, False))
    assert (noisy.noisy_share, noisy.is_noisy) == (1.0, True)
    assert "10.0 ± 2.0 ~" in row_of(noisy)
    assert "timed on a busy machine: 100% of the steps' time" in str(noisy)
    assert "timed on a busy machine" in repr(noisy)
    assert from_bytes(to_bytes(noisy)).is_noisy  # it is in the file
    loser = timed(a=(10.0, 0.5, False), b=(30.0, 9.0, True))
    assert not loser.is_noisy
    assert "busy" not in str(loser) + repr(loser)
    assert not replace(GOOD, tuning=()).is_noisy


# --- damage -------------------------------------------------------------------------------------


def test_flipped_bytes() -> None:
    rng = random.Random(0)
    places = {*range(0, len(CONTENT), 13), *rng.sample(range(len(CONTENT)), 500)}
    for place in sorted(places):
        changed = bytearray(CONTENT)
        changed[place] ^= 1 << rng.randrange(8)
        refused(bytes(changed))


def test_every_byte_of_the_directory_and_headers() -> None:
    with zipfile.ZipFile(io.BytesIO(CONTENT)) as archive:
        heads = [
            p for i in archive.infolist() for p in range(i.header_offset, i.header_offset + 30)
        ]
        directory = range(archive.start_dir, len(CONTENT))
    for place in (*heads, *directory):
        for value in (0x00, 0xFF, CONTENT[place] ^ 0x01):
            changed = bytearray(CONTENT)
            changed[place] = value
            if changed != CONTENT:
                refused(bytes(changed))


def test_truncated_anywhere() -> None:
    for size in {*range(0, len(CONTENT), 53), len(CONTENT) - 1}:
        with pytest.raises(ArtifactError):
            from_bytes(CONTENT[:size])


@pytest.mark.parametrize(
    "content", [b"", b"PK", b"\0" * 1000, b"PK\5\6" + b"\0" * 18, b"\x80\x04."]
)
def test_what_is_no_plan(content: bytes) -> None:
    with pytest.raises(CorruptArtifact):
        from_bytes(content)


# --- a plan rewritten by hand -------------------------------------------------------------------

Members = list[tuple[str, bytes]]


def members() -> Members:
    with zipfile.ZipFile(io.BytesIO(CONTENT)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def zipped(some: Members, compression: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in some:
            archive.writestr(name, content)
    return out.getvalue()


def test_the_same_members_in_another_zip_are_no_plan() -> None:
    """Only what ``to_bytes`` writes: nothing lies before, between or behind the members."""
    assert equal(from_bytes(archive_of(dict(members()))), GOOD)
    for content in (zipped(members()), b"#!" + CONTENT, CONTENT + b"\0"):
        refused(content)
    refused(archive_of(dict(reversed(members()))))


def packed(some: Members) -> bytes:
    """As ``to_bytes`` would: what is wrong then is what the members say."""
    return archive_of(dict(some))


def renamed(old: str, new: str) -> Members:
    return [(new if name == old else name, content) for name, content in members()]


def replaced(name: str, change: Callable[[bytes], bytes]) -> Members:
    return [(n, change(content) if n == name else content) for n, content in members()]


REWRITTEN = {
    "a member twice": lambda: zipped([*members(), members()[1]]),
    "the manifest twice": lambda: zipped([*members(), members()[0]]),
    "compressed": lambda: zipped(members(), zipfile.ZIP_DEFLATED),
    "outside by ..": lambda: packed(renamed(GRAPH, "../graph.txt")),
    "inner ..": lambda: packed(renamed(GRAPH, "a/../graph.txt")),
    "absolute": lambda: packed(renamed(GRAPH, "/etc/passwd")),
    "backslash": lambda: packed(renamed(GRAPH, "..\\graph.txt")),
    "a folder": lambda: packed([*members(), ("folder/", b"")]),
    "one more": lambda: packed([*members(), ("more.bin", b"x")]),
    "one less": lambda: packed([m for m in members() if m[0] != "golden.safetensors"]),
    "no manifest": lambda: packed(members()[1:]),
    "other weights": lambda: packed(replaced("weights.safetensors", lambda c: c[:-1] + b"\x7f")),
    "cut weights": lambda: packed(replaced("weights.safetensors", lambda c: c[:-4])),
    "later version": lambda: packed(
        replaced("manifest.json", lambda c: c.replace(b'"version": 4', b'"version": 99'))
    ),
    "another record": lambda: packed(
        replaced("manifest.json", lambda c: c.replace(b'"resize": "squash"', b'"resize": "crop"'))
    ),
    "too many members": lambda: packed([(f"{i}", b"") for i in range(5000)]),
}


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_plans_are_refused(name: str) -> None:
    content = REWRITTEN[name]()
    with pytest.raises(UnknownVersion if name == "later version" else CorruptArtifact):
        from_bytes(content)


@pytest.mark.parametrize("field", ["compressed", "full", "both"])
@pytest.mark.parametrize("size", [0, 1, 2**31, 2**32 - 2])
def test_lying_sizes(field: str, size: int) -> None:
    """Sizes in the directory, at 20 (compressed) and 24 of an entry that starts with PK 1 2."""
    with zipfile.ZipFile(io.BytesIO(CONTENT)) as archive:
        start = CONTENT.index(b"PK\1\2", archive.start_dir)
    changed = bytearray(CONTENT)
    if field != "full":
        struct.pack_into("<L", changed, start + 20, size)
    if field != "compressed":
        struct.pack_into("<L", changed, start + 24, size)
    with pytest.raises(ArtifactError):
        from_bytes(bytes(changed))


# --- several programs in one file -----------------------------------------------------------------


def for_target(plan: Plan, target: str) -> Plan:
    there = replace(plan.manifest.fingerprint, target=target, arch=target)
    return replace(plan, manifest=replace(plan.manifest, fingerprint=there))


def several() -> Plan:
    """The plan with a second program, whose weight is another and whose answers are the same."""
    other = for_target(linear_plan(), "sm_80")
    return replace(linear_plan(), others=(replace(other, weights={"w": torch.ones(3, 16)}),))


SEVERAL = to_bytes(several())
OTHER = "targets/sm_80/"


def rehashed(change: Callable[[dict[str, bytes]], object]) -> bytes:
    """The file with other members, and a manifest that vouches for what is there."""
    held = members_of(SEVERAL)
    change(held)
    manifest = json.loads(held[MANIFEST])
    manifest["members"] = {
        name: {"sha256": sha256(content).hexdigest(), "nbytes": len(content)}
        for name, content in held.items()
        if name != MANIFEST
    }
    return archive_of({**held, MANIFEST: json.dumps(manifest).encode()})


def without_the_folder(held: dict[str, bytes]) -> None:
    for name in [n for n in held if n.startswith(OTHER)]:
        del held[name]


def moved(folder: str) -> Callable[[dict[str, bytes]], None]:
    def move(held: dict[str, bytes]) -> None:
        for name in [n for n in held if n.startswith(OTHER)]:
            held[name.replace(OTHER, folder)] = held.pop(name)

    return move


def said(old: bytes, new: bytes, member: str = MANIFEST) -> Callable[[dict[str, bytes]], None]:
    def say(held: dict[str, bytes]) -> None:
        assert old in held[member]
        held[member] = held[member].replace(old, new)

    return say


def named(target: str) -> Callable[[dict[str, bytes]], None]:
    """The second program's target is called otherwise, in the manifest and by its folder."""

    def name(held: dict[str, bytes]) -> None:
        said(b'"sm_80"', json.dumps(target).encode())(held)
        moved(f"targets/{target}/")(held)

    return name


def swapped(held: dict[str, bytes]) -> None:
    manifest = json.loads(held[MANIFEST])
    manifest["programs"] = dict(reversed(manifest["programs"].items()))
    held[MANIFEST] = json.dumps(manifest).encode()


TENSORS = f"{OTHER}tensors.json"
LYING: dict[str, Callable[[dict[str, bytes]], object]] = {
    "no folder": without_the_folder,
    "a folder that no manifest names": lambda held: held.update(
        {f"targets/sm_90/{n.removeprefix(OTHER)}": c for n, c in held.items() if OTHER in n}
    ),
    "a member less": lambda held: held.pop(f"{OTHER}lock.jsonl"),
    "names a tensor that is not there": said(b"w'", b"v", TENSORS),
    "a tensor that nobody names": said(b"w'", b"w", TENSORS),
    "no name for what a step reads": said(b'{"w":', b'{"v":', TENSORS),
    "no names": said(b'"weights"', b'"heights"', TENSORS),
    "another program that is wrong": said(b'"offset":64', b'"offset":65', f"{OTHER}program.json"),
    "another program of another batch": said(b'"batch":1', b'"batch":9', f"{OTHER}program.json"),
    "noise for tuning": said(b"{", b"[", f"{OTHER}tuning.jsonl"),
    "an unknown target": named("sm_81"),
    "a target out of the file": named("../sm_80"),
    "a target in a target": named("sm_80/../cpu"),
    "an absolute target": named("/etc"),
    "no target": named(""),
    "a folder elsewhere": moved("targets/../"),
    "a program under another name": said(b'"target": "sm_80"', b'"target": "sm_90"'),
    "two for one target": said(b'"target": "sm_80"', b'"target": "cpu"'),
    "in another order": swapped,
    "no programs": said(b'"programs": {', b'"programs": {}, "x": {'),
}


def test_several_programs_come_back() -> None:
    held = members_of(SEVERAL)
    assert set(deserialized(held["weights.safetensors"])) == {"w", "w'"}
    assert set(deserialized(held["golden.safetensors"])) == {"input.image", "output.scores"}
    for target in ("cpu", "sm_80"):
        back = from_bytes(SEVERAL, target=target)
        assert back.targets == ("cpu", "sm_80")
        assert equal(back, replace(several().at(target), manifest=back.manifest))
        assert to_bytes(back) == SEVERAL
    assert from_bytes(rehashed(lambda held: None)).targets == ("cpu", "sm_80")


@pytest.mark.parametrize("name", LYING)
def test_several_programs_of_which_one_lies_are_refused(name: str) -> None:
    """Whatever program this machine would use: all are checked."""
    content = rehashed(LYING[name])
    for target in ("cpu", "sm_80", None):
        with pytest.raises(CorruptArtifact):
            from_bytes(content, target=target)


def test_each_member_of_each_program_is_vouched_for() -> None:
    for name in members_of(SEVERAL):
        held = members_of(SEVERAL)
        held[name] = held[name][:-2] + b"~\n" if held[name] else b"~"
        refused(archive_of(held))
        if name == MANIFEST:
            continue
        manifest = json.loads(members_of(SEVERAL)[MANIFEST])
        del manifest["members"][name]
        text = json.dumps(manifest).encode()
        refused(archive_of({**members_of(SEVERAL), MANIFEST: text}))


def test_flipped_bytes_of_several_programs() -> None:
    rng = random.Random(2)
    for place in rng.sample(range(len(SEVERAL)), 300):
        changed = bytearray(SEVERAL)
        changed[place] ^= 1 << rng.randrange(8)
        refused(bytes(changed))


def test_a_plan_of_the_format_before_is_refused_with_its_command() -> None:
    manifest = members_of(CONTENT)[MANIFEST].replace(b'"version": 4', b'"version": 3')
    old = archive_of({MANIFEST: manifest, "program.json": b"{}", "weights.safetensors": b""})
    with pytest.raises(UnknownVersion, match="make the plan again: tessella compile x"):
        from_bytes(old)


def test_members_that_overlap_are_refused() -> None:
    """Each entry of the directory is whole, and together they are more than the file."""
    inner = zipped([("b", b"x" * 500)])[: 30 + 1 + 500]
    content = zipped([(MANIFEST, b"{}"), ("a", inner)])
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        within = archive.getinfo("a").header_offset + 31
        start, count = archive.start_dir, len(archive.infolist())
    entry = bytearray(content[start : content.rindex(b"PK\1\2")])
    size = len(b"x" * 500)
    struct.pack_into("<LLL", entry, 16, zlib.crc32(b"x" * 500), size, size)
    struct.pack_into("<H", entry, 28, 1)
    struct.pack_into("<L", entry, 42, within)
    entry[46:] = b"b"
    end = bytearray(content[content.rindex(b"PK\5\6") :])
    struct.pack_into("<HHL", end, 8, count + 1, count + 1, len(content) - 22 - start + len(entry))
    crafted = content[:-22] + bytes(entry) + bytes(end)
    with zipfile.ZipFile(io.BytesIO(crafted)) as archive:
        assert archive.namelist() == [MANIFEST, "a", "b"]
    with pytest.raises(CorruptArtifact, match=r"(?i)overlap"):
        from_bytes(crafted)


# --- programs that hashes vouch for but that are wrong ------------------------------------------


def with_bucket(**changes: object) -> Plan:
    plan = linear_plan()
    bucket = replace(plan.program.buckets[0], **changes)
    return replace(plan, program=replace(plan.program, buckets=(bucket,)))


BUCKET = linear_plan().program.buckets[0]
IMAGE, HIDDEN, SCORES = BUCKET.buffers
LINEAR, RELU = BUCKET.steps

WRONG = {
    "reads what is not made": with_bucket(steps=(RELU, LINEAR)),
    "reads what was freed": with_bucket(steps=(LINEAR, RELU, RELU)),
    "output never made": with_bucket(steps=(LINEAR,)),
    "writes no buffer": with_bucket(steps=(LINEAR, replace(RELU, outputs=("scores", "x")))),
    "makes nothing": with_bucket(steps=(LINEAR, RELU, replace(RELU, inputs=(), outputs=()))),
    "beyond the arena": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, offset=128))),
    "before the arena": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, offset=-64))),
    "not aligned": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, offset=4))),
    "negative shape": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, shape=(-1, -3)))),
    "huge shape": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, shape=(2**62, 2**62)))),
    "unknown type": with_bucket(buffers=(IMAGE, HIDDEN, replace(SCORES, dtype="object"))),
    "a name twice": with_bucket(buffers=(IMAGE, HIDDEN, HIDDEN, SCORES)),
    "a weight's name": with_bucket(buffers=(IMAGE, HIDDEN, SCORES, replace(HIDDEN, name="w"))),
    "huge arena": with_bucket(arena_bytes=2**60),
    "negative arena": with_bucket(arena_bytes=-1),
    "batch of nothing": with_bucket(batch=0),
    "no buckets": replace(linear_plan(), program=replace(GOOD.program, buckets=())),
    "other inputs": replace(linear_plan(), program=replace(GOOD.program, inputs=("picture",))),
    "no precision": replace(
        linear_plan(), manifest=replace(GOOD.manifest, precisions={"scores": "int9"})
    ),
    "other outputs": replace(linear_plan(), program=replace(GOOD.program, outputs=("hidden",))),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_programs_are_refused(name: str) -> None:
    with pytest.raises(CorruptArtifact, match="program"):
        from_bytes(to_bytes(WRONG[name]))


def test_nonsense_that_hashes_vouch_for() -> None:
    """An author who means harm can hash anything: every member, filled with noise."""
    rng, refusals = random.Random(1), 0
    names = ("program.json", "tensors.json", "tuning.jsonl")
    for name in ("weights.safetensors", "golden.safetensors", *(f"targets/cpu/{n}" for n in names)):
        original = dict(members())[name]
        for _ in range(150):
            noise = bytearray(original)
            for _ in range(rng.randrange(1, 6)):
                noise[rng.randrange(len(noise))] = rng.randrange(256)
            content = bytes(noise[: rng.randrange(len(noise))] if rng.random() < 0.2 else noise)
            rewritten = packed(vouched(name, content))
            try:
                from_bytes(rewritten)
            except ArtifactError:
                refusals += 1
    assert refusals > 300  # of 750; elsewhere noise lies in weights, which may be any numbers


def vouched(name: str, content: bytes) -> Members:
    old = GOOD.manifest.members[name]
    new = Member(sha256=sha256(content).hexdigest(), nbytes=len(content))
    manifest = dict(members())["manifest.json"].replace(old.sha256.encode(), new.sha256.encode())
    manifest = manifest.replace(b'"nbytes": %d' % old.nbytes, b'"nbytes": %d' % new.nbytes)
    return [
        (n, manifest if n == "manifest.json" else content if n == name else c) for n, c in members()
    ]
