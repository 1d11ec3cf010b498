"""The compiler: a captured graph becomes a plan. ``compile_graph`` runs the list of ``passes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tessella.artifacts.build import Input
from tessella.artifacts.outline import UNTUNED, Candidate, Manifest
from tessella.artifacts.plan import Plan
from tessella.artifacts.program import Bucket, Program
from tessella.compiler import calibration as calibrating
from tessella.compiler import precision as precision_of
from tessella.compiler import slow_roundings, verify
from tessella.compiler.absent import compile_kernels
from tessella.compiler.buckets import Check, built, imports, outwards
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.choices.variants import fastest, with_siblings, with_sums
from tessella.compiler.fall_back import fallen_back
from tessella.compiler.passes import Request, multiplies_tf32, narrows, run, steps
from tessella.compiler.settings import About, Measuring
from tessella.compiler.stopping import stopping
from tessella.compiler.verify import Expected
from tessella.core.architectures import is_gpu
from tessella.core.device import described, fingerprint, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.errors import CompileError, UsageError
from tessella.core.events import Emit, phase, silent, warning
from tessella.core.spec import DimRange, TensorSpec
from tessella.core.task import TaskRecord
from tessella.core.version import VERSION
from tessella.device.ahead_of_time import Collected, kernel_cache, using_kernels
from tessella.device.machine import aimed_at
from tessella.execution.host_memory import keep_freed_memory
from tessella.graph.graph import Dim, Graph, Value
from tessella.graph.sample import in_its_size, one_sample
from tessella.graph.show import text
from tessella.graph.value import fixed
from tessella.search.allowance import Allowance
from tessella.search.interruptions import cpu_use, others_cores
from tessella.search.tuning import Lock
from tessella.tasks.finished import alignment


def compile_graph(
    graph: Graph,
    *,
    target: str,
    batch: DimRange,
    precision: str = "fp32",
    precisions: Mapping[str, str] | None = None,
    calibration: Calibration | None = None,
    input: Input = "float32",
    samples: Mapping[str, torch.Tensor] | None = None,
    about: About,
    measuring: Measuring = Measuring(),
    emit: Emit = silent,
) -> Plan:
    """Optimize a network for a device and put it into a plan that has been checked.

    Args:
        graph: as captured; it is not changed.
        target: ``cpu``, a GPU's (``sm_90``) or ``reference``. The GPU must be here, unless nothing
            is to be measured (``measuring.untuned``): then the network is checked as it is
            interpreted on the CPU, and the plan's own self-test runs where it is first loaded.
        batch: the plan gets a program for its sizes and the powers of two between them. For a batch
            of 1, a graph without a batch axis gets one: an axis of 1 before each input and output.
        precision: ``fp32``, ``tf32``, ``bf16``, ``fp16``, ``int8`` or ``fp8``.
        precisions: another one for single operations, by the name of their result in
            ``optimized(graph)``; ``precision.layers`` lists those that may be int8 or fp8. Behind
            that of a layer ``+2:4`` may stand: its weight is pruned.
        calibration: of this graph, for int8 and fp8.
        input: ``uint8``: the plan takes images as bytes [N, H, W, C] of the network's size and
            scales them itself, as ``about.preprocess`` says. Other inputs stay as they are.
        samples: inputs by name to check the plan with, for networks that random ones do not fit.
        about: what the plan says of itself to its user.
        measuring: how kernels are measured, and what is known before.

    Raises:
        UsageError: an unknown target, precision or input, or a batch that the graph does not have.
        CompileError: no kernel fits, or the plan would not compute what the network computes.
        BuildStopped: out of time, or of memory; the next build with this cache goes on there.
    """
    require_precision(precision)
    graph = one_sample(graph, batch)
    _require_batch(graph, batch)
    request = Request(
        target=target,
        precision=precision,
        precisions=precisions or {},
        calibration=calibration,
        input=input,
        preprocess=about.preprocess,
    )
    began = cpu_use()
    network = _lowered(graph, request, batch, samples, about.task, measuring, emit)
    trials = Lock(measuring.cache, lines=measuring.lock)
    programs = _programs(network, batch, trials, measuring, emit)
    plan = Plan(
        manifest=_manifest(network, programs, batch, about, measuring),
        program=Program(
            inputs=tuple(v.name for v in network.graph.inputs),
            outputs=tuple(v.name for v in network.graph.outputs),
            buckets=programs.buckets,
        ),
        weights={v.name: t.contiguous() for v, t in programs.graph.constants.items()},
        # with 128 samples instead of three, ResNet-50's plan is 77 MB larger, and loads in 2.59 s
        # instead of 1.48
        golden=network.answers.least(batch.min).tensors(),
        tuning=programs.tuning,
        graph=text(programs.graph),
        lock=trials.used,
        compiled=programs.compiled.compiled,
    )
    if measuring.untuned:
        emit(warning(UNTUNED))
    if plan.is_noisy and measuring.lock is None:
        emit(warning(_busy(plan, others_cores(began, cpu_use()))))
    return plan


@dataclass(frozen=True, kw_only=True)
class _Network:
    """A network as kernels will compute it, before any is chosen.

    Attributes:
        graph: as it was captured, but for the kind of its input.
        rounded: optimized, with its roundings: what each program is compared with.
        lowered: what kernels are chosen for.
        answers: what the network says of some samples.
        request: with the precision that each layer got.
        snr_db: how much rounding leaves of single layers, by name.
    """

    graph: Graph
    rounded: Graph
    lowered: Graph
    answers: Expected
    request: Request
    snr_db: Mapping[str, float]

    @property
    def loosest(self) -> str:
        """The precision of the layers that are the least exact."""
        return self.request.decided.loosest


def _lowered(
    graph: Graph,
    request: Request,
    batch: DimRange,
    samples: Mapping[str, torch.Tensor] | None,
    task: TaskRecord,
    measuring: Measuring,
    emit: Emit,
) -> _Network:
    """The network after all rewrites that need no measurement, interpreted on the samples."""
    calibration = request.calibration
    graph = run(graph, request, until="input")
    judge = request.target if is_here(request.target, measuring) else "cpu"
    torch_device(judge)  # told before the work if it is not there
    emit(phase("optimize", f"{len(graph.nodes)} operations"))
    if samples is None and calibration is not None:
        samples = calibration.samples_for(graph)
    answers = verify.expected(
        graph, batch.min, batch.max, samples, target=judge, align=alignment(task)
    )
    exact = optimized(graph, emit)
    request = request.assigned(exact)
    if slow := slow_roundings.layers(exact, request, batch.opt):
        emit(phase("rounding", f"faster in {request.decided.rest}: {', '.join(slow)}"))
        request = request.assigned(exact, request.decided.without(slow))
    request, rounded, answers = fallen_back(exact, request, answers, judge, emit)
    lowered = run(rounded, request, after="lower", until="narrow")
    if narrows(request):
        answers = verify.narrowed(answers, lowered, target=judge)
    return _Network(
        graph=graph,
        rounded=rounded,
        lowered=run(lowered, request, after="narrow", until="mark"),
        answers=answers,
        request=request,
        snr_db={} if calibration is None else calibration.snr_of(exact, request.decided.kinds),
    )


@dataclass(frozen=True, kw_only=True)
class _Programs:
    """What was chosen for a network.

    Attributes:
        graph: the variant of it that was the fastest, in the fastest layout.
        buckets: a program for each batch size, the smallest first.
        tuning: every kernel that was tried for each of their steps.
        compiled: kernels for a GPU that is not here.
    """

    graph: Graph
    buckets: tuple[Bucket, ...]
    tuning: tuple[Candidate, ...]
    compiled: Collected


def _programs(
    network: _Network, batch: DimRange, trials: Lock, measuring: Measuring, emit: Emit
) -> _Programs:
    """The fastest programs that compute what the network computes, one for each batch size."""
    request, lowered = network.request, network.lowered
    target, here = request.target, is_here(request.target, measuring)
    ways = () if measuring.untuned else (with_siblings, with_sums)
    variants = [lowered, *(graph for way in ways for graph, _ in way(lowered, target))]
    tuner = _tuner(variants, request, trials, measuring)
    if not is_gpu(target):
        keep_freed_memory()  # as where the plan will run: a library's large results cost less then
    with (
        stopping(measuring.cache, tuner.allowance) as progress,
        using_kernels(kernel_cache(target)),
        aimed_at(target),
    ):
        graph, formats = fastest(variants, batch.opt, request.precision, tuner, emit)
        if not here:
            verify.check_interpreted(graph, network.answers.least(batch.min), network.loosest)
        buckets, tuning, compiled = [], [], Collected(target)
        for size in outwards(bucket_sizes(batch), batch.opt):
            progress.begin(size)
            concrete = graph.at_batch(size)
            check = (
                _run_check(concrete, network, size, tuner)
                if here
                else partial(compile_kernels, target=target, made=compiled)
            )
            bucket, candidates = built(concrete, formats, size, tuner, emit, check)
            buckets.append(bucket)
            tuning += candidates
    return _Programs(
        graph=graph,
        buckets=tuple(sorted(buckets, key=lambda bucket: bucket.batch)),
        tuning=tuple(sorted(tuning, key=lambda candidate: candidate.batch)),
        compiled=compiled,
    )


def _tuner(
    variants: Sequence[Graph], request: Request, trials: Lock, measuring: Measuring
) -> Tuner:
    target = request.target
    device = torch_device(target if is_here(target, measuring) else "cpu")
    constants = {v.name: t for graph in variants for v, t in graph.constants.items()}
    return Tuner(
        target=target,
        math="tf32" if multiplies_tf32(request) else "ieee",
        constants={name: t.to(device) for name, t in constants.items()},
        cache=trials,
        budget_s=measuring.budget_s,
        allowance=Allowance(measuring.time_limit_s),
        measures=not measuring.untuned,
    )


def _manifest(
    network: _Network, programs: _Programs, batch: DimRange, about: About, measuring: Measuring
) -> Manifest:
    """What the plan says of itself."""
    request = network.request
    here = is_here(request.target, measuring)
    machine = fingerprint(request.target) if here else described(request.target)
    return Manifest(
        fingerprint=machine,
        inputs=tuple(_spec(v, batch) for v in network.graph.inputs),
        outputs=tuple(_spec(v, batch) for v in network.graph.outputs),
        precision=request.precision,
        preprocess=about.preprocess,
        preprocess_hash=None if about.preprocess is None else about.preprocess.hash,
        labels=tuple(about.labels),
        task=about.task,
        accuracy=dict(about.accuracy),
        weights_sha256=about.weights_sha256,
        built_from=about.built_from,
        built_with={"tessella": VERSION, **machine.libraries},
        rebuild=about.rebuild,
        tolerance=network.answers.tolerance(network.loosest),
        members={},
        imports=imports(programs.buckets),
        precisions={**request.decided.fallen, **request.precisions},
        snr_db=dict(network.snr_db),
        untuned=measuring.untuned,
    )


def is_here(target: str, measuring: Measuring) -> bool:
    """Whether a build runs what it chooses: an untuned one for a GPU asks no GPU for anything."""
    return not (measuring.untuned and is_gpu(target))


def _run_check(graph: Graph, network: _Network, batch: int, tuner: Tuner) -> Check:
    """A check that runs a bucket and compares it with the network."""
    answers = network.answers.at(batch)

    def check(choices: Sequence[Choice], bucket: Bucket) -> None:
        verify.check(choices, bucket, graph, network.rounded, answers, tuner, network.loosest)

    return check


def _busy(plan: Plan, cores: float) -> str:
    """What a busy machine did to a plan's times, for people."""
    return (
        f"the machine was busy: {plan.noisy_share:.0%} of the steps' time was measured while other "
        f"work disturbed it, and other processes kept {cores:.1f} cores busy on average; what was "
        "chosen may not be the fastest, and the plan says so"
    )


