"""A plan that carries its kernels: another process loads it where nothing can be compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tessella import compiler, graph, runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.core.errors import CorruptArtifact
from tessella.core.spec import DimRange, TensorSpec
from tessella.kernels import catalog
from tessella.search import find as search

ROOT = Path(__file__).parents[2]
BATCH = DimRange(min=1, opt=8, max=8)
SPEC = TensorSpec(name="image", dtype="float32", shape=(BATCH, 64, 14, 14))
X = (5, 64, 14, 14)
LIMIT_S = 1.5  # after import torch, the CUDA context apart

LOAD = """
import sys, time
import torch
torch.zeros(1, device="cuda")
start = time.perf_counter()
from tessella import runtime
import triton
def refuse(*_, **__): raise AssertionError("something is compiled")
triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = refuse
triton.runtime.jit.JITFunction.run = refuse
engine = runtime.load(sys.argv[1])
torch.cuda.synchronize()
print(time.perf_counter() - start)
x = torch.load(sys.argv[2])
torch.save(engine(x), sys.argv[3])
"""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 128, 1)
        self.fc = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu()
        return self.fc((self.b(x) + x).relu().mean((2, 3)))


def build(lock: str | None = None) -> Plan:
    """Convolutions and products by our own kernels: the libraries' are left out."""
    rows = catalog.candidates
    libraries = {"cudnn", "cublaslt"}

    def ours(op: str, target: str) -> tuple[catalog.Kernel, ...]:
        found = [row for row in rows(op, target) if row.source not in libraries]
        own = [row for row in found if row.source == "tessella" and row.id.endswith(".sm90")]
        return tuple(own or found)

    torch.manual_seed(0)
    captured = graph.capture(Small().eval(), (SPEC,), outputs=("scores",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "candidates", ours)
        built = compiler.compile_graph(
            captured, target="sm_90", batch=BATCH, precision="fp16",
            about=compiler.About(built_from="a test", rebuild="tessella compile a-test"),
            measuring=compiler.Measuring(lock=lock),
        )  # fmt: skip
    return runtime.add_kernels(built)[0]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build()


def test_another_process_loads_it_without_a_compiler(plan: Plan, tmp_path: Path) -> None:
    assert plan.compiled.kernels
    x = torch.randn(X, generator=torch.Generator().manual_seed(0))
    torch.save(x, tmp_path / "x.pt")
    files = [plan.save(tmp_path / "small.plan"), tmp_path / "x.pt", tmp_path / "y.pt"]
    empty = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "empty")}
    environment = {**empty, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, files)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < LIMIT_S
    compiled_here = runtime.load(plan, compiled=False)(x)
    made = torch.load(tmp_path / "y.pt")
    assert made.keys() == compiled_here.keys()
    for name, right in compiled_here.items():
        assert torch.equal(made[name], right)


def test_collecting_twice_gives_the_same_bytes(plan: Plan) -> None:
    again, left_out = runtime.add_kernels(plan)
    assert left_out == {}
    assert to_bytes(again) == to_bytes(plan)


def test_the_lock_gives_the_same_bytes(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code included."""
    monkeypatch.setattr(search.Search, "_measured", None)
    assert to_bytes(build(lock=plan.lock)) == to_bytes(plan)


def test_a_driver_says_no_and_the_process_goes_on(plan: Plan) -> None:
    kernel = next(k for k in plan.compiled.kernels if k.parameters)
    others = tuple(k for k in plan.compiled.kernels if k != kernel)
    broken = {
        "fewer parameters": replace(kernel, parameters=kernel.parameters[:-1]),
        "no parameters": replace(kernel, parameters=()),
        "too many threads": replace(kernel, threads=1024, shared_bytes=200_000),
    }
    for lie in broken.values():
        kernels = tuple(sorted((*others, lie), key=lambda k: k.key))
        lying = replace(plan, compiled=replace(plan.compiled, kernels=kernels))
        with pytest.raises(CorruptArtifact, match="cannot run here"):
            runtime.load(from_bytes(to_bytes(lying)))
    runtime.load(plan)(torch.zeros(X))


def test_kernels_of_another_version_are_compiled_with_a_warning(plan: Plan) -> None:
    kernels = tuple(replace(k, key=k.key[::-1]) for k in plan.compiled.kernels)
    kernels = tuple(sorted(kernels, key=lambda k: k.key))
    other = replace(plan, compiled=replace(plan.compiled, kernels=kernels))
    with pytest.warns(UserWarning, match="compiled here"):
        engine = runtime.load(other)
    x = torch.randn(X)
    for name, right in runtime.load(plan)(x).items():
        assert torch.equal(engine(x)[name], right)
