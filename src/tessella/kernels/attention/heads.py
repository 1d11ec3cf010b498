"""What machine code for attention shares: the heads that threads take one after another, by a
table of where their rows lie, and the mask's rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.device.x86.code import CACHE_LINE
from tessella.kernels.catalog import Call
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta

VECTORS = 2  # of a panel of keys or values
MOST_PART_BYTES = 2**21  # for a thread
MOST_CHANNELS = 256
MOST_THREADS = 64
# of a mask, for minus infinity, of which a difference would be no number; log2 e times it is one
HIDDEN = -2e38
NOTHING = -87.0  # e to what is less is 0, here as in torch: else one would see huge values


@dataclass(frozen=True, kw_only=True)
class Head:
    """What machine code is written for: a head of ``queries`` rows and ``keys``.

    Attributes:
        channels: of queries and keys; ``width``: of values.
        pitch: bytes from a row of the result to the next.
        scale: of the scores.
        is_masked: something is added to them.
    """

    queries: int
    keys: int
    channels: int
    width: int
    pitch: int
    scale: float
    is_masked: bool

    @classmethod
    def of(cls, problem: Problem) -> Self:
        _, count, queries, channels = problem["query"].shape
        keys, width = problem["value"].shape[2:]
        scale = problem.attrs["scale"]
        return cls(
            queries=queries,
            keys=keys,
            channels=channels,
            width=width,
            pitch=count * width * problem.output.itemsize,
            scale=channels**-0.5 if scale is None else float(scale),
            is_masked=problem.get("attn_mask") is not None,
        )


def refusal(problem: Problem, dtype: str, width: int) -> str | None:
    """Why heads of this element type and a multiple of so many channels are not what it asks."""
    query, key, value = (problem[name] for name in ("query", "key", "value"))
    a, mask = problem.attrs, problem.get("attn_mask")
    if a["is_causal"] or a["enable_gqa"]:
        return "all queries see the same keys, and each head has its own"
    if mask is not None and (
        mask.dtype not in ("bool", "float32", dtype)
        or mask.shape not in {(n, 1, 1, key.shape[2]) for n in (1, key.shape[0])}
    ):
        return "a mask of keys, for each image or all"
    if problem.constants:
        return "takes no constants"
    if {t.dtype for t in (query, key, value, problem.output)} != {dtype}:
        return f"{dtype} throughout"
    if problem.output.format != "strided":
        return "its result's heads lie side by side in each row"
    if any(len(t.shape) != 4 for t in (query, key, value)):
        return "[images, heads, rows, channels]"
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return "nothing is broadcast"
    if 0 in query.shape or 0 in value.shape:
        return "nothing to make"
    for channels in (query.shape[3], value.shape[3]):
        if channels % width or channels > MOST_CHANNELS:
            return f"a multiple of {width} channels a head, up to {MOST_CHANNELS}"
    return None


def threads(problem: Problem) -> int:
    """How many threads have a part of the workspace."""
    return min(MOST_THREADS, math.prod(problem["query"].shape[:2]))


def workspace_bytes(problem: Problem, part_bytes: int) -> int:
    return threads(problem) * part_bytes + CACHE_LINE


def bound(problem: Problem, made: code.MachineCode, part_bytes: int) -> Call:
    """The call of some machine code on all heads."""
    most, needed, metas = threads(problem), workspace_bytes(problem, part_bytes), problem.inputs
    images, heads, queries, _ = problem["query"].shape
    shape = (images, queries, heads, problem["value"].shape[3])
    known: dict[
        tuple[object, ...], code.Table
    ] = {}  # by all that a call is asked about its tensors

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        workspace: torch.Tensor,
    ) -> torch.Tensor:
        if workspace.nbytes < needed:
            raise KernelError(
                "the workspace is too small",
                seen=f"{workspace.nbytes} bytes",
                fix=f"{needed} bytes",
            )
        # a permuted view is seldom, and copied: what a search tried lay in rows
        query, key, value = (
            t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value)
        )
        rows = (query, key, value)
        strides = tuple(t.stride() for t in rows)
        asked = tuple((t.dtype, t.shape, t.device) for t in rows)
        of_mask = None if mask is None else (mask.dtype, mask.shape, mask.device)
        table = known.get((strides, asked, of_mask))
        if table is None:
            require_rows(rows, mask, metas)
            known.clear()  # they are the same at each call of a plan
            numbers = items(rows, mask)
            require_inside(numbers, rows, mask)
            table = known[strides, asked, of_mask] = code.Table(numbers)
        result = torch.empty(shape, dtype=query.dtype, device="cpu")
        added = result if mask is None else rows_of_mask(mask)
        made.run(
            table, *(t.data_ptr() for t in rows), *(s[2] * query.itemsize for s in strides),
            result.data_ptr(), workspace.data_ptr() + -workspace.data_ptr() % CACHE_LINE, 0,
            added.data_ptr(), threads=min(most, torch.get_num_threads()),
        )  # fmt: skip
        return result.transpose(1, 2)

    return attend


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys, values


def require_rows(rows: Rows, mask: torch.Tensor | None, metas: Sequence[TensorMeta | None]) -> None:
    """Refuse tensors that are not what the code was written for."""
    given = (*rows, mask)
    for tensor, meta in zip(given, (*metas, None)[: len(given)], strict=True):
        if tensor is None or meta is None:
            is_right = tensor is None and meta is None
        else:
            is_right = tensor.dtype == getattr(torch, meta.dtype) and tensor.shape == meta.shape
            # of a mask a copy is read
            is_right &= tensor.device.type == "cpu" and (tensor is mask or tensor.stride(-1) == 1)
        if not is_right:
            seen = "no mask" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise KernelError(
                "attention in machine code needs rows whose channels lie together",
                seen=seen if tensor is None else f"{seen} strides {tensor.stride()}",
                fix=f"give {meta}",
            )


def items(rows: Rows, mask: torch.Tensor | None) -> npt.NDArray[np.int64]:
    """A row for each head: distances in bytes of its queries, keys, values and results, and of
    the row of the mask.
    """
    query, _, value = rows
    images, heads, queries, _ = query.shape
    image, head = np.arange(images)[:, None], np.arange(heads)[None]
    table = np.zeros((images, heads, len(ITEM)), np.int64)
    for number, tensor in enumerate(rows):
        table[..., number] = (image * tensor.stride(0) + head * tensor.stride(1)) * tensor.itemsize
    table[..., 3] = (image * queries * heads + head) * value.shape[3] * value.itemsize
    if mask is not None and len(mask) > 1:
        table[..., 4] = image * mask_bytes(mask)
    return table.reshape(-1, len(ITEM))


def mask_bytes(mask: torch.Tensor) -> int:
    """Of a row of ``rows_of_mask``."""
    isa = code.require_instructions()
    panels = math.ceil(mask.shape[3] / (VECTORS * isa.lanes))
    return (panels * VECTORS + 1) * isa.vector_bytes


def rows_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """What is added to the scores of each image's keys, in whole panels, and behind it a vector of
    what is subtracted from their largest: 0, or ``HIDDEN`` where no key is seen, beside which
    all are nothing then: the result is 0, as torch's.

    All layers of a network mostly see one mask: what torch makes of it takes 11 µs, and 75 to 110
    between the steps of a BERT, whose attention takes 150.
    """
    mask = mask.contiguous()
    content = ctypes.string_at(mask.data_ptr(), mask.nbytes)
    return rows_of_bytes(content, mask.dtype, tuple(mask.shape), code.require_instructions().lanes)


@functools.lru_cache(8)
def rows_of_bytes(
    content: bytes, dtype: torch.dtype, shape: tuple[int, ...], lanes: int
) -> torch.Tensor:
    """The same of a mask's bytes. Nobody writes to it."""
    mask = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
    # the last panel is filled up with its last key, which must not count where it is hidden
    width = mask_bytes(mask) // torch.float32.itemsize
    rows = torch.full((len(mask), width), HIDDEN, dtype=torch.float32, device="cpu")
    of_keys, seen = rows[:, : mask.shape[3]], mask[:, 0, 0]
    if mask.dtype == torch.bool:
        of_keys.zero_().masked_fill_(~seen, HIDDEN)
    else:
        torch.clamp(seen.float(), min=HIDDEN, out=of_keys)
        seen = seen != -torch.inf
    rows[:, -lanes:].masked_fill_(seen.any(1, keepdim=True), 0.0)
    return rows


