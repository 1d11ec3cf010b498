"""Packed weights, shared: the buckets of a plan bind the same weight several times.

A weight is packed again only where a bucket wants another layout; its packed forms go when it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tessella.device.launch import only_compiles

# weight → {(how, layout): packed weight}
_packed: MutableMapping[torch.Tensor, dict[tuple[str, Hashable], torch.Tensor]]
_packed = WeakIdKeyDictionary()


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
    return forms.setdefault((key, None if layout is None else layout(made)), made)


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
