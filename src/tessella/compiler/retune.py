"""Tuning a plan where it shall run: its steps get the kernels that are measured to be fastest here.

The graph is read out of the plan's program, so neither the network nor its checkpoint is needed.
Everything else of the plan stays: weights, steps, formats, preprocessing, labels and self-test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tessella.artifacts.plan import Plan
from tessella.artifacts.program import Bucket
from tessella.compiler import verify
from tessella.compiler.buckets import built, imports, outwards
from tessella.compiler.choices.choose_kernels import Choice, Tuner
from tessella.compiler.rewrites import mark_wide_sums
from tessella.compiler.rewrites.assign_layout import Formats
from tessella.compiler.settings import Measuring
from tessella.compiler.stopping import stopping
from tessella.compiler.verify import Expected, Tensors
from tessella.core.architectures import has, is_gpu
from tessella.core.compiled import CompiledKernels
from tessella.core.device import fingerprint, torch_device
from tessella.core.dtype import dtype_name, plain_precision
from tessella.core.errors import UsageError
from tessella.core.events import Emit, silent
from tessella.core.version import VERSION
from tessella.device.ahead_of_time import kernel_cache, using_kernels
from tessella.device.machine import aimed_at
from tessella.execution.host_memory import keep_freed_memory
from tessella.graph.check import check as check_graph
from tessella.graph.graph import Graph, Node, Value
from tessella.operations.user_operators import require
from tessella.search.allowance import Allowance
from tessella.search.tuning import Lock


def retune(plan: Plan, *, measuring: Measuring = Measuring(), emit: Emit = silent) -> Plan:
    """The same plan with the kernels and configurations that are fastest on this machine.

    Its programs for other targets stay as they are.

    Every batch size is run and compared with the outputs that the plan recorded.

    Args:
        plan: for this machine's GPU, or for any CPU.

    Raises:
        WrongDevice: the plan is for a GPU that is not here; the message has the rebuild command.
        CompileError: no kernel fits, or the plan does not compute what it recorded.
        BuildStopped: out of time, or of memory; the next call with this cache goes on there.
    """
    manifest = plan.manifest
    target = manifest.fingerprint.target
    if target == "reference":
        raise UsageError("the target reference is never tuned", seen=manifest.built_from)
    if is_gpu(target):
        manifest.fingerprint.require_target(rebuild=manifest.rebuild, targets=plan.targets)
    require(manifest.imports)
    device, trials = torch_device(target), Lock(measuring.cache, lines=measuring.lock)
    tuner = Tuner(
        target=target,
        math="tf32" if manifest.precision == "tf32" and has(target, "tf32_mma") else "ieee",
        constants={name: tensor.to(device) for name, tensor in plan.weights.items()},
        cache=trials,
        budget_s=measuring.budget_s,
        allowance=Allowance(measuring.time_limit_s),
    )
    if device.type == "cpu":
        keep_freed_memory()
    wanted, loosest = _recorded(plan), _loosest(plan)
    by_batch = {bucket.batch: bucket for bucket in plan.program.buckets}
    buckets, tuning = [], []
    with (
        stopping(measuring.cache, tuner.allowance) as progress,
        using_kernels(kernel_cache(target)),
        aimed_at(target),
    ):
        for size in outwards(sorted(by_batch), manifest.main_input.batch.opt):
            progress.begin(size)
            graph, formats = read_graph(plan, by_batch[size])
            at = wanted.at(size)

            def check(
                choices: Sequence[Choice], bucket: Bucket, graph: Graph = graph, at: Expected = at
            ) -> None:
                verify.check(choices, bucket, graph, graph, at, tuner, loosest)

            bucket, candidates = built(graph, formats, size, tuner, emit, check)
            buckets.append(bucket)
            tuning += candidates
    buckets.sort(key=lambda bucket: bucket.batch)
    tuning.sort(key=lambda candidate: candidate.batch)
    here = fingerprint(target)
    tuned = replace(
        manifest,
        fingerprint=here,
        built_with={"tessella": VERSION, **here.libraries},
        imports=imports(buckets),
        untuned=False,
        members={},
    )
    return replace(
        plan,
        manifest=tuned,
        program=replace(plan.program, buckets=tuple(buckets)),
        tuning=tuple(tuning),
        lock=trials.used,
        compiled=CompiledKernels(),
    )


def read_graph(plan: Plan, bucket: Bucket) -> tuple[Graph, Formats]:
    """The graph that a bucket computes, with concrete shapes, and the formats of its values.

    Parts of concatenations are values of their own again: where they lie is chosen anew.
    """
    specs = plan.manifest.inputs
    made = {b.name: Value(b.name, b.dtype, b.shape) for b in bucket.buffers}
    given = {s.name: Value(s.name, s.dtype, s.at(bucket.batch)) for s in specs}
    constants = {
        name: Value(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in plan.weights.items()
    }
    values = {**made, **given, **constants}
    graph = Graph(
        plan.manifest.built_from,
        inputs=[given[s.name] for s in specs],
        outputs=[values[name] for name in plan.program.outputs],
        nodes=[
            Node(
                op=step.op,
                inputs=tuple(None if name is None else values[name] for name in step.inputs),
                outputs=tuple(made[name] for name in step.outputs),
                attrs=dict(step.attrs),
                layer=step.layer,
            )
            for step in bucket.steps
        ],
        constants={value: plan.weights[name] for name, value in constants.items()},
    )
    if plan.manifest.fingerprint.target == "cpu":
        mark_wide_sums.apply(graph)  # the plan may be from a processor whose sums are wider
    check_graph(graph)
    return graph, _formats(bucket)


def _formats(bucket: Bucket) -> Formats:
    """The format of each value as no slice of another: that of what it lies in."""
    buffers = {b.name: b for b in bucket.buffers}
    parts = {name for step in bucket.steps if step.op == "split" for name in step.outputs}
    return {
        b.name: b.format if b.slice is None or b.name in parts else buffers[b.slice.of].format
        for b in bucket.buffers
    }


def _recorded(plan: Plan) -> Expected:
    """The plan's own samples and answers, and the tolerance that it was built with."""
    golden = plan.golden
    inputs: Tensors = {s.name: golden[f"input.{s.name}"] for s in plan.manifest.inputs}
    outputs: Tensors = {s.name: golden[f"output.{s.name}"] for s in plan.manifest.outputs}
    return Expected(
        inputs=inputs, outputs=outputs, noise=plan.manifest.tolerance / verify.NOISE_MARGIN
    )


def _loosest(plan: Plan) -> str:
    """The precision in the plan that rounds most."""
    used = {plan.manifest.precision, *map(plain_precision, plan.manifest.precisions.values())}
    return max(used, key=lambda precision: verify.TOLERANCES[precision])
