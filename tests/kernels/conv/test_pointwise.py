"""1×1 convolutions as matrix products: the views are right, whatever multiplies them."""

from __future__ import annotations

import pytest

from tessella.kernels import catalog
from tessella.kernels.conv.hopper import pointwise
from tests.support.problems.convolutions import Case, check

LAST = "channels_last"
ROW = catalog.kernel("conv2d.pointwise.sm90")
CASES = {
    "plain": Case(x=(2, 16, 5, 3), w=(24, 16, 1, 1), x_format=LAST),
    "epilogue": Case(
        x=(2, 16, 3, 5), w=(8, 16, 1, 1), x_format=LAST, bias="float32", residual=True, scale=True,
        alpha=0.5, beta=-2.0, activation="relu",
    ),
    "factor": Case(
        x=(2, 16, 3, 5), w=(8, 16, 1, 1), x_format=LAST, bias="float32", activation="gelu",
        gamma=3.0,
    ),
    "weight last": Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1), x_format=LAST, w_format=LAST),
    "argument": Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1), x_format=LAST, constant=False),
    "one pixel": Case(x=(3, 16, 1, 1), w=(8, 16, 1, 1)),
    "half": Case(x=(2, 16, 4, 3), w=(16, 16, 1, 1), x_format=LAST, dtype="float16", bias="float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs_here = catalog.kernel("linear.tiled")  # in Triton's interpreter
    monkeypatch.setattr(pointwise, "BY", {"wgmma": (runs_here, 2)})
    case = CASES[name]
    assert ROW.load().fits(case.problem) is None
    for config in ROW.configs(case.problem):
        check(ROW, case, config)
        check(ROW, case, config, integers=True)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(x=(1, 16, 4, 4), w=(8, 16, 3, 1), x_format=LAST), "1×1"),
        (Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1), stride=2, x_format=LAST), "stride"),
        (Case(x=(1, 16, 4, 4), w=(8, 8, 1, 1), groups=2, x_format=LAST), "groups"),
        (Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1), padding=1, x_format=LAST), "padding"),
        (Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1)), "channels_last"),
        (Case(x=(0, 16, 4, 4), w=(8, 16, 1, 1), x_format=LAST), "empty"),
        (Case(x=(1, 16, 4, 4), w=(8, 16, 1, 1), x_format=LAST), "TF32"),
    ],
)
def test_what_it_refuses(case: Case, reason: str) -> None:
    assert reason in ROW.load().fits(case.problem)


def test_few_pixels_stream_the_weights_first() -> None:
    few = Case(x=(1, 512, 7, 7), w=(2048, 512, 1, 1), x_format=LAST, dtype="float16")
    many = Case(x=(8, 512, 7, 7), w=(2048, 512, 1, 1), x_format=LAST, dtype="float16")
    assert ROW.configs(few.problem)[0]["by"] == "skinny"
    assert {c["by"] for c in ROW.configs(many.problem)} == {"wgmma"}
