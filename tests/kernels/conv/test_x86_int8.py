"""Convolutions of int8 in machine code, bit for bit beside integers: sums, epilogues, tables."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella.core.errors import KernelError
from tessella.device.x86 import code
from tessella.device.x86.assembler import AVX2, InstructionSet
from tessella.kernels import catalog
from tessella.kernels.catalog import Kernel
from tessella.kernels.gemm.x86 import as_convolution
from tessella.kernels.shared import amx_int8, amx_window, x86_convolution, x86_int8
from tessella.operations import problems
from tessella.operations.epilogue import ACTIVATIONS
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.instructions import isa as isa
from tests.support.problems import direct_convolutions as convolutions

CPU = torch.device("cpu")
GUARD = 64  # bytes around the workspace
Drawn = tuple[list[torch.Tensor], dict[int, torch.Tensor]]


HERE = code.instructions()
FORMS = ("avx2_int8", "avx2_vnni_int8", "avx512_vnni_int8", "amx_int8")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The row of each form that this processor runs, which a wider one runs as if it was not."""
    row = catalog.kernel(f"conv2d.{request.param}")
    base = code.EXTENDED.get(str(row.isa), AVX2)
    if HERE is None or HERE.vector_bytes < base.vector_bytes:
        pytest.skip(f"this processor has no {base.name}")
    monkeypatch.setattr(code, "instructions", lambda: base)
    monkeypatch.setattr(catalog, "_known_configs", {})
    if (why := code.refusal(str(row.isa))) is not None:
        pytest.skip(why)
    return row


def problem(
    shape: tuple[int, int, int, int],
    channels: int,
    *,
    out: str = "int8",
    residual: bool = False,
    non_negative: bool = True,
    **attrs: Any,
) -> Problem:
    p = convolutions.problem(shape, channels, "int8", residual=residual, **attrs)
    x, weight, *_ = p.inputs
    vector, made = TensorMeta(shape=(channels,), dtype="float32"), replace(p.output, dtype=out)
    return replace(
        p,
        inputs=(x, weight, vector, made if residual else None, vector),
        outputs=(made,),
        constant=(1, 2, 4),
        attrs={**p.attrs, "dtype": out, "non_negative": non_negative},
    )


def drawn(p: Problem, largest: int = 64) -> Drawn:
    """The image and perhaps the residual over their whole range, and weights like a network's."""
    generator = torch.Generator().manual_seed(0)

    def image(meta: TensorMeta, least: int) -> torch.Tensor:
        numbers = torch.randint(least, 128, meta.shape, generator=generator)
        return meta.empty(CPU).copy_(numbers)

    given = [image(p["input"], 0 if p.attr("non_negative") else -128)]
    if p.epilogue.residual is not None:
        given.append(image(p.epilogue.residual, -128))
    shape = p["weight"].shape
    weight = torch.randn(shape, generator=generator).mul(largest / 3.5).round()
    scale = torch.rand(shape[0], generator=generator) / (4 * largest * weight[0].numel() ** 0.5)
    bias = 20 * torch.randn(shape[0], generator=generator)
    return given, {1: weight.clamp(-largest, largest).to(torch.int8), 2: bias, 4: scale}


def right(p: Problem, given: list[torch.Tensor], constants: dict[int, torch.Tensor]) -> Any:
    """Exact sums; then float32, one operation after another."""
    window = [p.attrs[name] for name in ("stride", "padding", "dilation")]
    sums = torch.conv2d(given[0].double(), constants[1].double(), None, *window)
    assert sums.abs().max() < 2**24  # float32 holds them
    scale, bias = (constants[i].view(1, -1, 1, 1) for i in (4, 2))
    y = sums.float() * (scale * p.epilogue.alpha) + bias
    if len(given) > 1 and p.epilogue.beta:
        y = y + given[1].float() * p.epilogue.beta
    if p.epilogue.activation is not None:
        y = ACTIVATIONS[p.epilogue.activation](y)
    y = y * p.epilogue.gamma
    return y if p.output.dtype == "float32" else y.round().clamp(-128, 127).to(torch.int8)


def run(
    row: Kernel,
    p: Problem,
    given: list[torch.Tensor],
    constants: dict[int, torch.Tensor],
    **config: int,
) -> torch.Tensor:
    """Its answer, in a workspace that holds numbers and beside which nothing is written."""
    out = p.output.empty(CPU).fill_(77)
    whole = torch.full((row.workspace_bytes(p, config) + 2 * GUARD,), 85, dtype=torch.uint8)
    call = row.load().bind(p, constants, **config)
    assert call(*given, out=out, workspace=whole[GUARD:-GUARD]) is out
    assert (whole[:GUARD] == 85).all()
    assert (whole[-GUARD:] == 85).all()
    return out