def require_inside(table: npt.NDArray[np.int64], rows: Rows, mask: torch.Tensor | None) -> None:
    """Refuse a table that leads out of a tensor, whoever wrote it."""
    query, _, value = rows
    *begins, results, masks = torch.from_numpy(table).T
    for name, begin, tensor in zip(("queries", "keys", "values"), begins, rows, strict=True):
        span = ((tensor.shape[2] - 1) * tensor.stride(2) + tensor.shape[3]) * tensor.itemsize
        behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.itemsize
        code.require_inside(name, begin, torch.full_like(begin, span), int(behind))
    images, heads, queries, _ = query.shape
    pixel = value.shape[3] * value.itemsize
    span, written = ((queries - 1) * heads + 1) * pixel, images * queries * heads * pixel
    code.require_inside("result", results, torch.full_like(results, span), written)
    if mask is not None:
        row = mask_bytes(mask)
        code.require_inside("mask", masks, torch.full_like(masks, row), len(mask) * row)


ITEM = range(0, 5 * code.NUMBER, code.NUMBER)
OF_QUERIES, OF_KEYS, OF_VALUES, OF_RESULT, OF_MASK = ITEM
(QUERIES, KEYS_AT, VALUES, QUERY_STEP, KEY_STEP, VALUE_STEP, RESULT, PART, TAKEN, MASK) = map(
    code.given, range(10)
)
