"""A kernel's answer against float64, run to run, and what it takes from the GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tessella.artifacts.outline import WRONG
from tessella.device.launch import watching
from tessella.device.machine import gpu_target
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.torch_operators.arguments import arguments
from tessella.operations.user_operators import as_tuple
from tessella.search.buffers import POISON, whole, wrote_beside
from tessella.search.timing import Run
from tessella.search.tuning import Inspection

BY_IMAGE, SOME = ("conv2d",), 3  # operations whose images know nothing of each other; some of them
# Largest error over the largest value that a kernel may show, by input type; tf32 has its own.
TOLERANCES = {
    "float32": 1e-4,
    "tf32": 5e-3,
    "float16": 1e-2,
    "bfloat16": 5e-2,
    "float8_e4m3fn": 5e-2,
    "float8_e5m2": 1e-1,
    "int8": 1e-2,  # one step of an int8 result, of 127: ties fall either way in float32
}
# int8 results that may be a step off, since they lie at a tie: so many, or this part of all
FEWEST_TIES, TIES = 2, 1e-2
# half a step of fp8 beside the largest value: what writing a result costs, beyond what it deviates
# (6.25 % in e4m3, for which right kernels were refused while 5 % were allowed in all)
ROUNDING = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
# Operators whose second result is where the numbers of the first lie, by the place of their axis
# among the arguments.
RANKING = {"aten::topk": 2, "aten::sort": 1, "aten::max.dim": 1, "aten::min.dim": 1}


@dataclass(frozen=True)
class Places:
    """Where the numbers of a ranking lie. Of equal numbers any may be told, each once.

    Attributes:
        ranked: the numbers that are ranked, float64.
        axis: along which they are.
        told: the numbers that belong to the places.
    """

    ranked: torch.Tensor
    axis: int
    told: torch.Tensor

    def error(self, made: torch.Tensor) -> float:
        """0, or 1 of places of other numbers, outside the axis or told twice."""
        at = made.reshape(self.told.shape)
        inside = (at >= 0) & (at < self.ranked.shape[self.axis])
        twice = at.sort(self.axis).values.diff(dim=self.axis) == 0
        if not bool(inside.all()) or bool(twice.any()):
            return 1.0
        found = self.ranked.gather(self.axis, at)
        return 0.0 if found.allclose(self.told, rtol=0, atol=0, equal_nan=True) else 1.0


Exact: TypeAlias = torch.Tensor | Places  # a result as it should be


def exact_answers(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    images: Sequence[int] | None = None,
) -> tuple[Exact, ...]:
    """The results in float64; as they would be stored where they are integers, and no larger than
    fp8 holds; of a ranking the numbers at its places.

    Args:
        images: those of ``some_images``; None for all.
    """
    if images is not None:
        count = problem.output.shape[0]
        rows = list(images)  # of a bias or a scale that is computed all numbers stay
        inputs = [t[rows] if t.dim() > 1 and t.shape[0] == count else t for t in inputs]
    operands = list(problem.operands(constants, inputs))
    if problem.op != "fallback":
        operands = [exactly(t) for t in operands]
    else:  # torch's operators want places as integers
        operands = [t if t is None or not t.is_floating_point() else t.double() for t in operands]
    made = operation(problem.op).call(operands, problem.attrs)
    dtypes = (getattr(torch, meta.dtype) for meta in problem.outputs)
    stored = tuple(_stored(exact, dtype) for exact, dtype in zip(made, dtypes, strict=True))
    target = problem.attrs.get("target") if problem.op == "fallback" else None
    if target not in RANKING:
        return stored
    return stored[0], _places(made[1], operands, RANKING[target], problem.attrs)


def _places(
    at: torch.Tensor, operands: Sequence[Any], place: int, attrs: Mapping[str, Any]
) -> Places:
    """What a ranking's places are compared by. Those of ``max.dim`` may lack the axis."""
    args, kwargs = arguments(attrs["args"], attrs["kwargs"], operands)
    ranked = args[0]
    axis = kwargs.get("dim", args[place] if place < len(args) else -1) % max(1, ranked.dim())
    at = at if at.dim() == ranked.dim() else at.unsqueeze(axis)
    return Places(ranked=ranked, axis=axis, told=ranked.gather(axis, at))


