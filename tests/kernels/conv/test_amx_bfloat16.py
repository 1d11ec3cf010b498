"""Convolutions and linear layers of bfloat16 on AMX's tiles, beside float64: every way of reaching
rows, rests of blocks, epilogues, slices, threads, and tables that lead out of tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.shared import amx_bfloat16 as amx
from tessella.operations import problems
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.problems.direct_convolutions import drawn, exact, problem

CPU = torch.device("cpu")
TOLERANCE = 5e-3  # of the largest result: bfloat16 rounds it by 2e-3
GUARD = 64  # bytes around the workspace
ROW = catalog.kernel("conv2d.amx_bf16")

pytestmark = pytest.mark.skipif(
    code.instructions() is None or code.refusal("amx_bf16") is not None,
    reason="no tiles of bfloat16 here",
)

WINDOWS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "1×1": ((1, 1), {}),
    "1×1, by two": ((1, 1), {"stride": (2, 2)}),
    "3×3": ((3, 3), {"padding": (1, 1)}),
    "3×3, by two": ((3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "3×3, nothing beside": ((3, 3), {}),
    "1×7": ((1, 7), {"padding": (0, 3)}),
    "7×1": ((7, 1), {"padding": (3, 0)}),
    "2×3, askew": ((2, 3), {"padding": (1, 2), "dilation": (3, 1)}),
    "far beside": ((3, 3), {"padding": (5, 5)}),
    "7×7, by two": ((7, 7), {"padding": (3, 3), "stride": (2, 2)}),
    "2×8, by four": ((2, 8), {"padding": (0, 1), "stride": (3, 4)}),
}
# one block, a rest of pixels, of channels, many steps, several items, steps that zeros fill, few
# channels, whose lines are spread; fewer results than a block has
SHAPES = [
    ((1, 32, 8, 8), 32),
    ((2, 64, 9, 11), 80),
    ((1, 256, 7, 9), 64),
    ((1, 96, 21, 20), 224),
    ((2, 19, 9, 8), 48),
    ((1, 32, 3, 300), 32),
    ((2, 3, 19, 77), 80),
    ((1, 1, 9, 144), 32),
    ((1, 4, 9, 64), 33),
    ((1, 64, 9, 8), 16),
    ((2, 40, 9, 11), 24),
    ((1, 3, 9, 77), 31),
]


def run(
    p: Problem, given: list[torch.Tensor], constants: dict[int, torch.Tensor], config: Any
) -> torch.Tensor:
    """Its answer, in a workspace of NaNs beside which nothing is written."""
    needed = ROW.workspace_bytes(p, config)
    whole = torch.full((needed + 2 * GUARD,), 255, dtype=torch.uint8)
    out = p.output.empty(CPU).fill_(torch.nan)
    call = amx.bind(p, constants, **config)
    assert call(*given, out=out, workspace=whole[GUARD:-GUARD]) is out
    assert (whole[:GUARD] == 255).all()
    assert (whole[-GUARD:] == 255).all()
    return out


def near(made: torch.Tensor, right: torch.Tensor) -> None:
    assert (made.double() - right).abs().max() < TOLERANCE * right.abs().max()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_any_filter_beside_float64(window: str, residual: bool) -> None:
    kernel, attrs = WINDOWS[window]
    ways = set()
    for shape, channels in SHAPES:
        p = problem(
            shape, channels, "bfloat16", kernel=kernel, residual=residual, activation="relu",
            bias=residual, **attrs,
        )  # fmt: skip
        if amx.fits(p) is not None:  # too few pixels are left
            continue
        given, constants = drawn(p)
        right = exact(p, given, constants)
        for config in ROW.configs(p):
            near(run(p, given, constants, config), right)
            ways.add(config["way"])
    assert ways, "no shape was taken"


# a block each, less than one each, two and eight in one block, several panels each
GROUPS = [(2, 64, 64), (3, 48, 72), (4, 64, 64), (32, 128, 128), (2, 64, 160)]


@pytest.mark.parametrize(("groups", "read", "made"), GROUPS)
def test_groups_beside_float64(groups: int, read: int, made: int) -> None:
    for window in ("1×1", "1×1, by two", "3×3", "3×3, by two", "2×3, askew"):
        kernel, attrs = WINDOWS[window]
        p = problem(
            (2, read, 13, 11),
            made,
            "bfloat16",
            kernel=kernel,
            groups=groups,
            residual=True,
            **attrs,
        )
        assert ROW.refusal(p) is None
        given, constants = drawn(p)
        for config in ROW.configs(p):
            near(run(p, given, constants, config), exact(p, given, constants))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_beside_float64(activation: str) -> None:
    for kernel in ((1, 1), (3, 3)):
        p = problem((1, 64, 9, 9), 48, "bfloat16", kernel=kernel, activation=activation)
        given, constants = drawn(p)
        for config in ROW.configs(p):
            near(run(p, given, constants, config), exact(p, given, constants))


def test_gelu_of_every_number() -> None:
    """Half a unit in the last place, and what the polynomial is off, infinities too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    p = problem((1, 32, 256, 256), 32, "bfloat16", bias=False, activation="gelu")
    weight = torch.zeros(32, 32, 1, 1, dtype=torch.bfloat16)
    weight[:, 0] = 1
    image = p.inputs[0].empty(CPU).zero_()
    image[0, 0] = x.reshape(256, 256)
    made = run(p, [image], {1: weight}, ROW.configs(p)[0])[0, 7].flatten()
    right = torch.nn.functional.gelu(x.double())
    right[x == -torch.inf] = 0
    assert torch.equal(made.isnan(), x.isnan())
    assert torch.equal(made.isinf(), x == torch.inf)
    some = x.isfinite()
    bound = 2**-8 * right.abs() + 1.4e-3 * right.abs().clamp(max=0.2) + 7e-5
    assert ((made.double() - right).abs() <= bound)[some].all()
    assert (made[x <= 0] <= 0).all()
    assert (made[x < -4.5] == 0).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", ["1×1", "3×3", "3×3, by two"])
