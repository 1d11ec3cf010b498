"""Two programs for one network: which is faster as a whole, with the strides that it really has.

The sum of steps that were measured one by one does not know what a view costs the step that reads
it: those ran on dense samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tessella.compiler.passes.choose_kernels import Choice, Tuner, constants_of
from tessella.core.device import fingerprint, torch_device
from tessella.core.record import digest
from tessella.graph.graph import Graph
from tessella.kernels import catalog
from tessella.kernels.auction import bind
from tessella.kernels.float32_math import float32_math
from tessella.kernels.timing import latency
from tessella.kernels.tuning import Trial

Programs = Sequence[tuple[Graph, Sequence[Choice]]]

SECONDS = 50.0  # of measuring, for each second that one step may take: a program has many steps
VERSION = 1  # of the timings; raised when what is measured changes


def times_us(programs: Programs, tuner: Tuner) -> list[float]:
    """The time of each program (a graph with concrete shapes and its choices), interleaved.

    What was measured before, for the same steps with the same kernels, is believed.
    """
    names = [f"program.{i}" for i in range(len(programs))]
    device = fingerprint(tuner.target).hash
    key = digest([[(c.problem.key, c.kernel, c.config) for c in made] for _, made in programs])
    known = [tuner.cache.get(device, key, name, VERSION) for name in names]
    if all(known):
        return [trial.time_us or 0.0 for trial in known if trial]
    with torch.inference_mode(), float32_math(tuner.math):
        timings = latency(
            {n: _run(*program, tuner) for n, program in zip(names, programs, strict=True)},
            device=torch_device(tuner.target),
            seconds=SECONDS * tuner.budget_s,
        )
    for name in names:
        timing = timings[name]
        trial = Trial(kernel=name, time_us=timing.time_us, spread_us=timing.spread_us)
        tuner.cache.put(device, key, VERSION, trial)
    return [timings[name].time_us for name in names]


def _run(graph: Graph, choices: Sequence[Choice], tuner: Tuner) -> Callable[[], None]:
    """All steps on zeros; what nothing reads any more is let go."""
    device = torch_device(tuner.target)
    slots = {value: i for i, value in enumerate(graph.values())}
    live: list[torch.Tensor | None] = [None] * len(slots)
    for value in graph.inputs:
        shape = tuple(int(d) for d in value.shape)
        live[slots[value]] = torch.zeros(shape, dtype=getattr(torch, value.dtype), device=device)
    last = {v: i for i, c in enumerate(choices) for v in (*c.node.inputs, *c.node.outputs)}
    keep = {None, *graph.inputs, *graph.outputs}
    steps = []
    for index, choice in enumerate(choices):
        node = choice.node
        constants = constants_of(node, choice.problem, tuner.constants)
        row = catalog.kernel(choice.kernel)
        call, buffers = bind(row, choice.problem, constants, device, choice.config)
        reads = [
            slots[v] for i, v in enumerate(node.inputs) if v is not None and i not in constants
        ]
        writes = [slots[v] for v in node.outputs]
        drops = [slots[v] for v in {*node.inputs, *node.outputs} - keep if v and last[v] == index]
        steps.append((call, buffers, reads, writes, drops))

    def run() -> None:
        for call, buffers, reads, writes, drops in steps:
            made = call(*[live[i] for i in reads], **buffers)
            made = (made,) if isinstance(made, torch.Tensor) else made
            for slot, tensor in zip(writes, made, strict=True):
                live[slot] = tensor
            for slot in drops:
                live[slot] = None

    return run
