"""Winograd's convolutions in machine code, beside float64: edges, epilogues, slices, threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.conv import x86_winograd
from tessella.kernels.shared import x86_convolution as x86
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tests.support.instructions import isa as isa
from tests.support.problems.direct_convolutions import drawn, exact, problem

CPU = torch.device("cpu")
TOLERANCE = 2e-5  # ten times that of plain sums, of the largest result

pytestmark = pytest.mark.usefixtures("isa")

# whole tiles and parts of one, one tile, panels of one, two and three vectors, several items
SHAPES = [
    ((1, 16, 4, 4), 16),
    ((2, 16, 7, 9), 48),
    ((1, 64, 56, 56), 64),
    ((3, 32, 14, 13), 96),
    ((1, 208, 5, 21), 144),
    ((9, 128, 7, 7), 32),
]


def refusal(p: Problem) -> str | None:
    return catalog.kernel(f"{p.op}.{code.require_instructions().name}_winograd").refusal(p)


def run(
    p: Problem,
    given: list[torch.Tensor],
    constants: dict[int, torch.Tensor],
    config: dict[str, int],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Its answer, with a workspace of NaNs."""
    needed = x86_winograd.workspace_bytes(p, **config)
    workspace = torch.full((needed,), 255, dtype=torch.uint8)
    out = p.output.empty(CPU).fill_(torch.nan) if out is None else out
    assert x86_winograd.bind(p, constants, **config)(*given, out=out, workspace=workspace) is out
    return out


def near(made: torch.Tensor, right: torch.Tensor) -> None:
    assert (made.double() - right).abs().max() < TOLERANCE * right.abs().max()


@pytest.mark.parametrize("padding", [(1, 1), (0, 0), (2, 5)])
@pytest.mark.parametrize(("shape", "channels"), SHAPES)
def test_beside_float64(
    shape: tuple[int, int, int, int], channels: int, padding: tuple[int, int]
) -> None:
    p = problem(shape, channels, kernel=(3, 3), padding=padding, activation="relu")
    assert refusal(p) is None
    given, constants = drawn(p)
    for config in x86_winograd.configs(p):
        near(run(p, given, constants, config), exact(p, given, constants))


@pytest.mark.parametrize(
    ("shape", "channels", "slices", "front"),
    [((1, 16, 5, 8, 8), 16, 3, 1), ((2, 32, 4, 7, 9), 48, 3, 0), ((1, 16, 2, 9, 5), 32, 5, 2),
     ((1, 48, 3, 6, 6), 16, 1, 0)],
)  # fmt: skip
def test_volumes_beside_float64(
    shape: tuple[int, ...], channels: int, slices: int, front: int
) -> None:
    """Slices before the first and behind the last are zeros; a residual is added to each."""
    p = problem(
        shape, channels, kernel=(slices, 3, 3), padding=(front, 1, 1), residual=True,
        activation="relu",
    )  # fmt: skip
    assert refusal(p) is None
    given, constants = drawn(p)
    for config in x86_winograd.configs(p):
        near(run(p, given, constants, config), exact(p, given, constants))
    assert "5 slices" in str(refusal(problem(shape, channels, kernel=(7, 3, 3), padding=(3, 1, 1))))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias", [False, True])
def test_each_epilogue_beside_float64(activation: str | None, bias: bool) -> None:
    for residual in (False, True):
        p = problem(
            (2, 32, 9, 10), 32, kernel=(3, 3), padding=(1, 1),
            bias=bias, residual=residual, activation=activation,
        )  # fmt: skip
        given, constants = drawn(p)
        near(run(p, given, constants, {}), exact(p, given, constants))


@pytest.mark.parametrize("threads", [1, 3, 12])
def test_slices_and_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing beside a slice is written, and no thread's part of the workspace by another."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    p = problem((2, 32, 30, 29), 48, kernel=(3, 3), padding=(1, 1), residual=True)
    given, constants = drawn(p)
    right = exact(p, given, constants)
    metas = [replace(m, shape=(2, 112, *m.shape[2:])) for m in (p.inputs[0], p.inputs[3], p.output)]
    image, added, made = (m.part(1, n) for m, n in zip(metas, (32, 48, 48), strict=True))
    sliced = replace(p, inputs=(image, *p.inputs[1:3], added), outputs=(made,))
    assert refusal(sliced) is None
    whole_x, whole_residual, whole = (m.empty(CPU).fill_(3) for m in metas)
    whole_x[:, 80:], whole_residual[:, 16:64] = given
    config = {"vectors": 3, "tiles": 24}
    for _ in range(5):
        run(sliced, [whole_x[:, 80:], whole_residual[:, 16:64]], constants, config,
            whole[:, 48:96].fill_(7))  # fmt: skip
        near(whole[:, 48:96], right)
    assert (whole[:, :48] == 3).all()
    assert (whole[:, 96:] == 3).all()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    p = problem((1, 16, 8, 8), 16, kernel=(3, 3), padding=(1, 1))
    (x,), constants = drawn(p)
    short = torch.empty(x86_winograd.workspace_bytes(p) - 1, dtype=torch.uint8)
    with pytest.raises(KernelError, match="too small"):
        x86_winograd.bind(p, constants)(x, out=p.output.empty(CPU), workspace=short)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kernel": (3, 1)}, "3×3 and one group"),
        ({"groups": 2}, "3×3 and one group"),
        ({"stride": (2, 2)}, "stride and dilation 1"),
        ({"dilation": (1, 2)}, "stride and dilation 1"),
        ({"shape": (1, 20, 9, 9)}, "channels by"),
        ({"channels": 36}, "channels by"),
        ({"gamma": 2.0}, "gamma"),
        ({"shape": (1, 32, 512, 96, 96), "kernel": (3, 3, 3)}, "too many tiles"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], why: str) -> None:
    given = {"shape": (1, 32, 9, 9), "channels": 32, "kernel": (3, 3), **changes}
    assert why in str(refusal(problem(**given)))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_torch_s_default_type_changes_nothing(kind: torch.dtype) -> None:
    """Zeros and biases that the machine code reads are float32 in any case."""
    p = problem((1, 16, 8, 8), 16, kernel=(3, 3), padding=(1, 1))
    given, constants = drawn(p)
    direct = torch.empty_like(p.output.empty(CPU))
    usual = torch.get_default_dtype()
    try:
        torch.set_default_dtype(kind)
        made = run(p, given, constants, {})
        x86.bind(p, constants)(*given, out=direct)
    finally:
        torch.set_default_dtype(usual)
    near(made, exact(p, given, constants))
    near(direct, exact(p, given, constants))