def test_slices_and_threads(window: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing beside a slice is written, and no thread's part of the workspace by another."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    kernel, attrs = WINDOWS[window]
    p = problem((2, 64, 30, 29), 96, "bfloat16", kernel=kernel, residual=True, **attrs)
    given, constants = drawn(p)
    right = exact(p, given, constants)
    metas = [replace(m, shape=(2, 160, *m.shape[2:])) for m in (p.inputs[0], p.inputs[3], p.output)]
    image, added, made = (m.part(1, n) for m, n in zip(metas, (64, 96, 96), strict=True))
    sliced = replace(p, inputs=(image, *p.inputs[1:3], added), outputs=(made,))
    assert ROW.refusal(sliced) is None
    whole_x, whole_residual, whole = (m.empty(CPU).fill_(torch.nan) for m in metas)
    whole_x[:, 32:96], whole_residual[:, 64:] = given
    for config in ROW.configs(sliced):
        whole.fill_(3)
        call = amx.bind(sliced, constants, **config)
        scratch = torch.empty(ROW.workspace_bytes(sliced, config), dtype=torch.uint8)
        for _ in range(3):
            part = whole[:, 48:144].fill_(7)
            call(whole_x[:, 32:96], whole_residual[:, 64:], out=part, workspace=scratch)
            near(part, right)
        assert (whole[:, :48] == 3).all()
        assert (whole[:, 144:] == 3).all()


def test_an_infinite_pixel_reaches_those_results_that_see_it() -> None:
    for window, channels, width in (
        ("1×1", 32, 13), ("1×1", 24, 13), ("3×3", 24, 13), ("3×3, by two", 40, 13),
        ("3×3", 3, 32), ("7×7, by two", 3, 76),
    ):  # fmt: skip
        kernel, attrs = WINDOWS[window]
        p = problem((1, channels, 12, width), 32, "bfloat16", kernel=kernel, **attrs)
        (x,), constants = drawn(p)
        constants[1].abs_()
        x[0, :, 5, 12] = torch.inf
        for config in ROW.configs(p):
            made = run(p, [x], constants, config)
            assert torch.equal(made.isinf(), exact(p, [x], constants).isinf())
            assert not made.isnan().any()


@pytest.mark.parametrize("rows", [(32,), (197,), (3, 50)])
def test_linear_beside_float64(rows: tuple[int, ...]) -> None:
    linear = catalog.kernel("linear.amx_bf16")
    x, weight, bias = (
        TensorMeta(shape=s, dtype="bfloat16") for s in ((*rows, 96), (200, 96), (200,))
    )
    residual = replace(x, shape=(*rows, 200))
    p = problems.linear(x, weight, bias, residual, activation="gelu", constant=(1, 2))
    assert linear.refusal(p) is None
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(m.shape, generator=generator).bfloat16() for m in (x, weight, bias, residual)
    ]
    right = torch.nn.functional.gelu(
        torch.nn.functional.linear(*(t.double() for t in tensors[:3])) + tensors[3].double()
    )
    for config in linear.configs(p):
        call = linear.load().bind(p, {1: tensors[1], 2: tensors[2]}, **config)
        scratch = torch.empty(linear.workspace_bytes(p, config), dtype=torch.uint8)
        out = p.output.empty(CPU).fill_(torch.nan)
        near(call(tensors[0], tensors[3], out=out, workspace=scratch), right)


