"""Every kernel of ours on a GPU, for Hopper or the ``TARGET`` whose code it runs: its answers are
those of float64 on the problems that a kernel report tries, on one of them in its last
configuration, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tessella.device.machine import aimed_at
from tessella.kernels import catalog
from tessella.kernels.catalog import Kernel
from tessella.search.kernel_report.problems import problems_of
from tessella.search.kernel_report.record import Row
from tessella.search.kernel_report.trying import Bench
from tests.support.gpu_target import TARGET
from tests.support.kernels import for_targets

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)
OURS = {k.id: k for k in catalog.KERNELS if k.source == "tessella" and k.runs_on(TARGET)}
OURS = {id: row for id, row in OURS.items() if "gpu" in row.targets or TARGET in row.targets}
OPERATORS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "fallback.ranked": ("scores", lambda x: (-x).argsort(dim=1, stable=True)[:, :300]),
    "fallback.gathered": ("places", lambda x, at: x.gather(1, at)),
    "fallback.gridded": ("grid", lambda x, grid: F.grid_sample(x, grid, align_corners=False)),
}  # of torch's, which a report does not try


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(TARGET, torch.device("cuda"), lambda _: None)


@pytest.mark.parametrize("id", [id for id in OURS if id not in {*OPERATORS, "cat.in_place"}])
def test_it_answers_as_float64(id: str, bench: Bench) -> None:
    told = list(tried(OURS[id], bench))
    faults = [row for row in told if row.outcome not in ("right", "refused")]
    assert not faults
    if all(row.outcome == "refused" for row in told):
        pytest.skip(f"not for {TARGET}: {told[0].why}")


def tried(row: Kernel, bench: Bench) -> list[Row]:
    """What became of a kernel with every problem of its operation."""
    found, last = [], 0
    for name in (name for name, problem in problems_of(TARGET).items() if problem.op == row.op):
        made, configs = bench.try_kernel(row, name, 0)
        found.append(made)
        if configs > 1 and not last:
            last = configs - 1
            found.append(bench.try_kernel(row, name, last)[0])
    return found


@pytest.mark.parametrize("id", OPERATORS)
def test_it_answers_as_the_operator(id: str) -> None:
    name, operator = OPERATORS[id]
    problem, generator = for_targets.problems()[name], torch.Generator().manual_seed(0)
    given = [
        torch.randint(8400, meta.shape, generator=generator)
        if meta.dtype == "int64"
        else torch.randn(meta.shape, generator=generator).half()
        for meta in problem.given
    ]
    right = operator(*(t.double() if t.is_floating_point() else t for t in given))
    with aimed_at(TARGET):
        assert OURS[id].refusal(problem) is None
        for config in OURS[id].configs(problem):
            made = OURS[id].load().bind(problem, {}, **config)(*(t.cuda() for t in given))
            if isinstance(made, tuple):  # the values, and which they were
                assert torch.equal(made[0].cpu(), given[0].gather(1, right)), config
                made = made[1]
            limit = 0.0 if id != "fallback.gridded" else 4e-3 * right.abs().max()
            assert (made.cpu().double() - right).abs().max() <= limit, config
