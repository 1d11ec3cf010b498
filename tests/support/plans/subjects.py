"""Small plans, one of each kind that there is, for tests that change them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.receipt import Flip, Receipt
from tessella.compiler.choices import join_in_place
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tests.support.choices import for_nothing
from tests.support.networks import ABOUT, build, graph_of, plan

IMAGE = TensorSpec(name="image", dtype="float32", shape=(1, 1, 6, 6))


@dataclass(frozen=True)
class Subject:
    """A plan's bytes, samples that it takes, and what it must answer.

    Attributes:
        tolerance: of the largest value: what the plan's self-test would not see either.
    """

    content: bytes
    sample: Callable[[int], torch.Tensor]
    answer: Callable[[torch.Tensor], torch.Tensor]
    tolerance: float = 1e-3


def _normal(count: int) -> torch.Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(count))


def _own_answers(content: bytes) -> Callable[[torch.Tensor], torch.Tensor]:
    engine = runtime.load(from_bytes(content))
    return lambda x: engine(image=x)["scores"]


class Tiny(nn.Module):
    """A convolution, pooling, arena buffers, a program, a view, a fallback, a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.max_pool2d(self.conv(x).relu(), 2, 2)
        x = torch.cumsum(x.sigmoid() ** 1.3 + (-x).exp() ** 0.3, 2)
        return self.fc(x.flatten(1)).softmax(1)


class Small(nn.Module):
    """What int8 has: quantized layers, a residual with a factor of its own, a pooling of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.third, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(72, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.max_pool2d(self.first(x).relu(), 2, 2)).relu()
        return self.fc((self.third(x) + x).relu().flatten(1))


class Joined(nn.Module):
    """Two parts that are written in place, a split of the whole, attention, norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x.exp().tile(1, 4, 1, 1), x.tanh().tile(1, 4, 1, 1)], 1)
        one, two = x.split(4, 1)
        x = self.fc(self.norm(torch.softmax(one, 3) + torch.softmax(two, 2)))
        return F.scaled_dot_product_attention(x, x, x).mean((1, 2))


class Wide(nn.Module):
    """Channels by 16, for what is machine code of ours on a CPU with AVX-512; a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.third, self.fc = nn.Conv2d(32, 32, 1), nn.Linear(288, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.tile(1, 16, 1, 1)).relu()
        x = torch.max_pool2d(self.third((self.second(x) + x).relu()), 2, 2)
        return self.fc(x.flatten(1))


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


def _tiny() -> Subject:
    module = _seeded(Tiny)
    return Subject(to_bytes(build(module, IMAGE)), _normal, module)


def _small() -> Subject:
    module = _seeded(Small)
    graph = graph_of(module, IMAGE, DimRange(min=1, opt=2, max=2))
    images = [{"image": torch.randn(16, 1, 6, 6, generator=torch.Generator().manual_seed(0))}]
    made = plan(graph, precision="int8", calibration=compiler.calibrate(graph, images))
    content = to_bytes(made)
    return Subject(content, _normal, _own_answers(content), 0.15)


def _machine_code() -> Subject:
    """Convolutions and a pooling that are written as machine code when the plan is loaded.

    Where the CPU has no AVX-512, the plan has the kernels that there are.
    """
    module = _seeded(Wide)
    refusal = catalog.Kernel.refusal

    def own_first(kernel: catalog.Kernel, problem: Problem) -> str | None:
        own = [r for r in catalog.candidates(problem.op, "cpu") if "avx512" in r.id]
        others = kernel not in own and any(refusal(r, problem) is None for r in own)
        return "machine code of ours can do it" if others else refusal(kernel, problem)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog.Kernel, "refusal", own_first)
        return Subject(to_bytes(build(module, IMAGE)), _normal, module)


def _joined() -> Subject:
    module = _seeded(Joined)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join_in_place, "trials", for_nothing)
        return Subject(to_bytes(build(module, IMAGE)), _normal, module)


def _pixels() -> Subject:
    """Bytes in, 16 bits inside, and all that a manifest may say."""
    module = _seeded(lambda: nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
                                           nn.Flatten(), nn.Linear(288, 3)))  # fmt: skip
    graph = graph_of(module, IMAGE, DimRange(min=1, opt=2, max=2))
    about = replace(
        ABOUT,
        preprocess=Preprocess(height=6, width=6, channels=1, mean=(0.5,), std=(0.25,)),
        labels=("cat", "dog", "hen"),
        accuracy={"accuracy": 0.9},
    )
    made = compiler.compile_graph(
        graph,
        target="cpu",
        batch=DimRange(min=1, opt=2, max=2),
        precision="bf16",
        input="uint8",
        about=about,
        measuring=compiler.Measuring(budget_s=0.0),
    )
    flip = Flip(index=3, path="a.png", label="cat", before="cat", after="dog",
                probability_before=0.6, probability=0.5)  # fmt: skip
    receipt = Receipt(metric="accuracy", samples=9, before=1.0, after=0.9, loss=10.0, low=0.0,
                      high=30.0, p_value=1.0, budget=40.0, flipped=1, flips=(flip,))  # fmt: skip
    content = to_bytes(replace(made, manifest=replace(made.manifest, receipt=receipt)))

    def sample(count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randint(0, 256, (count, 6, 6, 1), generator=generator, dtype=torch.uint8)

    return Subject(content, sample, _own_answers(content), 0.1)


def _several() -> Subject:
    """Programs for two targets over the same constants; the other one's is not run here."""
    made, known = good(), subject("plain")
    there = replace(made.manifest.fingerprint, target="sm_80", arch="sm_80")
    other = replace(made, manifest=replace(made.manifest, fingerprint=there))
    return replace(known, content=to_bytes(replace(made, others=(other,))))


KINDS = {"plain": _tiny, "int8": _small, "slices": _joined, "pixels": _pixels,
         "x86": _machine_code, "several": _several}  # fmt: skip


@functools.cache
def subject(kind: str) -> Subject:
    """A small plan of one of ``KINDS``."""
    return KINDS[kind]()


def good() -> Plan:
    """The plain one."""
    return from_bytes(subject("plain").content)


def with_bucket(plan: Plan, index: int = 0, **changes: Any) -> Plan:
    """Only this bucket, so that what is seen is not that it differs from another."""
    bucket = replace(plan.program.buckets[index], **changes)
    return replace(plan, program=replace(plan.program, buckets=(bucket,)))
