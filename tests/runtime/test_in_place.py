"""A result may take the memory of an operand that ends there: only so, and only by some kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella import runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import Buffer, Step
from tessella.core.errors import ArtifactError
from tests.support.plans.subjects import good, with_bucket


def step(kernel: str, inputs: str, output: str, **attrs: Any) -> Step:
    op = kernel.partition(".")[0]
    return Step(kernel=kernel, op=op, inputs=tuple(inputs.split()), outputs=(output,), attrs=attrs)


def made(steps: list[Step], answer: torch.Tensor, x: torch.Tensor, **offsets: int | None) -> Plan:
    """A plan for one image of 6 × 6 that makes [1, 36]; buffers lie at these offsets."""
    plan = good()
    buffers = tuple(
        Buffer(name=name, dtype="float32", shape=(1, 36), offset=offset)
        for name, offset in offsets.items()
    )
    outputs = (replace(plan.manifest.outputs[0], shape=(1, 36)),)
    flat = step("reshape.view", "image", "flat", shape=[1, 36])
    return replace(
        with_bucket(plan, buffers=buffers, steps=(flat, *steps), arena_bytes=640),
        manifest=replace(plan.manifest, outputs=outputs),
        golden={"input.image": x, "output.scores": answer},
    )


def load(plan: Plan) -> torch.Tensor:
    with runtime.load(from_bytes(to_bytes(plan))) as engine:
        return engine(plan.golden["input.image"])["scores"]


X = torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))
FLAT = X.view(1, 36)


def test_an_operand_that_ends() -> None:
    steps = [
        step("exp.aten", "flat", "a"),
        step("sigmoid.aten", "a", "b"),
        step("add.aten", "b flat", "scores", alpha=1, scalar=None),
    ]
    right = FLAT.exp().sigmoid() + FLAT
    plan = made(steps, right, X, flat=None, a=0, b=0, scores=0)
    torch.testing.assert_close(load(plan), right)


REFUSED: dict[str, tuple[list[Step], dict[str, int | None]]] = {
    "read later": (
        [
            step("exp.aten", "flat", "a"),
            step("sigmoid.aten", "a", "b"),
            step("add.aten", "b a", "scores", alpha=1, scalar=None),
        ],
        {"a": 0, "b": 0, "scores": 192},
    ),
    "read through a view": (
        [
            step("exp.aten", "flat", "a"),
            step("reshape.view", "a", "b", shape=[1, 36]),
            step("add.aten", "a b", "scores", alpha=1, scalar=None),
        ],
        {"a": 0, "b": None, "scores": 0},
    ),
    "half over it": (
        [step("exp.aten", "flat", "a"), step("sigmoid.aten", "a", "scores")],
        {"a": 0, "scores": 64},
    ),
    "by a kernel that copies": (
        [step("exp.aten", "flat", "a"), step("to.aten", "a", "scores", dtype="float32")],
        {"a": 0, "scores": 0},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    steps, offsets = REFUSED[name]
    plan = made(steps, FLAT.clone(), X, flat=None, **offsets)
    with pytest.raises(ArtifactError, match="same memory at the same time"):
        load(plan)
