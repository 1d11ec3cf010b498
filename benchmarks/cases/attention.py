"""Attention beside the backends of torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.case import Case, Peer, meta
from tessella.operations import problems
from tessella.operations.reference.attention import repeated
from tessella.operations.tensor_meta import TensorMeta

# by name: batch, heads, tokens, width of a head, causal, the mask's shape
ATTENTIONS: dict[str, tuple[int, int, int, int, bool, tuple[int, ...] | None]] = {
    "BERT-large N32 S384": (32, 16, 384, 64, False, None),
    "BERT-large N32 S384 padded": (32, 16, 384, 64, False, (32, 1, 1, 384)),
    "BERT-large N1 S384": (1, 16, 384, 64, False, None),
    "BERT-base N32 S128 padded": (32, 12, 128, 64, False, (32, 1, 1, 128)),
    "ViT-B/16 N128": (128, 12, 197, 64, False, None),
    "ViT-B/16 N1": (1, 12, 197, 64, False, None),
    "Swin-T N128 windows": (128 * 64, 3, 49, 32, False, (1, 3, 49, 49)),
    "Swin-T N128 shifted": (128 * 64, 3, 49, 32, False, (64, 3, 49, 49)),
    "Swin-T N128 stage 3": (128 * 4, 12, 49, 32, False, (4, 12, 49, 49)),
    "GPT-2 N8 S1024": (8, 12, 1024, 64, True, None),
    "GPT-2 N2 S4096": (2, 12, 4096, 64, True, None),
    "128 wide N8 S1024": (8, 16, 1024, 128, True, None),
    "128 wide N2 S4096": (2, 16, 4096, 128, True, None),
    "128 wide N2 S4096 not causal": (2, 16, 4096, 128, False, None),
}


def forward() -> Iterator[Case]:
    """Attention on heads in the layout of a linear layer: a token's heads lie side by side."""
    for name, (n, heads, tokens, width, causal, mask) in ATTENTIONS.items():
        operand = TensorMeta(
            shape=(n, heads, tokens, width),
            dtype="float16",
            format="strided",
            strides=(tokens * heads * width, width, heads * width, 1),
        )
        added = None if mask is None else meta("float16", *mask)
        backends = ("FLASH_ATTENTION", "CUDNN_ATTENTION") if added is None else ()
        yield Case(
            family="attention fp16",
            name=name,
            problem=problems.attention(operand, operand, operand, added, is_causal=causal),
            peers={b: _attention_peer(b, causal) for b in (*backends, "EFFICIENT_ATTENTION")},
            algorithms=("flash", "windows"),
        )


def _attention_peer(backend: str, causal: bool) -> Peer:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        added = None if mask is None else repeated(mask, q)
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, added, is_causal=causal)

    return attend
