"""cuDNN's int8 through its graph interface, exact against int32."""

from __future__ import annotations

import pytest
import torch

from tessella.device.ahead_of_time import kernel_cache, using_kernels
from tessella.device.streams import capturing
from tessella.kernels.catalog import kernel
from tessella.kernels.conv.libraries import cudnn_graph
from tessella.operations import problems
from tessella.operations.epilogue import store
from tessella.operations.table import operation
from tessella.operations.tensor_meta import meta_of
from tessella.search.find import SearchOptions, bind, find

pytest.importorskip("cudnn", reason="needs nvidia-cudnn-frontend")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 64, 28, 28, 128, 3, 1), (3, 128, 14, 14, 64, 1, 1), (2, 64, 15, 15, 128, 3, 2)]
)
def test_int8_is_exact_in_every_plan(shape: tuple[int, ...], residual: bool) -> None:
    n, c, h, w, k, taps, stride = shape
    torch.manual_seed(0)

    def quantized(*shape: int) -> torch.Tensor:
        made = torch.randint(-8, 9, shape, dtype=torch.int8, device="cuda")
        return made.contiguous(memory_format=torch.channels_last)

    x, weight = quantized(n, c, h, w), quantized(k, c, taps, taps)
    size = (h - 1) // stride + 1
    # powers of two: each way of adding gives the same float32
    scale = 2.0 ** torch.randint(-7, -3, (k,), device="cuda").float()
    bias = torch.randint(-16, 17, (k,), device="cuda").float() / 2
    added = quantized(n, k, size, size) if residual else None
    tensors = (x, weight, bias, added, scale)
    problem = problems.conv(
        *(None if t is None else meta_of(t) for t in tensors),
        stride=stride, padding=taps // 2, activation="relu", out_dtype="int8", constant=(1, 2, 4),
        **({"beta": 0.5} if residual else {}),
    )  # fmt: skip
    assert cudnn_graph.fits(problem) is None
    constants = {1: weight, 2: bias, 4: scale}
    operands = [None if t is None else t.double() for t in tensors]
    right = store(operation("conv2d").call(operands, problem.attrs)[0], torch.int8)
    ran = 0
    for config in cudnn_graph.configs(problem):
        try:
            call = cudnn_graph.bind(problem, constants, **config)
        except cudnn_graph.KernelError:
            continue
        out = torch.full(right.shape, 77, dtype=torch.int8, device="cuda")
        out = out.contiguous(memory_format=torch.channels_last)
        call(*(t for t in (x, added) if t is not None), out=out)
        assert torch.equal(out, right), config
        ran += 1
    assert ran
    only = SearchOptions(algorithms=("cudnn_graph",), inspect=True)
    inputs = [t for t in (x, added) if t is not None]
    (trial,) = find(problem, constants, target="sm_90", options=only, inputs=inputs)
    assert trial.refused is None


@pytest.mark.parametrize("captured", [False, True])
def test_a_residual_that_a_kernel_of_ours_has_just_begun_to_make(captured: bool) -> None:
    """Kernels of ours let the next one start early, and cuDNN's does not wait for the residual."""
    torch.manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = (scale * torch.randn(*shape, device="cuda")).half()
        return made.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else made

    x, weight, bias = drawn(16, 1024, 28, 28), drawn(512, 1024, 3, 3, scale=0.01), drawn(512)
    other, thin, offset = drawn(16, 128, 28, 28), drawn(512, 128, 1, 1, scale=0.05), drawn(512)
    residual, out = (drawn(16, 512, 28, 28) for _ in range(2))
    makes = problems.conv(meta_of(x), meta_of(weight), meta_of(bias), padding=1, constant=(1, 2))
    adds = problems.conv(
        meta_of(other), meta_of(thin), meta_of(offset), meta_of(residual), constant=(1, 2)
    )
    ours = kernel("conv2d.implicit_gemm.sm90")
    first, buffers = bind(ours, makes, {1: weight, 2: bias}, x.device, out=residual)
    second = cudnn_graph.bind(adds, {1: thin, 2: offset})

    def run() -> None:
        first(x, **buffers)
        second(other, residual, out=out)

    with torch.inference_mode(), using_kernels(kernel_cache("sm_90")):
        run()
        first(x, **buffers)
        torch.cuda.synchronize()
        second(other, residual, out=out)
        right = out.clone()
        if captured:
            with capturing() as graph:
                run()
        for _ in range(3):
            residual.fill_(torch.nan)
            out.fill_(torch.nan)
            if captured:
                graph.replay()
            else:
                torch.cuda._sleep(2_000_000)  # so that both are queued
                run()
            assert torch.equal(out, right)
