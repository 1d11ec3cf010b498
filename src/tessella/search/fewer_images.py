"""The same layer with fewer images: where many take long, few tell which kernels are far behind."""

from __future__ import annotations

from dataclasses import replace

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

# Operations of a thread that take a core with AVX-512 about a millisecond, one with AVX2 three: of
# shorter calls another batch tells less (``evidence.LONG_US``).
ENOUGH_FLOPS = 1.5e8
OPS = ("conv2d",)  # whose first axis is the batch


def with_fewer_images(problem: Problem, threads: int) -> Problem | None:
    """A convolution with as few images as tell its kernels apart; None if that is half or more.

    Args:
        threads: each has an image at least, as it has in the problem.
    """
    work = problem.flops if problem.op in OPS else None
    if not work or not problem.is_constant("weight"):
        return None
    images, fewer = problem.output.shape[0], threads
    while fewer * work < images * threads * ENOUGH_FLOPS:
        fewer *= 2
    if 2 * fewer > images:
        return None

    def cut(meta: TensorMeta) -> TensorMeta:
        of_images = len(meta.shape) == len(problem.output.shape) and meta.shape[0] == images
        return replace(meta, shape=(fewer, *meta.shape[1:])) if of_images else meta

    return replace(
        problem,
        inputs=tuple(
            meta if meta is None or i in problem.constant else cut(meta)
            for i, meta in enumerate(problem.inputs)
        ),
        outputs=tuple(map(cut, problem.outputs)),
    )
