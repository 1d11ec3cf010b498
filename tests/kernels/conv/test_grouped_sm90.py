"""The Hopper convolution of several groups, without a GPU: weights, tiles, roles, machine code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.device import packing
from tessella.kernels import catalog
from tessella.kernels.conv.hopper import grouped, walk_device
from tessella.kernels.conv.hopper import implicit_gemm as kernel
from tessella.kernels.conv.hopper import implicit_gemm_tiles as tiles
from tests.support.emulators import gluon_roles
from tests.support.kernels.compile_only import compile_all
from tests.support.problems import convolutions
from tests.support.problems.convolutions import Case

ROW = catalog.kernel("conv2d.implicit_gemm.sm90")
CPU = torch.device("cpu")
LAST = "channels_last"


def case_of(
    groups: int,
    group_c: int,
    group_k: int | None = None,
    *,
    N: int = 2,
    size: tuple[int, int] = (7, 11),
    taps: tuple[int, int] = (3, 3),
    **more: Any,
) -> Case:
    group_k = group_k or group_c
    return Case(
        x=(N, groups * group_c, *size), w=(groups * group_k, group_c, *taps), groups=groups,
        x_format=LAST, w_format=LAST,
        **{"padding": 1, "dtype": "float16", "out": "float32", **more},
    )  # fmt: skip


# groups, input and output channels of each
GROUPS = [(16, 4, 4), (5, 8, 8), (3, 16, 16), (3, 40, 40), (4, 20, 20), (2, 64, 64), (2, 112, 112),
          (4, 8, 4), (4, 4, 24), (3, 48, 8), (1, 40, 40)]  # fmt: skip


@pytest.mark.parametrize(("groups", "group_c", "group_k"), GROUPS)
@pytest.mark.parametrize("tile_k", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("unit", [4, 8, 16])
def test_a_tile_reads_its_groups(
    groups: int, group_c: int, group_k: int, tile_k: int, unit: int
) -> None:
    """What is packed, from the first channel of each row's tile on, is the dense weight."""
    K, C = groups * group_k, groups * group_c
    weight = torch.randn(K, group_c, 3, 2)
    dense = torch.zeros(K, C, 3, 2)
    for group in range(groups):
        rows = slice(group * group_k, (group + 1) * group_k)
        dense[rows, group * group_c : (group + 1) * group_c] = weight[rows]
    reach = grouped.reach(groups, group_k, group_c, tile_k, unit)
    assert reach <= C
    made = grouped.pack(weight, groups, tile_k, reach, unit)
    assert made.is_contiguous(memory_format=torch.channels_last)
    widths = (group_k, group_c) if groups > 1 else (None, None)
    nonzero = 0
    for tile in range(0, len(made), tile_k):
        first = gluon_roles.call(walk_device.first_channel, tile, *widths, unit)
        assert first % unit == 0
        right = torch.nn.functional.pad(dense, (0, 0, 0, 0, 0, reach))[
            tile : tile + tile_k, first : first + reach
        ]
        assert torch.equal(made[tile : tile + len(right)], right)
        assert not made[tile + len(right) : tile + tile_k].any()
        nonzero += int(right.count_nonzero())
    assert nonzero == int(weight.count_nonzero())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
def test_packing_keeps_every_type(dtype: torch.dtype) -> None:
    weight = torch.randn(32, 4, 3, 3).mul(9).to(dtype)
    made = grouped.pack(weight, 8, 64, 32, 8)
    assert made.dtype == dtype
    assert torch.equal(made[4:8, 4:8].float(), weight[4:8].float())
    assert not made[4:8, :4].float().any()


def test_a_weight_is_packed_once_for_each_width_of_tiles() -> None:
    case = case_of(16, 4)
    weight = torch.randn(case.w, dtype=torch.float16)
    for tile_k in (32, 64, 64):
        config = {**CONFIG, "tile_k": tile_k}
        kernel.bind(case.problem, {1: weight}, **config)
    assert len(packing._packed[weight]) == 2


@pytest.mark.parametrize(("changes", "reason"), [
    ({"constant": False}, "a constant"),
    ({"groups": 32, "w": (32, 1, 3, 3)}, "one channel"),
    ({"x": (1, 36, 7, 7), "w": (36, 4, 3, 3), "groups": 9}, "C = 36"),
    ({"stride": 3}, "strides of 1 and 2"),
])  # fmt: skip
def test_refuses_what_it_cannot_do(changes: dict[str, Any], reason: str) -> None:
    case = case_of(8, 4)
    assert kernel.fits(case.problem) is None
    assert reason in str(kernel.fits(replace(case, **changes).problem))


