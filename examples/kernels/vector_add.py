"""Vector addition: grid, block and warps, and what they do to occupancy and speed.

    python -m examples.kernels.vector_add

The same kernel with one to eight warps a block. Each thread adds eight elements, so fewer warps
mean more blocks; with one warp the number of blocks limits the occupancy to half. An H200 moves
4.22 to 4.26 TB/s with all of them (torch: 4.25): occupancy is a means to have enough bytes on their
way, and half of it does here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessella.kernels.user import Launch, operator
from tessella.search.timing import measure

ELEMENTS_PER_THREAD = 8


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(x_ptr + at, mask=inside) + tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, total, mask=inside)


@operator(
    "examples::vector_add",
    shape=lambda x, y, warps: torch.empty_like(x),
    gradient=lambda grad, x, y, warps: (grad, grad, None),
    reference=lambda x, y, warps: x + y,
)
def vector_add(x: Tensor, y: Tensor, warps: int = 4, *, out: Tensor) -> Launch:
    block = 32 * warps * ELEMENTS_PER_THREAD
    return Launch(
        kernel=add_kernel,
        grid=(triton.cdiv(out.numel(), block),),
        args=(x, y, out, out.numel()),
        warps=warps,
        constants={"BLOCK": block},
    )


def main(n: int = 1 << 26 if torch.cuda.is_available() else 10_007) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = torch.randn(2, n, device=device)
    for warps in (1, 2, 4, 8):
        assert torch.equal(vector_add(x, y, warps), x + y)
        print(vector_add.last_launch)
    if device.type == "cuda":
        runs = {f"{w} warps": lambda w=w: vector_add.run(x, y, w) for w in (1, 2, 4, 8)}
        runs["torch"] = lambda: x + y
        for name, timing in measure(runs, device=device, budget_s=0.2).items():
            print(f"{name}: {3 * x.nbytes / timing.time_us / 1e6:.2f} TB/s")


if __name__ == "__main__":
    main()