def optimized(graph: Graph, emit: Emit = silent) -> Graph:
    """A copy of the graph after the stage ``optimize``; see ``passes.steps``."""
    graph, request = graph.copy(), Request(target="reference")  # it suits every target
    for step, count in steps(graph, request, after="input", until="optimize"):
        emit(phase(step.name, f"{count} rewrites: {step.why}"))
    return graph


def calibrate(
    graph: Graph, batches: Sequence[Mapping[str, torch.Tensor]], **settings: Any
) -> Calibration:
    """What int8 and fp8 need to know of a captured graph; see ``calibration.calibrate``."""
    return calibrating.calibrate(optimized(graph), in_its_size(graph, batches), **settings)


def layers(graph: Graph) -> tuple[str, ...]:
    """The layers of a captured graph that may be int8 or fp8, as ``precisions`` names them."""
    return precision_of.layers(optimized(graph))


def bucket_sizes(batch: DimRange) -> list[int]:
    """The smallest, the usual and the largest batch, and the powers of two between."""
    powers = {1 << i for i in range(batch.max.bit_length()) if batch.min <= 1 << i <= batch.max}
    return sorted(powers | {batch.min, batch.opt, batch.max})


def require_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise UsageError("unknown precision", seen=precision, fix=f"use {', '.join(PRECISIONS)}")


def _require_batch(graph: Graph, batch: DimRange) -> None:
    """Axis 0 of every input and output is the batch, free or exactly the asked size."""
    if not graph.inputs:
        raise CompileError(
            "the network has no inputs: what it answers is known without running it",
            seen=", ".join(map(str, graph.outputs)),
            fix="leave it out, or let it take what its answer depends on",
        )
    for value in (*graph.inputs, *graph.outputs):
        first = value.shape[0] if value.shape else None
        if first == Dim() or (first == batch.min == batch.max):
            continue
        if value in graph.inputs:
            raise UsageError(
                "the graph was captured for another batch",
                seen=f"{value}, asked: {batch}",
                fix="compile it for the batch it has, or export it with a batch axis of any size",
            )
        raise CompileError(
            "an output's first axis is not the batch, so answers cannot be split by sample",
            seen=value,
            fix="return one row a sample",
        )


def _spec(value: Value, batch: DimRange) -> TensorSpec:
    first = batch if isinstance(value.shape[0], Dim) else fixed(value.shape[0])
    return TensorSpec(
        name=value.name, dtype=value.dtype, shape=(first, *map(fixed, value.shape[1:]))
    )
