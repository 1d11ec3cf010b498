"""Convolutions in machine code, beside float64: tiles and what is left of them, residuals."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.kernels.conv import x86_depthwise, x86_depthwise_rows, x86_sum
from tessella.kernels.shared import x86_convolution as x86
from tessella.kernels.shared import x86_tiles
from tessella.operations.epilogue import ACTIVATIONS
from tessella.search import find as search
from tests.support.instructions import isa as isa
from tests.support.problems.direct_convolutions import drawn, exact, problem

CPU = torch.device("cpu")
# float32: sums in another order; bfloat16: the result's rounding, and some of the sum's
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}


DEPTHWISE = {"_depthwise": x86_depthwise, "_depthwise_rows": x86_depthwise_rows}

pytestmark = pytest.mark.usefixtures("isa")


def row(suffix: str = "") -> catalog.Kernel:
    here = x86.code.instructions()
    assert here is not None
    return catalog.kernel(f"conv2d.{here.name}{suffix}")


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest, isa: InstructionSet) -> str:
    if request.param == "bfloat16" and not x86.code.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    return str(request.param)


def near(made: torch.Tensor, right: torch.Tensor) -> None:
    error = (made.double() - right).abs().max() / right.abs().max()
    assert error < TOLERANCES[str(made.dtype).removeprefix("torch.")]


# whole tiles, tiles and a rest, one rest alone, several panels, panels of one vector, panels and
# vectors that overlap
SHAPES = [
    ((2, 64, 12, 12), 64),
    ((1, 256, 7, 7), 320),
    ((3, 40, 5, 5), 48),
    ((1, 8, 5, 5), 16),
    ((2, 16, 1, 3), 64),
    ((2, 24, 9, 31), 112),
    ((1, 512, 14, 14), 128),
    ((8, 16, 28, 28), 96),
    ((2, 768, 5, 7), 48),
    ((1, 4, 9, 9), 32),
    ((2, 72, 7, 9), 24),
    ((1, 16, 6, 6), 17),
    ((2, 32, 5, 9), 72),
    ((1, 64, 4, 7), 1000),
]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation_from_very_small_to_very_large(
    activation: str, isa: InstructionSet
) -> None:
    """The image's first channel passes through, and numbers of every size stand in it."""
    p = problem((1, 16, 1, 4096), isa.lanes, activation=activation, bias=False)
    (x,), constants = drawn(p)
    generator = torch.Generator().manual_seed(1)
    exponents = torch.rand(4096, generator=generator) * 70 - 35
    x[0, 0, 0] = exponents.exp2() * torch.randn(4096, generator=generator).sign()
    x[0, 0, 0, :2048] = torch.linspace(-20, 20, 2048)
    x[0, 0, 0, 2048:2052] = torch.tensor([0.0, torch.inf, -1e30, 1e30])
    constants[1].zero_()[:, 0] = 1
    made = x86.bind(p, constants)(x, out=p.output.empty(CPU))[0, :, 0].double()
    right = ACTIVATIONS[activation](x[0, 0, 0].double()).expand_as(made)
    torch.testing.assert_close(made, right, rtol=3e-6, atol=2e-6)
    x[0, 0, 0, ::5] = torch.nan
    made = x86.bind(p, constants)(x, out=p.output.empty(CPU))
    assert torch.equal(made[0, :, 0].isnan(), x[0, 0, 0].isnan().expand(isa.lanes, -1))


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("shape", "channels"), SHAPES)
def test_beside_float64(
    shape: tuple[int, int, int, int], channels: int, residual: bool, activation: str, dtype: str
) -> None:
    p = problem(shape, channels, dtype, residual=residual, activation=activation)
    assert row().refusal(p) is None
    given, constants = drawn(p)
    right = exact(p, given, constants)
    for config in x86.configs(p):
        call = x86.bind(p, constants, **config)
        for _ in range(2):
            out = p.output.empty(CPU).fill_(torch.nan)
            assert call(*given, out=out) is out
            near(out, right)


