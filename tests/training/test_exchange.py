"""Gradients of two processes are those of one that sees both batches."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tessella.training.exchange import Exchange
from tests.support.training import in_two_processes


def network(seed: int) -> nn.Module:
    """Layers of 16 and 32 bits, one that is frozen and one that nobody calls."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 24),
        nn.Linear(24, 24).bfloat16(), nn.Linear(24, 5),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    module[4].requires_grad_(False)
    module.register_module("unused", nn.Linear(3, 3))
    return module


def passed(module: nn.Module, images: torch.Tensor) -> torch.Tensor:
    x = module[:5](images)
    x = module[6](module[5](x.bfloat16()).float())
    loss = x.square().mean()
    loss.backward()
    return loss.detach()


def images(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def part(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module = network(seed=rank).eval()  # a norm in training would see its own part of the batch
    whole = Exchange(module)  # a bucket of each element type, one after the other
    averaged = gradients(whole, module, rank)
    whole.close()
    averaging = Exchange(module, bucket_bytes=200)
    found = gradients(averaging, module, rank)
    counts = len(whole._buckets), len(averaging._buckets)
    torch.save((module.state_dict(), found, averaged, counts), folder / f"{rank}.pt")
    averaging.close()
    module.zero_grad()
    passed(module, images(rank, 0))  # alone again
    torch.save(module[6].weight.grad, folder / f"alone-{rank}.pt")
    dist.destroy_process_group()


def gradients(averaging: Exchange, module: nn.Module, rank: int) -> list[dict[str, torch.Tensor]]:
    work, found = averaging.around(passed), []
    for step in range(3):
        for parameter in module.parameters():
            parameter.grad = None
        work(module, images(rank, step))
        found.append({n: p.grad for n, p in module.named_parameters() if p.grad is not None})
        found[-1] = {n: g.clone() for n, g in found[-1].items()}
    return found


def test_gradients_are_those_of_both_batches(tmp_path):
    in_two_processes(part, tmp_path)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    (state, ours, whole, counts), (same, others, _, _) = parts
    assert counts == (3, 6)
    module = network(seed=0).eval()
    assert all(torch.equal(state[n], same[n]) for n in state)
    assert all(torch.equal(state[n], value) for n, value in module.state_dict().items())
    for step in range(3):
        module.zero_grad()
        passed(module, torch.cat([images(0, step), images(1, step)]))
        expected = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert ours[step].keys() == others[step].keys() == expected.keys()
        assert "unused.weight" not in expected
        for name, gradient in expected.items():
            assert torch.equal(ours[step][name], others[step][name])
            assert torch.equal(ours[step][name], whole[step][name])
            rel = 2e-2 if gradient.dtype == torch.bfloat16 else 1e-2
            torch.testing.assert_close(ours[step][name], gradient, rtol=rel, atol=rel / 100)
            assert ours[step][name].stride() == gradient.stride()
    alone = [torch.load(tmp_path / f"alone-{rank}.pt") for rank in range(2)]
    assert not torch.equal(*alone)
