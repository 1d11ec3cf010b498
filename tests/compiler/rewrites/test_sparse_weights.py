"""2:4 weights in the compiler: told, offered to their kernels, pruned where that is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from tessella import compiler, runtime
from tessella.artifacts.plan import Plan, to_bytes
from tessella.compiler.pipeline import optimized
from tessella.compiler.rewrites import mark_sparse_weights
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.kernels.sparse.two_four import TWO_FOUR, is_two_four, prune_two_four
from tests.support.kernels import sparse_row

BATCH = DimRange(min=4, opt=4, max=4)
ABOUT = compiler.About(built_from="net", rebuild="tessella compile net")


class Net(nn.Module):
    """Six layers with weights; ``first`` is called twice. The weights of ``narrow``, which a norm
    scales, and of ``sparse`` are 2:4, and those of ``wide`` and ``grouped``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.grouped, self.norm = nn.Conv2d(16, 16, 1, groups=2), nn.BatchNorm2d(16)
        self.first, self.sparse = nn.Linear(16, 16), nn.Linear(16, 8)
        with torch.no_grad():
            for layer in (self.wide, self.narrow, self.grouped, self.sparse):
                layer.weight.copy_(prune_two_four(layer.weight))
            self.norm.running_mean.normal_()
            self.norm.running_var.uniform_(0.5, 2.0)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.narrow(torch.relu(self.wide(x))))
        return torch.relu(self.grouped(x)).mean((2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.features(x)
        return self.sparse(torch.relu(self.first(torch.relu(self.first(x)))))


def graph() -> Graph:
    spec = TensorSpec(name="x", dtype="float32", shape=(BATCH, 8, 4, 4))
    return capture(Net().eval(), (spec,), outputs=("y",))


def built(**settings: object) -> Plan:
    measuring = compiler.Measuring(budget_s=0.0, lock=settings.pop("lock", None))
    return compiler.compile_graph(
        graph(), target="cpu", batch=BATCH, about=ABOUT, measuring=measuring, **settings
    )


def names(exact: Graph) -> dict[str, list[str]]:
    """By module, its layers' names in the optimized graph."""
    found: dict[str, list[str]] = {}
    for node in exact.nodes:
        found.setdefault(node.layer, []).append(node.outputs[0].name)
    return found


def test_what_a_matrix_product_carries_out_is_marked() -> None:
    exact = optimized(graph())
    assert mark_sparse_weights.apply(exact) == 2
    marked = {n.layer for n in exact.nodes if n.attrs.get("sparsity") == TWO_FOUR}
    assert marked == {"narrow", "sparse"}


def test_the_pass_is_where_kernels_want_to_know() -> None:
    def passes(target: str) -> list[str]:
        return [r.name for r in compiler.explain(graph(), target=target)]

    assert "mark_sparse_weights" in passes("sm_90")
    assert "mark_sparse_weights" not in passes("cpu") + passes("reference")
    with sparse_row.registered():
        assert "mark_sparse_weights" in passes("cpu")
    (plan,) = [r for r in compiler.explain(graph(), target="sm_90") if "sparse" in r.name]
    assert plan.rewrites == 2
    assert "sparsity=2:4" in plan.diff


def test_a_kernel_for_sparse_layers_competes_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = catalog.candidates

    def alone(op: str, target: str) -> tuple[catalog.Kernel, ...]:
        """It wins wherever it fits: the reference runs what nothing else does."""
        rows = candidates(op, target)
        return tuple(r for r in rows if op != "linear" or r.id in (sparse_row.ID, "reference"))

    monkeypatch.setattr(catalog, "candidates", alone)
    with sparse_row.registered() as kernel:
        plan = built()
        linears = [s for b in plan.program.buckets for s in b.steps if s.op == "linear"]
        assert [s.kernel for s in linears] == ["reference", "reference", kernel]
        assert [s.attrs.get("sparsity") for s in linears] == [None, None, TWO_FOUR]
        refused = {c.refused for c in plan.tuning if c.kernel == kernel}
        assert refused == {None, "the weight is not 2:4 sparse"}
        x = torch.randn(4, 8, 4, 4, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            right = Net().eval()(x)
        made = runtime.load(plan)(x=x)["y"]
        torch.testing.assert_close(torch.as_tensor(made), right, rtol=1e-4, atol=1e-4)
        weights = {**plan.weights, linears[2].inputs[1]: torch.ones(8, 16)}
        with pytest.raises(ArtifactError, match="not 2:4 sparse"):
            runtime.load(replace(plan, weights=weights))


def test_a_dense_target_changes_nothing() -> None:
    plan = built()
    assert not any("sparsity" in s.attrs for b in plan.program.buckets for s in b.steps)


def test_a_layer_is_pruned_where_its_precision_says_so() -> None:
    exact = optimized(graph())
    first, second = names(exact)["first"]
    plan = built(precisions={first: "fp32+2:4"})
    assert plan.manifest.precisions == {first: "fp32+2:4"}
    net = Net().eval()
    pruned = prune_two_four(net.first.weight)
    kept = [w for w in plan.weights.values() if w.shape == (16, 16)]
    assert any(torch.equal(w, pruned) for w in kept)
    assert any(torch.equal(w, net.first.weight) for w in kept)  # the other reader's
    x = torch.randn(4, 8, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = torch.relu(nn.functional.linear(net.features(x), pruned, net.first.bias))
        right = net.sparse(torch.relu(net.first(y)))
    made = runtime.load(plan)(x=x)["y"]
    torch.testing.assert_close(torch.as_tensor(made), right, rtol=1e-4, atol=1e-5)
    again = built(precisions={first: "fp32+2:4"}, lock=plan.lock)
    assert to_bytes(again) == to_bytes(plan)
    both = built(precisions={first: "bf16+2:4", second: "bf16+2:4"})
    (weight,) = [w for w in both.weights.values() if w.shape == (16, 16)]
    assert weight.dtype == torch.bfloat16
    assert is_two_four(weight)


@pytest.mark.parametrize("layer", ["grouped", "nobody"])
def test_what_cannot_be_sparse_is_refused(layer: str) -> None:
    (name,) = names(optimized(graph())).get(layer, ["nobody"])
    with pytest.raises(UsageError):
        built(precisions={name: "fp32+2:4"})
