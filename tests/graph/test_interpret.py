"""What interpret checks, frees and casts; that it is right is in test_capture and test_onnx."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella.core.errors import InputError
from tessella.graph import capture, interpret
from tessella.operations.operation import Operation
from tests.support.graphs import BATCH, Attention, Residual, image


def test_inputs_are_checked() -> None:
    graph = capture(Residual(), image(3, 8, 8))
    with pytest.raises(InputError, match=r"Seen: picture. To do: give image"):
        interpret(graph, {"picture": torch.zeros(1, 3, 8, 8)})
    for wrong in (
        torch.zeros(1, 3, 8, 9),
        torch.zeros(3, 8, 8),
        torch.zeros(2, 3, 8, 8).double(),
    ):
        with pytest.raises(InputError, match=r"input 'image' does not fit"):
            interpret(graph, {"image": wrong})


def test_upcast_computes_in_float64() -> None:
    """Against the module itself in float64, far below what float32 could reach."""
    torch.manual_seed(0)
    module = Attention().eval()
    graph = capture(module, image(3, 16, 16))
    x = torch.randn(3, 3, 16, 16)
    got = interpret(graph, {"image": x}, upcast=torch.float64)["output"]
    want = module.double()(x.double())
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_upcast_replaces_casts_on_the_way() -> None:
    class Casts(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.softmax(x.half() / 3, dim=1, dtype=torch.float32)
            return torch.cumsum(y, 1, dtype=torch.float32)

    graph = capture(Casts(), image(7))
    x = torch.randn(2, 7)
    got = interpret(graph, {"image": x}, upcast=torch.float64)["output"]
    want = torch.softmax(x.double() / 3, 1).cumsum(1)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert interpret(graph, {"image": x})["output"].dtype == torch.float32


def test_values_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three activations of a chain of ten are alive at a time."""
    graph = capture(nn.Sequential(*[nn.Sigmoid() for _ in range(10)]), image(1000))
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    call = Operation.call

    def counting(*args: object) -> tuple[torch.Tensor, ...]:
        nonlocal most
        made = call(*args)  # type: ignore[arg-type]
        alive.extend(weakref.ref(t) for t in made)
        most = max(most, sum(r() is not None for r in alive))
        return made

    monkeypatch.setattr(Operation, "call", counting)
    interpret(graph, {"image": torch.zeros(1, 1000)})
    assert len(alive) == 10
    assert most <= 3


def test_a_value_read_twice_and_an_unused_input() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x)
            return y * y

    (spec,) = image(4)
    other = type(spec)(name="unused", dtype="float32", shape=(BATCH, 2))
    graph = capture(Twice(), [spec, other])
    x = torch.randn(3, 4)
    got = interpret(graph, {"image": x, "unused": torch.zeros(3, 2)})["output"]
    torch.testing.assert_close(got, x.relu() ** 2)
