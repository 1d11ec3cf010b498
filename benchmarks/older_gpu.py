"""Kernels for an older GPU on the newer one that is here: ``as_if`` and ``python -m
benchmarks.older_gpu sm_80 benchmarks.engine --networks resnet50``.

A target decides which kernels may run, which configurations they have and what Triton writes: for
``sm_80`` products by ``mma.sync`` and copies by ``cp.async``, in at most 163 KB of shared memory.
All of that is as on the older GPU. The one step that is not is the last, from PTX to machine code:
ptxas writes it for the GPU that is here, as its driver would. So answers are those of the older
GPU's code; times are of this chip by the older one's instructions.

``sm_120`` multiplies by ``mma.sync``, too. What else its code has that Hopper has not, such as sums
of pairs, is spelled out before the last step. Some kernels were assembled so; none has run.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import os
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from tessella.core import cubin, device
from tessella.core.architectures import ARCHITECTURES, capability
from tessella.device import launch, machine
from tessella.device.cuda import CudaKernel
from tessella.search import compile_ahead, find

OWN = ("tessella", "user")
_launching: ContextVar[bool] = ContextVar("launching", default=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--own", action="store_true", help="libraries only where ours do not fit")
    parser.add_argument("module", help="a benchmark, followed by its arguments")
    args, rest = parser.parse_known_args()
    as_if(args.target)
    sys.argv = [args.module, *rest]
    with only_own() if args.own else nullcontext():
        runpy.run_module(args.module, run_name="__main__", alter_sys=True)


def as_if(target: str, here: int | None = None) -> None:
    """From now on this process, and those that it starts, build for ``target`` and run it here.

    Args:
        here: this machine's GPU as a capability in one number, where a process does not see it.
    """
    here = here or capability(str(device.gpu_target()))
    for module in (device, machine):
        module.is_own = lambda asked, *_: asked == target  # type: ignore[attr-defined]
    device.target_of = lambda *_: target  # type: ignore[attr-defined]
    machine._target_of.cache_clear()
    _accept_code(capability(target), here)
    _compile_cuda(target, here)
    _compile(target, here)
    _in_new_processes(target, here)
    compile_ahead._running.clear()  # the compiling process knows nothing of it


@contextmanager
def only_own() -> Iterator[None]:
    """Inside, a search takes libraries only where no kernel of ours takes the problem."""
    everyone = find._admitted

    @functools.wraps(everyone)
    def admitted(problem: Any, target: str, options: Any) -> list[Any]:
        rows = everyone(problem, target, options)
        ours = [r for r in rows if r.source in OWN and find._refusal(r, problem, options) is None]
        return ours or rows

    find._admitted = admitted
    try:
        yield
    finally:
        find._admitted = everyone


def _accept_code(target: int, here: int) -> None:
    """Machine code of the target's kernels is that of the GPU here."""
    wrong = cubin.wrong
    cubin.wrong = lambda code, name, asked: wrong(  # type: ignore[assignment]
        code, name, here if asked == target else asked
    )


def _compile_cuda(target: str, here: int) -> None:
    """Let CUDA C++ that is only compiled be so for the GPU here, where it will run."""
    start = CudaKernel.launch

    @functools.wraps(start)
    def launched(self: Any, *args: Any, target: str | None = None, **given: Any) -> Any:
        return start(self, *args, target=f"sm_{here}" if target == older else target, **given)

    older = target
    CudaKernel.launch = launched  # type: ignore[method-assign]


def _compile(target: str, here: int) -> None:
    """Let Triton compile our kernels, and no others, for the target."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction

    assemble, current = CUDABackend.make_cubin, CudaDriver.get_current_target
    limit = ARCHITECTURES[target].shared_bytes_of_block()

    def make_cubin(self: Any, src: Any, metadata: Any, opt: Any, asked: int) -> Any:
        if asked != capability(target):
            return assemble(self, src, metadata, opt, asked)
        if metadata["shared"] > limit:
            raise OutOfResources(metadata["shared"], limit, "shared memory")
        # a cubin keeps the name that its PTX has; one of both would be refused where it is loaded
        own = "a" if here >= 90 else ""
        if asked > here:
            src = spelled_out(src)
        named = re.sub(rf"\.target {target}a?\b", f".target sm_{here}{own}", src)
        return assemble(CUDABackend(GPUTarget("cuda", here, 32)), named, metadata, opt, here)

    def get_current_target(self: Any) -> Any:
        ours = GPUTarget("cuda", capability(target), 32)
        return ours if _launching.get() else current(self)

    CUDABackend.make_cubin = make_cubin
    CudaDriver.get_current_target = get_current_target
    launch._launch = _told(launch._launch)
    for one in gc.get_objects():
        if issubclass(type(one), JITFunction):  # isinstance would ask lazy modules
            one.device_caches.clear()  # each remembers for which target it compiles
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache"
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder, f"as-{target}"))


# of sm_100 and later: an instruction for a pair, a maximum of three, a sum of two types
_PAIR = re.compile(r"(fma|add|sub|mul)([\w.]*)\.f32x2\s+([^;]+);")
_THREE = re.compile(r"((?:max|min)[\w.]*\.f32)\s+([^,;]+), ([^,;]+), ([^,;]+), ([^,;]+);")
_MIXED = re.compile(r"(add|sub)([\w.]*)\.f32\.(b?f16)\s+([^,;]+), ([^,;]+), ([^,;]+);")
_PTX_OF_HOPPER = ".version 8.6"


def spelled_out(ptx: str) -> str:
    """The same PTX without instructions that Hopper does not have."""
    ptx = re.sub(r"\.version [\d.]+", _PTX_OF_HOPPER, ptx)
    ptx = _PAIR.sub(_of_pair, ptx)
    ptx = _THREE.sub(r"{ .reg .f32 %x; \1 %x, \3, \4; \1 \2, %x, \5; }", ptx)
    return _MIXED.sub(r"{ .reg .f32 %x; cvt.f32.\3 %x, \5; \1\2.f32 \4, %x, \6; }", ptx)


def _of_pair(found: re.Match[str]) -> str:
    name, how, operands = found.groups()
    out, *given = operands.split(", ")
    parts = [f"mov.b64 {{%x{2 * i}, %x{2 * i + 1}}}, {each};" for i, each in enumerate(given)]
    for half in range(2):
        these = ", ".join(f"%x{2 * i + half}" for i in range(len(given)))
        parts.append(f"{name}{how}.f32 %x{half}, {these};")
    return f"{{ .reg .f32 %x<6>; {' '.join(parts)} mov.b64 {out}, {{%x0, %x1}}; }}"


def _told(start: Callable[..., Any]) -> Callable[..., Any]:
    """A launch inside which Triton's driver names the target."""

    @functools.wraps(start)
    def launched(*args: Any) -> Any:
        token = _launching.set(True)
        try:
            return start(*args)
        finally:
            _launching.reset(token)

    return launched


def _in_new_processes(target: str, here: int) -> None:
    """Python processes that run a line of ours (``-c``) begin with ``as_if``, too."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Path(folder, "sitecustomize.py").write_text(
        "import sys\n"
        "if '-c' in sys.orig_argv and any('tessella' in word for word in sys.orig_argv):\n"
        f"    from {__spec__.name if __name__ == '__main__' else __name__} import as_if\n"
        f"    as_if({target!r}, {here})\n"
    )
    sys.path.insert(0, folder)  # an instance of a server is given this path
    root, before = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, root, *filter(None, [before])])


if __name__ == "__main__":
    assert torch.cuda.is_available()
    main()
