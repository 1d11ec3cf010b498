"""The compiler: a captured graph becomes a plan. ``PASSES`` and ``compile_graph`` are all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch

from tessella.artifacts.plan import Candidate, Manifest, Plan
from tessella.artifacts.program import Bucket, Program
from tessella.compiler import calibration as calibrating
from tessella.compiler import precision as precision_of
from tessella.compiler import verify
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices import (
    choose_kernels,
    fuse_chains,
    join_in_place,
    overwrite_residuals,
    plan_memory,
    race_close_calls,
)
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.choices.variants import fastest, with_siblings
from tessella.compiler.precision import Assignment, most_harmed
from tessella.compiler.rewrites import (
    dead_code,
    drop_no_ops,
    fold_batch_norm,
    fold_constants,
    fold_scales,
    fuse_attention,
    fuse_epilogue,
    fuse_pointwise,
    fuse_rearrangements,
    fuse_requantization,
    insert_quantization,
    lower_precision,
    lower_quantization,
    mark_non_negative,
    mark_sparse_weights,
    move_permutes,
    move_reshapes,
    pad_channels,
    prune_weights,
    share_masks,
    swap_means,
    take_pixels,
    turn_residuals,
    widen_results,
)
from tessella.compiler.rewrites.assign_layout import Formats
from tessella.compiler.settings import About, Measuring
from tessella.compiler.stopping import stopping
from tessella.compiler.verify import Expected
from tessella.core.device import fingerprint, torch_device
from tessella.core.dtype import PRECISIONS
from tessella.core.errors import CompileError, UsageError
from tessella.core.events import Emit, phase, silent
from tessella.core.preprocess import Preprocess
from tessella.core.spec import DimRange, TensorSpec
from tessella.core.version import VERSION
from tessella.graph.check import check
from tessella.graph.graph import Dim, Graph, Value
from tessella.graph.sample import in_its_size, one_sample
from tessella.graph.show import text
from tessella.kernels import catalog
from tessella.kernels.allowance import Allowance
from tessella.kernels.carried import carrying, workshop
from tessella.kernels.tuning import Lock
from tessella.kernels.user import registry


@dataclass(frozen=True)
class Pass:
    """A rewrite of the graph: ``apply`` changes it and returns how many rewrites it made."""

    apply: Callable[[Graph], int]
    why: str

    @property
    def name(self) -> str:
        function = self.apply.func if isinstance(self.apply, partial) else self.apply
        return function.__module__.rpartition(".")[2]


# In this order, each one file in compiler/rewrites/. After each change, graph.check runs.
PASSES = (
    Pass(fold_constants.apply, "what depends on constants only is computed once, here"),
    Pass(drop_no_ops.apply, "a copy or a reshape of a reshape would hide what could be fused"),
    Pass(fuse_attention.apply, "products of all queries with all keys need not be in memory"),
    Pass(share_masks.apply, "a mask that all queries share is one row of it"),
    Pass(fold_scales.apply, "a factor a channel before a sum is a change of the layer's weights"),
    Pass(turn_residuals.apply, "what is added behind a permute is added before it, by the layer"),
    Pass(move_permutes.apply, "permutes that meet cancel, and rows need not be turned for a layer"),
    Pass(fold_batch_norm.apply, "a batch norm after a convolution is a change of its weights"),
    Pass(swap_means.apply, "a mean of few channels, a product of few pixels: both are linear"),
    Pass(fuse_epilogue.apply, "bias, residual and activation while the result is in registers"),
    Pass(move_reshapes.apply, "element-wise operations meet in one shape, and are one step then"),
    Pass(dead_code.apply, "what the rewrites left over costs memory and time"),
)
# Before them, where a plan is to take images as bytes:
#   take_pixels       uint8 pixels in, scaled by the plan's first step
# Then, by what the user asked for and what the device is best at:
#   prune_weights     layers that are to be sparse keep two of each four weights
#   insert_quantization   layers that are to be int8 or fp8 round what they read
#   lower_quantization    layers between such roundings, a file's own too, work on int8 or fp8
#   pad_channels          their channels by 16, for a GPU
#   lower_precision   16-bit values, with casts at the edges of the network
#   fuse_rearrangements   reshapes, permutes and rolls that end in a copy, as one step
#   fuse_pointwise    what no layer took, element by element or along rows, as one step
#   widen_results     a layer before a cast to float32 writes float32, on a GPU
#   mark_non_negative poolings of 16-bit numbers behind a ReLU say so, on a CPU
#   mark_sparse_weights   2:4 weights say so, where the target has kernels for them
#   fuse_siblings     layers that read one value as one layer, or not: the faster wins
#   assign_layout     channels_last regions around convolutions, or none: the faster wins
# and for each batch size, on concrete shapes:
#   choose_kernels    every kernel that fits is measured, the fastest is taken
#   join_in_place     parts of concatenations are written where these want them, if faster
#   fuse_chains       two 1×1 convolutions in a row as one step, or a convolution and its pooling,
#                     or a linear and its norm, where the program is faster
#   overwrite_residuals   a sum is made where its residual lies, if nothing else needs that
#   race_close_calls  kernels within noise of each other: the faster whole program decides
#   plan_memory       lifetimes, and one arena for the live values

WRONG_KERNELS = 8  # that one batch size may turn out to have before the build is given up
Input = Literal["float32", "uint8"]  # what an image is when a plan gets it


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
        target: ``cpu``, ``sm_90`` or ``reference``.
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
    graph = _changed(graph, input_passes(input, about.preprocess))
    device = fingerprint(target)
    emit(phase("optimize", f"{len(graph.nodes)} operations"))
    if samples is None and calibration is not None:
        samples = calibration.samples_for(graph)
    wanted = verify.expected(graph, batch.min, batch.max, samples, target=target)
    exact = optimized(graph, emit)
    assignment = precision_of.assign(exact, precision, precisions or {}, target, calibration)
    assignment, rounded, wanted = _rounded(
        exact, assignment, calibration, wanted, frozenset(precisions or ()), emit
    )
    snr_db = {} if calibration is None else calibration.snr_of(exact, assignment.kinds)
    loosest = assignment.loosest
    lowered = _changed(rounded, lowering(assignment))
    if lowering(assignment):
        wanted = verify.narrowed(wanted, lowered, target=target)
    lowered = _changed(lowered, (*fusing(target), *marking(target)))
    variants = [lowered, *(fused for fused, _ in with_siblings(lowered, target))]
    constants = {v.name: t for graph in variants for v, t in graph.constants.items()}
    trials = Lock(measuring.cache, lines=measuring.lock)
    tuner = Tuner(
        target=target,
        math="tf32" if precision == "tf32" and target == "sm_90" else "ieee",
        constants={name: t.to(torch_device(target)) for name, t in constants.items()},
        cache=trials,
        budget_s=measuring.budget_s,
        allowance=Allowance(measuring.time_limit_s),
    )
    with stopping(measuring.cache, tuner.allowance) as progress, carrying(workshop(target)):
        lowered, formats = fastest(variants, batch.opt, precision, tuner, emit)
        buckets, tuning = [], []
        for size in bucket_sizes(batch):
            progress.begin(size)
            emit(phase("tune", f"batch {size}"))
            concrete = lowered.at_batch(size)
            choices = _chosen(concrete, formats, tuner, emit, size)
            for left in reversed(range(WRONG_KERNELS)):
                try:
                    verify.check(choices, concrete, rounded, wanted.at(size), tuner, loosest)
                    break
                except verify.WrongKernel as wrong:
                    if not left or wrong.choice.kernel == "reference":
                        raise
                    emit(phase("verify", f"{wrong.wrong}, {wrong.seen}: the next best is taken"))
                    tuner.refuse(wrong.choice, wrong.reason)
                    choices = _chosen(concrete, formats, tuner, emit, size)
            buckets.append(plan_memory.apply(concrete, choices, size))
            tuning += _candidates(choices, size)
    manifest = Manifest(
        fingerprint=device,
        inputs=tuple(_spec(v, batch) for v in graph.inputs),
        outputs=tuple(_spec(v, batch) for v in graph.outputs),
        precision=precision,
        preprocess=about.preprocess,
        preprocess_hash=None if about.preprocess is None else about.preprocess.hash,
        labels=tuple(about.labels),
        accuracy=dict(about.accuracy),
        built_from=about.built_from,
        built_with={"tessella": VERSION, **device.libraries},
        rebuild=about.rebuild,
        tolerance=wanted.tolerance(loosest),
        members={},
        imports=_imports(buckets),
        precisions={**assignment.fallen, **(precisions or {})},
        snr_db=snr_db,
    )
    program = Program(
        inputs=tuple(v.name for v in graph.inputs),
        outputs=tuple(v.name for v in graph.outputs),
        buckets=tuple(buckets),
    )
    return Plan(
        manifest=manifest,
        program=program,
        weights={v.name: t.contiguous() for v, t in lowered.constants.items()},
        golden=wanted.least(batch.min).tensors(),
        tuning=tuple(tuning),
        graph=text(lowered),
        lock=trials.used,
    )


def _rounded(
    exact: Graph,
    assignment: Assignment,
    calibration: Calibration | None,
    wanted: Expected,
    asked: frozenset[str],
    emit: Emit,
) -> tuple[Assignment, Graph, Expected]:
    """The graph with its roundings, and what it answers.

    Where layers in int8 or fp8 say something else than the network, those that rounding harms most
    compute like the rest instead: one, two, four … of them, but none that the user has ``asked``,
    and at most half of all: more means a calibration of other data.
    """
    fallen: list[str] = []
    most = len(assignment.kinds) // 2
    while True:
        graph = _changed(exact, rounding(exact, assignment, calibration))
        if not assignment.kinds and not assignment.pruned:
            return assignment, graph, wanted
        try:
            found = verify.rounded(
                wanted,
                graph,
                emit,
                target=assignment.target,
                alike=not assignment.pruned,
                snr_db=None if calibration is None else calibration.snr_of(exact, assignment.kinds),
            )
            return assignment, graph, found
        except verify.RoundedAway:
            harmed = [] if calibration is None else most_harmed(assignment, calibration, asked)
            fallen += harmed[: max(1, len(fallen))]
            if not harmed or len(fallen) > most:
                raise
            assignment = assignment.without(fallen)
            emit(phase("rounding", f"computed in {assignment.rest} instead: {', '.join(fallen)}"))


def _chosen(graph: Graph, formats: Formats, tuner: Tuner, emit: Emit, batch: int) -> list[Choice]:
    """A kernel for each step of a graph with concrete shapes, by the passes for a batch size."""
    choices = choose_kernels.apply(graph, formats, tuner, emit, f"batch {batch}")
    choices = join_in_place.apply(graph, choices, tuner)
    choices = fuse_chains.apply(graph, choices, tuner, emit)
    choices = overwrite_residuals.apply(graph, choices, tuner)
    return race_close_calls.apply(graph, choices, tuner, emit)


def input_passes(input: Input, record: Preprocess | None) -> tuple[Pass, ...]:
    """The passes before ``PASSES`` for a kind of input; none where images are float32.

    Raises:
        UsageError: an unknown kind, or no record that says how bytes are scaled.
    """
    if input not in get_args(Input):
        raise UsageError("unknown kind of input", seen=input, fix="use float32 or uint8")
    if input == "float32":
        return ()
    if record is None:
        raise UsageError(
            "uint8 images need a preprocessing record, which says how they are scaled",
            fix="compile from a checkpoint, or give preprocess=Preprocess(...)",
        )
    take = partial(take_pixels.apply, record=record)
    return (Pass(take, "images come as bytes, and the first step scales them"),)


def optimized(graph: Graph, emit: Emit = silent) -> Graph:
    """A copy of the graph after ``PASSES``, checked after each."""
    graph = copied(graph)
    for step, count in apply_each(graph, PASSES):
        emit(phase(step.name, f"{count} rewrites: {step.why}"))
    return graph


def apply_each(graph: Graph, steps: Sequence[Pass]) -> Iterator[tuple[Pass, int]]:
    """Change ``graph`` by one pass after another; yields each, when it is done, with its rewrites.

    ``graph.check`` runs before the first and after each.
    """
    check(graph)
    for step in steps:
        count = step.apply(graph)
        check(graph)
        yield step, count


def calibrate(
    graph: Graph, batches: Sequence[Mapping[str, torch.Tensor]], **settings: Any
) -> Calibration:
    """What int8 and fp8 need to know of a captured graph; see ``calibration.calibrate``."""
    return calibrating.calibrate(optimized(graph), in_its_size(graph, batches), **settings)


def layers(graph: Graph) -> tuple[str, ...]:
    """The layers of a captured graph that may be int8 or fp8, as ``precisions`` names them."""
    return precision_of.layers(optimized(graph))


def rounding(
    graph: Graph, assignment: Assignment, calibration: Calibration | None
) -> tuple[Pass, ...]:
    """The passes that follow ``PASSES`` where layers are to be sparse, int8 or fp8, or a file says
    so."""
    steps = pruning(assignment)
    if assignment.kinds and calibration is not None:
        insert = partial(insert_quantization.apply, kinds=assignment.kinds, calibration=calibration)
        steps.append(Pass(insert, "layers read int8 or fp8, in the scales of the calibration"))
    if assignment.kinds or any(n.op in ("quantize", "dequantize") for n in graph.nodes):
        steps.append(Pass(lower_quantization.apply, "products of int8 or fp8, rounded in place"))
        if assignment.target == "sm_90":
            steps.append(Pass(pad_channels.apply, "tensor cores take 16 channels at a time"))
    return tuple(steps)


def pruning(assignment: Assignment) -> list[Pass]:
    """The pass that makes weights sparse, where some are to be."""
    prune = partial(prune_weights.apply, layers=assignment.pruned)
    return [Pass(prune, "two of each four weights are left")] if assignment.pruned else []


def marking(target: str) -> tuple[Pass, ...]:
    """The passes after ``narrowing`` that tell kernels what they want to know on a target."""
    marks = []
    if target == "cpu":
        marks.append(Pass(mark_non_negative.apply, "16-bit numbers from zero on, as integers"))
    if any(row.sparse and target in row.targets for row in catalog.rows()):
        marks.append(
            Pass(mark_sparse_weights.apply, "2:4 weights, for kernels that skip their zeros")
        )
    return tuple(marks)


def narrowing(assignment: Assignment) -> tuple[Pass, ...]:
    """The passes that come then, the last before kernels are measured."""
    return (*lowering(assignment), *fusing(assignment.target))


def lowering(assignment: Assignment) -> tuple[Pass, ...]:
    """The passes that make values 16-bit, where some are to be."""
    if assignment.rest == "float32" and not assignment.dtypes:
        return ()
    lower = partial(lower_precision.apply, dtype=assignment.rest, layers=assignment.dtypes)
    return (
        Pass(lower, f"{assignment.rest} values: half the memory, and what tensor cores multiply"),
        Pass(dead_code.apply, "the float32 weights are not read any more"),
    )


def fusing(target: str) -> tuple[Pass, ...]:
    """The passes after ``lowering``: what is left between the layers goes into fewer steps."""
    round_ = partial(fuse_requantization.apply, target=target)
    chains = partial(fuse_pointwise.apply, target=target)
    fuse = (
        Pass(round_, "codes are made by the layer, behind its activation"),
        Pass(fuse_rearrangements.apply, "what reshapes and rolls copy moves once, and is a step"),
        Pass(chains, "a chain of small operations passes memory once"),
    )
    if target != "sm_90":
        return fuse
    widen = partial(widen_results.apply, target=target)
    return (*fuse, Pass(widen, "sums are float32: scores are not rounded first, and widened then"))


def _changed(graph: Graph, steps: Sequence[Pass]) -> Graph:
    """A copy of the graph after these passes."""
    graph = copied(graph)
    for _ in apply_each(graph, steps):
        pass
    return graph


def bucket_sizes(batch: DimRange) -> list[int]:
    """The smallest, the usual and the largest batch, and the powers of two between."""
    powers = {1 << i for i in range(batch.max.bit_length()) if batch.min <= 1 << i <= batch.max}
    return sorted(powers | {batch.min, batch.opt, batch.max})


def copied(graph: Graph) -> Graph:
    """A graph whose nodes and values can be changed; constants are shared."""
    return graph.copy()


def _candidates(choices: list[Choice], batch: int) -> list[Candidate]:
    """``tuning.jsonl``: every trial of every step."""
    return [
        Candidate(
            batch=batch,
            step=choice.node.outputs[0].name,
            kernel=trial.kernel,
            chosen=trial is choice.trials[0],
            time_us=trial.time_us,
            spread_us=trial.spread_us,
            refused=trial.refused,
            workspace_bytes=trial.workspace_bytes,
            program_us=choice.raced_us.get(trial.kernel),
        )
        for choice in choices
        for trial in choice.trials
    ]


def _imports(buckets: Sequence[Bucket]) -> dict[str, str]:
    """What of a user's own the steps run, and the modules that define it."""
    steps = [step for bucket in buckets for step in bucket.steps]
    names = {step.attrs["target"] if step.op == "user" else step.kernel for step in steps}
    return {name: registry.module(name) for name in sorted(names) if registry.module(name)}


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
    first = batch if isinstance(value.shape[0], Dim) else int(value.shape[0])
    return TensorSpec(
        name=value.name, dtype=value.dtype, shape=(first, *(int(d) for d in value.shape[1:]))
    )
