"""Matrix products to test kernels with: a case, its tensors, and what is right in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tessella.core.dtype import Math
from tessella.kernels.sparse.two_four import prune_two_four
from tessella.operations.epilogue import store
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta

POISON = 77
# largest error over largest value: of sums of products (fp8 tensor cores keep 14 bits), of storing
PRODUCTS = {"tf32": 3e-3, "float8_e4m3fn": 2e-3, "float8_e5m2": 2e-3}
STORED = {
    "float32": 1e-5,
    "float16": 1e-3,
    "bfloat16": 8e-3,  # the interpreter truncates
    "float8_e4m3fn": 7e-2,
    "float8_e5m2": 1.3e-1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One product: C [*batch, m, n] of A [*batch, m, k] and B."""

    m: int
    n: int
    k: int
    op: str = "linear"
    batch: tuple[int, ...] = ()
    shared: bool = True
    dtype: str = "float16"
    out: str | None = None
    transpose_a: bool = False
    transpose_b: bool = False
    bias: str | None = None
    residual: str | None = None
    scale: bool = False
    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    strided: bool = False
    math: Math = "ieee"
    fast_accumulation: bool = False
    sparsity: str | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        names = ("activation", "alpha", "beta", "gamma", "fast_accumulation")
        transposes = ("transpose_a", "transpose_b") if self.op == "matmul" else ()
        sparsity = ("sparsity",) if self.sparsity else ()
        return {name: getattr(self, name) for name in (*names, *transposes, *sparsity)}


def draw(
    case: Case, device: str = "cpu", *, integers: bool = False, seed: int = 0
) -> tuple[Problem, list[torch.Tensor | None], torch.Tensor]:
    """The problem, its inputs by position, and a poisoned buffer for the result.

    Args:
        integers: small whole numbers and powers of two, with which every step is exact.
    """
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        padded = (*shape[:-1], shape[-1] + 3) if case.strided and len(shape) > 1 else shape
        if dtype == "int8" and not integers:
            made = torch.randint(-128, 128, padded, generator=generator)
        elif integers or dtype == "int8":
            made = torch.randint(-3, 4, padded, generator=generator)
        else:
            made = torch.randn(padded, generator=generator)
        made = made.to(device, getattr(torch, dtype))
        return made[..., 1 : 1 + shape[-1]] if padded != shape else made

    def matrix(rows: int, columns: int, swap: bool, batch: tuple[int, ...]) -> torch.Tensor:
        return tensor((*batch, columns, rows) if swap else (*batch, rows, columns), case.dtype)

    by_rows = case.op == "linear" or case.transpose_b
    a = matrix(case.m, case.k, case.transpose_a, case.batch)
    b = matrix(case.k, case.n, by_rows, () if case.shared else case.batch)
    b = prune_two_four(b) if case.sparsity else b
    shape = (*case.batch, case.m, case.n)
    bias = tensor((case.n,), case.bias) if case.bias else None
    residual = tensor(shape, case.residual) if case.residual else None
    scale = None
    if case.scale:
        powers = torch.randint(-4, -1, (case.n,), generator=generator)
        drawn = torch.rand(case.n, generator=generator) / math.sqrt(case.k + 1)
        scale = (powers.float().exp2() if integers else drawn).to(device)
    out = tensor(shape, case.out or case.dtype).fill_(POISON)
    inputs = [a, b, bias, residual, scale]
    problem = Problem(
        op=case.op,
        inputs=tuple(_meta(t, case.strided) for t in inputs),
        outputs=(_meta(out, case.strided),),
        attrs=case.attrs,
        math=case.math,
    )
    return problem, inputs, out


def _meta(tensor: torch.Tensor | None, strided: bool) -> TensorMeta | None:
    if tensor is None:
        return None
    format: Format = "strided" if strided and tensor.dim() > 1 else "contiguous"
    return TensorMeta(shape=tuple(tensor.shape), dtype=str(tensor.dtype)[6:], format=format)


def run(
    module: Any,
    case: Case,
    device: str = "cpu",
    *,
    integers: bool = False,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    constant: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a kernel makes of a case, and what is right, in float64."""
    problem, inputs, out = draw(case, device, integers=integers, seed=seed)
    problem = replace(problem, constant=tuple(i for i in constant if inputs[i] is not None))
    assert module.fits(problem) is None, module.fits(problem)
    config = config or {}
    buffers = {"out": out}
    workspace_bytes = getattr(module, "workspace_bytes", None)
    if workspace_bytes and (needed := workspace_bytes(problem, **config)):
        buffers["workspace"] = torch.full((needed,), POISON, dtype=torch.uint8, device=device)
    constants = {i: inputs[i] for i in problem.constant}
    call = module.bind(problem, constants, **config)
    given = [t for i, t in enumerate(inputs) if t is not None and i not in constants]
    copies = [t.clone() for t in given]
    made = call(*given, **buffers)
    assert made.data_ptr() == out.data_ptr()
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(given, copies, strict=True))
    wide = [None if t is None else t.double() for t in inputs]
    (right,) = operation(case.op).call(wide, case.attrs)
    return made, right


def assert_right(made: torch.Tensor, right: torch.Tensor, case: Case) -> None:
    """Within the tolerance of the types; whole numbers to one, where a tie may fall either way."""
    assert made.shape == right.shape
    if not made.dtype.is_floating_point:
        allowed = 0 if made.dtype == torch.int32 else 1
        difference = made.long() - store(right, made.dtype).long()
        assert difference.numel() == 0 or difference.abs().max() <= allowed
        return
    if not right.numel():
        return
    inner = "tf32" if case.dtype == "float32" and case.math == "tf32" else case.dtype
    tolerance = max(PRODUCTS.get(inner, 1e-5), STORED[str(made.dtype)[6:]])
    error = (made.double() - right).abs().max() / right.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"{case}: error {float(error):.2e}"


def assert_exact(made: torch.Tensor, right: torch.Tensor) -> None:
    """Bit for bit what the exact result is as this type."""
    assert torch.equal(made.double(), store(right, made.dtype).double())