# whole tiles, tiles and a rest, a rest alone, panels that overlap, words that make no whole chain
SHAPES: list[tuple[tuple[int, int, int, int], int, dict[str, Any]]] = [
    ((1, 64, 9, 9), 64, {}),
    ((2, 12, 7, 9), 37, {"kernel": (3, 3), "padding": (1, 1)}),
    ((1, 20, 13, 11), 8, {"kernel": (5, 3), "padding": (2, 0), "stride": (2, 2)}),
    ((3, 256, 7, 7), 24, {"kernel": (3, 3), "padding": (2, 2), "dilation": (2, 2)}),
    ((1, 4, 1, 1), 1003, {}),
    ((1, 76, 11, 31), 530, {"stride": (1, 2)}),
    ((1, 1216, 7, 9), 32, {}),
    ((2, 4, 23, 21), 24, {"kernel": (7, 7), "padding": (3, 3), "stride": (2, 2)}),
    ((1, 16, 6, 7), 16, {"kernel": (3, 4), "padding": (5, 2)}),  # 64 bits, lines far outside
    # of AMX: tiles in lines, in every second line, half a line each, of another's copy
    ((2, 64, 14, 14), 33, {"kernel": (3, 3), "padding": (1, 1)}),
    ((1, 64, 28, 28), 32, {"stride": (2, 2)}),
    ((1, 64, 5, 56), 64, {"kernel": (3, 3), "padding": (1, 1)}),
    ((1, 64, 12, 32), 32, {"kernel": (3, 5), "padding": (2, 2), "dilation": (2, 1)}),
]