NAMES = ("image", "result", "residual", "weight", "bias", "places", "results")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("by", [-8, 1 << 26])
def test_a_table_that_leads_out_of_a_tensor_is_refused(
    name: str, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = amx.make_items

    def moved(*args: Any) -> Any:
        table = built(*args)
        table[0 if by < 0 else -1, NAMES.index(name)] += by
        return table

    monkeypatch.setattr(amx, "make_items", moved)
    for window in ("1×1", "3×3", "3×3, by two"):
        kernel, attrs = WINDOWS[window]
        p = problem((2, 64, 20, 20), 64, "bfloat16", kernel=kernel, residual=True, **attrs)
        _, constants = drawn(p)
        config = ROW.configs(p)[0]
        if name not in {0: NAMES[:5], 1: NAMES[:6], 2: NAMES}[config["way"]]:
            continue
        with pytest.raises(KernelError, match=f"would leave its {name}"):
            amx.bind(p, constants, **config)


@pytest.mark.parametrize("column", [8, 9, 10])
def test_more_rows_than_there_is_room_for_are_refused(
    column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, rows that the last one begins earlier, and pixels that are copied."""
    built = amx.make_items

    def longer(*args: Any) -> Any:
        table = built(*args)
        table[0, column] += 1000
        return table

    monkeypatch.setattr(amx, "make_items", longer)
    p = problem((1, 64, 20, 20), 64, "bfloat16", kernel=(3, 3), padding=(1, 1))
    with pytest.raises(KernelError, match="would leave its"):
        amx.bind(p, drawn(p)[1])


def test_what_a_plan_may_not_say() -> None:
    p = problem((1, 64, 20, 20), 64, "bfloat16", kernel=(3, 3), stride=(2, 2))
    (x,), constants = drawn(p)
    for config in ({"rows": 20, "way": 1}, {"rows": 1024, "way": 1}, {"rows": 64, "way": 0},
                   {"rows": 64, "way": 2}, {"rows": 64, "way": 7}):  # fmt: skip
        with pytest.raises(KernelError, match="no way"):
            amx.bind(p, constants, **config)
    short = torch.empty(ROW.workspace_bytes(p, {}) - 1, dtype=torch.uint8)
    with pytest.raises(KernelError, match="too small"):
        amx.bind(p, constants)(x, out=p.output.empty(CPU), workspace=short)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float32"}, "bfloat16"),
        ({"groups": 64}, "16 channels at least, 16 of the input"),
        ({"channels": 15}, "16 channels at least"),
        ({"shape": (1, 12, 9, 9)}, "16 of the input"),
        ({"shape": (1, 32, 5, 5)}, "32 pixels at least"),
        ({"gamma": 2.0}, "gamma"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], why: str) -> None:
    given = {"shape": (1, 64, 9, 9), "channels": 64, "dtype": "bfloat16", **changes}
    assert why in str(ROW.refusal(problem(**given)))


def test_what_a_filter_sees_far_away_is_not_copied_for_each_thread() -> None:
    """The dilated layers of a DeepLabV3 would copy 14 times as many rows as they have."""
    for shape, dilation in (
        ((1, 2048, 65, 65), 36),
        ((1, 2048, 33, 33), 18),
        ((1, 64, 1, 20000), 1),
    ):
        pad = (dilation, dilation)
        p = problem(shape, 256, "bfloat16", kernel=(3, 3), padding=pad, dilation=pad)
        assert ROW.refusal(p) is None
        for config in ROW.configs(p):
            assert ROW.workspace_bytes(p, config) < 20 * 2**20


@pytest.mark.parametrize(
    ("shape", "channels", "attrs", "rows", "needed"),
    [
        ((1, 1024, 14, 14), 256, {}, 256, 16_960),
        ((1, 64, 56, 56), 256, {}, 64, 67_648),
        ((1, 128, 56, 56), 128, WINDOWS["3×3, by two"][1] | {"kernel": (3, 3)}, 256, 2_376_256),
    ],
)
def test_plans_from_before_find_their_workspace_enough(
    shape: tuple[int, int, int, int], channels: int, attrs: dict[str, Any], rows: int, needed: int
) -> None:
    p = problem(shape, channels, "bfloat16", **attrs)
    config = ROW.configs(p)[0] | {"rows": rows}
    assert ROW.knows(p, config)
    assert config.pop("items")
    assert ROW.knows(p, config)
    assert config.pop("chunks")
    assert ROW.knows(p, config)
    assert not ROW.knows(p, config | {"chunks": 2})
    assert ROW.workspace_bytes(p, config) == needed < ROW.workspace_bytes(p, config | {"chunks": 1})
    given, constants = drawn(p)
    near(run(p, given, constants, config), exact(p, given, constants))


def test_batch_sizes_of_a_linear_layer_share_its_packed_weight() -> None:
    weight = torch.randn(64, 96).bfloat16()
    made = []
    for rows in (32, 64):
        x, w = (TensorMeta(shape=s, dtype="bfloat16") for s in ((rows, 96), (64, 96)))
        p = problems.linear(x, w, None, constant=(1,))
        call = catalog.kernel("linear.amx_bf16").load().bind(p, {1: weight})
        made.append(call.items._numbers[0][3])  # where the weight lies
    assert made[0] == made[1]
