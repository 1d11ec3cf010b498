"""Plans whose buffers are slices of others: those that lie about it are refused when they load."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella import runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import Buffer, Slice
from tessella.core.errors import ArtifactError
from tests.support.plans.joined import Joined, subject


def test_the_subject_itself_loads() -> None:
    plan = from_bytes(to_bytes(subject()))
    assert to_bytes(plan) == to_bytes(subject())
    (bucket,) = plan.program.buckets
    assert [b.slice.start for b in bucket.buffers if b.slice] == [0, 4, 0, 4]
    assert "cat.in_place" in [s.kernel for s in bucket.steps]
    x = torch.randn(2, 4, 3, 4)
    (answer,) = runtime.load(plan)(x).values()
    torch.testing.assert_close(answer, Joined()(x))


def part(number: int) -> Buffer:
    """The written slices first, then those that are views."""
    return [b for b in subject().program.buckets[0].buffers if b.slice is not None][number]


def changed(name: str, **changes: Any) -> Plan:
    plan = subject()
    (bucket,) = plan.program.buckets
    buffers = tuple(replace(b, **changes) if b.name == name else b for b in bucket.buffers)
    assert buffers != bucket.buffers
    program = replace(plan.program, buckets=(replace(bucket, buffers=buffers),))
    return replace(plan, program=program)


def placed(number: int, **place: Any) -> Plan:
    return changed(part(number).name, slice=replace(part(number).slice, **place))


def twice_the_first(plan: Plan) -> Plan:
    """The concatenation copies its first part over the second, which nobody reads."""
    (bucket,) = plan.program.buckets
    name = part(0).name
    steps = tuple(replace(s, inputs=(name, name)) if s.op == "cat" else s for s in bucket.steps)
    return replace(plan, program=replace(plan.program, buckets=(replace(bucket, steps=steps),)))


LIES: dict[str, tuple[Callable[[], Plan], str]] = {
    "over the other": (lambda: placed(1, start=0), "same memory"),
    "half over the other": (lambda: placed(1, start=2), "same memory"),
    "a part beyond the end": (lambda: placed(1, start=5), "not valid"),
    "a part before the start": (lambda: placed(1, start=-4), "not valid"),
    "far away": (lambda: placed(1, start=2**62), "not valid"),
    "another axis": (lambda: placed(1, axis=2), "not valid"),
    "no axis": (lambda: placed(1, axis=4), "not valid"),
    "a negative axis": (lambda: placed(1, axis=-3), "not valid"),
    "of nothing": (lambda: placed(1, of="nothing"), "not valid"),
    "of an input": (lambda: placed(1, of="image"), "not valid"),
    "of itself": (lambda: placed(1, of=part(1).name), "not valid"),
    "of a slice": (lambda: placed(1, of=part(0).name), "not valid"),
    "of a view": (lambda: placed(0, of=part(2).name), "not valid"),
    "in two places": (lambda: changed(part(1).name, offset=0), "not valid"),
    "another type": (lambda: changed(part(1).name, dtype="int32"), "not valid"),
    "another shape": (lambda: changed(part(1).name, shape=(2, 4, 4, 3)), "not valid"),
    "dense": (lambda: changed(part(1).name, format="contiguous"), "not laid out"),
    "no slice": (lambda: changed(part(1).name, slice=None), "no place|cannot"),
    "a view elsewhere": (lambda: placed(2, start=4), "another tensor"),
    "another answer": (lambda: twice_the_first(subject()), "self-test"),
}


@pytest.mark.parametrize("name", LIES)
def test_lying_slices(name: str) -> None:
    made, match = LIES[name]
    with pytest.raises(ArtifactError, match=match):
        runtime.load(from_bytes(to_bytes(made())))


def test_a_slice_begins_at_a_multiple_of_16_bytes_on_a_gpu() -> None:
    """What bulk copies ask is asked of every plan for one."""
    plan = subject()
    (bucket,) = plan.program.buckets
    whole = part(0).slice.of
    odd = Buffer(
        name="odd", dtype="float32", shape=(2, 8, 3, 3), format="strided",
        slice=Slice(of=whole, axis=3, start=1),
    )  # fmt: skip
    program = replace(plan.program, buckets=(replace(bucket, buffers=(*bucket.buffers, odd)),))
    plan = replace(plan, program=program)
    (read,) = from_bytes(to_bytes(plan)).program.buckets
    assert read.buffers[-1].slice == odd.slice
    fingerprint = replace(plan.manifest.fingerprint, target="sm_90")
    plan = replace(plan, manifest=replace(plan.manifest, fingerprint=fingerprint))
    with pytest.raises(ArtifactError, match="multiple of 16"):
        from_bytes(to_bytes(plan))


def test_whatever_slices_say_the_answer_is_right_or_there_is_none() -> None:
    """Random slices of random buffers in honest plans, a self-test left out on purpose."""
    rng = random.Random(0)
    plan, x = subject(), torch.randn(2, 4, 3, 4)
    (bucket,) = plan.program.buckets
    names, right = [b.name for b in bucket.buffers], Joined()(x)
    loaded = 0
    for _ in range(300):
        buffers = list(bucket.buffers)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(buffers))
            place = Slice(
                of=rng.choice(names), axis=rng.choice((0, 1, 1, 1)), start=rng.randrange(9)
            )
            changes: dict[str, Any] = {"slice": rng.choice((place, place, None))}
            if rng.random() < 0.5:
                changes["offset"] = rng.choice((None, 0, 384, 768))
            buffers[at] = replace(buffers[at], **changes)
        program = replace(plan.program, buckets=(replace(bucket, buffers=tuple(buffers)),))
        try:
            lying = from_bytes(to_bytes(replace(plan, program=program)))
            engine = runtime.load(lying, self_test=False)
            (answer,) = engine(x).values()
        except ArtifactError:
            continue
        loaded += 1
        torch.testing.assert_close(answer, right)
    assert 0 < loaded < 150
