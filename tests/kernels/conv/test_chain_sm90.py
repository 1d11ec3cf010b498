"""Two 1 × 1 convolutions in one kernel, without a GPU: roles, refusals, machine code."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import UsageError
from tessella.kernels.conv.hopper import chain as kernel
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators import gluon_roles
from tests.support.kernels.compile_only import compile_all
from tests.support.problems.chains import Tensors, exact, operands_of, problem_of

CPU = torch.device("cpu")


# ResNet-50 and others: name → channels, size
SHAPES: dict[str, tuple[tuple[int, int, int], int]] = {
    "resnet50@56": ((64, 256, 64), 56),
    "resnet50@56 to 28": ((64, 256, 128), 56),
    "resnet50@28": ((128, 512, 128), 28),
    "resnet50@14": ((256, 1024, 256), 14),
    "wide": ((128, 256, 128), 56),
    "few channels": ((32, 96, 16), 19),
    "one pixel": ((64, 64, 64), 1),
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "multiplies"),
        ({"channels": (12, 64, 64)}, "12 channels"),
        ({"dtype": "int8", "channels": (64, 72, 64)}, "72 channels"),
        ({"channels": (64, 256, 512)}, "512 channels do not fit registers"),
        ({"channels": (2048, 256, 256)}, "do not fit shared memory"),
        ({"constant": (1,)}, None),  # biases may come from anywhere
        ({"constant": (2,)}, "must be constant"),
        ({"format": "contiguous"}, "channels_last"),
        ({"N": 0}, "empty"),
        ({"N": 2**15, "size": (32, 32)}, "2^31"),
    ],
)
def test_refuses_what_it_cannot_do(change: dict[str, Any], reason: str | None) -> None:
    refused = kernel.fits(problem_of(**change))
    assert (refused is None) if reason is None else reason in str(refused)


def test_refuses_results_of_another_type() -> None:
    problem = problem_of("int8")
    wider = replace(problem.outputs[0], dtype="float16")
    assert "must be int8" in str(kernel.fits(replace(problem, outputs=(wider, problem.outputs[1]))))
    attrs = {**problem.attrs, "dtype": "float32"}
    assert "must be int8" in str(kernel.fits(replace(problem, attrs=attrs)))


@pytest.mark.parametrize("dtype", kernel.TYPES)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("N", [1, 128])
def test_configurations_fit_the_multiprocessor(name: str, dtype: str, N: int) -> None:
    channels, size = SHAPES[name]
    problem = problem_of(dtype, channels, N=N, size=(size, size))
    assert kernel.fits(problem) is None
    configs, shape = kernel.configs(problem), kernel.shape_of(problem)
    assert 1 <= len(configs) <= kernel.MAX_CONFIGS
    assert len({repr(c) for c in configs}) == len(configs)
    for config in configs:
        assert kernel.shared_bytes(shape, config) <= kernel.SHARED_BYTES
        assert 3 <= config["slots"] <= kernel.MOST_SLOTS
        chunks = math.ceil(shape.between / config["chunk"])
        assert config["stages"] == chunks if config["resident"] else config["stages"] < chunks


def test_no_chain_of_other_convolutions() -> None:
    x, wide = (TensorMeta(shape=(1, c, 8, 8), dtype="float16") for c in (16, 32))
    up, down, three = (
        TensorMeta(shape=s, dtype="float16")
        for s in ((32, 16, 1, 1), (16, 32, 1, 1), (16, 32, 3, 3))
    )
    first, second = problems.conv(x, up), problems.conv(wide, down)
    assert problems.unchainable(first, second) is None
    for other, why in (
        (problems.conv(wide, three), "1×1"),
        (problems.conv(wide, down, stride=2), "stride"),
        (problems.conv(wide, down, alpha=0.5), "alpha"),
        (problems.conv(wide, down, None, x), "residual"),
        (problems.conv(x, up), "reads"),
    ):
        assert why in str(problems.unchainable(first, other))
        with pytest.raises(UsageError, match=why):
            problems.conv2d_chain(first, other)


# ------------------------------------------------------------------ roles


def ran(
    problem: Problem, operands: Tensors, monkeypatch: pytest.MonkeyPatch, seed: int, **config: Any
) -> tuple[torch.Tensor, ...]:
    """The kernel's roles in turns, on two multiprocessors."""
    monkeypatch.setattr(kernel, "launch", functools.partial(gluon_roles.run, seed=seed))
    monkeypatch.setattr(kernel, "multiprocessors", lambda: 2)
    rest = {i: t for i, t in operands.items() if i not in problem.constant}
    constants = {i: operands[i] for i in problem.constant}
    made = kernel.bind(problem, constants, **config)(*rest.values())
    return made if isinstance(made, tuple) else (made,)


