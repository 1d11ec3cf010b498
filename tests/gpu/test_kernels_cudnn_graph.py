"""cuDNN's int8 through its graph interface, exact against int32."""

from __future__ import annotations

import pytest
import torch

from tessella.kernels import problems, reference
from tessella.kernels.auction import Terms, find
from tessella.kernels.conv.libraries import cudnn_graph
from tessella.kernels.epilogue import store
from tessella.kernels.problem import meta_of

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

    def codes(*shape: int) -> torch.Tensor:
        made = torch.randint(-8, 9, shape, dtype=torch.int8, device="cuda")
        return made.contiguous(memory_format=torch.channels_last)

    x, weight = codes(n, c, h, w), codes(k, c, taps, taps)
    size = (h - 1) // stride + 1
    # powers of two: each way of adding gives the same float32
    scale = 2.0 ** torch.randint(-7, -3, (k,), device="cuda").float()
    bias = torch.randint(-16, 17, (k,), device="cuda").float() / 2
    added = codes(n, k, size, size) if residual else None
    tensors = (x, weight, bias, added, scale)
    problem = problems.conv(
        *(None if t is None else meta_of(t) for t in tensors),
        stride=stride, padding=taps // 2, activation="relu", out_dtype="int8", constant=(1, 2, 4),
        **({"beta": 0.5} if residual else {}),
    )  # fmt: skip
    assert cudnn_graph.fits(problem) is None
    constants = {1: weight, 2: bias, 4: scale}
    operands = [None if t is None else t.double() for t in tensors]
    right = store(reference.call("conv2d", operands, problem.attrs)[0], torch.int8)
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
    only = Terms(algorithms=("cudnn_graph",), inspect=True)
    inputs = [t for t in (x, added) if t is not None]
    (trial,) = find(problem, constants, target="sm_90", terms=only, inputs=inputs)
    assert trial.refused is None