@pytest.mark.parametrize("non_negative", [True, False])
@pytest.mark.parametrize(("shape", "channels", "window"), SHAPES)
def test_bit_for_bit(
    shape: tuple[int, int, int, int],
    channels: int,
    window: dict[str, Any],
    non_negative: bool,
    form: Kernel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(amx_window, "WINDOW_BYTES", 2**15)  # some lines at a time
    channels = max(channels, code.require_instructions().lanes)
    for out, residual, activation in (
        ("int8", False, "relu"), ("int8", True, None), ("float32", True, "relu"),
    ):  # fmt: skip
        p = problem(
            shape, channels, out=out, residual=residual, activation=activation, beta=0.9,
            non_negative=non_negative, **window,
        )  # fmt: skip
        assert form.refusal(p) is None
        given, constants = drawn(p)
        for config in form.configs(p):
            assert torch.equal(run(form, p, given, constants, **config), right(p, given, constants))


@pytest.mark.parametrize("largest", [1, 9, 30, 64, 127])
def test_sums_never_leave_their_bits(largest: int, form: Kernel) -> None:
    """All weights of a channel are the largest or the least there is, and so are the numbers."""
    words = x86_int8._chain(torch.full((16, 64, 1, 1), largest, dtype=torch.int8), signed=False)
    assert words == min(8, 32767 // (2 * 127 * largest))
    p = problem((1, 64, 3, 5), 16, kernel=(3, 3), out="float32")
    given, constants = drawn(p)
    given[0].fill_(127)
    constants[1].fill_(largest)
    constants[1][::2] = -largest - (largest == 127)
    for config in form.configs(p):
        assert torch.equal(run(form, p, given, constants, **config), right(p, given, constants))


def test_weights_that_leave_16_bits_are_refused(form: Kernel) -> None:
    if form.algorithm != "avx2_int8":
        pytest.skip("adds in 32 bits")
    p = problem((1, 16, 3, 5), 16, non_negative=False)
    given, constants = drawn(p, 127)
    constants[1][3, 4:6] = 65  # 2 · 65 · 255 is more than 32767
    with pytest.raises(KernelError, match="leave 16 bits"):
        form.load().bind(p, constants)
    marked = replace(p, attrs={**p.attrs, "wide_sums": True})
    assert "leave 16 bits" in (form.refusal(marked) or "")
    constants[1] = constants[1].clamp(-64, 64)
    assert torch.equal(run(form, p, given, constants), right(p, given, constants))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_each_epilogue(activation: str | None, form: Kernel) -> None:
    """Transcendental ones to a rounding: theirs are polynomials."""
    for out in ("int8", "float32"):
        p = problem(
            (1, 32, 5, 7), 32, out=out, residual=True, activation=activation, alpha=0.5,
            gamma=1.75, beta=-1.0,
        )  # fmt: skip
        given, constants = drawn(p)
        constants[4] *= 8
        wanted = right(p, given, constants).double()
        for config in form.configs(p):
            error = (run(form, p, given, constants, **config).double() - wanted).abs().max()
            assert error <= (1 if out == "int8" else 1e-5 * wanted.abs().max())


@pytest.mark.parametrize("channels", [8, 43, 64])
def test_a_first_layer_in_float32_rounds_its_result(channels: int, isa: InstructionSet) -> None:
    channels = max(channels, isa.lanes)
    p = convolutions.problem(
        (2, 3, 15, 17), channels, kernel=(7, 7), stride=(2, 2), padding=(3, 3), activation="relu"
    )  # fmt: skip
    given, constants = convolutions.drawn(p)
    y = convolutions.exact(p, given, constants) * 30.5
    attrs = {**p.attrs, "dtype": "int8", "gamma": 30.5}
    p = replace(p, outputs=(replace(p.output, dtype="int8"),), attrs=attrs)
    assert catalog.kernel(f"conv2d.{isa.name}").refusal(p) is None
    assert y.max() > 128
    for config in x86_convolution.configs(p):
        out = p.output.empty(CPU).fill_(77)
        x86_convolution.bind(p, constants, **config)(*given, out=out)
        error = (out.double() - y.clamp(-128, 127)).abs().max()
        assert error < 0.5001  # half a step, and float32's own error


def test_what_no_int8_holds_saturates(form: Kernel) -> None:
    p = problem((1, 16, 1, 3), 16)
    given, constants = drawn(p)
    constants[2][:6] = torch.tensor([3e9, -3e9, torch.inf, -torch.inf, 127.5, -128.5])
    assert torch.equal(run(form, p, given, constants), right(p, given, constants))


@pytest.mark.parametrize("threads", [1, 5])
def test_slices_and_threads(threads: int, form: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing beside a slice is written, whoever writes it."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    p = problem((2, 32, 20, 19), 40, kernel=(3, 3), padding=(1, 1), residual=True)
    given, constants = drawn(p)
    metas = [replace(m, shape=(2, 112, *m.shape[2:])) for m in (p.inputs[0], p.inputs[3], p.output)]
    image, added, made = (m.part(1, n) for m, n in zip(metas, (32, 40, 40), strict=True))
    sliced = replace(p, inputs=(image, *p.inputs[1:3], added, p.inputs[4]), outputs=(made,))
    assert form.refusal(sliced) is None
    whole_x, whole_residual, whole = (m.empty(CPU).fill_(3) for m in metas)
    whole_x[:, 80:], whole_residual[:, 16:56] = given
    for config in form.configs(sliced):
        call = form.load().bind(sliced, constants, **config)
        scratch = torch.empty(form.workspace_bytes(sliced, config), dtype=torch.uint8)
        part = whole[:, 48:88].fill_(7)
        call(whole_x[:, 80:], whole_residual[:, 16:56], out=part, workspace=scratch)
        assert torch.equal(whole[:, 48:88], right(p, given, constants))
    assert (whole[:, :48] == 3).all()
    assert (whole[:, 88:] == 3).all()


@pytest.mark.parametrize("name", ["image", "result", "residual", "weight", "bias", "places"])
@pytest.mark.parametrize("by", [-8, 1 << 20])
def test_a_table_that_leads_out_of_a_tensor_is_refused(
    name: str, by: int, form: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ("image", "result", "residual", "weight", "bias", "places")
    tiles = form.load()._Tiles if form.algorithm == "amx_int8" else x86_int8._Tiles
    built = tiles._items

    def moved(self: Any, *args: Any) -> Any:
        table = built(self, *args)
        table[0 if by < 0 else -1, columns.index(name)] += by
        return table

    monkeypatch.setattr(tiles, "_items", moved)
    p = problem((1, 16, 8, 8), 32, residual=True)
    with pytest.raises(KernelError, match=f"would leave its {name}"):
        form.load().bind(p, drawn(p)[1])


@pytest.mark.parametrize(("column", "by"), [(6, 1), (6, -1), (8, 1), (8, -8)])
def test_items_whose_copy_is_not_that_of_their_blocks_are_refused(
    column: int, by: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "instructions", lambda: HERE)  # whatever was narrowed before
    if (why := code.refusal("amx_int8")) is not None:
        pytest.skip(why)
    built = amx_int8._Tiles._items

    def moved(self: Any, *args: Any) -> Any:
        table = built(self, *args)
        table[0, column] += by
        return table

    monkeypatch.setattr(amx_int8._Tiles, "_items", moved)
    for width in (40, 7):  # of lines, and of pixels that are copied one by one
        p = problem((1, 16, 8, width), 32, kernel=(3, 3), padding=(1, 1))
        with pytest.raises(KernelError, match="would leave its"):
            amx_int8.bind(p, drawn(p)[1])


@pytest.mark.parametrize(
    "config", [{"vectors": 1, "pixels": 50}, {"vectors": 3, "pixels": 4}, {"depth": 4}]
)
def test_tiles_that_a_stranger_names_are_refused(config: dict[str, int], form: Kernel) -> None:
    p = problem((1, 16, 8, 8), 32)
    with pytest.raises(KernelError, match="no such tile"):
        form.load().bind(p, drawn(p)[1], **config)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"groups": 2}, "one group"),
        ({"channels": 7}, "channels at least"),
        ({"shape": (0, 16, 9, 9)}, "nothing to make"),
        ({"out": "float16"}, "makes int8 or float32"),
        ({"shape": (1, 8192, 3, 3), "kernel": (3, 3)}, "at most 65536 products"),
    ],
)
def test_what_it_leaves_to_others(changes: dict[str, Any], why: str, form: Kernel) -> None:
    given = {"shape": (1, 32, 9, 9), "channels": 32, **changes}
    assert why in str(form.refusal(problem(**given)))