STRUCTURES = [  # groups, buffers, stages, slots, resident; 192 channels or fewer between
    (1, 1, 3, 3, True),
    (1, 2, 2, 4, False),
    (2, 1, 2, 3, False),
    (2, 2, 3, 5, True),
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("keep", [True, False])
def test_roles_in_any_order_make_the_chain(
    structure: tuple[Any, ...], residual: bool, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles that end past the last pixel, chunks past the last channel, several tiles a block."""
    names = ("groups", "buffers", "stages", "slots", "resident")
    config = dict(zip(names, structure, strict=True), chunk=64)
    dtype = "float16" if residual and keep else "int8"
    for seed in range(3):
        problem = problem_of(
            dtype, (32, 176, 80), N=3, size=(7, 9), residual=residual, keep=keep,
            beta=0.5 if residual else 1.0,
        )  # fmt: skip
        operands = operands_of(problem, seed)
        made = ran(problem, operands, monkeypatch, seed, **config)
        for one, right in zip(made, exact(problem, operands), strict=True):
            if dtype == "int8":
                assert torch.equal(one.double(), right)
            else:
                assert (one.double() - right).abs().max() <= 2e-3 * right.abs().max()


def test_a_residual_that_counts_for_nothing_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("float16", (32, 64, 64), N=1, size=(8, 8), beta=0.0)
    operands = operands_of(problem, 0)
    right = exact(problem, operands)
    operands[3].fill_(torch.nan)
    made = ran(problem, operands, monkeypatch, 0, **kernel.configs(problem)[0])
    for one, wanted in zip(made, right, strict=True):
        assert (one.double() - wanted).abs().max() <= 2e-3 * wanted.abs().max()


def test_each_piece_of_a_wide_result_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pieces, all on their way out at once, of several tiles a block."""
    problem = problem_of("float16", (32, 64, 256), N=1, size=(16, 16))
    operands = operands_of(problem, 0)
    made = ran(problem, operands, monkeypatch, 0, **kernel.configs(problem)[0])
    for one, right in zip(made, exact(problem, operands), strict=True):
        assert (one.double() - right).abs().max() <= 2e-3 * right.abs().max()


def test_the_play_shows_who_waits_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is freed two uses late: with only one of them its next residual never comes."""
    problem = problem_of("int8", (32, 128, 64), N=1, size=(8, 8))
    config = {"groups": 1, "buffers": 1, "stages": 2, "slots": 1, "resident": True, "chunk": 64}
    with pytest.raises(gluon_roles.Deadlock):
        ran(problem, operands_of(problem, 0), monkeypatch, 0, **config)


def test_rows_of_int8_weights_are_spread() -> None:
    """Sum 8 j + q of every 64 belongs to output channel j + 8 q."""
    weight = torch.arange(80, dtype=torch.int8).view(80, 1, 1, 1).expand(80, 16, 1, 1)
    rows = kernel._rows_of_weight(weight)
    assert rows.shape == (128, 16)
    column = torch.arange(64)
    channel = column // 8 + 8 * (column % 8)
    assert torch.equal(rows[:64, 0].long(), channel)
    assert torch.equal(rows[64:, 0].long(), torch.where(channel < 16, 64 + channel, 0))


# ------------------------------------------------------------------ machine code


def compiled_problems() -> dict[str, Problem]:
    sized = {name: (channels, (size, size)) for name, (channels, size) in SHAPES.items()}
    found = {}
    for dtype, name, residual, keep in (
        ("float16", "resnet50@56", True, True),
        ("bfloat16", "resnet50@14", True, True),
        ("float16", "few channels", False, False),
        ("int8", "resnet50@28", True, True),
    ):
        channels, size = sized[name]
        found[f"{dtype} {name}"] = problem_of(
            dtype, channels, N=128, size=size, residual=residual, keep=keep,
            beta=0.5 if residual and dtype == "int8" else 1.0,
        )  # fmt: skip
    return found


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, problem in compiled_problems().items():
        yield name, functools.partial(_run, problem, kernel.configs(problem)[0])


def _run(problem: Problem, config: dict[str, Any]) -> None:
    operands = {i: meta.empty(CPU) for i, meta in enumerate(problem.inputs) if meta is not None}
    constants = {i: operands.pop(i) for i in problem.constant}
    kernel.bind(problem, constants, **config)(*operands.values())


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.conv.test_chain_sm90:cases")


@pytest.mark.parametrize("name", compiled_problems())
def test_compiles_to_two_products_fed_by_tma(
    name: str, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    problem = compiled_problems()[name]
    config, shape = kernel.configs(problem)[0], kernel.shape_of(problem)
    (made,) = compiled[name]
    # of three groups' 160 registers newer Tritons want one or two more
    assert made["spilled_bytes"] <= (16 if config["groups"] == 3 else 0)
    assert made["shared_bytes"] <= 227 * 1024
    assert made["threads"] == 128 * (config["groups"] + 1)
    groups, chunk, eight_bits = config["groups"], config["chunk"], shape.itemsize == 1
    slabs = math.ceil(shape.wide_in * shape.itemsize / 128)  # a bulk copy moves 128 bytes a row
    opcodes = made["opcodes"]
    residual = problem.meta(3) is not None
    assert opcodes["UTMALDG"] == groups * slabs + slabs + 1 + groups * residual
    pieces = max(1, shape.wide_out // kernel.PIECE)
    assert opcodes["UTMASTG"] == groups * (pieces + problem.attrs["keep"])
    depth = 32 // shape.itemsize
    widest = 128 if eight_bits else 256
    products = shape.wide_in // depth * max(1, chunk // widest)
    products += chunk // depth * max(1, shape.wide_out // widest)
    assert opcodes["IGMMA" if eight_bits else "HGMMA"] == groups * products
