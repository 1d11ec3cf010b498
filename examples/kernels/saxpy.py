"""SAXPY, y ← a·x + y (BLAS level 1): a kernel of one's own, from Triton to a trained operator.

    python -m examples.kernels.saxpy

One program computes a block of 1,024 elements with four warps. The decorator makes of the launch a
function of tensors; the gradient is two lines. Without a GPU Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessella.kernels.user import Launch, operator

BLOCK = 1024


@triton.jit
def saxpy_kernel(a, x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(x_ptr + at, mask=inside)
    y = tl.load(y_ptr + at, mask=inside)
    tl.store(out_ptr + at, a * x + y, mask=inside)


@operator(
    "examples::saxpy",
    shape=lambda a, x, y: torch.empty_like(x),
    gradient=lambda grad, a, x, y: (None, a * grad, grad),
    reference=lambda a, x, y: a * x + y,
)
def saxpy(a: float, x: Tensor, y: Tensor, *, out: Tensor) -> Launch:
    n = out.numel()
    return Launch(
        kernel=saxpy_kernel,
        grid=(triton.cdiv(n, BLOCK),),
        args=(a, x, y, out, n),
        warps=4,
        constants={"BLOCK": BLOCK},
    )


def main(n: int = 100_003) -> float:
    """Run, differentiate and compare with torch; returns the largest relative error."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(n, device=device, requires_grad=True)
    y = torch.randn(n, device=device)
    result = saxpy(2.0, x, y)
    print(saxpy.last_launch)
    result.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
    error = saxpy.check(2.0, x, y)
    print(f"{n:,} elements, largest error {error:.1e}, gradients too")
    return error


if __name__ == "__main__":
    main()
