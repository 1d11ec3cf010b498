"""A processor that is no x86: no code for one is offered, and plans run by torch's operators.

The processor is made up, here; on a real one of Arm nothing has been tried.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import platform
import torch
from torch import backends

platform.machine = platform.processor = lambda: "aarch64"
backends.cpu.get_cpu_capability = lambda: "DEFAULT"  # what torch says on Arm
backends.mkl.is_available = lambda: False

import tessella
from tessella import runtime
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.search.kernel_report import chip
from tests.support.networks import DimRange, graph_of, network, plan


def forbidden(*args, **kwargs):
    raise AssertionError("this is machine code for x86")


code._executable = forbidden
module, spec = network("lenet")
graph = graph_of(module, spec, DimRange(min=1, opt=2, max=2))
x = torch.randn(3, *spec.shape[1:])
with torch.no_grad():
    right = module(x)
for sources in ({"tessella", "aten", "onednn"}, {"tessella", "aten"}):
    backends.mkldnn.is_available = lambda: "onednn" in sources
    made = plan(graph)
    used = [catalog.kernel(step.kernel) for b in made.program.buckets for step in b.steps]
    assert not any(row.isa for row in used), used
    assert {row.source for row in used} <= sources, used
    assert made.manifest.fingerprint.arch == "aarch64-default"
    (answer,) = runtime.load(made)(x).values()
    torch.testing.assert_close(answer, right, rtol=0, atol=1e-5)
assert chip.processor().own_code is None
"""


def test_a_lenet_becomes_a_plan_and_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
