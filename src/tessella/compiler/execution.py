"""A bucket bound before there is a plan, as the runtime binds it: to check it and to race it."""

from __future__ import annotations

from tessella.artifacts.program import Bucket, Program
from tessella.compiler.choices.choose_kernels import Tuner
from tessella.core.device import torch_device
from tessella.execution.arena import Arena
from tessella.execution.bucket import BoundBucket
from tessella.execution.steps import Binder
from tessella.graph.graph import Graph
from tessella.graph.value import shape_at
from tessella.operations.tensor_meta import TensorMeta


def bound(graph: Graph, bucket: Bucket, tuner: Tuner, arena: Arena | None = None) -> BoundBucket:
    """The bucket of a graph with concrete shapes, in an arena of its own if none is given."""
    program = Program(
        inputs=tuple(v.name for v in graph.inputs),
        outputs=tuple(v.name for v in graph.outputs),
        buckets=(bucket,),
    )
    inputs = [
        TensorMeta(shape=shape_at(v.shape, bucket.batch), dtype=v.dtype) for v in graph.inputs
    ]
    binder = Binder(
        program=program,
        bucket=bucket,
        weights={v.name: tuner.constants[v.name] for v in graph.constants},
        inputs=inputs,
        target=tuner.target,
        math=tuner.math,
        arena=arena or Arena(bucket.arena_bytes, torch_device(tuner.target)),
    )
    return BoundBucket(binder)
