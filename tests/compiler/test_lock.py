"""The lock: what decided one plan decides another, byte for byte, and nothing is measured."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella import api
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.compiler.choices import race
from tessella.core.errors import UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph.graph import Graph
from tessella.search import find as search
from tessella.search.tuning import Lock, TimingCache, Trial
from tests.support.networks import captured, graph_of, network, plan

BATCH = (1, 2, 2)


@pytest.fixture
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something is measured")

    for module in (search, race):
        for name in ("time_interleaved", "glance", "latency"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)


class Branches(nn.Module):
    """Two formats to choose from, and two layers that read one value: one or two, by measuring."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.a, self.b = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 24, 1)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        x = torch.cat([self.a(x), self.b(x)], 1).relu()
        return self.fc(x.mean((2, 3)))


@functools.cache
def graph() -> Graph:
    torch.manual_seed(0)
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 3, 12, 12))
    return graph_of(Branches().eval(), spec, DimRange(min=1, opt=2, max=2))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def first(request: pytest.FixtureRequest) -> tuple[str, Plan]:
    return request.param, plan(graph(), precision=request.param)


@pytest.fixture(scope="module")
def lenet() -> Plan:
    return plan(captured("lenet"))


def test_the_same_lock_gives_the_same_bytes(
    first: tuple[str, Plan], nothing_is_measured: None
) -> None:
    precision, made = first
    again = plan(graph(), precision=precision, lock=made.lock)
    assert to_bytes(again) == to_bytes(made)
    assert from_bytes(to_bytes(made)).lock == made.lock


def test_the_lock_decides_even_against_all_sense(lenet: Plan, nothing_is_measured: None) -> None:
    """Times of a lock where another kernel wins: it is taken."""
    lines = [json.loads(line) for line in lenet.lock.splitlines()]
    for line in lines:
        trial = line["trial"]
        if trial["time_us"] is not None or trial["behind"]:
            trial |= {"time_us": 1e6, "behind": None, "refused": None}
            if trial["kernel"].endswith(".aten"):
                trial["time_us"] = 1.0
    other = plan(captured("lenet"), lock="\n".join(map(json.dumps, lines)))
    kernels = {s.kernel for b in other.program.buckets for s in b.steps}
    assert {"conv2d.aten", "linear.aten"} <= kernels
    assert not kernels & {"conv2d.onednn", "linear.onednn", "linear.mkl"}


def test_a_lock_of_another_network_or_device_is_refused(first: tuple[str, Plan]) -> None:
    precision, made = first
    with pytest.raises(UsageError, match="does not hold"):
        plan(captured("lenet"), precision=precision, lock=made.lock)
    with pytest.raises(UsageError, match="another device"):
        plan(captured("lenet"), lock=made.lock.replace('"device":"', '"device":"x'))
    with pytest.raises(UsageError, match="does not hold"):
        plan(captured("lenet"), lock="nonsense\n{}\n")


def test_a_lock_comes_from_a_plan_its_file_or_a_file_of_lines(
    tmp_path: Path, nothing_is_measured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, spec = network("lenet")
    monkeypatch.undo()
    made = api.compile(module, inputs=[spec], batch=BATCH, target="cpu")
    (tmp_path / "lock.jsonl").write_text(made.lock)
    for lock in (made, made.save(tmp_path / "a.plan"), str(tmp_path / "lock.jsonl")):
        again = api.compile(module, inputs=[spec], batch=BATCH, target="cpu", lock=lock)
        assert to_bytes(again) == to_bytes(made)
    with pytest.raises(UsageError, match="no lock"):
        api.compile(module, inputs=[spec], target="cpu", lock=tmp_path / "none")


def test_a_lock_has_what_was_used_of_a_cache_and_no_more(tmp_path: Path) -> None:
    spec = TensorSpec(name="image", dtype="float32", shape=(1, 8))
    cache = tmp_path / "cache.jsonl"
    big = api.compile(nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).eval(),
                      inputs=[spec], batch=1, target="cpu", cache=cache)  # fmt: skip
    small = api.compile(nn.Linear(8, 3).eval(), inputs=[spec], batch=1, target="cpu", cache=cache)
    assert set(small.lock.splitlines()).isdisjoint(big.lock.splitlines())
    again = api.compile(nn.Linear(8, 3).eval(), inputs=[spec], batch=1, target="cpu", cache=cache)
    assert again.lock == small.lock


def test_what_is_true_for_a_moment_is_in_the_lock_but_in_no_cache(tmp_path: Path) -> None:
    path = tmp_path / "cache.jsonl"
    lock = Lock(path)
    lock.put("device", "problem", 1, Trial(kernel="k", refused="no memory"), lasting=False)
    assert lock.get("device", "problem", "k", 1) is None
    assert TimingCache(path).get("device", "problem", "k", 1) is None
    again = Lock(lines=lock.used)
    assert again.get("device", "problem", "k", 1) == Trial(kernel="k", refused="no memory")
