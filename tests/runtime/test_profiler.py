"""The profiler: a line a step, with work and limits that can be counted by hand; trace, picture."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from tessella import runtime
from tessella.core.errors import UsageError
from tessella.core.spec import TensorSpec
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.runtime import picture, profiler
from tessella.runtime.profiler import Profile, profile, table
from tessella.runtime.trace import chrome_trace
from tessella.search.limits import Limits
from tessella.search.timing import Timing
from tessella.studio.plan_profile import trace_of
from tests.support.networks import build, captured, plan
from tests.support.plans.joined import subject

# A machine that is easy to count with: 1 GB/s, 1 GFLOP/s.
ROUND = Limits(device="a <round> machine", copy_bytes_s=1e9, flops_s={"float32": 1e9})


@pytest.fixture(scope="module")
def measured() -> Profile:
    engine = runtime.load(plan(captured("lenet"), (1, 1, 2)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "limits", lambda *_: ROUND)
        x = torch.randn(2, 1, 28, 28)
        before = engine(x)["scores"]
        made = profile(engine, 2, budget_s=0.0)
        assert torch.equal(engine(x)["scores"], before)  # profiling leaves the engine as it was
    return made


def test_profile_of_lenet(measured: Profile) -> None:
    steps = plan(captured("lenet"), (1, 1, 2)).program.buckets[1].steps
    assert [t.op for t in measured] == [s.op for s in steps]
    assert all(t.time_us > 0 for t in measured)
    assert all(t.in_run_us > 0 for t in measured)
    assert measured.total_us > 0
    assert sum(t.share for t in measured) == pytest.approx(1.0)
    first = measured[0]
    assert (first.layer, first.op) == ("conv1", "conv2d")
    assert first.flops == 2 * 2 * 20 * 24 * 24 * 25
    assert first.nbytes == 4 * (2 * 28 * 28 + 20 * 25 + 20 + 2 * 20 * 24 * 24)
    pool = next(t for t in measured if t.op == "max_pool2d")
    assert (pool.flops, pool.peak_share) == (None, None)


def test_the_roofline_of_each_step(measured: Profile) -> None:
    first = measured[0]
    assert first.bound == "arithmetic"
    assert first.least_us == pytest.approx(first.flops / 1e3)
    assert first.peak_share == pytest.approx(first.flops / 1e3 / first.time_us)
    assert first.reached == pytest.approx(first.peak_share)
    assert not first.tensor_cores
    pool = next(t for t in measured if t.op == "max_pool2d")
    assert pool.bound == "memory"
    assert pool.least_us == pytest.approx(pool.nbytes / 1e3)
    flat = next(t for t in measured if t.kernel == "reshape.view")
    assert flat.nbytes in (0, 2 * 4 * 2 * 800)  # a view, or rows of channels_last turned to planes
    assert flat.least_us == pytest.approx(flat.nbytes / 1e3)
    assert measured.least_us == pytest.approx(sum(t.least_us for t in measured))


@pytest.mark.parametrize(("dtype", "math", "on"), [
    ("float16", "ieee", True), ("int8", "ieee", True), ("float32", "tf32", True),
    ("float32", "ieee", False),
])  # fmt: skip
def test_which_products_tensor_cores_do(dtype: str, math: str, on: bool) -> None:
    gpu = Limits(
        device="a GPU", copy_bytes_s=1.0,
        flops_s={"float32": 1.0, "tf32": 1.0, "float16": 1.0, "int8": 1.0},
    )  # fmt: skip
    x = TensorMeta(shape=(4, 8), dtype=dtype)
    problem = Problem(op="linear", inputs=(x, x, None, None), outputs=(x,), math=math)
    assert profiler._on_tensor_cores(problem, gpu) is on
    assert not profiler._on_tensor_cores(problem, ROUND)  # a CPU has none


def test_how_busy_tensor_cores_are(measured: Profile) -> None:
    first = replace(measured[0], time_us=30.0, peak_share=0.5, tensor_cores=True)
    other = replace(measured[1], time_us=10.0, peak_share=None, tensor_cores=False)
    assert replace(measured, steps=(first, other)).tensor_core_share == pytest.approx(15 / 40)


def test_as_a_table(measured: Profile) -> None:
    lines = table(measured).splitlines()
    assert len(lines) == 1 + len(measured) + 1
    assert lines[1].split()[1] == measured[0].kernel
    assert "limits allow" in lines[-1]


def test_as_a_trace(measured: Profile) -> None:
    """What Perfetto asks of complete events, and that they do not overlap in a row."""
    trace = json.loads(json.dumps(chrome_trace(measured), allow_nan=False))
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X"}
    names = {e["name"] for e in events if e["ph"] == "M"}
    assert names == {"process_name", "thread_name"}
    for thread in (1, 2):
        row = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
        assert len(row) == len(measured)
        assert all(isinstance(e[k], int | float) for e in row for k in ("ts", "dur", "pid"))
        for one, other in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-2
    steps = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert [e["dur"] for e in steps] == [t.in_run_us for t in measured]
    assert steps[0]["args"]["kernel"] == measured[0].kernel


def test_disturbed_steps_are_marked(measured: Profile, tmp_path: Path) -> None:
    steps = [replace(step, noisy=index == 1) for index, step in enumerate(measured)]
    busy = replace(measured, steps=tuple(steps), noisy=False)
    assert f"1 of {len(steps)} steps were disturbed by other work" in table(busy)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(busy)))
    assert [step.noisy for step in trace_of(path).steps] == [step.noisy for step in steps]
    assert not trace_of(path).noisy
    quiet = replace(measured, steps=tuple(replace(s, noisy=False) for s in steps), noisy=False)
    assert "disturbed" not in table(quiet)
    assert "~" not in table(quiet)


def test_a_disturbed_program_is_marked(measured: Profile, tmp_path: Path) -> None:
    steps = tuple(replace(step, noisy=False) for step in measured)
    busy = replace(measured, steps=steps, noisy=True)
    assert f"whole program {busy.total_us:,.1f} µs (disturbed by other work" in table(busy)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(chrome_trace(busy)))
    assert trace_of(path).noisy


def test_as_a_picture(measured: Profile) -> None:
    root = ElementTree.fromstring(picture.svg(measured))
    rows = [g for g in root if g.tag.endswith("}g")]
    assert len(rows) == len(measured)
    whole, dark = [r for r in rows[0] if r.tag.endswith("}rect")]
    assert float(dark.get("width")) <= float(whole.get("width"))
    size = float(root.get("width")), float(root.get("height"))
    for line in root.iter():
        assert float(line.get("x", 0)) <= size[0]
        assert float(line.get("y", 0)) <= size[1]


def test_only_its_own_batch_sizes() -> None:
    engine = runtime.load(plan(captured("lenet"), (1, 1, 2)))
    with pytest.raises(UsageError, match="no program for this batch"):
        profile(engine, 7)


def test_a_slice_is_timed_in_the_strides_that_its_kernel_was_bound_to(monkeypatch) -> None:
    engine = runtime.load(subject())
    seen = {}

    def timed(runs, **_):
        runs["step"]()
        return {"step": Timing(time_us=1.0, spread_us=0.0)}

    for i, step in enumerate(engine.bound(2).steps):
        if step.out is not None:

            def call(*inputs, out, step=step):
                seen[step.step.outputs[0]] = step.problem.output.matches(out)
                return step.call(*inputs, out=out)

            engine.bound(2).steps[i] = replace(step, call=call)
    monkeypatch.setattr(profiler, "measure", timed)
    profile(engine, 2, budget_s=0.0)
    assert [b.name for b in subject().program.buckets[0].buffers if b.slice and b.name in seen]
    assert all(seen.values())


class Turned(nn.Module):
    """A view of any strides, and what cannot be one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp().mT.reshape(-1, 12, 4).exp()


def test_a_reshape_that_copies_is_timed_on_such_a_view(monkeypatch) -> None:
    engine = runtime.load(build(Turned(), TensorSpec(name="x", dtype="float32", shape=(1, 6, 8))))
    at = [s.step.op for s in engine.bound(2).steps].index("reshape")
    step, seen = engine.bound(2).steps[at], []

    def call(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.stride())
        return step.call(x)

    engine.bound(2).steps[at] = replace(step, call=call)
    monkeypatch.setattr(profiler, "limits", lambda *_: ROUND)
    made = profile(engine, 2, budget_s=0.0)
    assert set(seen) == {(48, 1, 8)}
    assert made[at].nbytes == 2 * 4 * 2 * 6 * 8
    assert made[at].least_us == pytest.approx(made[at].nbytes / 1e3)
    assert [(t.nbytes, t.least_us) for t in made if t.op == "permute"] == [(0, 0.0)]