WINDOWS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "3×3": ((3, 3), {"padding": (1, 1)}),
    "3×3, by two": ((3, 3), {"padding": (1, 1), "stride": (2, 2)}),
    "3×3, nothing beside": ((3, 3), {}),
    "1×1, by two": ((1, 1), {"stride": (2, 2)}),
    "1×7": ((1, 7), {"padding": (0, 3)}),
    "5×5, dilated": ((5, 5), {"padding": (4, 4), "dilation": (2, 2)}),
    "2×3, askew": ((2, 3), {"padding": (1, 2), "stride": (1, 3), "dilation": (3, 1)}),
    "far beside": ((3, 3), {"padding": (5, 5)}),
}


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_any_filter_beside_float64(window: str, residual: bool, dtype: str) -> None:
    kernel, attrs = WINDOWS[window]
    for shape, channels in SHAPES[2:7]:
        if min(shape[2:]) < 9:
            shape = (*shape[:2], 9, 10)
        p = problem(
            shape, channels, dtype, kernel=kernel, residual=residual, activation="relu", **attrs
        )
        assert row().refusal(p) is None
        given, constants = drawn(p)
        right = exact(p, given, constants)
        for config in x86.configs(p):
            out = p.output.empty(CPU).fill_(torch.nan)
            near(x86.bind(p, constants, **config)(*given, out=out), right)


# a vector each, several panels, panels that overlap, an odd number to read, some in one vector
GROUPS = [(4, 64, 64), (3, 96, 288), (5, 120, 120), (4, 20, 68), (32, 128, 128), (4, 12, 32)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("groups", "read", "made"), GROUPS)
def test_groups_beside_float64(
    groups: int, read: int, made: int, residual: bool, dtype: str
) -> None:
    for window in ("1×1, by two", "3×3, by two", "2×3, askew"):
        kernel, attrs = WINDOWS[window]
        shape = (2, read, 9, 11)
        p = problem(shape, made, dtype, kernel=kernel, groups=groups, residual=residual, **attrs)
        assert row().refusal(p) is None
        given, constants = drawn(p)
        for config in x86.configs(p):
            out = p.output.empty(CPU).fill_(torch.nan)
            near(x86.bind(p, constants, **config)(*given, out=out), exact(p, given, constants))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_few_channels_beside_float64(
    activation: str | None, dtype: str, isa: InstructionSet
) -> None:
    """1×1, whole and between other channels of a wider image, which stay."""
    for shape, channels in (
        ((2, 501, 1, 1), isa.lanes - 1),
        ((1, 32, 9, 31), 2),
        ((3, 3, 5, 1), 1),
    ):
        p = problem(shape, channels, dtype, activation=activation)
        (x,), constants = drawn(p)
        wide_x, wide_y = (
            replace(m, shape=(m.shape[0], m.shape[1] + 32, *m.shape[2:]))
            for m in (p["input"], p.output)
        )
        parts = wide_x.part(1, shape[1]), wide_y.part(1, channels)
        sliced = replace(p, inputs=(parts[0], *p.inputs[1:]), outputs=(parts[1],))
        image, made = wide_x.empty(CPU).fill_(torch.nan), wide_y.empty(CPU).fill_(3)
        image[:, 16:-16] = x
        for asked, given, out in (
            (p, x, p.output.empty(CPU)),
            (sliced, image[:, 16:-16], made[:, 16:-16]),
        ):
            assert row("_few").refusal(asked) is None
            row("_few").load().bind(asked, constants)(given, out=out)
            near(out, exact(p, [x], constants))
        assert (made[:, :16] == 3).all()
        assert (made[:, -16:] == 3).all()
    assert "1×1" in str(row("_few").refusal(problem((1, 8, 5, 5), 4, kernel=(3, 3))))


def test_any_number_of_channels_beside_float64(dtype: str) -> None:
    window = {"kernel": (7, 7), "stride": (2, 2), "padding": (3, 3)}
    for channels in (1, 2, 3, 5, 6, 7):
        p = problem((2, channels, 11, 12), 48, dtype, **window)
        given, constants = drawn(p)
        for config in x86.configs(p):
            out = p.output.empty(CPU).fill_(torch.nan)
            near(x86.bind(p, constants, **config)(*given, out=out), exact(p, given, constants))


def test_passes_over_some_channels_beside_float64() -> None:
    """The first begins with the bias, the last adds the residual and activates; one is between."""
    for channels, kernel in ((1536, (1, 1)), (512, (3, 3))):
        p = problem((1, channels, 7, 9), 192, kernel=kernel, residual=True, activation="gelu")
        given, constants = drawn(p)
        split = [
            config for config in x86.configs(p) if channels / config.get("depth", channels) > 2
        ]
        assert split
        for config in split:
            out = p.output.empty(CPU).fill_(torch.nan)
            near(x86.bind(p, constants, **config)(*given, out=out), exact(p, given, constants))


