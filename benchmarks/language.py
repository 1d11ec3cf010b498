"""Language models as people write them in plain torch, each with its loss: BERT-large and GPT-2.

Norms, attention and linear layers are torch's own; tokens go in, the mean loss comes out.

Letters: N rows, T tokens of a row, P places of a row that are asked for, H numbers of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of a model.

    Attributes:
        tokens: of a row.
        asked: places of a row whose token is asked for; 0: the next token of each.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    vocabulary: int
    asked: int = 0


BERT_LARGE = Size(layers=24, width=1024, heads=16, tokens=512, vocabulary=30522, asked=76)
GPT2 = Size(layers=12, width=768, heads=12, tokens=1024, vocabulary=50304)  # 50257, rounded up


class Attention(nn.Module):
    def __init__(self, size: Size, *, causal: bool) -> None:
        super().__init__()
        self.inward = nn.Linear(size.width, 3 * size.width)
        self.outward = nn.Linear(size.width, size.width)
        self.heads, self.causal = size.heads, causal

    def forward(self, x_NTH: Tensor) -> Tensor:
        rows, tokens, width = x_NTH.shape
        parts = self.inward(x_NTH).view(rows, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        made: Tensor = self.outward(y.transpose(1, 2).reshape(rows, tokens, width))
        return made


class Block(nn.Module):
    """Attention and two linear layers around a GELU, each with a residual."""

    def __init__(self, size: Size, *, causal: bool, first: bool) -> None:
        super().__init__()
        self.attention = Attention(size, causal=causal)
        self.widen = nn.Linear(size.width, 4 * size.width)
        self.narrow = nn.Linear(4 * size.width, size.width)
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.first = first  # whether norms stand before the layers, or behind the sums
        self.approximate = "tanh" if causal else "none"

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.norms
        if self.first:
            x = x + self.attention(one(x))
            return x + self._dense(two(x))
        x = one(x + self.attention(x))
        made: Tensor = two(x + self._dense(x))
        return made

    def _dense(self, x: Tensor) -> Tensor:
        made: Tensor = self.narrow(F.gelu(self.widen(x), approximate=self.approximate))
        return made


class LanguageModel(nn.Module):
    """BERT with its masked tokens, or GPT-2 with the next ones; without dropout."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        causal = size.asked == 0
        self.size = size
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.place = nn.Embedding(size.tokens, size.width)
        self.before = nn.Identity() if causal else nn.LayerNorm(size.width)
        self.blocks = nn.ModuleList(
            Block(size, causal=causal, first=causal) for _ in range(size.layers)
        )
        self.behind: nn.Module = nn.LayerNorm(size.width)
        if not causal:
            dense = nn.Linear(size.width, size.width)
            self.behind = nn.Sequential(dense, nn.GELU(), nn.LayerNorm(size.width))
        self.bias = None if causal else nn.Parameter(torch.zeros(size.vocabulary))
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, std=0.02)

    def forward(self, tokens_NT: Tensor, targets: Tensor) -> Tensor:
        """The mean loss.

        Args:
            targets: the next tokens [N, T]; of BERT [2, N, P]: places in a row, and their tokens.
        """
        places = torch.arange(tokens_NT.shape[1], device=tokens_NT.device)
        x = self.before(self.token(tokens_NT) + self.place(places))
        for block in self.blocks:
            x = block(x)
        if self.bias is not None:
            asked, targets = targets.unbind(0)
            x = x.gather(1, asked[..., None].expand(-1, -1, x.shape[-1]))
        logits = F.linear(self.behind(x), self.token.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def batch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random tokens, and what is asked of them."""
        size = self.size
        tokens = torch.randint(size.vocabulary, (rows, size.tokens), device=device)
        if not size.asked:
            return tokens, tokens.roll(-1, 1)
        places = torch.rand(rows, size.tokens, device=device).argsort(1)[:, : size.asked]
        return tokens, torch.stack([places, tokens.gather(1, places)])

    def flops_of_row(self) -> float:
        """Of forward and backward: six for each weight and token, and those of attention."""
        size = self.size
        weights = sum(p.numel() for p in self.parameters()) - self.place.weight.numel()
        return size.tokens * (6.0 * weights + 12 * size.layers * size.width * size.tokens)
