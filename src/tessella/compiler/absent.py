"""Kernels for a GPU that is not here: compiled, so that the plan carries them, and never run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from tessella.artifacts.program import Bucket
from tessella.compiler.choices.choose_kernels import Choice
from tessella.compiler.verify import WrongKernel
from tessella.device.ahead_of_time import Collected
from tessella.kernels import catalog
from tessella.search.compile_ahead import Request, compile_absent


def compile_kernels(
    choices: Sequence[Choice], bucket: Bucket, *, target: str, made: Collected
) -> None:
    """Compile what the steps of a bucket launch, and add it to ``made``.

    Where there is no Triton nothing is compiled: the machine that loads the plan does it.

    Raises:
        WrongKernel: a kernel does not compile for this GPU.
    """
    if importlib.util.find_spec("triton") is None:
        return
    ours = {
        (choice.problem.key, choice.kernel): choice
        for choice in choices
        if catalog.kernel(choice.kernel).source == "tessella"
    }
    done = compile_absent([_request(choice) for choice in ours.values()], target)
    for choice, compiled in zip(ours.values(), done, strict=True):
        if compiled is None:
            raise WrongKernel(choice, f"it does not compile for {target}")
        for kernel in compiled.kernels:
            made.add(kernel, compiled.cubins[kernel.cubin])


def _request(choice: Choice) -> Request:
    return choice.problem, catalog.kernel(choice.kernel), choice.config