@pytest.mark.parametrize(
    ("shape", "kernel", "why"),
    [
        ((1, 1024, 9, 9), (3, 3), "a part of the workspace"),
        ((1, 4, 60, 60), (23, 23), "at most 512"),
    ],
)
def test_what_amx_would_copy_too_much_of(
    shape: tuple[int, int, int, int], kernel: tuple[int, int], why: str, form: Kernel
) -> None:
    refused = form.refusal(problem(shape, 32, kernel=kernel, dilation=(1, 2)))
    assert why in str(refused) if form.algorithm == "amx_int8" else refused is None


def test_words_of_four_channels(form: Kernel) -> None:
    window = {"kernel": (7, 7), "padding": (3, 3), "stride": (2, 2)}
    for shape, channels in (((2, 3, 23, 21), 70), ((1, 18, 9, 9), 20)):
        p = problem(shape, channels, **window)
        if form.algorithm != "amx_int8":
            assert "input by 4" in str(form.refusal(p))
            continue
        assert form.refusal(p) is None
        given, constants = drawn(p)
        assert torch.equal(run(form, p, given, constants), right(p, given, constants))


@pytest.mark.parametrize("rows", [(1,), (3, 7)])
def test_linear_bit_for_bit(rows: tuple[int, ...], form: Kernel) -> None:
    x, weight = (TensorMeta(shape=shape, dtype="int8") for shape in ((*rows, 72), (50, 72)))
    vector = TensorMeta(shape=(50,), dtype="float32")
    p = problems.linear(x, weight, vector, None, vector, out_dtype="float32", constant=(1, 2, 4))
    p = replace(p, attrs={**p.attrs, "dtype": "float32", "non_negative": True})
    row = catalog.kernel(f"linear.{form.algorithm}")
    assert row.refusal(p) is None
    as_image = as_convolution(p)
    (image,), constants = drawn(as_image)
    wanted = right(as_image, [image], constants)
    given = {**constants, 1: constants[1][:, :, 0, 0].contiguous()}
    made = image.permute(0, 2, 3, 1).reshape(*rows, 72)
    for config in row.configs(p):
        scratch = torch.empty(row.workspace_bytes(p, config), dtype=torch.uint8)
        call, y = row.load().bind(p, given, **config), torch.empty(*rows, 50)
        out = call(made, out=y, workspace=scratch)
        assert torch.equal(out.reshape(-1, 50), wanted[0, :, 0].t())


def main() -> None:
    """Run layers whose copies are larger than a thread's stack of 128 KB, by two threads."""
    torch.set_num_threads(2)
    row = catalog.kernel("conv2d.amx_int8")
    # lines that are copied, and what each pixel reads
    for shape, channels in (((8, 64, 20, 64), 64), ((8, 256, 12, 7), 128)):
        p = problem(shape, channels, kernel=(3, 3), padding=(1, 1))
        given, constants = drawn(p)
        wanted = right(p, given, constants)
        for _ in range(8):
            assert torch.equal(run(row, p, given, constants), wanted)
    print("ran")


def test_copies_need_no_large_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "instructions", lambda: HERE)  # whatever was narrowed before
    if (why := code.refusal("amx_int8")) is not None:
        pytest.skip(why)
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_STACKSIZE": "128k"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "ran\n", (ran.returncode, ran.stderr[-1500:])


if __name__ == "__main__":
    main()
