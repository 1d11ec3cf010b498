"""find for people: what ran, how right it was, what was refused and why; limits and a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tessella import kernels
from tessella.core.device import fingerprint
from tessella.core.errors import UsageError
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.search import find as search
from tessella.search import limits, report, roofline
from tessella.search.timing import Timing
from tests.support.kernels import scratch

LIMITS = limits.Limits(
    device="a machine", copy_bytes_s=1e10, flops_s={"float32": 1e11, "tf32": 4e11}
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that need no measuring, and the kernel of ``scratch`` in the catalog."""
    monkeypatch.setattr(report, "limits", lambda target, folder: LIMITS)
    monkeypatch.setattr(catalog, "KERNELS", (*catalog.KERNELS, scratch.ROW))
    monkeypatch.setattr(catalog, "BY_ID", {**catalog.BY_ID, scratch.ROW.id: scratch.ROW})


def found(**arguments: object) -> dict[str, report.Finding]:
    x, w = torch.randn(16, 64), torch.randn(32, 64)
    return {f.algorithm: f for f in kernels.find("linear", x, w, budget_s=0.0, **arguments)}


def test_a_finding_says_time_workspace_error_and_configuration() -> None:
    mine = found()["scratch"]
    assert mine.config in ({"pieces": 1}, {"pieces": 2})
    assert mine.workspace_bytes == 4 * mine.config["pieces"] * 16 * 32
    assert 0 < mine.max_rel_error < 1e-5
    assert mine.repeatable
    assert [t.refused for t in mine.tried] == [None, None, "failed: three is one too many"]
    assert mine.tflops == pytest.approx(2 * 16 * 32 * 64 / mine.time_us * 1e-6)
    least_us = 1e6 * max(2 * 16 * 32 * 64 / 1e11, 4 * (16 * 64 + 32 * 64 + 16 * 32) / 1e10)
    assert mine.limit_share == pytest.approx(least_us / mine.time_us)


def test_order_limits_of_workspace_and_choice_of_algorithms() -> None:
    everything = list(found().values())
    times = [f.time_us for f in everything if f.time_us is not None]
    assert times == sorted(times)
    assert [f.refused is None for f in everything] == sorted(
        (f.refused is None for f in everything), reverse=True
    )
    assert (
        "2048 bytes of workspace, 100 are allowed"
        in found(max_workspace_bytes=100)["scratch"].refused
    )
    assert set(found(algorithms=["aten", "mkl"])) == {"aten", "mkl"}
    assert found(constant_weight=True)["mkl"].refused is None


def test_a_kernel_that_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: Problem, constants: object, *, pieces: int):  # type: ignore[no-untyped-def]
        return lambda x, w, *, out, workspace: torch.mm(x, w.t(), out=out).mul_(1.01)

    monkeypatch.setattr(scratch, "bind", wrong)
    assert "deviates from float64 by 1.0e-02" in found()["scratch"].refused


def test_a_kernel_that_leaves_its_result_unwritten_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = scratch.bind

    def forgetful(problem: Problem, constants: object, *, pieces: int):  # type: ignore[no-untyped-def]
        call, calls = bind(problem, constants, pieces=pieces), []

        def once(*inputs, out, workspace):  # type: ignore[no-untyped-def]
            calls.append(1)
            return call(*inputs, out=out, workspace=workspace) if len(calls) == 1 else out

        return once

    monkeypatch.setattr(scratch, "bind", forgetful)
    assert "deviates from float64" in found()["scratch"].refused


def test_the_table_has_a_row_each() -> None:
    text = str(kernels.find("linear", torch.randn(4, 8), torch.randn(3, 8), budget_s=0.0))
    head, columns, *rows = text.splitlines()
    assert head.startswith("linear 4×8 × 3×8, float32 contiguous ieee, on a machine")
    assert columns.split("  ")[0] == "algorithm"
    assert len(rows) == len(catalog.candidates("linear", "cpu")) - 1  # without the last resort
    assert any("refused: weight and bias must be constants" in row for row in rows)


def test_extras_by_name_and_torchs_types() -> None:
    x, w, b, r = (torch.randn(s) for s in ((16, 64), (32, 64), (32,), (16, 32)))
    made = kernels.find(
        "linear", x, w, bias=b, residual=r, out_dtype=torch.float32, algorithms="aten", budget_s=0.0
    )
    same = kernels.find("linear", x, w, b, r, algorithms=["aten"], budget_s=0.0)
    assert [f.algorithm for f in made] == ["aten"]
    assert made.problem == same.problem


def test_a_picture_of_nothing_to_compute() -> None:
    made = kernels.find("linear", torch.randn(0, 64), torch.randn(32, 64), budget_s=0.0)
    assert not ElementTree.fromstring(roofline.svg(made)).findall(".//{*}circle")


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_kernel_is_judged_on_numbers_that_tell(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.full((16, 64), value), torch.randn(32, 64)
    judged = {f.algorithm: f.refused for f in kernels.find("linear", x, w, budget_s=0.0)}
    assert judged["aten"] is judged["scratch"] is None  # right ones are not refused for good

    def zeros(problem: Problem, constants: object, *, pieces: int):  # type: ignore[no-untyped-def]
        return lambda x, w, *, out, workspace: out.zero_()

    monkeypatch.setattr(scratch, "bind", zeros)
    x = torch.full((8, 64), value)
    judged = {f.algorithm: f.refused for f in kernels.find("linear", x, w, budget_s=0.0)}
    assert "deviates from float64" in judged["scratch"]


@pytest.mark.parametrize(
    ("operands", "arguments", "what"),
    [
        ((), {}, "two tensors or more"),
        ((torch.ones(2, 3), 3), {}, "two tensors or more"),
        ((torch.ones(2, 3), torch.ones(2, 3)), {"algorithms": ["magic"]}, "no algorithm"),
        ((torch.ones(2, 3), torch.ones(2, 3)), {"math": "bf16"}, "one of two ways"),
    ],
)
def test_wrong_searches_say_so(operands, arguments, what: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=what):
        kernels.find("linear", *operands, **arguments)


def test_a_gradient_has_no_constant_weight() -> None:
    dy, w = torch.randn(1, 4, 3, 3), torch.randn(4, 3, 3, 3)
    with pytest.raises(UsageError, match="no constant weight"):
        kernels.find("conv2d_dgrad", dy, w, input_size=(1, 3, 5, 5), constant_weight=True)


def test_unknown_operation() -> None:
    with pytest.raises(UsageError, match="use conv1d, conv2d"):
        kernels.find("deconvolve", torch.randn(2, 2))


def test_the_roofline_is_a_picture_with_a_point_a_kernel() -> None:
    made = kernels.find("linear", torch.randn(16, 64), torch.randn(32, 64), budget_s=0.0)
    root = ElementTree.fromstring(roofline.svg(made))
    points = root.findall(".//{*}circle")
    ran = [f for f in made if f.time_us is not None]
    assert len(points) == len(ran)
    # faster is higher up
    assert [float(p.get("cy")) for p in points] == sorted(float(p.get("cy")) for p in points)
    labels = [float(t.get("y")) for t in root.findall(".//{*}text") if " µs" in (t.text or "")]
    assert min(b - a for a, b in pairwise(labels)) >= 15.9


def test_a_report_says_what_is_close_and_what_was_disturbed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"onednn": (10.0, 1.0, False), "mkl": (11.5, 1.0, True), "scratch": (13.0, 0.5, False)}

    def time_interleaved(runs: object, heats: dict[str, str], **_: object) -> dict[str, Timing]:
        known = {
            n: times.get(kernel.split(".")[1], (99.0, None, False)) for n, kernel in heats.items()
        }
        return {
            n: Timing(time_us=t, spread_us=s, noisy=noisy) for n, (t, s, noisy) in known.items()
        }

    monkeypatch.setattr(search, "time_interleaved", time_interleaved)
    x, w = torch.randn(16, 64), torch.randn(32, 64)
    made = kernels.find("linear", x, w, budget_s=0.0, constant_weight=True)
    by = {f.algorithm: f for f in made}
    assert {n for n, finding in by.items() if finding.close} == {"mkl"}
    lines = {line.split()[0]: line for line in str(made).splitlines()}
    assert "close to the fastest; noisy" in lines["mkl"]
    assert "close" not in lines["onednn"] + lines["scratch"]
    assert "99.0  " in lines["aten"]  # sampled once: no spread is known


def test_limits_keep_the_quickest_of_several_readings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by a process of its own; then they are believed."""
    readings = iter([(1e10, 3e11), (4e10, 1e11), (2e10, 2e11)])

    def measured(target: str, name: str) -> limits.Limits:
        copied, multiplied = next(readings)
        return limits.Limits(device=name, copy_bytes_s=copied, flops_s={"float32": multiplied})

    monkeypatch.setattr(limits, "measured", measured)
    for _ in range(limits.READINGS + 2):
        monkeypatch.setattr(limits, "_measured_here", set())
        found = limits.limits("cpu", tmp_path)
        assert limits.limits("cpu", tmp_path) == found  # once a process
    assert (found.copy_bytes_s, found.flops_s) == (4e10, {"float32": 3e11})
    assert found.readings == limits.READINGS


def test_limits_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = limits.limits("cpu", tmp_path)
    assert first.device == fingerprint("cpu").name
    assert 1e8 < first.copy_bytes_s < 1e13
    assert 1e8 < first.flops_s["float32"] < 1e14
    monkeypatch.setattr(limits, "measured", None)
    assert limits.limits("cpu", tmp_path) == first
    problem = Problem(
        op="linear",
        inputs=(
            TensorMeta(shape=(8, 4), dtype="float32"),
            TensorMeta(shape=(2, 4), dtype="float32"),
        ),
        outputs=(TensorMeta(shape=(8, 2), dtype="float32"),),
        math="tf32",
    )
    assert LIMITS.flops_limit(problem) == 4e11
    assert LIMITS.least_us(problem) == pytest.approx(4 * (32 + 8 + 16) / 1e10 * 1e6)