@pytest.mark.parametrize("activation", [None, "hardswish"])
@pytest.mark.parametrize("window", WINDOWS)
def test_depthwise_beside_float64(window: str, activation: str | None, dtype: str) -> None:
    kernel, attrs = WINDOWS[window]
    for shape in ((2, 64, 13, 11), (1, 112, 9, 10), (3, 16, 9, 9), (1, 72, 30, 17), (2, 19, 7, 8)):
        p = problem(
            shape, shape[1], dtype, kernel=kernel, groups=shape[1], activation=activation, **attrs
        )
        given, constants = drawn(p)
        right = exact(p, given, constants)
        for way, module in DEPTHWISE.items():
            assert row(way).refusal(p) is None
            for config in module.configs(p):
                out = p.output.empty(CPU).fill_(torch.nan)
                near(module.bind(p, constants, **config)(*given, out=out), right)


def test_depthwise_tiles_whose_ends_differ(dtype: str) -> None:
    attrs = {"kernel": (3, 5), "stride": (1, 2), "padding": (1, 7), "dilation": (2, 4)}
    p = problem((2, 32, 3, 150), 32, dtype, groups=32, **attrs)
    given, constants = drawn(p)
    for config in x86_depthwise_rows.configs(p):
        assert len(x86_depthwise_rows._tiles(p, **config)) > 2
        out = p.output.empty(CPU).fill_(torch.nan)
        made = x86_depthwise_rows.bind(p, constants, **config)(*given, out=out)
        near(made, exact(p, given, constants))


