"""A torch for CPUs may come without Triton: nothing that a CPU needs may import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from torch import nn
import tessella
from tessella import runtime
from tessella.core.spec import TensorSpec
from tests.support.networks import build

torch.manual_seed(0)
module = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Sigmoid(),
    nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 4), nn.LayerNorm(4), nn.Softmax(1),
).eval()
x = torch.randn(2, 3, 8, 8)
image = TensorSpec(name="image", dtype="float32", shape=(2, 3, 8, 8))
for precision, atol in (("fp32", 1e-5), ("bf16", 2e-2)):
    engine = runtime.load(build(module, image, precision=precision))
    (made,) = engine(x).values()
    torch.testing.assert_close(made, module(x), rtol=0, atol=atol, msg=lambda m: precision + m)
"""


def test_a_cpu_builds_and_runs_a_plan() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
