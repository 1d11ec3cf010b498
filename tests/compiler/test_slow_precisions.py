"""Precisions that a processor has no instructions for: told with what was measured, not offered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tessella as ts
from tessella.artifacts.plan import Plan
from tessella.compiler import slow_precisions
from tessella.compiler.budget import mixes
from tessella.compiler.slow_precisions import slowdown, warnings_for
from tessella.core.events import Event
from tessella.core.spec import TensorSpec
from tests.support.networks import captured

pytestmark = pytest.mark.instructions

NARROW = torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT", "NO AVX")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two of which wait for each other are as slow in float32 where other tests take the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    slow_precisions._ratio.cache_clear()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(not NARROW, reason="this processor may have bfloat16: run again with AVX2")
@pytest.mark.parametrize("op", ["conv2d", "linear"])
def test_without_its_instructions_bfloat16_is_slower(op: str) -> None:
    assert slowdown("bf16", "cpu", op) > 2.0
    assert mixes.offered("cpu", "fp32") == ("int8",)


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], float]:
    """What was measured on a processor, by element type and kind of product."""
    found = {("bfloat16", "conv2d"): 8.0, ("bfloat16", "linear"): 4.0, ("float16", "conv2d"): 0.5}
    monkeypatch.setattr(slow_precisions, "_ratio", lambda dtype, op: found[dtype, op])
    return found


def compiled(precision: str, **settings: object) -> Plan:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    image = TensorSpec(name="image", dtype="float32", shape=(1, 3, 8, 8))
    return ts.compile(module, inputs=[image], batch=1, precision=precision, **settings)


def test_compile_says_how_much_slower(ratios: dict[tuple[str, str], float]) -> None:
    told: list[Event] = []
    compiled("bf16", target="cpu", emit=told.append)
    (text,) = [event.text for event in told if event.kind == "warning" and "fp32" in event.text]
    assert text.startswith("bf16 is slower than fp32 on this processor")
    assert "a convolution takes 8.0 times as long" in text


@pytest.mark.filterwarnings("default")
def test_python_says_so_where_nobody_listens_to_events(
    ratios: dict[tuple[str, str], float],
) -> None:
    with pytest.warns(UserWarning, match="bf16 is slower than fp32 .* 8.0 times") as seen:
        compiled("bf16", target="cpu")
    assert seen[0].filename == __file__


@pytest.mark.parametrize(("target", "precision", "better"), [
    ("sm_75", "bf16", "fp16"), ("sm_75", "fp8", "int8"), ("sm_86", "fp8", "int8"),
])  # fmt: skip
def test_a_gpu_without_the_instructions_is_told(target: str, precision: str, better: str) -> None:
    (text,) = warnings_for(captured("lenet"), {precision, "fp32"}, target)
    assert text.startswith(f"{precision} is slow on {target}")
    assert text.endswith(f"precision {better}")


@pytest.mark.parametrize(("precision", "target"), [
    ("fp16", "cpu"),  # that processor is quick at
    ("fp32", "cpu"), ("int8", "cpu"), ("bf16", "reference"), ("bf16", "sm_90"),
    ("bf16", "sm_80"), ("fp8", "sm_89"), ("fp16", "sm_75"), ("int8", "sm_75"),
])  # fmt: skip
def test_nothing_is_said_of_others(
    precision: str, target: str, ratios: dict[tuple[str, str], float]
) -> None:
    assert warnings_for(captured("lenet"), {precision}, target) == []


@pytest.mark.parametrize(
    ("ratio", "offered"), [(8.0, ("int8",)), (1.05, ("bf16", "int8")), (0.5, ("bf16", "int8"))]
)
def test_a_budget_is_not_spent_on_a_slower_precision(
    ratio: float, offered: tuple[str, ...], ratios: dict[tuple[str, str], float]
) -> None:
    ratios["bfloat16", "conv2d"] = ratio
    assert mixes.offered("cpu", "fp32") == offered
    assert mixes.offered("cpu", "int8") == offered
    assert mixes.offered("cpu", "bf16") == ("bf16",)  # who asks for it gets it
    assert mixes.offered("reference", "fp32") == ("bf16", "int8")


def test_a_ratio_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_precisions._ratio.cache_clear()
    measured: list[str] = []

    def product_us(op: str, dtype: torch.dtype) -> float:
        measured.append(op)
        return {torch.bfloat16: 30.0, torch.float32: 10.0}[dtype]

    monkeypatch.setattr(slow_precisions, "_product_us", product_us)
    monkeypatch.setattr(slow_precisions.processor, "extensions", lambda: ())
    assert [slowdown("bf16", "cpu", "linear") for _ in range(3)] == [3.0] * 3
    assert measured == ["linear"] * 2 * slow_precisions.ROUNDS
    slow_precisions._ratio.cache_clear()
    monkeypatch.setattr(slow_precisions.processor, "extensions", lambda: ("amx_bf16",))
    assert slowdown("bf16", "cpu", "linear") == 1.0  # its instructions are there: none is measured
    assert len(measured) == 2 * slow_precisions.ROUNDS
    slow_precisions._ratio.cache_clear()
