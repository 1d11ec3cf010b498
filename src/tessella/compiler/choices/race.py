"""Two programs for one network: which is faster as a whole, with the strides that it really has.

The sum of steps that were measured one by one does not know what a view costs the step that reads
it: those ran on dense samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.execution import bound
from tessella.core.device import fingerprint, torch_device
from tessella.core.record import digest
from tessella.device.cuda_graphs import GRAPH_LOCK
from tessella.device.float32_math import float32_math
from tessella.device.streams import capturing
from tessella.graph.graph import Graph, Value
from tessella.search.timing import latency
from tessella.search.tuning import Trial

Programs = Sequence[tuple[Graph, Sequence[Choice]]]

SECONDS = 50.0  # of measuring, for each second that one step may take: a program has many steps
VERSION = 4  # of the timings; raised when what is measured changes
WARM_UP_RUNS = 2  # cuDNN and cuBLAS make their handles and workspaces before a capture


def times_us(programs: Programs, tuner: Tuner, *, seconds: float | None = None) -> list[float]:
    """The time of each program (a graph with concrete shapes and its choices), interleaved.

    What was measured before, for the same steps with the same kernels, is believed.

    Args:
        seconds: how long to measure; ``SECONDS`` for each of the tuner's budget if None.
    """
    names = [f"program.{i}" for i in range(len(programs))]
    device = fingerprint(tuner.target).hash
    key = digest(
        [[(c.problem.key, c.kernel, c.config, c.slices) for c in made] for _, made in programs]
    )
    known = [tuner.cache.get(device, key, name, VERSION) for name in names]
    if all(known):
        return [trial.time_us or 0.0 for trial in known if trial]
    tuner.allowance.spend()
    with torch.inference_mode(), float32_math(tuner.math):
        timings = latency(
            {n: _run(*program, tuner) for n, program in zip(names, programs, strict=True)},
            device=torch_device(tuner.target),
            seconds=SECONDS * tuner.budget_s if seconds is None else seconds,
        )
    for name in names:
        timing = timings[name]
        trial = Trial(kernel=name, time_us=timing.time_us, spread_us=timing.spread_us)
        tuner.cache.put(device, key, VERSION, trial)
    return [timings[name].time_us for name in names]


def _run(graph: Graph, choices: Sequence[Choice], tuner: Tuner) -> Callable[[], None]:
    """All steps; what nothing reads any more is let go. On a GPU a graph, as in a plan."""
    device = torch_device(tuner.target)
    slots = {value: i for i, value in enumerate(graph.values())}
    live: list[torch.Tensor | None] = [None] * len(slots)
    for value in graph.inputs:
        live[slots[value]] = sample(value, device)
    last = {v: i for i, c in enumerate(choices) for v in (*c.node.inputs, *c.node.outputs)}
    keep = {None, *graph.inputs, *graph.outputs}
    steps = []
    for index, step in enumerate(bound(choices, tuner)):
        reads = [slots[v] for v in step.reads]
        writes = [slots[v] for v in step.node.outputs]
        ends = {*step.node.inputs, *step.node.outputs} - keep
        drops = [slots[v] for v in ends if v and last[v] == index]
        steps.append((step.run, reads, writes, drops))

    def run() -> None:
        for call, reads, writes, drops in steps:
            for slot, tensor in zip(writes, call(*[live[i] for i in reads]), strict=True):
                live[slot] = tensor
            for slot in drops:
                live[slot] = None

    return run if device.type == "cpu" else _captured(run)


def sample(value: Value, device: torch.device) -> torch.Tensor:
    """An input of concrete shape that is no easier than a real one: a GPU is faster on zeros, which
    draw less power. Whole numbers other than bytes are 0: they may be places in a table.
    """
    shape, dtype = tuple(int(d) for d in value.shape), getattr(torch, value.dtype)
    generator = torch.Generator(device).manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """A run as one CUDA graph."""
    for _ in range(WARM_UP_RUNS):
        run()
    with capturing() as graph:
        run()
    return partial(_replay, graph, run)


def _replay(graph: torch.cuda.CUDAGraph, kept: Callable[[], None]) -> None:
    """Replay; ``kept`` is what was captured: a graph holds none of the weights and buffers that it
    reads and writes, and without it they were freed (ResNet-50: "illegal memory access")."""
    with GRAPH_LOCK:
        graph.replay()