def _stored(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return store(exact, dtype).double()
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        return exact.double().clamp(-limit, limit)
    return exact.double()


def some_images(problem: Problem) -> list[int] | None:
    """The images of a convolution that tell whether a kernel is right: what is built of it is asked
    for all. None where that is not so, or there are no more.
    """
    images = problem.output.shape[0] if problem.op in BY_IMAGE else 0
    return [0, images // 2, images - 1] if images > SOME and problem.is_constant("weight") else None


def exactly(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same values in float64; a mask of bools is one, not numbers to add."""
    return tensor if tensor is None or tensor.dtype == torch.bool else tensor.double()


def deviation(
    run: Run,
    exact: Sequence[Exact],
    out: torch.Tensor | None,
    *,
    sliced: bool,
    kept: Sequence[torch.Tensor] = (),
    images: Sequence[int] | None = None,
) -> float:
    """The error of ``inspect`` alone, by one run.

    Args:
        images: those that ``exact`` has; None for all.
    """
    if out is not None:
        _poison(out, kept)
    made = as_tuple(run())
    if out is not None and sliced and wrote_beside(out):
        return math.inf
    if images is not None:
        made = tuple(result[list(images)] for result in made)
    return _largest([_error(one, right) for one, right in zip(made, exact, strict=True)])


def inspect(
    run: Run,
    exact: Sequence[Exact],
    out: torch.Tensor | None,
    *,
    sliced: bool,
    kept: Sequence[torch.Tensor] = (),
) -> Inspection:
    """Run a kernel twice and compare its results with each other and with exact ones.

    Args:
        run: the kernel with its operands.
        exact: what its results should be.
        out: where the answer goes, if that is given to it; overwritten with poison before.
        sliced: ``out`` is a slice, and the memory between its parts is not the kernel's.
        kept: inputs that lie in ``out``, which keep their numbers.
    """
    if out is not None:
        _poison(out, kept)
    with watching() as launches:
        first = [result.clone() for result in as_tuple(run())]
    beside = out is not None and sliced and wrote_beside(out)
    again = as_tuple(run())
    errors = [_error(made, right) for made, right in zip(first, exact, strict=True)]
    compiled = [one for one in launches if one.compiled is not None]
    main = max(compiled, key=lambda one: math.prod(one.grid), default=None)
    resources = main.resources() if main else None
    return Inspection(
        max_rel_error=math.inf if beside else _largest(errors),
        repeatable=all(torch.equal(_bits(a), _bits(b)) for a, b in zip(first, again, strict=True)),
        launches=len(launches),
        registers=resources.registers if resources else None,
        shared_bytes=resources.shared_bytes if resources else None,
        occupancy=round(resources.occupancy(gpu_target()).share, 3) if resources else None,
    )


def _poison(out: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
    numbers = [part.clone() for part in kept]
    whole(out).fill_(POISON)
    for part, own in zip(kept, numbers, strict=True):
        part.copy_(own)


def deviates(problem: Problem, made: Sequence[torch.Tensor], exact: Sequence[Exact]) -> str | None:
    """How far results are from the exact ones, where that is more than the problem allows."""
    return too_far(_largest([_error(m, r) for m, r in zip(made, exact, strict=True)]), problem)


def wrong(inspection: Inspection, problem: Problem) -> str | None:
    """Why an answer is not the problem's, or None."""
    return too_far(inspection.max_rel_error, problem)


def too_far(error: float, problem: Problem) -> str | None:
    """Why an answer with this error is not the problem's, or None."""
    if error <= tolerance(problem):  # and no NaN
        return None
    beside = error == math.inf
    why = "writes beside its slice" if beside else f"deviates from float64 by {error:.1e}"
    return WRONG + why


def tolerance(problem: Problem) -> float:
    """The largest error over the largest value that a right kernel may show.

    It is that of the coarsest element type of a problem, and the rounding of fp8.
    """
    dtypes = {meta.dtype for meta in (*problem.inputs, *problem.outputs) if meta is not None}
    # a chain of small operations may round between: float32 → bfloat16 → a sum → float32
    dtypes |= {attrs.get("dtype") for _, _, attrs in problem.attrs.get("program", ())}
    if "float32" in dtypes and problem.math == "tf32":
        dtypes.add("tf32")
    rounding = max((ROUNDING.get(meta.dtype, 0.0) for meta in problem.outputs), default=0.0)
    return max(TOLERANCES.get(dtype, 0.0) for dtype in dtypes) + rounding


def _error(made: torch.Tensor, exact: Exact) -> float:
    """The largest difference over the largest value; where few ties differ, over int8's.

    NaN where a value that should be finite, infinite or NaN is not: a constant mask has infinities.
    """
    if isinstance(exact, Places):
        return exact.error(made)
    finite = exact.isfinite()
    if not bool(finite.all()):
        if not bool(made.double()[~finite].isclose(exact[~finite], equal_nan=True).all()):
            return math.nan
        made, exact = made[finite], exact[finite]
    largest = exact.abs().max() if exact.numel() else exact.sum()
    if largest and made.is_floating_point():  # below, a type's numbers have ever fewer bits
        largest = largest.clamp_min(torch.finfo(made.dtype).smallest_normal)
    off = (made.double() - exact).abs()
    if made.dtype == torch.int8 and largest and _are_ties(off):
        largest = largest.new_tensor(torch.iinfo(torch.int8).max)
    return float(off.max() / largest if largest else largest)


def _are_ties(off: torch.Tensor) -> bool:
    """Whether results are off by one step, and few: those fall either way by a sum's last bit,
    however small the other values are.
    """
    few = max(FEWEST_TIES, TIES * off.numel())
    return bool(off.max() <= 1) and int(off.count_nonzero()) <= few


def _largest(errors: Sequence[float]) -> float:
    """The largest error, or NaN where one is."""
    return math.nan if any(math.isnan(e) for e in errors) else max(errors)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
