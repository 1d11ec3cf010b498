"""Packed weights, shared: the buckets of a plan bind the same weight several times.

A weight is packed again only where a bucket wants another layout; its packed forms go when it goes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tessella.core.memory import LARGE_PAGE, empty_bytes
from tessella.device.launch import only_compiles

# weight → {(how, layout): packed weight}
_packed: MutableMapping[torch.Tensor, dict[tuple[str, Hashable], torch.Tensor]]
_packed = WeakIdKeyDictionary()

CPU = torch.device("cpu")
CACHE_LINE = 64
CHUNK_BYTES = 8 * LARGE_PAGE


class _Shelf:
    """Memory in large pages, where tensors lie one behind the other."""

    def __init__(self) -> None:
        self._left = empty_bytes(0, CPU)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """The equal tensor that lies here; a packed one that is no plain memory stays as it is."""
        if tensor.layout != torch.strided or tensor.device != CPU or not tensor.is_contiguous():
            return tensor
        nbytes = math.ceil(tensor.nbytes / CACHE_LINE) * CACHE_LINE
        if nbytes > self._left.nbytes:
            pages = math.ceil(max(nbytes, CHUNK_BYTES) / LARGE_PAGE)
            self._left = empty_bytes(pages * LARGE_PAGE, CPU)
        place, self._left = self._left[: tensor.nbytes], self._left[nbytes:]
        return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


_shelf: ContextVar[_Shelf | None] = ContextVar("_shelf", default=None)


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Inside, what is packed in a host's memory lies in large pages.

    A network's weights come from memory at each run, through pages whose addresses a processor has
    forgotten: one core of a Xeon reads 9 GB/s from pages of 4 KiB and 20 from large ones. A search
    packs many forms that nobody keeps, so it packs each by itself.
    """
    token = _shelf.set(_Shelf())
    try:
        yield
    finally:
        _shelf.reset(token)


def packed(
    weight: torch.Tensor,
    how: tuple[Any, ...],
    pack: Callable[[torch.Tensor], torch.Tensor],
    *,
    layout: Callable[[torch.Tensor], Hashable] | None = None,
) -> torch.Tensor:
    """``pack(weight)``, or the equal one that was packed before.

    Args:
        how: what the packing depends on, apart from the weight.
        layout: what tells two packed forms apart that differ in layout only: where there is such,
            it must be packed to know.
    """
    if only_compiles():  # a packing kernel has not run: what it would have made is not there
        return pack(weight)
    forms, key = _packed.setdefault(weight, {}), repr(how)
    if layout is None and (key, None) in forms:
        return forms[key, None]
    made = pack(weight)
    if made.layout == torch.strided and _is_same_memory(made, weight):
        made = made.detach()  # a view would hold its weight, and the weight's entry the view
    elif (shelf := _shelf.get()) is not None:
        made = shelf.put(made)
    return forms.setdefault((key, None if layout is None else layout(made)), made)


def _is_same_memory(packed: torch.Tensor, weight: torch.Tensor) -> bool:
    if weight.layout != torch.strided:
        return False
    return packed.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def with_packed(
    constants: Mapping[int, torch.Tensor],
    how: tuple[Any, ...],
    pack: Callable[[torch.Tensor], torch.Tensor],
    position: int = 1,
) -> dict[int, torch.Tensor]:
    """The constants, with the weight packed once if it is among them."""
    held = dict(constants)
    if position in held:
        held[position] = packed(held[position], how, pack)
    return held


def forget(weights: Iterable[torch.Tensor]) -> None:
    """Let the packed forms of these go, but for those in use: a search tries many (a 3×3 layer's
    weights are hundreds of times as large after a Fourier transform), and one wins.
    """
    for weight in weights:
        _packed.pop(weight, None)


def onednn_layout(packed: torch.Tensor) -> Hashable:
    """oneDNN's description of a packed weight."""
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist())
