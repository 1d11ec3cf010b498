"""A matrix product in five steps, from naive to the machine's limit.

    python -m examples.kernels.matmul_steps

Each step is a short kernel, and its docstring says what keeps it from the next. On a GPU this
prints what each reaches beside torch.matmul: float16, 8192×8192×8192, sums in float32. The rates in
the docstrings are those of one run on an H200, interleaved, in which cuBLAS had 761 TFLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tessella import kernels
from tessella.kernels.user import Launch, operator
from tessella.search.timing import measure


@triton.jit
def naive_kernel(a_ptr, b_ptr, c_ptr, n, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        a = tl.load(a_ptr + row * K + k).to(tl.float32)
        b = tl.load(b_ptr + k * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        sums += a * b
    tl.store(c_ptr + row * n + columns, sums.to(tl.float16), mask=columns < n)


@triton.jit
def tiled_kernel(
    a_ptr, b_ptr, c_ptr, m, n, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile(m, n, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    steps = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = k + steps < K
        a_at = a_ptr + rows * K + k + steps[None, :]
        b_at = b_ptr + (k + steps[:, None]) * n + columns
        a = tl.load(a_at, mask=(rows < m) & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=inside[:, None] & (columns < n), other=0.0)
        sums = tl.dot(a, b, sums)
    tl.store(c_ptr + rows * n + columns, sums.to(tl.float16), mask=(rows < m) & (columns < n))


@triton.jit
def descriptor_kernel(
    a_desc, b_desc, c_desc, m, n, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile(m, n, BLOCK_M, BLOCK_N, GROUP)
    row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        sums = tl.dot(a_desc.load([row, k]), b_desc.load([k, column]), sums)
    c_desc.store([row, column], sums.to(tl.float16))


@triton.jit
def _tile(m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Which tile of C: in columns GROUP tiles high, so that neighbours in time share operands."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    inside = program % (GROUP * tiles_n)
    return first + inside % height, inside // height


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _step(name: str) -> Callable:
    return operator(
        f"examples::{name}", shape=_product, reference=torch.matmul, dtypes=("float16",)
    )


@_step("matmul_naive")
def naive(a: Tensor, b: Tensor, *, out: Tensor) -> Launch:
    """Each lane makes one output. Every operand comes from a cache, every time. 3 TFLOP/s."""
    (m, k), n = a.shape, b.shape[1]
    return Launch(
        kernel=naive_kernel,
        grid=(m, triton.cdiv(n, 128)),
        args=(a, b, out, n),
        constants={"K": k, "BLOCK": 128},
    )


@_step("matmul_tiled")
def tiled(a: Tensor, b: Tensor, *, out: Tensor) -> Launch:
    """A block makes a tile on the tensor cores. It waits for each tile it loads. 225 TFLOP/s."""
    return _tiled(a, b, out, tile=(64, 64, 32), group=1, warps=4, num_stages=1)


@_step("matmul_pipelined")
def pipelined(a: Tensor, b: Tensor, *, out: Tensor) -> Launch:
    """Larger tiles, three on their way while one is multiplied, ordered so that the second-level
    cache serves neighbours. Threads still compute addresses. 748 TFLOP/s."""
    return _tiled(a, b, out, tile=(128, 256, 64), group=8, warps=8, num_stages=3)


def _tiled(a: Tensor, b: Tensor, out: Tensor, tile, group: int, warps: int, num_stages: int):
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n, block_k = tile
    return Launch(
        kernel=tiled_kernel,
        grid=(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),),
        args=(a, b, out, m, n),
        warps=warps,
        constants={
            "K": k, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": group,
            "num_stages": num_stages,
        },
    )  # fmt: skip


@_step("matmul_descriptors")
def descriptors(a: Tensor, b: Tensor, *, out: Tensor) -> Launch:
    """The copy engine (TMA) moves tiles, bounds included. One block a tile: loading the next tile's
    first operands and storing the last results overlap with nothing. 760 TFLOP/s."""
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n, block_k = 128, 256, 64
    return Launch(
        kernel=descriptor_kernel,
        grid=(triton.cdiv(m, block_m) * triton.cdiv(n, block_n),),
        args=(
            TensorDescriptor.from_tensor(a, [block_m, block_k]),
            TensorDescriptor.from_tensor(b, [block_k, block_n]),
            TensorDescriptor.from_tensor(out, [block_m, block_n]),
            m,
            n,
        ),
        warps=8,
        constants={
            "K": k, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP": 8,
            "num_stages": 4,
        },
    )  # fmt: skip


def ours(a: Tensor, b: Tensor) -> Tensor:
    """Persistent blocks whose warps have roles, one loading and others multiplying, in Gluon: what
    Tessella finds for this shape (src/tessella/kernels/gemm). 724 TFLOP/s here, less than the step
    before; where b comes transposed, as weights do, 1.02 times cuBLAS in another run."""
    return kernels.matmul(a, b)


STEPS: tuple[Callable, ...] = (naive, tiled, pipelined, descriptors, ours)


def main(size: int = 8192 if torch.cuda.is_available() else 80) -> dict[str, float]:
    """Check each step against torch and measure it; returns TFLOP/s by step (on a GPU)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    a, b = torch.randn(2, size, size, device=device).half()
    wanted = a.float() @ b.float()
    for step in STEPS:
        error = (step(a, b).float() - wanted).abs().max() / wanted.abs().max()
        assert error < 1e-3, f"{step.__name__}: {error}"
        print(step.last_launch if step is not ours else "ours: tessella.kernels.matmul")
    if device.type == "cpu":
        return {}
    runs = {s.__name__: lambda s=s: getattr(s, "run", s)(a, b) for s in STEPS}
    runs["torch"] = lambda: a @ b
    rates = {
        name: 2 * size**3 / timing.time_us / 1e6
        for name, timing in measure(runs, device=device, budget_s=0.5).items()
    }
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} TFLOP/s")
    return rates


if __name__ == "__main__":
    main()
