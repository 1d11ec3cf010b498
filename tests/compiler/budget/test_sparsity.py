"""Sparsity as a choice of the search: offered where it has a kernel, judged as precision is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import to_bytes
from tessella.compiler.budget import Built, Labelled, mixes, of_tensors, search
from tessella.compiler.budget.costs import uniform
from tessella.compiler.budget.mixes import Unit
from tessella.compiler.pipeline import optimized
from tessella.core.dtype import SPARSE, plain_precision
from tessella.core.spec import TensorSpec
from tessella.graph import capture
from tessella.kernels.sparse.two_four import is_two_four
from tests.support.digits import BATCH, TRAIN
from tests.support.kernels import sparse_row

PIXELS = TensorSpec(name="pixels", dtype="float32", shape=(BATCH, 64))
ABOUT = compiler.About(built_from="digits", rebuild="tessella compile digits")
PRICES = {"fp32": 100.0, "bf16": 60.0, "int8": 40.0}


class Table:
    """Sparse layers cost half; nothing is measured."""

    def layers_us(self, precision: str, units: Sequence[Unit]) -> dict[str, float]:
        self.names = [name for unit in units for name in unit.layers]
        return {
            name: self._price(precision if precision in unit.kinds else "fp32")
            for unit in units
            for name in unit.layers
        }

    def total_us(self, mix: Mapping[str, str]) -> float:
        return sum(self._price(mix.get(name, "fp32")) for name in self.names)

    def plans_us(self, built: Sequence[Built], sample: object) -> list[float]:
        return [self.total_us(one.mix) for one in built]

    def _price(self, precision: str) -> float:
        return PRICES[plain_precision(precision)] / (2 if precision.endswith(SPARSE) else 1)


@pytest.fixture(scope="module")
def mlp(digits: tuple[torch.Tensor, torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    images, labels = digits[0][:TRAIN].flatten(1), digits[1][:TRAIN]
    solver = torch.optim.AdamW(net.parameters(), 3e-3)
    for _ in range(12):
        for batch in torch.randperm(TRAIN).split(50):
            solver.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            solver.step()
    return net.eval()


@pytest.fixture(scope="module")
def data(digits: tuple[torch.Tensor, torch.Tensor]) -> Labelled:
    some = slice(TRAIN, TRAIN + 320)
    return of_tensors({"pixels": digits[0][some].flatten(1)}, digits[1][some])


def test_it_is_offered_where_a_proven_kernel_wants_it() -> None:
    assert mixes.offered("cpu", "fp32") == ("bf16", "int8")
    with sparse_row.registered(unproven=True):
        assert mixes.offered("cpu", "fp32") == ("bf16", "int8")
    with sparse_row.registered():
        assert mixes.offered("cpu", "fp32") == ("bf16", "int8", "bf16+2:4", "int8+2:4")
        assert mixes.offered("cpu", "bf16") == ("bf16", "bf16+2:4")
        assert mixes.offered("reference", "fp32") == ("bf16", "int8")


def test_a_mix_says_which_weights_are_pruned() -> None:
    exact = optimized(capture(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32),
                                            nn.ReLU(), nn.Linear(32, 8)), (PIXELS,)))  # fmt: skip
    names = [n.output.name for n in mixes.layer_nodes(exact)]
    mix = dict(zip(names, ("int8+2:4", "bf16+2:4", "bf16"), strict=True))
    precision, precisions = mixes.spelled(exact, mix, "cpu")
    assert precision == "fp32"
    assert precisions == mix
    on_gpu = dict(zip(names, ("int8+2:4", "fp16+2:4", "fp16"), strict=True))
    precision, precisions = mixes.spelled(exact, on_gpu, "sm_90")
    assert precision == "fp16"
    assert precisions == dict(zip(names[:2], ("int8+2:4", "fp16+2:4"), strict=True))


def test_what_cannot_be_sparse_goes_along_dense() -> None:
    units = [
        Unit(layers=("a", "b"), kinds=("bf16", "int8", "int8+2:4")),
        Unit(layers=("c",), kinds=("bf16", "int8")),
        Unit(layers=("d",), kinds=("bf16",)),
    ]
    assert uniform(units, "int8+2:4") == {"a": "int8+2:4", "b": "int8+2:4", "c": "int8"}
    assert uniform(units, "int8") == {"a": "int8", "b": "int8", "c": "int8"}


def test_the_budget_buys_sparsity_and_the_plan_is_made_again(
    mlp: nn.Module, data: Labelled, tmp_path: Path
) -> None:
    def run(plan):
        engine = runtime.load(plan)
        return lambda batch: engine(**batch)

    graph = capture(mlp, (PIXELS,), outputs=("scores",))
    build = {"target": "cpu", "batch": BATCH, "about": ABOUT}
    cache = tmp_path / "times.jsonl"
    with sparse_row.registered():
        front = search(
            graph, data=data, run=run, budget=3.0, costs=Table(), **build,
            measuring=compiler.Measuring(cache=cache, budget_s=0.0),
        )  # fmt: skip
        chosen = front[front.chosen]
        assert chosen.receipt.loss <= 3.0
        sparse = {name for name, p in chosen.precisions.items() if p.endswith(SPARSE)}
        assert sparse
        assert sum(n for kind, n in chosen.layers.items() if kind.endswith(SPARSE)) == len(sparse)
        marked = {
            step.outputs[0]: step.inputs[1]
            for step in chosen.plan.program.buckets[0].steps
            if step.attrs.get("sparsity")
        }
        assert len(marked) == len(sparse)
        assert all(is_two_four(chosen.plan.weights[name]) for name in marked.values())
        again = compiler.compile_graph(
            graph, precision=chosen.precision, precisions=chosen.precisions,
            calibration=front.calibration, **build,
            measuring=compiler.Measuring(lock=chosen.plan.lock, budget_s=0.0),
        )  # fmt: skip
    receipt = chosen.plan.manifest.receipt
    again = replace(again, manifest=replace(again.manifest, receipt=receipt))
    assert to_bytes(again) == to_bytes(chosen.plan)
