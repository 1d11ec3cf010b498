"""A process that loads a plan has neither compiler nor graphs nor networks in it, and one that
trains not torch's compiler before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tessella as ts
from tessella.core.spec import TensorSpec

HEAVY = ("tessella.compiler", "tessella.graph", "tessella.nn", "tessella.training", "onnx", "timm")

SCRIPT = """
import sys
{load}
engine = load(sys.argv[1])
assert engine(x=__import__("numpy").ones((1, 4), "float32"))["output"].shape == (1, 3)
print(*(name for name in sys.modules if name.startswith({heavy!r})))
{more}
"""
# 1.4 s of each process that trains or shows a network, where a decorator once imported it
WORKER = "import tessella.training.worker; assert 'torch._dynamo' not in sys.modules"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = TensorSpec(name="x", dtype="float32", shape=(1, 4))
    made = ts.compile(torch.nn.Linear(4, 3), inputs=[x], batch=1, target="cpu")
    return made.save(tmp_path_factory.mktemp("plans") / "linear.plan")


@pytest.mark.parametrize(
    ("load", "more"),
    [("from tessella import load", ""), ("from tessella.runtime import load", WORKER)],
    ids=["tessella", "tessella.runtime"],
)
def test_loading_imports_neither_compiler_nor_graph(load: str, more: str, plan: Path) -> None:
    script = SCRIPT.format(load=load, heavy=HEAVY, more=more)
    command = [sys.executable, "-c", script, str(plan)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []
