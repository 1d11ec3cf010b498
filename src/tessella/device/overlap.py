"""Triton kernels that start while the one before them still runs (programmatic dependent launch).

About a microsecond of a launch then costs nothing: at batch 1, most layers take five.

A kernel lets the next one start when its own wait is over, so that at most two are on the GPU at
once. Where kernels did so before their wait, ResNet-50's plan for one image gave NaN, or was off by
0.186 of the largest value, and was no faster (267.6 µs on an H200, now 267.9). What is launched so
and does not wait for all that it reads is wrong: see ``graph_edges``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from tessella.device.machine import gpu


@triton.jit
def await_earlier(OVERLAP: tl.constexpr):
    """First in the kernel: what the ones before have written can be read after it."""
    if OVERLAP:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


def overlapping() -> dict[str, bool]:
    """Arguments of ``launch`` for a kernel with ``await_earlier``; interpreted, none waits, nor
    on a GPU that starts each kernel when the one before has ended.
    """
    if triton.knobs.runtime.interpret or "dependent_launch" not in gpu().has:
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
