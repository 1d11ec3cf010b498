"""The profiler: a line a step, with work that can be counted by hand."""

from __future__ import annotations

import pytest
import torch

from tessella import runtime
from tessella.core.errors import UsageError
from tessella.runtime.profiler import profile, table
from tests.compiler.networks import captured, plan


def test_profile_of_lenet() -> None:
    lenet = plan(captured("lenet"), (1, 1, 2))
    engine = runtime.load(lenet)
    x = torch.randn(2, 1, 28, 28)
    before = engine(x)["scores"]
    times = profile(engine, 2, budget_s=0.0)
    assert [t.step for t in times] == [s.outputs[0] for s in lenet.program.buckets[1].steps]
    assert all(t.time_us > 0 for t in times)
    assert sum(t.share for t in times) == pytest.approx(1.0)
    first = times[0]
    assert (first.layer, first.op) == ("conv1", "conv2d")
    assert first.flops == 2 * 2 * 20 * 24 * 24 * 25
    assert first.nbytes == 4 * (2 * 28 * 28 + 20 * 25 + 20 + 2 * 20 * 24 * 24)
    pool = next(t for t in times if t.op == "max_pool2d")
    assert pool.flops is None
    assert torch.equal(engine(x)["scores"], before)  # profiling leaves the engine as it was
    lines = table(times).splitlines()
    assert len(lines) == 1 + len(times)
    assert lines[1].split()[1] == first.kernel


def test_only_its_own_batch_sizes() -> None:
    engine = runtime.load(plan(captured("lenet"), (1, 1, 2)))
    with pytest.raises(UsageError, match="no program for this batch"):
        profile(engine, 7)
