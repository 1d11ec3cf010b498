"""What machine code for attention shares: the heads that threads take one after another, by a
table of where their rows lie, and the mask's rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from tessella.core.errors import KernelError
from tessella.device.packing import packed
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
MOST_MASK_BYTES = 2**26  # of rows as they are read, where a mask has one for each query
NOTHING = -87.0  # e to what is less is 0, here as in torch: else one would see huge values


@dataclass(frozen=True, kw_only=True)
class Head:
    """What machine code is written for: a head of ``queries`` rows and ``keys``.

    Attributes:
        channels: of queries and keys; ``width``: of values.
        pitch: bytes from a row of the result to the next.
        scale: of the scores.
        is_masked: something is added to them.
        mask_step: bytes from what is added for a query to the next query's; 0: all have one row.
    """

    queries: int
    keys: int
    channels: int
    width: int
    pitch: int
    scale: float
    is_masked: bool
    mask_step: int

    @classmethod
    def of(cls, problem: Problem) -> Self:
        _, count, queries, channels = problem["query"].shape
        keys, width = problem["value"].shape[2:]
        scale, mask = problem.attrs["scale"], problem.get("attn_mask")
        return cls(
            queries=queries,
            keys=keys,
            channels=channels,
            width=width,
            pitch=count * width * problem.output.itemsize,
            scale=channels**-0.5 if scale is None else float(scale),
            is_masked=mask is not None,
            mask_step=0 if mask is None or mask.shape[-2] == 1 else mask_bytes(keys),
        )


def refusal(problem: Problem, dtype: str, width: int) -> str | None:
    """Why heads of this element type and so many channels at least are not what it asks."""
    query, key, value = (problem[name] for name in ("query", "key", "value"))
    a, mask = problem.attrs, problem.get("attn_mask")
    if a["is_causal"] or a["enable_gqa"]:
        return "all queries see the same keys, and each head has its own"
    if any(map(problem.is_constant, ("query", "key", "value"))):
        return "the mask alone may be constant"
    if {t.dtype for t in (query, key, value, problem.output)} != {dtype}:
        return f"{dtype} throughout"
    if problem.output.format != "strided":
        return "its result's heads lie side by side in each row"
    if any(len(t.shape) != 4 for t in (query, key, value)):
        return "[images, heads, rows, channels]"
    if mask is not None and (why := _mask_refusal(problem, mask, dtype)):
        return why
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        return "nothing is broadcast"
    if 0 in query.shape or 0 in value.shape:
        return "nothing to make"
    for channels in (query.shape[3], value.shape[3]):
        if not width <= channels <= MOST_CHANNELS:
            return f"from {width} channels a head to {MOST_CHANNELS}"
    return None


def _mask_refusal(problem: Problem, mask: TensorMeta, dtype: str) -> str | None:
    """Why a mask is none of keys alone, for each image or all, nor a constant for some images (the
    first for the first of so many), heads and queries, or for all of any of them."""
    of_keys = "a mask of keys, for each image or all, or a constant"
    images, heads, queries, _ = problem["query"].shape
    keys = problem["key"].shape[2]
    if mask.dtype not in ("bool", "float32", dtype) or not 2 <= len(mask.shape) <= 4:
        return of_keys
    if mask.shape in {(n, 1, 1, keys) for n in (1, images)}:
        return None
    some, *others = _axes(mask)
    known = [size in (1, full) for size, full in zip(others, (heads, queries), strict=False)]
    if not (problem.is_constant("attn_mask") and all(known) and others[-1] == keys):
        return of_keys
    if 0 in mask.shape or images % some:
        return of_keys
    if math.prod(mask.shape[:-1]) * mask_bytes(keys) > MOST_MASK_BYTES:
        return f"a mask whose rows take {MOST_MASK_BYTES} bytes at most"
    return None


def _axes(mask: TensorMeta | torch.Tensor) -> tuple[int, ...]:
    """How many images, heads, queries and keys a mask is for."""
    return (1,) * (4 - len(mask.shape)) + tuple(mask.shape)


def threads(problem: Problem) -> int:
    """How many threads have a part of the workspace."""
    return min(MOST_THREADS, math.prod(problem["query"].shape[:2]))


def workspace_bytes(problem: Problem, part_bytes: int) -> int:
    return threads(problem) * part_bytes + CACHE_LINE


def bound(
    problem: Problem,
    constants: Mapping[int, torch.Tensor],
    made: code.MachineCode,
    part_bytes: int,
) -> Call:
    """The call of some machine code on all heads."""
    problem.require_constants(constants)
    constant, held = constants.get(problem.operation.position("attn_mask")), None
    if constant is not None:
        lanes = code.require_instructions().lanes
        held = packed(constant, ("attention's mask", lanes), lambda m: _rows(m.detach(), lanes))
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
        mask = mask if constant is None else constant
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
        added = held if held is not None else result if mask is None else rows_of_mask(mask)
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
    if mask is not None:
        some, own, each, keys = _axes(mask)
        row = image % some * own + (head if own > 1 else 0)
        table[..., 4] = row * each * mask_bytes(keys)
    return table.reshape(-1, len(ITEM))


def mask_bytes(keys: int) -> int:
    """Of a row of ``rows_of_mask``."""
    isa = code.require_instructions()
    panels = math.ceil(keys / (VECTORS * isa.lanes))
    return (panels * VECTORS + 1) * isa.vector_bytes


def rows_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """``_rows`` of a mask that a call is given.

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
    return _rows(torch.frombuffer(bytearray(content), dtype=dtype).view(shape), lanes)


def _rows(mask: torch.Tensor, lanes: int) -> torch.Tensor:
    """What is added to the scores of keys for each image, head and query of the mask, in whole
    panels, and behind it a vector of what is subtracted from their largest: 0, or ``HIDDEN`` where
    no key is seen, beside which all are nothing then: the result is 0, as torch's.
    """
    keys = mask.shape[-1]
    # the last panel is filled up with its last key, which must not count where it is hidden
    width, seen = mask_bytes(keys) // torch.float32.itemsize, mask.reshape(-1, keys)
    rows = torch.full((len(seen), width), HIDDEN, dtype=torch.float32, device="cpu")
    of_keys = rows[:, :keys]
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
        row, whole = mask_bytes(mask.shape[-1]), math.prod(mask.shape[:-1])
        spans = torch.full_like(masks, mask.shape[-2] * row)
        code.require_inside("mask", masks, spans, whole * row)


ITEM = range(0, 5 * code.NUMBER, code.NUMBER)
OF_QUERIES, OF_KEYS, OF_VALUES, OF_RESULT, OF_MASK = ITEM
(QUERIES, KEYS_AT, VALUES, QUERY_STEP, KEY_STEP, VALUE_STEP, RESULT, PART, TAKEN, MASK) = map(
    code.given, range(10)
)
