"""``tessella diff``: plans made by hand, so that every difference is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from tessella.artifacts.comparison import Comparison, compare
from tessella.artifacts.outline import Candidate, Manifest
from tessella.artifacts.plan import Plan, load_outline
from tessella.artifacts.program import Bucket, Buffer, Program, Step
from tessella.core.device import Fingerprint
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tests.support.cli import Tessella

RECORD = Preprocess(height=2, width=2, channels=1)


def steps(*, fused: bool, kernel: str) -> tuple[Step, ...]:
    """A linear layer and its activation, in one step or in two, then a second layer."""
    made = "relu" if fused else "linear"
    first = Step(
        kernel=kernel, op="linear", inputs=("image", "w", None), outputs=(made,),
        attrs={"activation": "relu"} if fused else {}, layer="fc1",
    )  # fmt: skip
    relu = Step(
        kernel="relu.aten", op="relu", inputs=("linear",), outputs=("relu",), attrs={}, layer="act"
    )
    last = Step(
        kernel="linear.aten", op="linear", inputs=("relu", "v", None), outputs=("scores",),
        attrs={}, layer="fc2",
    )  # fmt: skip
    return (first, last) if fused else (first, relu, last)


def made(
    *,
    fused: bool = False,
    kernel: str = "linear.aten",
    times: dict[str, float] | None = None,
    batches: tuple[int, ...] = (1, 2),
    offset: int = 0,
) -> Plan:
    span = DimRange(min=batches[0], opt=batches[0], max=batches[-1])
    names = ["relu", "scores"] if fused else ["linear", "relu", "scores"]
    buckets = tuple(
        Bucket(
            batch=n,
            buffers=(
                Buffer(name="image", dtype="float32", shape=(n, 4)),
                *(
                    Buffer(name=name, dtype="float32", shape=(n, 4), offset=offset + 64 * i)
                    for i, name in enumerate(names)
                ),
            ),
            steps=steps(fused=fused, kernel=kernel),
            arena_bytes=offset + 64 * len(names),
            held_bytes=64 * len(names),
            peak_bytes=64 * len(names),
        )
        for n in batches
    )
    manifest = Manifest(
        fingerprint=Fingerprint(
            target="cpu", arch="x86_64-avx2", name="a CPU", units=2, memory_bytes=0,
            libraries={"torch": "2.8"},
        ),
        inputs=(TensorSpec(name="image", dtype="float32", shape=(span, 4)),),
        outputs=(TensorSpec(name="scores", dtype="float32", shape=(span, 4)),),
        precision="fp32",
        preprocess=RECORD,
        preprocess_hash=RECORD.hash,
        labels=("a", "b", "c", "d"),
        accuracy={"val/accuracy": 0.5},
        built_from="a hand",
        built_with={"tessella": "1", "torch": "2.8"},
        rebuild="make it again",
        tolerance=1e-4,
        members={},
    )  # fmt: skip
    chosen = [
        Candidate(batch=n, step=step, kernel="k", chosen=True, time_us=time)
        for n in batches
        for step, time in (times or {}).items()
    ]
    refused = [Candidate(batch=n, step="relu", kernel="x", chosen=False) for n in batches]
    return Plan(
        manifest=manifest,
        program=Program(inputs=("image",), outputs=("scores",), buckets=buckets),
        weights={"w": torch.ones(4, 4), "v": torch.ones(4, 4)},
        golden={"input.image": torch.ones(1, 4), "output.scores": torch.ones(1, 4)},
        tuning=(*chosen, *refused),
    )


def compared(a: Plan, b: Plan) -> Comparison:
    """The comparison of two plans, read from their files as everybody reads them."""
    with TemporaryDirectory() as folder:
        paths = [plan.save(Path(folder) / f"{i}.plan") for i, plan in enumerate((a, b))]
        return compare(load_outline(paths[0]), load_outline(paths[1]))


def changed(plan: Plan, **fields: object) -> Plan:
    return replace(plan, manifest=replace(plan.manifest, **fields))


APART = made(times={"linear": 6.0, "relu": 2.0, "scores": 4.0})
FUSED = made(fused=True, kernel="linear.mkl", times={"relu": 5.0, "scores": 4.0})


def test_a_plan_is_the_same_as_itself_whatever_was_measured() -> None:
    found = compared(APART, made(times={"linear": 3.0, "relu": 1.0, "scores": 2.0}))
    assert found.same
    assert found.differences == ()
    assert [b.count("same") for b in found.buckets] == [3, 3]
    assert found.buckets[0].total_us == (12.0, 6.0)
    assert found.buckets[0].ratio == 0.5


def test_a_fused_activation_is_a_changed_step_and_a_removed_one() -> None:
    found = compared(APART, FUSED)
    assert not found.same
    bucket = found.buckets[-1]
    assert [(s.change, s.name, s.layer) for s in bucket.steps] == [
        ("changed", "relu", "fc1"),
        ("removed", "relu", "act"),
        ("same", "scores", "fc2"),
    ]
    first = bucket.steps[0]
    assert first.differs == ("kernel", "attrs")
    assert (first.a.kernel, first.b.kernel) == ("linear.aten", "linear.mkl")
    assert first.ratio == pytest.approx(5 / 6)
    assert bucket.total_us == (12.0, 9.0)
    assert bucket.ratio == 0.75
    assert bucket.arena_bytes == (192, 128)


def test_the_other_way_round_the_step_is_added() -> None:
    bucket = compared(FUSED, APART).buckets[0]
    assert [s.change for s in bucket.steps] == ["changed", "added", "same"]
    assert bucket.ratio == pytest.approx(12 / 9)


def test_a_layer_more_does_not_shift_the_steps_behind_it() -> None:
    """Values are numbered: what ``linear.1`` was in one network is ``linear.2`` in the other."""

    def chain(layers: list[str]) -> Plan:
        names = ["linear", *(f"linear.{i}" for i in range(1, len(layers) - 1)), "scores"]
        read = ["image", *names]
        bucket = Bucket(
            batch=1,
            buffers=tuple(Buffer(name=n, dtype="float32", shape=(1, 4), offset=0) for n in names),
            steps=tuple(
                Step(
                    kernel="linear.aten", op="linear", inputs=(i, "w", None), outputs=(o,),
                    attrs={}, layer=layer,
                )
                for i, o, layer in zip(read, names, layers, strict=False)
            ),
            arena_bytes=64,
            held_bytes=64,
            peak_bytes=64,
        )  # fmt: skip
        return replace(APART, program=replace(APART.program, buckets=(bucket,)))

    found = compared(chain(["a", "b", "c"]), chain(["a", "new", "b", "c"])).buckets[0]
    assert [(s.layer, s.change) for s in found.steps] == [
        ("a", "same"),
        ("new", "added"),
        ("b", "changed"),
        ("c", "changed"),
    ]
    assert found.steps[2].differs == ("inputs",)


def test_fields_of_the_manifest() -> None:
    other = replace(RECORD, height=3)
    found = compared(
        APART,
        changed(
            APART, precision="bf16", preprocess=other, preprocess_hash=other.hash,
            labels=("a", "b", "c", "e"), accuracy={"val/accuracy": 0.25},
            fingerprint=replace(APART.manifest.fingerprint, libraries={"torch": "2.9"}),
            built_with={"tessella": "1", "torch": "2.9"},
        ),
    )  # fmt: skip
    assert {d.name: (d.a, d.b) for d in found.differences} == {
        "fingerprint.libraries.torch": ("2.8", "2.9"),
        "precision": ("fp32", "bf16"),
        "preprocess.height": (2, 3),
        "preprocess_hash": (RECORD.hash, other.hash),
        "labels": (["a", "b", "c", "d"], ["a", "b", "c", "e"]),
        "accuracy.val/accuracy": (0.5, 0.25),
    }
    assert not found.same


def test_weights_bit_for_bit() -> None:
    kept = {"v": torch.ones(4, 4)}
    a = replace(APART, weights=kept | {"w": torch.ones(4, 4), "t": torch.ones(2)})
    other = {"w": torch.full((4, 4), 1.0 + 2**-20), "u": torch.ones(3, dtype=torch.bfloat16)}
    found = compared(a, replace(APART, weights=kept | other))
    assert found.weights == {"equal": 1, "changed": 1, "only_a": 1, "only_b": 1}
    assert found.weight_bytes == (136, 134)
    assert not found.same
    nan = replace(APART, weights=kept | {"w": torch.tensor(float("nan"))})
    assert compared(nan, nan).weights["equal"] == 2


def test_memory_and_batches() -> None:
    found = compared(APART, made(batches=(1, 4), offset=64))
    assert (found.only_a, found.only_b) == ((2,), (4,))
    assert [b.batch for b in found.buckets] == [1]
    assert found.buckets[0].arena_bytes == (192, 256)
    assert found.buckets[0].peak_bytes == (192, 192)


def test_without_a_measurement_of_every_step_there_is_no_total() -> None:
    bucket = compared(APART, made(times={"linear": 3.0})).buckets[0]
    assert bucket.total_us == (12.0, None)
    assert bucket.ratio is None
    assert [s.ratio for s in bucket.steps] == [0.5, None, None]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return APART.save(tmp_path / "a.plan"), FUSED.save(tmp_path / "b.plan")


def test_the_verbs_table(tessella: Tessella, files: tuple[Path, Path]) -> None:
    answer = tessella("diff", *files)
    assert answer.code == 0, answer.err
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["2", "1", "1", "0", "1", "12", "9", "0.75", "192", "128", "192", "128"] in lines
    (row,) = [line for line in lines if line[:2] == ["changed", "relu"]]
    assert row[2:8] == ["fc1", "linear.aten", "linear.mkl", "6", "5", "0.8333"]
    assert not any(line[:1] == ["same"] for line in lines)
    assert any(line[:1] == ["same"] for line in map(str.split, tessella(
        "diff", *files, "--all", "--batch", "1").out.splitlines()))  # fmt: skip


def test_the_verbs_json(tessella: Tessella, files: tuple[Path, Path]) -> None:
    found = tessella("diff", *files, "--json").json
    assert found["same"] is False
    assert [b["total_us"] for b in found["buckets"]] == [[12.0, 9.0]] * 2
    assert found["buckets"][0]["steps"][1]["change"] == "removed"
    assert tessella("diff", files[0], files[0], "--json").json["same"] is True


def test_what_cannot_be_compared_is_told(tessella: Tessella, files: tuple[Path, Path]) -> None:
    answer = tessella("diff", *files, "--batch", "8")
    assert answer.code == 2
    assert "1, 2" in answer.err
    answer = tessella("diff", files[0], files[0].parent / "none.plan")
    assert answer.code != 0
    assert "there is no plan here" in answer.err
