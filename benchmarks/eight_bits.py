"""Training in 8 bits as it is usual beside torch.compile: the peer of ``precision="fp8"``.

Every product of a linear layer, forward and both gradients, is one of 8-bit numbers with one factor
a tensor, taken from its largest magnitude in this step (what torchao names ``tensorwise``); casts
are plain torch, which torch.compile fuses. ``rows=True`` is the other usual recipe, a factor for
each row and the weight's gradient in 16 bits: the same products as ours, without our kernels.

``python -m benchmarks.eight_bits`` compares what is learned: a ViT of width 512 on pictures drawn
by rule, with the same seeds, data and order in bf16, in fp8 and in fp8 whose gradients are rounded
to e4m3.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.defaults import dataset
from benchmarks.intake import Row
from benchmarks.pictures import SETS
from benchmarks.report import RESULTS, document, markdown, write
from tessella.api.training import train
from tessella.artifacts.dataset import Dataset
from tessella.core.device import default_target
from tessella.nn import fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"bf16": E5M2, "fp8": E5M2, "fp8, gradients e4m3": E4M3}
NETWORK = """
from torchvision.models import VisionTransformer

class Network(VisionTransformer):
    def __init__(self, classes):
        super().__init__(image_size={side}, patch_size={patch}, num_layers=6, num_heads=8,
                         hidden_dim=512, mlp_dim=2048, num_classes=classes)

    def forward(self, x):
        return super().forward(x.expand(-1, 3, -1, -1))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", default="digits")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=20)
    parser.add_argument("--images", type=int, default=0, help="0: as many as the set has")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "pictures")
    parser.add_argument("--out", type=Path, default=RESULTS / "eight-bits.json")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for seed in range(arguments.seeds):
        for name in arguments.sets.split(","):
            data = dataset(arguments.cache, name, arguments.images or SETS[name].count)
            for recipe in GRADIENTS:
                rows.append(learned(data, name, recipe, seed, arguments.epochs))
                print(rows[-1], flush=True)
                write(arguments.out, document(default_target(), rows))
    print(markdown(list(rows[0]), [list(row.values()) for row in rows]))


def learned(data: Dataset, name: str, recipe: str, seed: int, epochs: float) -> Row:
    """The row of a training: its loss over the last epoch, and on images held out."""
    fp8.GRADIENTS, fp8.LEAST = GRADIENTS[recipe], 512
    side = data.preprocess.input_shape[1]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "network.py"
        source.write_text(
            NETWORK.format(side=side, patch=side // 7 if side % 7 == 0 else side // 8)
        )
        run = train(
            f"{source}:Network", data, out=Path(folder) / "run", epochs=epochs, batch_size=64,
            seed=seed, precision=recipe.partition(",")[0], fuse=False, label_smoothing=0.0,
            solver={"name": "adamw", "lr": 5e-4, "weight_decay": 0.05},
            policy={"name": "cosine", "warmup": 0.1}, emit=lambda event: None,
            val_interval=epochs, snapshot_interval=epochs,
        )  # fmt: skip
        metrics = run.metrics()
    losses = [m.values["loss"] for m in metrics if "loss" in m.values]
    in_epoch = round(len(losses) / epochs)
    last = metrics[-1].values
    return {
        "what": f"ViT 512×6, {name}, {len(losses)} steps", "who": recipe, "seed": seed,
        "loss, last epoch": round(mean(losses[-in_epoch:]), 5),
        "val/loss": round(last["val/loss"], 4), "val/accuracy": round(last["val/accuracy"], 4),
    }  # fmt: skip


def convert(module: nn.Module, *, rows: bool = False) -> None:
    """Let the layers train in 8 bits that ours would, in place."""
    fp8.to_fp8(module)
    if rows:
        return
    theirs: dict[type[nn.Module], type[nn.Module]]
    theirs = {fp8.Linear: _Linear, fp8.Attention: _Attention}
    for part in module.modules():
        part.__class__ = theirs.get(type(part), type(part))


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class _Attention(nn.MultiheadAttention):
    def forward(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        rows, places, width = query.shape
        made = linear(query, self.in_proj_weight, self.in_proj_bias)
        parts = made.view(rows, places, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        context = F.scaled_dot_product_attention(q, k, v)
        joined = context.transpose(1, 2).reshape(rows, places, width)
        return linear(joined, self.out_proj.weight, self.out_proj.bias), None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer of [..., K] under autocast."""
    low = torch.get_autocast_dtype(x.device.type)
    made: Tensor = _Product.apply(x.to(low).flatten(0, -2), weight.to(low))
    made = made.view(*x.shape[:-1], len(weight))
    return made if bias is None else made + bias.to(low)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _multiplied(_cast(x, E4M3), _cast(weight.t(), E4M3), fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        low = _cast(gradient, E5M2)
        of_x = _multiplied(low, _cast(weight, E4M3), fast=False)
        of_weight = _multiplied((low[0].t(), low[1]), _cast(x, E4M3), fast=False)
        return of_x, of_weight


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit numbers, and the factor that gives ``x``."""
    scale = torch.finfo(dtype).max / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).to(dtype), scale.reciprocal()


def _multiplied(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, fast: bool) -> Tensor:
    (a, a_scale), (b, b_scale) = one, other
    turned = b.t().contiguous().t()  # 8-bit products want the sum's dimension innermost in both
    with torch.autocast(a.device.type, enabled=False):
        made: Tensor = torch._scaled_mm(
            a.contiguous(), turned, a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
        )
    return made


if __name__ == "__main__":
    main()
