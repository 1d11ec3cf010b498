"""What of torch is otherwise while torch.export traces a module: ``with traced():``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tessella.core.errors import CompileError
from tessella.graph import recurrent

Tensor = torch.Tensor


@contextmanager
def traced(module: torch.nn.Module) -> Iterator[None]:
    """Recurrent layers whole, bags of embeddings as sums, masks as given, lengths as sizes, and no
    page of graph.
    """
    with (
        _Caught(),
        recurrent.packed_as_given(),
        _masks_as_given(),
        _lengths_as_sizes(module),
        _without_graphs(),
    ):
        yield


class _Caught(TorchFunctionMode):
    """Some of torch's functions, written in others."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _CAUGHT:  # of DenseNet-121 181,000 calls, most of them of a size
            return func(*args, **kwargs)
        if func is F.embedding_bag:
            return _embedding_bag(*args, **kwargs)
        if func is F.one_hot:
            return _one_hot(*args, **kwargs)
        made = recurrent.caught(func, args, kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made


_CAUGHT = frozenset((F.embedding_bag, F.one_hot, *recurrent.CAUGHT))


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """torch looks whether each class is one of these, which a graph cannot: others get zeros."""
    if num_classes < 1:
        raise CompileError(
            "the number of classes of one_hot depends on data",
            seen=f"num_classes={num_classes}",
            fix="give num_classes",
        )
    classes = torch.arange(num_classes, device=tensor.device)
    return (tensor.unsqueeze(-1) == classes).to(torch.int64)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Bags of one length, [N, L]: torch would count where each begins, from the batch alone."""
    if input.dim() != 2 or max_norm is not None or (mode == "max" and padding_idx is not None):
        raise CompileError(
            "an EmbeddingBag of this kind cannot be part of a plan",
            seen=f"indices of {input.dim()} axes, mode={mode!r}, padding_idx={padding_idx}, "
            f"max_norm={max_norm}",
            fix="give [N, L] indices without offsets and max_norm; fill bags up with padding_idx "
            "(mode sum or mean)",
        )
    rows = F.embedding(input, weight)
    if mode == "max":
        return rows.amax(1)
    counted = None
    if padding_idx is not None:
        padding_idx %= weight.shape[0]
        counted = (input != padding_idx).to(rows.dtype).unsqueeze(2)
        rows = rows * counted
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(2)
    total = rows.sum(1)
    if mode == "sum":
        return total
    return total / (input.shape[1] if counted is None else counted.sum(1).clamp_min(1))


@contextmanager
def _masks_as_given() -> Iterator[None]:
    """nn.Transformer compares its mask with a causal one, to use a faster kernel; the mask that it
    has says the same, and the comparison would be a branch on data.
    """
    module = cast(Any, torch.nn.modules.transformer)
    known = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = known


@contextmanager
def _lengths_as_sizes(module: torch.nn.Module) -> Iterator[None]:
    """``len(tensor)`` is its first size, which may be the open batch, in the files of a module's
    layers: Python's own makes a number of it, and so would fix the batch.
    """
    names = {type(m).__module__ for m in module.modules()}
    files = [vars(sys.modules[name]) for name in names if name in sys.modules]
    files = [f for f in files if "len" not in f and not f["__name__"].startswith("torch.")]
    for file in files:
        file["len"] = _length
    try:
        yield
    finally:
        for file in files:
            del file["len"]


def _length(of: Any) -> Any:
    return of.shape[0] if isinstance(of, Tensor) and of.dim() else len(of)


@contextmanager
def _without_graphs() -> Iterator[None]:
    """Without the whole graph, which torch prints where a size depends on data."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(cast(Any, _Lines(sys.stderr))):
            yield
    finally:
        logger.setLevel(level)


class _Lines:
    """A stream that leaves out the text of graphs."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if "torch.ops.aten." in text else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
