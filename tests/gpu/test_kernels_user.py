"""Kernels of a user's own on the GPU: occupancy is CUDA's own answer, values are torch's."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.cuda import _utils as driver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from examples.kernels import matmul_steps, own_layer, saxpy, stencil_1d, vector_add
from tessella import compiler, graph, kernels, runtime
from tessella.core.errors import KernelError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.device import launch
from tessella.device.driver import cuda_driver
from tessella.device.occupancy import occupancy
from tessella.kernels import catalog
from tessella.kernels.user import Launch, cuda, operator

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    # torch.export of torch 2.11 warns of itself
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def cuda_answer(function: ctypes.c_void_p, threads: int, dynamic_bytes: int) -> int:
    """Blocks on one multiprocessor, by the CUDA driver."""
    blocks = ctypes.c_int()
    asked = driver._get_gpu_runtime_library().cuOccupancyMaxActiveBlocksPerMultiprocessor
    driver._check_cuda(
        asked(ctypes.byref(blocks), function, threads, ctypes.c_size_t(dynamic_bytes))
    )
    return blocks.value


# threads, registers at most, static floats, dynamic bytes
BLOCKS = [
    (threads, registers, 256, dynamic)
    for threads in (32, 96, 128, 192, 256, 320, 512, 768, 1024)
    for registers in (24, 37, 64, 100, 128, 168, 255)
    for dynamic in (0, 1000, 20_000, 50_000, 100_000, 200_000)
    if threads * registers <= 65536
]


def test_occupancy_of_cuda_kernels_is_cudas():
    source = """extern "C" __global__ void busy(float* x, int n) {
        __shared__ float fixed[256];
        extern __shared__ float more[];
        float v[96];
        #pragma unroll
        for (int i = 0; i < 96; ++i) v[i] = x[i * n];
        fixed[threadIdx.x % 256] = v[n % 7]; more[0] = v[1];
        __syncthreads();
        float s = fixed[n % 256];
        #pragma unroll
        for (int i = 0; i < 96; ++i) s = s * v[i] + v[95 - i];
        x[threadIdx.x] = s + more[0];
    }"""
    compiled = {}
    seen = set()
    for threads, registers, _, dynamic in BLOCKS:
        if registers not in compiled:
            compiled[registers] = cuda(source, "busy", options=(f"--maxrregcount={registers}",))
        kernel = compiled[registers]
        x = torch.zeros(1, device="cuda")
        grid = block = (1, 1, 1)
        made = kernel.launch(grid, block, (x, 1), shared_bytes=dynamic, target="sm_90")
        used = made.resources()
        if threads * -(-used.registers // 8) * 8 > 65536:
            continue
        loaded = cuda_driver().function(kernel.name, kernel.cubin("sm_90"), 0)
        cuda_driver().allow(loaded, dynamic)
        ours = occupancy(threads=threads, registers=used.registers, shared_bytes=used.shared_bytes)
        assert ours.blocks == cuda_answer(loaded.handle, threads, dynamic), (threads, used)
        seen.add(ours.limited_by)
    assert seen == {"warps", "registers", "shared memory", "blocks"}


def test_occupancy_of_triton_kernels_is_cudas():
    a, b = torch.randn(2, 512, 512, device="cuda").half()
    with launch.watching() as launches:
        for step in matmul_steps.STEPS[:-1]:
            step(a, b)
    assert len(launches) == 4
    for one in launches:
        used = one.resources()
        ours = occupancy(
            threads=used.threads, registers=used.registers, shared_bytes=used.shared_bytes
        )
        function = ctypes.c_void_p(one.compiled.function)
        assert ours.blocks == cuda_answer(function, used.threads, one.compiled.metadata.shared)


def test_occupancy_refuses_what_cannot_run():
    with pytest.raises(UsageError, match="cannot hold one"):
        occupancy(threads=1024, registers=128, shared_bytes=0)


@pytest.mark.parametrize("n", [1, 31, 1024, 100_003])
def test_examples_on_the_gpu(n):
    assert saxpy.main(n) < 1e-6
    assert saxpy.saxpy.last_launch.where == "gpu"
    assert stencil_1d.main(n) < 1e-5
    assert stencil_1d.stencil.last_launch.where == "gpu"
    assert vector_add.vector_add.check(*torch.randn(2, n, device="cuda")) < 1e-6


def test_steps_of_the_matrix_product():
    for m, k, n in ((256, 128, 512), (72, 40, 136)):
        a, b = torch.randn(m, k, device="cuda").half(), torch.randn(k, n, device="cuda").half()
        for step in matmul_steps.STEPS:
            error = (step(a, b).double() - a.double() @ b.double()).abs().max()
            assert error < 0.05, step


def test_a_cuda_kernel_gets_its_numbers_as_it_declares_them():
    kernel = cuda(
        """extern "C" __global__ void numbers(double* out, float f, double d, int i, long long l,
                                              bool b, unsigned int u) {
            out[0] = f; out[1] = d; out[2] = i; out[3] = (double)l; out[4] = b; out[5] = u; }""",
        "numbers",
    )
    out = torch.zeros(6, dtype=torch.float64, device="cuda")
    args = (out, 0.25, 0.1, -7, 1 << 40, True, 3_000_000_000)
    kernel.launch((1, 1, 1), (1, 1, 1), args)
    assert out.tolist() == [0.25, 0.1, -7.0, float(1 << 40), 1.0, 3e9]


def test_cuda_that_does_not_compile_says_where():
    with pytest.raises(KernelError, match="does not compile"):
        cuda('extern "C" __global__ void f(int n) { nonsense; }', "f").cubin("sm_90")


@gluon.jit
def triple_kernel(x_ptr, out_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(out_ptr + at, 3.0 * gl.load(x_ptr + at, mask=at < n), mask=at < n)


@operator(
    "gpu_tests::triple",
    shape=lambda x: torch.empty_like(x),
    gradient=lambda grad, x: triple(grad),
    reference=lambda x: 3 * x,
)
def triple(x: Tensor, *, out: Tensor) -> Launch:
    return Launch(
        kernel=triple_kernel, grid=(triton.cdiv(out.numel(), 512),),
        args=(x, out, out.numel()), constants={"BLOCK": 512},
    )  # fmt: skip


def test_gluon():
    assert triple.check(torch.randn(1000, device="cuda")) < 1e-6
    strided = torch.randn(64, 32, device="cuda").t()
    torch.testing.assert_close(triple(strided), 3 * strided)


shift_kernel = cuda(
    """extern "C" __global__ void shift(const float* x, float by, float* out, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) out[i] = x[i] + by; }""",
    "shift",
)


@operator(
    "gpu_tests::shift", shape=lambda x, by: torch.empty_like(x), reference=lambda x, by: x + by
)
def shift(x: Tensor, by: float, *, out: Tensor) -> Launch:
    n = out.numel()
    return Launch(kernel=shift_kernel, grid=(-(-n // 64),), block=(64,), args=(x, by, out, n))


def test_a_plan_with_kernels_of_ones_own(tmp_path: Path):
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
            self.snake = own_layer.Snake(32)

        def forward(self, x: Tensor) -> Tensor:
            return shift(self.second(self.snake(self.first(triple(x)))), 0.25)

    torch.manual_seed(0)
    network = Network().cuda()
    x = torch.randn(8, 16, device="cuda")
    wanted = network(x).detach()
    inputs = [TensorSpec(name="x", dtype="float32", shape=(8, 16))]
    plan = compiler.compile_graph(
        graph.capture(network, inputs), target="sm_90", batch=DimRange(min=8, opt=8, max=8),
        about=compiler.About(built_from="Network", rebuild=""),
    )  # fmt: skip
    assert plan.manifest.imports["examples::snake"] == "examples.kernels.own_layer"
    engine = runtime.load(plan.save(tmp_path / "own.plan"))
    for _ in range(3):  # replays of a CUDA graph
        torch.testing.assert_close(engine(x)["output"], wanted, rtol=1e-4, atol=1e-4)


@triton.jit
def rows_kernel(x_ptr, w_ptr, b_ptr, out_ptr, K: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, N)
    sums = tl.load(b_ptr + column).to(tl.float32)
    for k in range(K):
        sums += tl.load(x_ptr + row * K + k).to(tl.float32) * tl.load(w_ptr + column * K + k)
    tl.store(out_ptr + row * N + column, sums.to(out_ptr.dtype.element_ty))


@operator(
    "gpu_tests::rows",
    shape=lambda input, weight, bias: input.new_empty(*input.shape[:-1], len(weight)),
    reference=torch.nn.functional.linear,
    dtypes=("float32", "float16"),
)
def rows(input: Tensor, weight: Tensor, bias: Tensor, *, out: Tensor) -> Launch:
    k, n = input.shape[-1], out.shape[-1]
    args = (input, weight, bias, out)
    return Launch(
        kernel=rows_kernel, grid=(out.numel() // n,), args=args, constants={"K": k, "N": n}
    )


def test_a_kernel_of_ones_own_competes():
    def fits(problem):
        n = problem.output.shape[-1]
        return None if n & (n - 1) == 0 and n <= 1024 else "wants a power of two of outputs"

    name = rows.register("linear", algorithm="rows", fits=fits)
    try:
        x, weight = torch.randn(8, 24, device="cuda"), torch.randn(32, 24, device="cuda")
        bias = torch.randn(32, device="cuda")
        found = {k.algorithm: k for k in kernels.find("linear", x, weight, bias)}
        mine = found["rows"]
        print(mine)
        assert mine.refused is None
        assert mine.max_rel_error < 1e-5
        wanted = torch.nn.functional.linear(x, weight, bias)
        made = kernels.linear(x, weight, bias, algorithm="rows")
        torch.testing.assert_close(made, wanted)
        odd = {k.algorithm: k for k in kernels.find("linear", x, weight[:31], bias[:31])}
        assert "power of two" in odd["rows"].refused
        without = {k.algorithm: k for k in kernels.find("linear", x, weight)}
        assert "needs its tensor 'bias'" in without["rows"].refused
    finally:
        catalog.unregister(name)
