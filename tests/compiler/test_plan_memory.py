"""The memory plan: nothing live is overwritten, and the arena is no larger than it must be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tessella.artifacts.plan import ALIGNMENT, Bucket
from tessella.compiler.passes.plan_memory import _Storage, place
from tessella.core.spec import TensorSpec
from tessella.kernels import catalog
from tessella.kernels.problem import TensorMeta
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


def _reads(bucket: Bucket) -> Iterator[tuple[int, str]]:
    for index, step in enumerate(bucket.steps):
        yield from ((index, name) for name in step.inputs if name is not None)


def _check_lifetimes(bucket: Bucket, outputs: tuple[str, ...]) -> None:
    """Follow who owns each byte of the arena, views included, as the steps run."""
    buffers = {b.name: b for b in bucket.buffers}
    last_read = {name: index for index, name in _reads(bucket)}
    last_read |= dict.fromkeys(outputs, len(bucket.steps))
    bases: dict[str, set[str]] = {}
    for index, step in enumerate(bucket.steps):
        views = catalog.kernel(step.kernel).views
        for name in step.outputs:
            read = [bases.get(n, set()) for n in step.inputs if n is not None]
            bases[name] = set().union(*read) if views else {name}
            mine = buffers[name]
            if mine.offset is None:
                continue
            size = torch.empty(mine.shape, dtype=getattr(torch, mine.dtype)).nbytes
            for other, owns in bases.items():
                if other == name or last_read.get(other, -1) < index:
                    continue  # nobody reads it any more, not even this step
                for base in owns & buffers.keys():
                    theirs = buffers[base]
                    if theirs.offset is None:
                        continue
                    end = theirs.offset + torch.empty(
                        theirs.shape, dtype=getattr(torch, theirs.dtype)
                    ).nbytes  # fmt: skip
                    assert end <= mine.offset or mine.offset + size <= theirs.offset, (name, other)
        for name in step.frees:
            assert last_read.get(name, index) == index


def test_no_live_value_of_a_network_is_overwritten() -> None:
    for name in ("vit", "resnet18"):
        made = plan(captured(name))
        for bucket in made.program.buckets:
            if name == "vit":  # its additions always write into the arena
                assert bucket.arena_bytes > 0
            _check_lifetimes(bucket, made.program.outputs)


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
        _check_lifetimes(bucket, made.program.outputs)
