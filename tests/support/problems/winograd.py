"""What Winograd convolution is tested with, in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tessella.kernels import catalog
from tests.support.problems.convolutions import Case, draw, right, run

FUSED = catalog.kernel("conv2d.winograd")
STEPS = catalog.kernel("conv2d.winograd_nonfused")
LAST = "channels_last"

# largest error over largest value, by outputs of a tile and what the products are made of
TOLERANCES = {
    (2, "float32"): 1e-6, (4, "float32"): 1e-5, (6, "float32"): 4e-5,
    (2, "float16"): 2e-3, (4, "float16"): 5e-3, (2, "bfloat16"): 1.5e-2, (4, "bfloat16"): 4e-2,
    (2, "tf32"): 2e-3, (4, "tf32"): 5e-3,
}  # fmt: skip


PLAIN = Case(x=(1, 7, 9, 6), w=(5, 7, 3, 3), padding=1)
WHOLE: dict[str, Any] = {
    "bias": "float32", "residual": True, "scale": True, "alpha": 0.5, "beta": -2.0,
}  # fmt: skip
CASES = {
    "plain": PLAIN,
    "last": replace(PLAIN, x_format=LAST),
    "to last": replace(PLAIN, out_format=LAST, padding=(0, 2)),
    "from last": replace(PLAIN, x_format=LAST, out_format="contiguous", constant=False),
    "weights last": replace(PLAIN, w_format=LAST, constant=False),
    "more than a block": Case(x=(2, 33, 8, 5), w=(35, 33, 3, 3), padding=1, constant=False),
    "one pixel": Case(x=(1, 3, 1, 1), w=(4, 3, 3, 3), padding=1),
    "wide padding": Case(x=(1, 2, 2, 3), w=(3, 2, 3, 3), padding=(4, 5)),
    "view": replace(PLAIN, x_format="strided"),
    "empty": Case(x=(0, 3, 8, 8), w=(4, 3, 3, 3)),
    "float16": replace(PLAIN, dtype="float16", bias="float16", residual=True),
    "float16 to float32": replace(PLAIN, dtype="float16", out="float32", x_format=LAST),
    "tf32": replace(PLAIN, math="tf32"),
    "tf32 last": replace(PLAIN, math="tf32", x_format=LAST, constant=False),
    "whole epilogue": replace(PLAIN, activation="silu", **WHOLE),
    "whole epilogue last": replace(PLAIN, activation="relu", x_format=LAST, **WHOLE),
}


def assert_right(
    row: catalog.Kernel, case: Case, config: dict[str, Any], device: str = "cpu", seed: int = 0
) -> None:
    """The kernel agrees with float64, as nearly as its tile and type allow."""
    operands = draw(case, device, seed=seed)
    made = run(row, case, operands, config).double()
    expected = right(case, operands)
    if expected.numel() == 0:
        return
    by = "tf32" if case.math == "tf32" else case.dtype
    error = float((made - expected).abs().max() / expected.abs().max())
    assert error <= TOLERANCES[config.get("tile", 2), by], f"{row.id} {config}: error {error:.2e}"