# ResNeXt-50's 3×3 layers, RegNet's, and one in wide groups
LAYERS: dict[str, Case] = {
    "4 channels": case_of(32, 4, N=128, size=(56, 56), out="float16"),
    "8 channels, stride 2": case_of(32, 8, N=128, size=(56, 56), stride=2, out="float16"),
    "8 channels": case_of(32, 8, N=128, size=(28, 28), out="float16"),
    "16 channels": case_of(32, 16, N=128, size=(14, 14), out="float16"),
    "32 channels": case_of(32, 32, N=128, size=(7, 7), out="float16"),
    "24 channels": case_of(10, 24, N=32, size=(28, 28), out="float16"),
    "40 channels": case_of(14, 40, N=32, size=(14, 14), out="float16"),
    "112 channels": case_of(8, 112, N=32, size=(14, 14), out="float16"),
    "128 channels": case_of(2, 128, N=32, size=(14, 14), out="float16"),
    "one image": case_of(32, 32, N=1, size=(7, 7), out="float16"),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn"])
def test_configurations_are_proposed(name: str, dtype: str) -> None:
    problem = replace(LAYERS[name], dtype=dtype, out=dtype).problem
    assert kernel.fits(problem) is None
    configs, shape = kernel.configs(problem), tiles.shape_of(problem)
    assert configs
    for config in configs:
        read = tiles.channels_read(shape, config["tile_k"])
        assert config["tile_c"] < 2 * max(read, 32 // shape.itemsize)
        assert config["splits"] == 1 or name == "one image"
        pixels = config["tile_n"] * config["tile_h"] * config["tile_w"]
        slot = pixels * config["tile_k"] * (4 if config["splits"] > 1 else shape.out_itemsize)
        held = tiles.round_up(read, config["tile_c"]) * 9 * config["tile_k"] * shape.itemsize
        rows = (config["tile_h"] + config["taps"] - 1) * config["tile_n"] * config["tile_w"]
        rows += 0 if "held" in config else config["taps"] * config["tile_k"]
        nbytes = config["groups"] * config["slots"] * slot + held * ("held" in config)
        nbytes += config["stages"] * rows * config["tile_c"] * shape.itemsize
        assert nbytes <= tiles.SHARED_BYTES[config["residents"]]
    first = tiles.channels_read(shape, configs[0]["tile_k"])
    assert first < 2 * 64 + 2 * shape.C // shape.groups, "multiplies more zeros than it must"


CONFIG = {
    "tile_n": 1, "tile_h": 2, "tile_w": 8, "tile_k": 32, "tile_c": 16, "stages": 2, "slots": 1,
    "groups": 1, "residents": 1, "warps": 4, "swap": False, "splits": 1, "taps": 1,
}  # fmt: skip
EPILOGUE = {"bias": "float32", "residual": True, "activation": "relu"}
EIGHT_BITS: dict[str, Any] = {"dtype": "int8", "out": "int8", "scale": True, **EPILOGUE}
PLAYED: dict[str, tuple[Case, dict[str, Any]]] = {
    "4": (case_of(16, 4), {}),
    "8, stride": (case_of(5, 8, stride=2, **EPILOGUE), {}),
    "16, dilation": (case_of(3, 16, dilation=(2, 1), padding=(2, 0), **EPILOGUE), {}),
    "40, chunks that end in other groups": (case_of(3, 40), {}),
    "20, a column of taps": (case_of(4, 20, residual=True), {"taps": 3}),
    "64, a group's tiles": (case_of(2, 64, taps=(1, 3), padding=(0, 1), **EPILOGUE), {}),
    "4 to 24": (case_of(4, 4, 24), {}),
    "48 to 8": (case_of(3, 48, 8, taps=(3, 1)), {}),
    "1 × 1": (case_of(4, 12, 20, taps=(1, 1), padding=0), {"tile_h": 1, "tile_n": 2}),
    "a split sum": (case_of(2, 40, N=1, **EPILOGUE), {"splits": 3}),
    "one group": (case_of(1, 40, **EPILOGUE), {"held": True}),
    "one group, a weight that comes late": (case_of(1, 40, constant=False), {"held": True}),
    "int8": (case_of(8, 16, taps=(1, 3), padding=(0, 1), **EIGHT_BITS), {"tile_k": 64}),
    "int8, 24, swapped": (
        case_of(4, 24, 28, taps=(1, 3), padding=(0, 1), **EIGHT_BITS),
        {"tile_k": 64, "swap": True},
    ),
}


STRUCTURES: list[dict[str, Any]] = [
    {"slots": 2},
    {"groups": 2, "stages": 3},
    {"residents": 2},
    {"held": True},
    {"held": True, "groups": 2, "stages": 3},
]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("name", PLAYED)
def test_roles_in_any_order_make_the_convolution(
    name: str, structure: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tiles a block, on two multiprocessors; tiles and chunks that end outside.

    One order of two for each: every case and every structure meets both.
    """
    case, changes = PLAYED[name]
    seed = (list(PLAYED).index(name) + STRUCTURES.index(structure)) % 2
    assert kernel.fits(case.problem) is None
    if "splits" in changes:
        structure = {key: value for key, value in structure.items() if key != "held"}
    if changes.get("splits", 1) == 1:  # blocks of a split sum have one tile each
        monkeypatch.setattr(kernel, "multiprocessors", lambda: 2)
    else:
        monkeypatch.setattr(kernel, "_add_parts", _add_parts)
    monkeypatch.setattr(kernel, "launch", functools.partial(gluon_roles.run, seed=seed))
    config = {**CONFIG, **structure, **changes}
    convolutions.check(ROW, case, config, integers=True, seed=seed)


def _add_parts(
    problem: Any, parts: torch.Tensor, splits: int, epilogue: Any, out: torch.Tensor
) -> None:
    """The second kernel in torch; it knows nothing of groups."""
    N, _, P, Q = out.shape
    H, _, W, K = parts.shape
    total = parts.view(H, splits, -1, W, K).sum(1)[:, :N].permute(1, 3, 0, 2)
    assert total.shape[2:] == (P, Q)
    out.copy_(torch.relu(total + epilogue.bias.view(1, -1, 1, 1) + epilogue.residual))


# ------------------------------------------------------------------ machine code


def compiled_problems() -> dict[str, Any]:
    fused = {"bias": "float32", "activation": "relu"}
    return {
        "float16": replace(LAYERS["4 channels"], **fused, residual=True).problem,
        "bfloat16": replace(LAYERS["40 channels"], **fused, dtype="bfloat16", out=None).problem,
        "float16, stride 2": replace(LAYERS["8 channels, stride 2"], **fused).problem,
        "int8": replace(LAYERS["32 channels"], **fused, dtype="int8", out="int8").problem,
    }


@functools.cache
def _compiled_configs() -> dict[str, list[dict[str, Any]]]:
    """By problem: its best configuration, and of structures that no problem before had, the best.

    Of a problem at most four structures, and those of int8, whose products are others, in any case.
    """
    seen: set[Any] = set()
    found: dict[str, list[dict[str, Any]]] = {}
    for name, problem in compiled_problems().items():
        kinds: dict[Any, dict[str, Any]] = {}
        for config in kernel.configs(problem):
            kind = tuple(config[key] for key in ("groups", "residents", "taps"))
            kinds.setdefault((name == "int8", *kind, "held" in config), config)
        tried = list(kinds)[:4]
        found[name] = [kinds[kind] for i, kind in enumerate(tried) if i == 0 or kind not in seen]
        seen.update(tried)
    return found


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for name, problem in compiled_problems().items():
        for i, config in enumerate(_compiled_configs()[name]):
            yield f"{name} #{i}", functools.partial(_run, problem, config)


def _run(problem: Any, config: dict[str, Any]) -> None:
    tensors = [None if meta is None else meta.empty(CPU) for meta in problem.inputs]
    call = kernel.bind(problem, {1: tensors[1]}, **config)
    rest = [t for i, t in enumerate(tensors) if t is not None and i != 1]
    call(*rest, out=problem.output.empty(CPU))


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    return compile_all("tests.kernels.conv.test_grouped_sm90:cases")


@pytest.mark.parametrize("name", compiled_problems())
def test_compiles_to_tensor_core_products_fed_by_tma(
    name: str, compiled: dict[str, list[dict[str, Any]]]
) -> None:
    for i, _ in enumerate(_compiled_configs()[name]):
        (made,) = compiled[f"{name} #{i}"]
        assert made["spilled_bytes"] == 0
        assert made["shared_bytes"] <= 227 * 1024
        opcodes = made["opcodes"]
        assert opcodes["IGMMA" if name == "int8" else "HGMMA"] >= 1
        assert opcodes["UTMALDG"] >= 2
        assert opcodes["UTMASTG"] >= 1
        assert not opcodes.get("LDL")
        assert not opcodes.get("STL")
