"""A 1-D stencil in CUDA C++: a block reads its elements and a halo into shared memory once.

    python -m examples.kernels.stencil_1d

Each output is the weighted sum of the 2·7 + 1 inputs around it (zero outside). Neighbouring threads
need almost the same inputs: from shared memory, each comes from global memory once instead of 15
times. A stencil's gradient is the stencil with its weights reversed. Without a GPU nvrtc still
compiles the kernel, so its registers and occupancy are known; the reference gives the numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tessella.kernels.user import Launch, cuda, operator

RADIUS, BLOCK = 7, 256

kernel = cuda(
    f"#define RADIUS {RADIUS}\n#define BLOCK {BLOCK}\n"
    r"""
extern "C" __global__ void stencil(const float* x, const float* weight, float* out, int n) {
    __shared__ float tile[BLOCK + 2 * RADIUS];
    int at = blockIdx.x * BLOCK + threadIdx.x;
    for (int i = threadIdx.x; i < BLOCK + 2 * RADIUS; i += BLOCK) {
        int from = blockIdx.x * BLOCK + i - RADIUS;
        tile[i] = 0 <= from && from < n ? x[from] : 0.0f;
    }
    __syncthreads();
    if (at >= n) return;
    float sum = 0.0f;
    for (int i = 0; i <= 2 * RADIUS; ++i) sum += weight[i] * tile[threadIdx.x + i];
    out[at] = sum;
}""",
    "stencil",
)


def stencil_reference(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x[None, None], weight[None, None], padding=RADIUS)[0, 0]


def stencil_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    windows = F.pad(x, (RADIUS, RADIUS)).unfold(0, 2 * RADIUS + 1, 1)
    return stencil(grad, weight.flip(0)), grad @ windows


@operator(
    "examples::stencil",
    shape=lambda x, weight: torch.empty_like(x),
    gradient=stencil_gradient,
    reference=stencil_reference,
)
def stencil(x: Tensor, weight: Tensor, *, out: Tensor) -> Launch:
    n = out.numel()
    return Launch(kernel=kernel, grid=(-(-n // BLOCK),), block=(BLOCK,), args=(x, weight, out, n))


def main(n: int = 100_003) -> float:
    """Run, and compare values and gradients with torch; returns the largest relative error."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(n, device=device)
    weight = torch.randn(2 * RADIUS + 1, device=device)
    stencil(x, weight)
    print(stencil.last_launch)
    error = stencil.check(x, weight)
    print(f"largest error against torch {error:.1e}, gradients too")
    return error


if __name__ == "__main__":
    main()
