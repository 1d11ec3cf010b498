"""Two programs for one network: which is faster as a whole, with the strides that it really has.

The sum of steps that were measured one by one does not know what a view costs the step that reads
it: those ran on dense samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tessella.artifacts.program import Bucket
from tessella.compiler.choices import plan_memory
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.execution import bound
from tessella.core.device import fingerprint, torch_device
from tessella.core.record import digest
from tessella.device.float32_math import float32_math
from tessella.execution.arena import Arena
from tessella.execution.capture import Captured
from tessella.graph.graph import Graph, Value
from tessella.graph.value import shape_at
from tessella.search.timing import Timing, latency
from tessella.search.tuning import Trial

Programs = Sequence[tuple[Graph, Sequence[Choice]]]

SECONDS = 50.0  # of measuring, for each second that one step may take: a program has many steps
# Of the timings. Programs once ran without an arena: those times may still be believed, as all that
# are compared come from one race.
VERSION = 4


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
    seconds = SECONDS * tuner.budget_s if seconds is None else seconds
    timings = measured(programs, tuner, seconds)
    for name, timing in zip(names, timings, strict=True):
        tuner.cache.put(device, key, VERSION, Trial(kernel=name, **vars(timing)))
    return [timing.time_us for timing in timings]


def measured(programs: Programs, tuner: Tuner, seconds: float) -> list[Timing]:
    """``times_us`` of programs of which nothing is known, and of which nothing is remembered."""
    tuner.allowance.spend()
    device = torch_device(tuner.target)
    # any batch: only a plan's reader asks for it
    buckets = [plan_memory.apply(graph, choices, 1) for graph, choices in programs]
    arena = Arena(max(bucket.arena_bytes for bucket in buckets), device)  # one runs at a time
    with torch.inference_mode(), float32_math(tuner.math):
        runs = {
            str(i): _run(graph, bucket, tuner, arena)
            for i, ((graph, _), bucket) in enumerate(zip(programs, buckets, strict=True))
        }
        timings = latency(runs, device=device, seconds=seconds)
    return [timings[name] for name in runs]


def _run(graph: Graph, bucket: Bucket, tuner: Tuner, arena: Arena) -> Callable[[], object]:
    """The program as a plan will have it: in an arena, and on a GPU as a CUDA graph."""
    device = torch_device(tuner.target)
    run = partial(bound(graph, bucket, tuner, arena), [sample(v, device) for v in graph.inputs])
    return run if device.type == "cpu" else Captured(run).replay


def sample(value: Value, device: torch.device) -> torch.Tensor:
    """An input of concrete shape that is no easier than a real one: a GPU is faster on zeros, which
    draw less power. Whole numbers other than bytes are 0: they may be places in a table.
    """
    shape, dtype = shape_at(value.shape, 1), getattr(torch, value.dtype)
    generator = torch.Generator(device).manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    if dtype == torch.uint8:
        return torch.randint(0, 256, shape, dtype=dtype, generator=generator, device=device)
    return torch.zeros(shape, dtype=dtype, device=device)
