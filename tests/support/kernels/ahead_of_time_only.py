"""Compiling kernels for a plan and launching them from it, in a process without interpreter or GPU.

``python -m tests.support.kernels.ahead_of_time_only OUT`` writes ``OUT``: the kernels, what a
driver that only takes notes was asked to launch when nothing could be compiled any more, and the
keys of launches that differ in one thing each.
"""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from tessella.core.compiled import CompiledKernels, Tiles
from tessella.core.record import to_plain
from tessella.device import ahead_of_time, identity, launch
from tessella.device.driver import MAP_BYTES, Function
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

TARGET = "sm_90"
M, N, K = 128, 1000, 2048


class NotingDriver:
    """Launches nothing."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def function(self, name: str, cubin: bytes, device: int) -> Function:
        return Function(name, ctypes.c_void_p(), ())

    def tensor_map(
        self, address: int, tiles: Tiles, shape: list[int], strides: list[int], **_: Any
    ) -> Any:
        assert len(tiles.box) == len(shape) == len(strides)
        return (ctypes.c_char * MAP_BYTES)()

    def launch(
        self,
        function: Function,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        parameters: list[Any],
        stream: int,
        **options: Any,
    ) -> None:
        self.launches.append(
            {
                "name": function.name,
                "grid": grid,
                "block": block,
                "sizes": [ctypes.sizeof(p) for p in parameters],
                "numbers": [p.value for p in parameters if not isinstance(p, ctypes.Array)],
                **options,
            }
        )


def products() -> None:
    """A linear layer by Gluon with tensor maps (in two launches), and by plain Triton."""
    weight, bias = torch.zeros(N, K, dtype=torch.float16), torch.zeros(N, dtype=torch.float16)
    metas = [TensorMeta(shape=s, dtype="float16") for s in ((M, K), (N, K), (N,), (M, N))]
    problem = Problem(
        op="linear", inputs=tuple(metas[:3]), outputs=(metas[3],), constant=(1, 2), attrs={}
    )
    for name in ("linear.wgmma.sm90", "linear.tiled"):
        row = catalog.kernel(name)
        config = row.configs(problem)[0]
        call = row.load().bind(problem, {1: weight, 2: bias}, **config)
        buffers = {"out": torch.zeros(M, N, dtype=torch.float16)} if row.writes_out else {}
        if scratch := row.workspace_bytes(problem, config):
            buffers["workspace"] = torch.zeros(scratch, dtype=torch.uint8)
        call(torch.zeros(M, K, dtype=torch.float16), **buffers)


@triton.jit
def scaled(x, out, n, pitch, scale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if HALF is not None:
        scale = scale * HALF
    tl.store(out + i * pitch, tl.load(x + i, i < n) * scale, i < n)


def variations() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Launches of ``scaled`` that differ in one thing each from the first."""
    x, out = torch.zeros(1024), torch.zeros(1024)
    same = {"HALF": None, "BLOCK": 128, "num_warps": 4}
    yield "first", (x, out, 1024, 1, 0.5), same
    yield "other numbers of the kind", (out, x, 2048, 1, 1.5), same
    yield "unaligned", (x[1:], out, 1024, 1, 0.5), same
    yield "no multiple of 16", (x, out, 1023, 1, 0.5), same
    yield "not one", (x, out, 1024, 3, 0.5), same
    yield "large", (x, out, 2**40, 1, 0.5), same
    yield "element type", (x.half(), out, 1024, 1, 0.5), same
    yield "another constant", (x, out, 1024, 1, 0.5), {**same, "HALF": 0.5}
    yield "one is not true", (x, out, 1024, 1, 0.5), {**same, "HALF": True}
    yield "one as a float", (x, out, 1024, 1, 0.5), {**same, "HALF": 1.0}
    yield "one", (x, out, 1024, 1, 0.5), {**same, "HALF": 1}
    yield "block", (x, out, 1024, 1, 0.5), {**same, "BLOCK": 256}
    yield "warps", (x, out, 1024, 1, 0.5), {**same, "num_warps": 8}
    yield "integer for a number", (x, out, 1024, 1, 2), same


def keys() -> dict[str, tuple[str | None, str]]:
    """By variation: our key, and what Triton says of what it compiled."""
    found = {}
    for name, args, named in variations():
        with launch.compiling(TARGET) as launches:
            launch.launch(scaled, (8,), *args, **named)
        options = {**named, "enable_fp_fusion": True}
        key = identity.key(scaled, args, options, TARGET)
        found[name] = key, launches[0].compiled.hash
    return found


SOURCE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
FACTOR = tl.constexpr({factor})
@triton.jit
def helper(x):
    return x * FACTOR + {more}
@triton.jit
def kernel(x, n):
    tl.store(x + tl.arange(0, 128), helper(n))
"""


def sources(folder: Path) -> dict[str, str]:
    """Hashes of one kernel whose helper, or whose constant, is another."""
    cases = {"first": (2, 0), "again": (2, 0), "constant": (3, 0), "helper": (2, 1)}
    found = {}
    for name, (factor, more) in cases.items():
        path = folder / name / "device.py"
        path.parent.mkdir()
        path.write_text(SOURCE.format(factor=factor, more=more))
        spec = importlib.util.spec_from_file_location("device", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = identity.source(module.kernel)
    return found


def forbid_compiling() -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something is compiled")

    triton.compile = triton.compiler.compile = triton.compiler.compiler.compile = refuse
    triton.runtime.jit.JITFunction.run = refuse


def in_a_kernel_cache() -> tuple[CompiledKernels, list[dict[str, Any]]]:
    """What a kernel cache collects while products run twice, and what the driver is asked for."""
    driver = NotingDriver()
    store = ahead_of_time.KernelCache(TARGET, driver)
    active, run = triton.runtime.driver._active, triton.runtime.jit.JITFunction.run
    triton.runtime.driver.set_active(launch._AbsentGpu(GPUTarget("cuda", 90, 32)))
    with ahead_of_time.using_kernels(store), ahead_of_time.collecting(TARGET) as made:
        products()
        triton.runtime.jit.JITFunction.run = None  # nothing is asked of Triton any more
        products()
    triton.runtime.driver._active, triton.runtime.jit.JITFunction.run = active, run
    return made.compiled, driver.launches


def main(out: Path) -> None:
    with launch.compiling(TARGET), ahead_of_time.collecting(TARGET) as made:
        products()
    kernel_cache, by_kernel_cache = in_a_kernel_cache()
    found = {"keys": keys(), "sources": sources(out.parent), "left_out": made.left_out}
    forbid_compiling()
    compiled, driver = made.compiled, NotingDriver()
    store = ahead_of_time.PlanKernels(compiled, TARGET, driver)
    with ahead_of_time.using_kernels(store), launch.watching() as launches:
        products()
    found["in a kernel cache"] = by_kernel_cache
    found["kernel cache"] = kernel_cache == compiled
    found["launches"], found["missed"] = driver.launches, sorted(store.missed)
    found["watched"] = [one.resources().kernel for one in launches]
    empty = ahead_of_time.PlanKernels(CompiledKernels(), TARGET, driver)
    with ahead_of_time.using_kernels(empty):
        try:
            products()
        except AssertionError as error:
            found["without"] = [str(error), *empty.missed]
    cubins = {h: base64.b64encode(c).decode() for h, c in compiled.cubins.items()}
    found["kernels"], found["cubins"] = to_plain(compiled.kernels), cubins
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
