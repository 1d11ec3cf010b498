"""The memory plan: nothing live is overwritten, and the arena is no larger than it must be."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessella import runtime
from tessella.artifacts.plan import ALIGNMENT
from tessella.compiler.passes.plan_memory import _Storage, place
from tessella.core.spec import TensorSpec
from tessella.kernels import catalog
from tessella.kernels.problem import TensorMeta
from tests.compiler.memory import check_memory
from tests.compiler.networks import build, captured, plan

storage = st.builds(
    lambda i, size, first, length: (i, size, first, first + length),
    st.integers(0, 10**9), st.integers(1, 5000), st.integers(0, 20), st.integers(0, 8),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(storage, max_size=25))
def test_storages_that_live_together_lie_apart(drawn: list[tuple[int, int, int, int]]) -> None:
    storages = [
        _Storage(str(i), TensorMeta(shape=(size,), dtype="uint8"), first, last, True)
        for i, size, first, last in drawn
    ]
    nbytes = place(storages)
    for i, a in enumerate(storages):
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.nbytes <= nbytes
        for b in storages[:i]:
            together = a.first <= b.last and b.first <= a.last
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or not together
    live = [sum(s.nbytes for s in storages if s.first <= t <= s.last) for t in range(30)]
    assert max(live, default=0) <= nbytes <= sum(s.nbytes for s in storages)


def test_a_gap_is_filled_with_what_fits_it_best() -> None:
    def made(name: str, size: int, first: int, last: int) -> _Storage:
        return _Storage(name, TensorMeta(shape=(size,), dtype="uint8"), first, last, True)

    chain = [made(str(i), 640, i, i + 1) for i in range(10)]  # each feeds the next
    assert place(chain) == 2 * 640


def test_no_live_value_of_a_network_is_overwritten() -> None:
    for name in ("vit", "resnet18"):
        made = plan(captured(name))
        for bucket in made.program.buckets:
            if name == "vit":  # its additions always write into the arena
                assert bucket.arena_bytes > 0
            check_memory(made.program, bucket)


def test_a_view_keeps_its_base_alive() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.exp(x)
            view = a.permute(0, 2, 1)  # a view of the arena, read last
            b = torch.tanh(torch.tanh(torch.tanh(x * 2)))
            return torch.cat([view, b.permute(0, 2, 1)], 1)

    spec = TensorSpec(name="image", dtype="float32", shape=(1, 4, 6))
    made = build(Views(), spec)
    assert any(s.kernel == "permute.view" for s in made.program.buckets[0].steps)
    for bucket in made.program.buckets:
        check_memory(made.program, bucket)


def test_a_result_takes_the_place_of_an_operand_that_ends() -> None:
    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.exp(x)  # read by the last addition: stays
            b = torch.tanh(torch.sigmoid(torch.tanh(a))) * 2
            return (b + a).relu()

    made = build(Chain(), TensorSpec(name="image", dtype="float32", shape=(1, 64)))
    for bucket in made.program.buckets:
        check_memory(made.program, bucket)
        places = {b.name: b.offset for b in bucket.buffers}
        assert len(set(places.values())) == 2
        assert bucket.arena_bytes == bucket.peak_bytes == 2 * 64 * 4 * bucket.batch


def test_an_operand_with_a_view_keeps_its_place() -> None:
    class Mirrored(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.exp(x)
            return a + a.permute(0, 2, 1)  # element (i, j) is read after (j, i) is written

    made = build(Mirrored(), TensorSpec(name="image", dtype="float32", shape=(1, 8, 8)))
    x = torch.randn(2, 8, 8)
    (answer,) = runtime.load(made)(x).values()
    torch.testing.assert_close(answer, x.exp() + x.exp().mT)
    for bucket in made.program.buckets:
        check_memory(made.program, bucket)
