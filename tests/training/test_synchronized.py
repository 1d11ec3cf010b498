"""Norms of two processes have the statistics of both; compressed gradients are of few columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessella.core.errors import UsageError
from tessella.nn.prototxt import modules as caffe
from tessella.training import parallel
from tessella.training.parallel import World
from tessella.training.recomputing import _counted_already
from tessella.training.synchronized import SynchronizedNorm, synchronized
from tessella.training.ways import refusal
from tests.support.training import in_two_processes, recipe


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 8),
        nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3),
    )  # fmt: skip


def images(rank: int) -> torch.Tensor:
    made = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(rank))
    return made + 50 + 3 * rank  # means that differ, and are far from zero


def learned(module: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the last batch, and all buffers."""
    for batch in batches:
        module.zero_grad()
        module(batch).square().mean().backward()
    core = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return {n: p.grad for n, p in core.named_parameters()} | dict(core.named_buffers())


def part(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    world = World(device=torch.device("cpu"), rank=rank, size=2)
    module = synchronized(network())
    assert sum(isinstance(m, SynchronizedNorm) for m in module.modules()) == 2
    found = learned(world.wrap(module), [images(rank), images(rank + 2)])
    torch.save((found, module.eval()(images(9))), folder / f"{rank}.pt")
    parallel.WHOLE_FIRST = 2
    torch.manual_seed(0)
    dense = world.wrap(nn.Linear(48, 40, bias=False), compress=2)
    seen = []
    for step in range(4):
        dense.zero_grad()
        x = torch.randn(99, 48, generator=torch.Generator().manual_seed(10 * step + rank))
        dense(x).square().mean().backward()
        seen.append(dense.module.weight.grad.clone())
    torch.save(seen, folder / f"dense-{rank}.pt")
    dist.destroy_process_group()


def test_norms_see_all_images_and_gradients_have_few_columns(tmp_path):
    in_two_processes(part, tmp_path)
    (one, answers), (other, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = network()
    both = [torch.cat([images(rank), images(rank + 1)]) for rank in (0, 2)]
    expected = learned(whole, both)
    assert one.keys() == other.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(one[name], other[name]), name
        torch.testing.assert_close(one[name], value, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(answers, whole.eval()(images(9)), rtol=1e-4, atol=1e-4)
    first, second = (torch.load(tmp_path / f"dense-{rank}.pt") for rank in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert [int(torch.linalg.matrix_rank(g, rtol=1e-5)) for g in first] == [40, 40, 2, 2]


def test_what_is_not_had_together(dataset):
    settings = recipe(dataset, sync_norms=True, compress=2, gpus=2, batch_size=10)
    cuda = torch.device("cuda")
    assert "middle of a step" in refusal("fused", settings, cuda)
    assert refusal("eager", settings, cuda) is None
    with pytest.raises(UsageError, match="middle of a step"):
        recipe(dataset, sync_norms=True, fuse=True)
    with pytest.raises(UsageError, match="compress counts columns"):
        recipe(dataset, compress=-1)
    for alone in ({"sync_norms": True}, {"compress": 2}):
        with pytest.raises(UsageError, match=r"nothing to exchange.*more gpus"):
            recipe(dataset, **alone)
    # an infinite gradient stays in what is added to the next ones: no step was taken any more
    with pytest.raises(UsageError, match="train with precision bf16"):
        recipe(dataset, compress=2, gpus=2, batch_size=10, precision="fp16")


class Odd(nn.BatchNorm1d):
    def forward(self, input):
        return 2 * super().forward(input)


def test_norms_stay_what_they_are(tmp_path):
    """Beside torch's and timm's own in one process: places, hooks, momentum, activations."""
    timm = pytest.importorskip("timm.layers")

    def made() -> nn.Module:
        shared = nn.BatchNorm2d(3, momentum=0.0)
        return nn.Sequential(
            shared, timm.BatchNormAct2d(3), shared, nn.BatchNorm2d(3, momentum=None),
            caffe.BatchNorm(3, eps=1e-5, fraction=0.9),
        )  # fmt: skip

    plain, heard = made(), []
    module = made()
    module[0].register_forward_hook(lambda *_: heard.append(1))
    module = synchronized(module)
    assert module[0] is module[2]
    assert isinstance(module[0], SynchronizedNorm)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        for number in range(3):
            batch = images(number)
            torch.testing.assert_close(module(batch), plain(batch), rtol=1e-4, atol=1e-4)
        with _counted_already(list(module)):  # recompute's second pass
            module(images(9))
    finally:
        dist.destroy_process_group()
    assert len(heard) == 8
    for (name, buffer), expected in zip(module.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(module.eval()(images(4)), plain.eval()(images(4)))
    with pytest.raises(UsageError, match=r"1, a .*Odd, has a forward pass"):
        synchronized(nn.Sequential(nn.ReLU(), Odd(3)))