@pytest.mark.parametrize("threads", [2, 5])
def test_depthwise_threads_share_the_work(
    threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an image alone has too few pixels; a slice is read and written, nothing beside."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for pixels in (7, 20):
        p = problem((1, 96, pixels, pixels), 96, dtype, kernel=(5, 5), padding=(2, 2), groups=96)
        (x,), constants = drawn(p)
        whole_x, whole = (replace(m, shape=(1, 160, *m.shape[2:])) for m in (p.inputs[0], p.output))
        sliced = replace(
            p, inputs=(whole_x.part(1, 96), *p.inputs[1:]), outputs=(whole.part(1, 96),)
        )
        image, out = whole_x.empty(CPU).fill_(9), whole.empty(CPU).fill_(3)
        image[:, 32:128] = x
        for way, module in DEPTHWISE.items():
            assert row(way).refusal(sliced) is None
            out[:, 32:128] = torch.nan
            module.bind(sliced, constants)(image[:, 32:128], out=out[:, 32:128])
            near(out[:, 32:128], exact(p, [x], constants))
            assert (out[:, :32] == 3).all()
            assert (out[:, 128:] == 3).all()


@pytest.mark.parametrize("threads", [2, 5])
def test_torchs_threads_share_the_work(
    threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    p = problem((3, 32, 17, 19), 192, dtype, kernel=(3, 3), padding=(1, 1), residual=True)
    given, constants = drawn(p)
    call, right = x86.bind(p, constants), exact(p, given, constants)
    for _ in range(20):
        near(call(*given, out=p.output.empty(CPU).fill_(torch.nan)), right)


@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
def test_each_width_of_a_tile(vectors: int, dtype: str, isa: InstructionSet) -> None:
    if vectors not in x86_tiles.PIXELS[isa]:
        pytest.skip(f"{isa.name} has too few registers")
    p = problem((2, 32, 9, 11), 192, dtype, bias=False, residual=True)
    given, constants = drawn(p)
    out = x86.bind(p, constants, vectors=vectors)(*given, out=p.output.empty(CPU))
    near(out, exact(p, given, constants))


def test_a_sum_where_its_residual_lies(dtype: str) -> None:
    for shape, channels in SHAPES:
        p = problem(shape, channels, dtype, residual=True, activation="relu")
        assert row("_sum").refusal(p) == "the residual is needed afterwards"
        p = replace(p, dying=(3,))
        lanes = x86.code.require_instructions().lanes
        if channels % lanes:
            assert row("_sum").refusal(p) == f"channels by {lanes}"
            continue
        assert row("_sum").refusal(p) is None
        (x, residual), constants = drawn(p)
        right = exact(p, [x, residual], constants)
        made = x86_sum.bind(p, constants, **x86_sum.configs(p)[0])(x, residual)
        assert made is residual
        near(made, right)


def test_a_search_gives_a_sum_its_residual_back_before_it_looks() -> None:
    """What earlier calls have added to must not be taken for a wrong answer."""
    p = replace(problem((1, 64, 9, 9), 64, residual=True, activation="relu"), dying=(3,))
    constants = drawn(p)[1]
    options = search.SearchOptions(algorithms=[row("_sum").algorithm])
    best, *_ = search.find(p, constants, target="cpu", options=options)
    assert (best.kernel, best.refused) == (row("_sum").id, None)


def test_nothing_is_added_twice_where_panels_would_overlap(isa: InstructionSet) -> None:
    p = problem((1, 16, 6, 6), 5 * isa.lanes, residual=True)
    (x, residual), constants = drawn(p)
    with pytest.raises(KernelError, match="added twice"):
        x86_sum.bind(p, constants, vectors=2)(x, residual)
    with pytest.raises(KernelError, match="cannot wait"):
        x86.bind(p, constants, vectors=2, depth=8)


def test_slices_are_read_and_written_and_nothing_beside_them(dtype: str) -> None:
    p = problem((2, 32, 6, 7), 48, dtype, residual=True)
    (x, residual), constants = drawn(p)
    metas = [replace(m, shape=(2, 112, 6, 7)) for m in (p.inputs[0], p.inputs[3], p.output)]
    image, added, made = (m.part(1, n) for m, n in zip(metas, (32, 48, 48), strict=True))
    sliced = replace(p, inputs=(image, *p.inputs[1:3], added), outputs=(made,))
    assert row().refusal(sliced) is None
    whole_x, whole_residual, whole = (m.empty(CPU).fill_(3) for m in metas)
    whole_x[:, 80:] = x
    whole_residual[:, 16:64] = residual
    call = x86.bind(sliced, constants)
    call(whole_x[:, 80:], whole_residual[:, 16:64], out=whole[:, 48:96])
    near(whole[:, 48:96], exact(p, [x, residual], constants))
    assert (whole[:, :48] == 3).all()
    assert (whole[:, 96:] == 3).all()


def test_a_nan_reaches_its_pixel_and_no_other(dtype: str) -> None:
    p = problem((1, 16, 5, 5), 32, dtype, activation="relu")
    (x,), constants = drawn(p)
    x[0, 3, 2, 2] = torch.nan
    out = x86.bind(p, constants)(x, out=p.output.empty(CPU))
    found = out.isnan().any(1)[0]
    assert found[2, 2]
    assert found.sum() == 1


def test_no_work_at_all() -> None:
    assert row().refusal(problem((0, 16, 5, 5), 32)) == "nothing to make"


def test_threads_do_not_disturb_each_other() -> None:
    p = problem((2, 64, 14, 14), 128)
    calls = [x86.bind(p, drawn(p, seed)[1]) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        given, constants = drawn(p, seed)
        right = exact(p, given, constants)
        for _ in range(25):
            out = calls[seed](*given, out=p.output.empty(CPU))
            if (out.double() - right).abs().max() > 1e-4:
                wrong.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_what_it_leaves_to_others() -> None:
    gamma = problem((2, 16, 8, 8), 32, gamma=2.0)
    assert row().refusal(gamma) == "no scale, alpha, beta or gamma"
    for groups in (2, 16):  # of too few channels, and an odd number of them
        narrow = problem((2, 48, 8, 8), 3 * groups, groups=groups)
        assert "some together in a vector" in str(row().refusal(narrow))
    assert "channels at least" in str(row().refusal(problem((2, 16, 8, 8), 7)))
    plain = problem((2, 16, 8, 8), 32, residual=True)
    given = replace(plain, constant=(0, 1, 2))
    assert row().refusal(given) == "its input is a constant"
    apart = replace(plain.output, shape=(2, 48, 8, 8)).part(1, 32)
    summed = replace(plain, inputs=(*plain.inputs[:3], apart), dying=(3,))
    assert row("_sum").refusal(summed) == "the residual's pixels lie as the result's"
    wide = problem((2, 9, 8, 8), 32, "bfloat16")
    assert "input by 4 bytes" in str(x86.fits(wide)) or not x86.code.has_bfloat16()
