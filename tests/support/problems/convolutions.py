"""Convolutions to test kernels with: a case, its tensors, and what is right in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tessella.core.dtype import Math
from tessella.kernels import catalog
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta, memory_format

POISON = 77
GUARD = 64  # bytes behind the workspace that must stay as they are
# largest error over largest value, by the type that products are made of and the result's
TOLERANCES = {
    "float32": 1e-5,
    "tf32": 3e-3,
    "float16": 2e-3,
    "bfloat16": 1.5e-2,
    "float8_e4m3fn": 7e-2,
    "float8_e5m2": 1.3e-1,
    "int8": 0.0,
    "int32": 0.0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One convolution: x [N, C, …], weight [K, C / groups, …]; numbers stand for every axis."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    dtype: str = "float32"
    out: str | None = None
    x_format: Format = "contiguous"
    w_format: Format = "contiguous"
    out_format: Format | None = None
    bias: str | None = None
    residual: bool = False
    scale: bool = False
    activation: str | None = None
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0
    floor: float = 0.0
    constant: bool = True
    math: Math = "ieee"

    @property
    def problem(self) -> Problem:
        axes = len(self.x) - 2
        stride, padding, dilation = (
            (v,) * axes if isinstance(v, int) else v
            for v in (self.stride, self.padding, self.dilation)
        )
        spatial = tuple(
            (size + 2 * p - d * (taps - 1) - 1) // s + 1
            for size, taps, s, p, d in zip(
                self.x[2:], self.w[2:], stride, padding, dilation, strict=True
            )
        )
        x_format = self.x_format if axes > 1 or self.x_format == "strided" else "contiguous"
        out_format = (self.out_format or x_format) if axes > 1 else "contiguous"
        made = TensorMeta(
            shape=(self.x[0], self.w[0], *spatial),
            dtype=self.out or self.dtype,
            format="contiguous" if out_format == "strided" else out_format,
        )
        vector = (self.w[0],)
        return Problem(
            op=f"conv{axes}d",
            inputs=(
                TensorMeta(shape=self.x, dtype=self.dtype, format=x_format),
                TensorMeta(
                    shape=self.w,
                    dtype=self.dtype,
                    format=self.w_format if axes > 1 else "contiguous",
                ),
                TensorMeta(shape=vector, dtype=self.bias) if self.bias else None,
                made if self.residual else None,
                TensorMeta(shape=vector, dtype="float32") if self.scale else None,
            ),
            outputs=(made,),
            attrs={
                "stride": stride,
                "padding": padding,
                "dilation": dilation,
                "groups": self.groups,
                "activation": self.activation,
                "alpha": self.alpha,
                "beta": self.beta,
                "gamma": self.gamma,
                **({"floor": self.floor} if self.floor else {}),
            },
            constant=(1,) if self.constant else (),
            math=self.math,
        )


def draw(
    case: Case, device: str = "cpu", *, integers: bool = False, seed: int = 0
) -> list[torch.Tensor | None]:
    """The operands by position: normal numbers, or small integers, of which sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    problem = case.problem

    def make(position: int, meta: TensorMeta | None) -> torch.Tensor | None:
        if meta is None:
            return None
        dtype = getattr(torch, meta.dtype)
        if position == 4:  # powers of two: a scaled sum of integers stays exact in float32
            drawn = 2.0 ** torch.randint(-3, 1, meta.shape, generator=generator)
        elif integers or not dtype.is_floating_point:
            drawn = torch.randint(-3, 4, meta.shape, generator=generator)
        else:
            drawn = torch.randn(meta.shape, generator=generator)
        drawn = drawn.to(device).to(dtype)
        if meta.format == "strided":
            wide = torch.zeros(*meta.shape[:-1], 2 * meta.shape[-1] + 3, dtype=dtype, device=device)
            return wide[..., 1 : 2 * meta.shape[-1] + 1 : 2].copy_(drawn)
        return drawn.contiguous(memory_format=memory_format(meta.format, drawn.dim()))

    return [make(i, meta) for i, meta in enumerate(problem.inputs)]


def right(case: Case, operands: list[torch.Tensor | None]) -> torch.Tensor:
    """The result in float64; rounded and saturated where it is an integer."""
    problem = case.problem
    x, w, bias, residual, scale = (None if t is None else t.double() for t in operands)
    product = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    a = problem.attrs
    made = product(x, w, None, a["stride"], a["padding"], a["dilation"], a["groups"]) * case.alpha
    across = (1, -1) + (1,) * (x.ndim - 2)
    made = made * (1 if scale is None else scale.view(across))
    made = made + (0 if bias is None else bias.view(across))
    made = made + (0 if residual is None else residual * case.beta)
    if case.floor:
        made = made.clamp(min=case.floor)
    elif case.activation:
        made = ACTIVATIONS[case.activation](made)
    made = made * case.gamma
    return made.round().clamp(-128, 127) if problem.output.dtype == "int8" else made


def run(
    row: catalog.Kernel,
    case: Case,
    operands: list[torch.Tensor | None],
    config: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """What a kernel makes of poisoned memory; it must leave its inputs and its neighbours alone."""
    problem, module = case.problem, row.load()
    device = operands[0].device
    config = module.configs(problem)[0] if config is None else config
    constants = {i: operands[i] for i in problem.constant}
    inputs = [t for i, t in enumerate(operands) if t is not None and i not in constants]
    out = problem.output.empty(device).fill_(POISON)
    nbytes = row.workspace_bytes(problem, dict(config))
    memory = torch.full((nbytes + GUARD,), POISON, dtype=torch.uint8, device=device)
    before = [t.clone() for t in inputs]
    call = module.bind(problem, constants, **config)
    made = call(*inputs, out=out, **({"workspace": memory[:nbytes]} if nbytes else {}))
    assert made is out
    assert bool((memory[nbytes:] == POISON).all()), "wrote behind its workspace"
    for was, now in zip(before, inputs, strict=True):
        assert torch.equal(was, now), "changed an input"
    return made


def check(
    row: catalog.Kernel,
    case: Case,
    config: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    integers: bool = False,
    seed: int = 0,
) -> None:
    """The kernel agrees with float64; small integers exactly, where the result can hold them."""
    operands = draw(case, device, integers=integers, seed=seed)
    made = run(row, case, operands, config).double()
    expected = right(case, operands)
    assert made.shape == expected.shape
    if expected.numel() == 0:
        return
    output = case.problem.output.dtype
    by = "tf32" if case.math == "tf32" and not integers else case.dtype
    tolerance = max(TOLERANCES[by], TOLERANCES[output])
    rounds = case.activation not in (None, "relu", "relu6")  # before the result's type does
    if integers and output in ("float32", "int8", "int32"):
        tolerance = 1e-6 if rounds else 0.0
    if output == "int8" and rounds:
        tolerance = 1.01 / 127  # a tie may fall either way: one step
    error = (made - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    assert float(error) <= tolerance, f"{row.id} {config}: error {float(error):.2e}"
