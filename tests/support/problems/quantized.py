"""All numbers of float16, quantized by a kernel and by hand."""

from __future__ import annotations

import torch

from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta, meta_of


def like(tensor: torch.Tensor, dtype: str) -> TensorMeta:
    return TensorMeta(shape=tuple(tensor.shape), dtype=dtype, format=meta_of(tensor).format)


SCALES = (0.5, 0.037, 3e-5, 0.125 - 2.0**-27)  # the last one's quotients are hardest to round


def every_quantized_value(kernel: str, dtype: str, scale: float, device: torch.device) -> None:
    """All numbers of float16: ties, what is out of range, and infinities among them."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x, step = x[~x.isnan()].to(device), torch.tensor(scale, device=device)
    problem = Problem(
        op="quantize",
        inputs=(meta_of(x), meta_of(step)),
        outputs=(like(x, dtype),),
        attrs={"axis": 0, "dtype": dtype},
        constant=(1,),
    )
    (right,) = operation("quantize").call([x, step], problem.attrs)
    row = catalog.kernel(kernel)
    for config in row.configs(problem):
        call = row.load().bind(problem, {1: step}, **config)
        assert torch.equal(call(x, out=torch.empty_like(right)).float(), right.float())
