"""Weights cut over two processes train as whole ones do, stop, and go on from whole checkpoints."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from tessella.artifacts.run import Recipe, Run, Solver
from tessella.core.errors import UsageError
from tessella.core.events import Event, silent
from tessella.nn.zoo import build
from tessella.training.expected import expected_memory
from tessella.training.loop import train, train_run
from tessella.training.parallel import joined
from tessella.training.prepare import begin
from tessella.training.trainer import Trainer
from tests.support.training import curve, free_port, losses, recipe, write_dataset

# 17 images to validate on in batches of 12: the second process has none of the last
SETTINGS = {"batch_size": 12, "epochs": 4.0, "accumulate": 2, "val_interval": 2.0, "clip": 0.5}
NORMED = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return x + self.norm(self.convolution(x)).relu()

class Normed(nn.Sequential):
    def __init__(self, classes):
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1), Block(), Block(), nn.Flatten(),
            nn.Linear(8 * 144, classes),
        )
"""


def process(rank: int, port: int, out: Path, stop: int, resumed: bool, parts: object) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    seen = []

    def emit(event: Event) -> None:
        seen.append(event.step)

    def kept(self: Trainer, *given: object, **named: object) -> torch.Tensor:
        made = stepped(self, *given, **named)
        held = list(self.module.parameters())
        held += [s["momentum_buffer"] for s in self.optimizer.state.values()]
        parts[rank] = sum(t.to_local().numel() for t in held) / sum(t.numel() for t in held)
        return made

    stepped, Trainer.plain_step = Trainer.plain_step, kept
    try:
        with joined(lambda: stop in seen) as world:
            train_run(Run(out), world, resumed=resumed, emit=emit if rank == 0 else silent)
    except KeyboardInterrupt:
        os._exit(130)  # what ends a process by itself waits for the other one


def together(out: Path, *, stop: int = -1, resumed: bool = False) -> tuple[list[int], list[float]]:
    """Exit codes of two processes, and the share of weights and velocities that each held."""
    port = free_port()
    # not from here: threads of autograd that another test began outlive no fork
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tessella.training.fully_sharded", __name__])
    parts = context.Array("d", 2)
    processes = [
        context.Process(target=process, args=(rank, port, out, stop, resumed, parts))
        for rank in range(2)
    ]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    return [one.exitcode for one in processes], list(parts)


def test_cut_weights_give_the_curve_of_whole_ones_also_behind_a_stop(tmp_path):
    data = write_dataset(tmp_path / "data", train=36, val=17)
    run, _ = begin(recipe(data, gpus=2, shard=True, **SETTINGS), tmp_path / "two", resume=False)
    codes, parts = together(run.path, stop=5)
    assert codes == [130, 130]
    assert all(0.45 < part < 0.6 for part in parts), parts  # 5 classes' rows are cut unevenly
    stopped = run.latest().info.position.step
    assert 5 <= stopped < 12
    assert together(run.path, resumed=True)[0] == [0, 0]
    one = train(recipe(data, **SETTINGS), tmp_path / "one")
    assert losses(run) == pytest.approx(losses(one), rel=1e-5, abs=1e-6)
    for (step, _, ours), (_, _, theirs) in zip(curve(run), curve(one), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6), step
    ours, theirs = run.latest(), one.latest()
    for name, value in theirs.weights().items():
        torch.testing.assert_close(ours.weights()[name], value, rtol=1e-4, atol=1e-6)
    (state, _), (expected, _) = ours.training_state(), theirs.training_state()
    assert {n: t.shape for n, t in state.items()} == {n: t.shape for n, t in expected.items()}


def test_norms_of_all_processes_in_blocks_that_are_computed_again(tmp_path):
    data = write_dataset(tmp_path / "data", train=36, val=6)
    (tmp_path / "normed.py").write_text(NORMED)
    settings = {"network": f"{tmp_path / 'normed.py'}:Normed", "batch_size": 12, "epochs": 2.0}
    settings |= {"recompute": True, "solver": Solver(lr=0.01, centralize=True)}
    two = recipe(data, gpus=2, shard=True, sync_norms=True, **settings)
    run, _ = begin(two, tmp_path / "two", resume=False)
    assert together(run.path)[0] == [0, 0]
    one = train(recipe(data, **settings), tmp_path / "one")
    assert losses(run) == pytest.approx(losses(one), rel=1e-4)
    for name, value in one.latest().weights().items():  # running statistics among them
        torch.testing.assert_close(run.latest().weights()[name], value, rtol=1e-3, atol=1e-5)


def test_a_step_is_said_to_take_less_by_what_others_hold(dataset, tmp_path):
    whole, cut = (
        begin(recipe(dataset, gpus=2, shard=cut), tmp_path / str(cut), resume=False)[0].info
        for cut in (False, True)
    )
    network = build(whole.network)
    optimizer = torch.optim.SGD(network.parameters())
    before, after = expected_memory(whole, optimizer), expected_memory(cut, optimizer)
    largest = 4 * max(p.numel() for p in network.parameters())
    bias = 4 * 500  # of the layer that has them
    every = before.weights
    assert after.solver == before.solver / 2 == every / 2
    assert after.weights == pytest.approx(every / 2 + 2 * (largest + bias), rel=1e-2)
    assert after.gradients == pytest.approx(every / 2 + largest + bias, rel=1e-2)
    assert after.kept == before.kept


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "gpus=1.*more gpus"),
        ({"gpus": 2, "fuse": True}, "fuse=True"),
        ({"gpus": 2, "compile": True}, "compile=True"),
        ({"gpus": 2, "precision": "fp16", "ema": 0.9}, "ema=0.9, precision='fp16'.*bf16"),
    ],
)
def test_what_cannot_be_had_with_cut_weights_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        Recipe(network="lenet", dataset=".", shard=True, **changes)
