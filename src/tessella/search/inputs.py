"""The tensors that kernels are tried on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch

from tessella.core.memory import empty_bytes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta, memory_format

POOL = 1_000_003  # numbers that are drawn; a prime
DRAWN = 1 << 12  # numbers of a smaller tensor are its own
PAGE = 4096  # bytes, of memory that a system gives at once
LINE = 16  # numbers of a cache line: where a tensor of drawn ones begins
ATTENTION, VALUES = "scaled_dot_product_attention", 2  # the place of what is averaged
# Values times what an 8-bit result holds. Where averages of normal numbers are 200 times and more
# beyond it, float16's last bits are whole steps: flash attention of an RF-DETR was refused.
SPREAD, HELD = 4.0, {"int8": 127.0, "float8_e4m3fn": 448.0}


class Numbers:
    """Normal numbers that all searches of a build read: to lay them out for each anew took a
    twentieth of DenseNet-121's build.

    They are those of a pool, again and again: drawing them takes longer on a CPU than many a
    kernel. The pool's length is prime, so that images and rows are not alike.
    """

    def __init__(self) -> None:
        self._flat, self._filled = torch.empty(0), 0

    def first(self, count: int) -> torch.Tensor:
        """The first ``count`` numbers, in memory that is shared: nobody may write there."""
        if count > len(self._flat):
            self._flat, self._filled = torch.empty(0), 0  # let go before asking for more
            room = 4 * (count + count // 2)  # of which the system gives what is written
            self._flat = empty_bytes(room, torch.device("cpu")).view(torch.float32)
        for start in range(self._filled // POOL * POOL, count, POOL):
            self._flat[start : start + POOL] = _pool()[: len(self._flat) - start]
            self._filled = start + POOL
        return self._flat[:count]


def sample_inputs(
    problem: Problem,
    device: torch.device,
    strides: Mapping[int, tuple[int, ...]] | None = None,
    *,
    numbers: Numbers | None = None,
) -> list[torch.Tensor]:
    """Every input that is not a constant: normal numbers, int8 over its range, indices zero.

    Half of bools are true. Where a problem says so, numbers are their magnitudes.

    Args:
        strides: by position, the strides of views, where the problem does not say them.
        numbers: what the searches of a build share: the inputs may then not be changed.
    """
    generator = torch.Generator(device).manual_seed(0)
    drawn = _Drawn(numbers or Numbers(), problem) if device.type == "cpu" else None

    def sample(meta: TensorMeta) -> torch.Tensor:
        dtype = getattr(torch, meta.dtype)
        if dtype == torch.int8:
            made = torch.randint(
                -127, 128, meta.shape, generator=generator, dtype=dtype, device=device
            )
            if problem.attr("non_negative"):
                made.abs_()
        elif dtype.is_floating_point:
            lies = meta.strides is not None and not problem.attr("non_negative")
            if drawn is not None and lies and dtype == torch.float32:
                return drawn.lying(meta)
            made = _normal(meta, generator, drawn)
            if problem.attr("non_negative"):
                made = made.abs()
        elif dtype == torch.bool:
            made = torch.rand(meta.shape, generator=generator, device=device) > 0.5
        else:
            made = torch.zeros(meta.shape, dtype=dtype)
        if meta.strides is not None:
            return meta.empty(device).copy_(made)
        return made.to(device, dtype).contiguous(
            memory_format=memory_format(meta.format, len(meta.shape))
        )

    def view(meta: TensorMeta, steps: tuple[int, ...]) -> torch.Tensor:
        extent = 1 + sum(max(0, d - 1) * s for d, s in zip(meta.shape, steps, strict=True))
        flat = sample(TensorMeta(shape=(extent,), dtype=meta.dtype))
        return flat.as_strided(meta.shape, steps)

    known = strides or {}
    made = {
        i: view(meta, known[i]) if i in known else sample(meta)
        for i, meta in enumerate(problem.inputs)
        if meta is not None and i not in problem.constant
    }
    if problem.op == ATTENTION and problem.outputs and VALUES in made:
        made[VALUES] = _held(made[VALUES], problem)
    return list(made.values())


def _held(values: torch.Tensor, problem: Problem) -> torch.Tensor:
    """The values of an attention, smaller where an 8-bit result could not hold their averages."""
    share = SPREAD * HELD.get(problem.output.dtype, math.inf) / problem.attr("gamma")
    if share >= 1:
        return values
    apart = torch.empty_strided(  # others may read the numbers of these
        values.shape, values.stride(), dtype=values.dtype, device=values.device
    )
    return apart.copy_(values * share)


def place(meta: TensorMeta, device: torch.device) -> torch.Tensor:
    """Where a result goes: memory with any content that lies as in an arena."""
    if meta.strides is not None:
        return meta.empty(device)
    dtype = getattr(torch, meta.dtype)
    flat = empty_bytes(math.prod(meta.shape) * dtype.itemsize, device).view(dtype)
    if meta.format != "channels_last":
        return flat.view(meta.shape)
    images, channels, *pixels = meta.shape
    return flat.view(images, *pixels, channels).movedim(-1, 1)


class _Drawn:
    """The numbers of one search on a CPU: each operand has the next ones, and slices of one tensor
    are slices of one.
    """

    def __init__(self, numbers: Numbers, problem: Problem) -> None:
        computed = [m for i, m in enumerate(problem.inputs) if i not in problem.constant and m]
        counts = [math.prod(m.shape) for m in computed if m.strides is None]
        counts += [_whole(m) for m in {m.strides: m for m in computed if m.strides}.values()]
        self._all, self._start = numbers.first(sum(map(_in_lines, counts))), 0
        self._wholes: dict[Sequence[int], tuple[torch.Tensor, int]] = {}  # and what of it is taken

    def next(self, count: int) -> torch.Tensor:
        taken = self._all[self._start : self._start + count]
        self._start += _in_lines(count)
        return taken if len(taken) == count else Numbers().first(count)  # of a view that reaches on

    def lying(self, meta: TensorMeta) -> torch.Tensor:
        """A slice with the strides of ``meta``, the next one of a tensor that is kept for these."""
        strides = meta.strides or ()
        whole, start = self._wholes.get(strides) or (self.next(_whole(meta)), 0)
        if start + meta.extent // meta.itemsize > len(whole):  # they are not of one tensor
            start = 0
        self._wholes[strides] = whole, start + meta.shape[1] * strides[1]
        return whole[start:].as_strided(meta.shape, strides)


def _whole(meta: TensorMeta) -> int:
    """Numbers of the tensor that a slice is one of."""
    return max(d * s for d, s in zip(meta.shape, meta.strides or (), strict=True))


def _in_lines(count: int) -> int:
    return -(-count // LINE) * LINE


def _normal(meta: TensorMeta, generator: torch.Generator, drawn: _Drawn | None) -> torch.Tensor:
    """Normal numbers, dense in the order of the format, a slice's as its whole is."""
    count = math.prod(meta.shape)
    if drawn is None or count <= DRAWN:
        return torch.randn(meta.shape, generator=generator, device=generator.device)
    flat = drawn.next(count)
    if meta.format == "contiguous" or meta.pixel_pitch is None:
        return flat.view(meta.shape)
    images, channels, *pixels = meta.shape
    return flat.view(images, *pixels, channels).movedim(-1, 1)


@functools.cache
def _pool() -> torch.Tensor:
    """Kept: to draw it takes 6 ms (an EPYC), more than many a search of ours runs kernels."""
    return torch.randn(POOL, generator=torch.Generator().manual_seed(0))


def touch(tensor: torch.Tensor) -> None:
    """Have a host give a new tensor its memory now: else who first writes there takes longer."""
    if tensor.device.type == "cpu":
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        memory[::PAGE].zero_()


def expose_errors(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether a wrong kernel shows on these numbers: all finite, and no operand all zero."""
    with torch.no_grad():
        sums = [float(t.float().abs().sum()) for t in inputs]
    return all(map(math.isfinite, sums)) and 0.0 not in sums[:2]


def joined(
    problem: Problem, inputs: Sequence[torch.Tensor], device: torch.device
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The inputs of a ``cat`` and its result: inputs that are in place already are its slices."""
    out, start, parts = problem.output.empty(device), 0, []
    for position, tensor in enumerate(inputs):
        size = tensor.shape[problem.attrs["dim"]]
        place = out.narrow(problem.attrs["dim"], start, size)
        parts.append(place.copy_(tensor) if position in problem.in_place else tensor)
        start += size
    return parts, out
