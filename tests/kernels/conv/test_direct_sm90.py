"""First layers on Hopper, line by line in NumPy: which values meet, where they are read and stored.

Gluon has no interpreter. The kernel's own source runs here with NumPy in the place of Gluon's
names: layouts and the asynchrony of copies and products are left out, everything else is checked,
reads outside the image's memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tessella.device.launch import launch
from tessella.kernels import catalog
from tessella.kernels.conv.hopper import direct as direct_sm90
from tessella.operations.epilogue import Epilogue, finish
from tests.support.problems.convolutions import Case, check
from tests.support.problems.portable_convolutions import LAST, interpreted


class Tile(np.ndarray):
    """A tensor of the device."""

    def expand_dims(self, axis: int) -> Tile:
        return np.expand_dims(self, axis)

    def to(self, dtype: Any) -> Tile:
        return self.astype(dtype)


def tile(values: Any) -> Tile:
    return np.asarray(values).view(Tile)


class Pointer:
    """A place, or a tensor of places, in dense memory."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        bits = 8 * memory.dtype.itemsize
        self.dtype = SimpleNamespace(element_ty=SimpleNamespace(primitive_bitwidth=bits))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def load(self, mask: Any, other: float) -> Tile:
        at, mask = np.broadcast_arrays(self.at, mask)
        assert ((at >= 0) & (at < self.memory.size))[mask].all(), "reads outside"
        return tile(np.where(mask, self.memory[np.where(mask, at, 0)], self.memory.dtype.type(0)))

    def store(self, values: np.ndarray, mask: Any) -> None:
        at, mask, values = np.broadcast_arrays(self.at, mask, values)
        assert ((at >= 0) & (at < self.memory.size))[mask].all(), "writes outside"
        self.memory[at[mask]] = values[mask]


class Shared:
    """Shared memory."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def index(self, i: int) -> Shared:
        return Shared(self.values[i])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.values.transpose(order))

    def store(self, values: np.ndarray) -> None:
        self.values[...] = values


class Descriptor:
    """A matrix that is copied in blocks; what lies outside is zero, or not written."""

    def __init__(self, matrix: torch.Tensor, block: Sequence[int]) -> None:
        assert matrix.stride(1) == 1
        assert matrix.stride(0) * matrix.itemsize % 16 == 0
        self.matrix, self.dtype, self.layout = matrix.numpy(), matrix.numpy().dtype, None
        nbytes = block[0] * block[1] * matrix.itemsize
        self.block_type = SimpleNamespace(shape=list(block), nbytes=nbytes)

    def _part(self, at: Sequence[int]) -> np.ndarray:
        rows, columns = self.block_type.shape
        return self.matrix[at[0] : at[0] + rows, at[1] : at[1] + columns]

    def load(self, at: Sequence[int], _: Any, shared: Shared) -> None:
        part = self._part(at)
        shared.values[...] = 0
        shared.values[: part.shape[0], : part.shape[1]] = part

    def store(self, at: Sequence[int], shared: Shared) -> None:
        part = self._part(at)
        part[...] = shared.values[: part.shape[0], : part.shape[1]]


def nothing(*_: Any, **__: Any) -> None:
    """What has no meaning here: layouts, barriers, fences."""


def wait(_: int, deps: tuple[Any, ...]) -> Any:
    return deps if len(deps) > 1 else deps[0]


def finished(
    acc: Any, scale: Any, bias: Any, residual: Any, alpha: float, beta: float, gamma: float | None,
    name: Any, dtype: Any,
) -> Tile:  # fmt: skip
    tensors = (None if t is None else torch.from_numpy(np.array(t)) for t in (bias, scale))
    bias, scale = (None if t is None else t.squeeze(0).double() for t in tensors)
    residual = None if residual is None else torch.from_numpy(np.array(residual)).double()
    numbers = {"activation": name, "alpha": alpha, "beta": beta, "gamma": gamma or 1.0}
    epilogue = Epilogue(bias=bias, residual=residual, scale=scale, **numbers)
    made = finish(torch.from_numpy(np.array(acc)).double(), epilogue)
    if dtype is np.int8:
        made = made.round().clamp(-128, 127)
    return tile(made.numpy().astype(dtype))


@pytest.fixture
def on_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """``direct_sm90`` launches its kernel here."""
    block = [0, 0]
    raw = direct_sm90.direct.fn
    names: dict[str, Any] = {
        "gl": SimpleNamespace(
            **dict.fromkeys(("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout"), nothing),
            int32=np.int32,
            int64=np.int64,
            float32=np.float32,
            program_id=block.__getitem__,
            minimum=min,
            static_range=range,
            arange=lambda a, b, layout: tile(np.arange(a, b)),
            zeros=lambda shape, dtype, layout: tile(np.zeros(shape)),
            zeros_like=lambda t: tile(np.zeros_like(t)),
            where=lambda c, a, b: tile(np.where(c, a, b)),
            load=lambda p, mask, other: p.load(mask, other),
            store=lambda p, values, mask: p.store(values, mask),
            allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, 99, dtype)),
        ),
        "mbarrier": SimpleNamespace(
            MBarrierLayout=nothing, init=nothing, expect=nothing, wait=nothing, invalidate=nothing
        ),
        "barrier": nothing,
        "fence_async_shared": nothing,
        "store_wait": nothing,
        "wait_for_dependencies": nothing,
        "load_tile": Descriptor.load,
        "store_tile": Descriptor.store,
        "descriptor": Descriptor,
        "warpgroup_mma": lambda a, b, acc, is_async: acc + a.astype(float) @ b.values.astype(float),
        "warpgroup_mma_wait": wait,
        "finish": finished,
        "AT_ONCE": 12,
        "load_chunk": direct_sm90.load_chunk.fn,
        "at": direct_sm90.at.fn,
        "DTYPES": {t: torch.empty(0, dtype=t).numpy().dtype.type
                   for t in (torch.float16, torch.float32, torch.int8, torch.int32)},
    }  # fmt: skip

    def run(kernel: Any, grid: Sequence[int], *args: Any, **constants: Any) -> None:
        if kernel is not direct_sm90.direct:
            launch(kernel, grid, *args, **constants)  # plain Triton, interpreted
            return
        with monkeypatch.context() as patch:
            for name, value in names.items():
                patch.setattr(direct_sm90, name, value)
            arguments = with_pointers(args)
            for block[0] in range(grid[0]):
                for block[1] in range(grid[1]):
                    raw(*arguments, **{k: v for k, v in constants.items() if k != "launch_pdl"})

    monkeypatch.setattr(direct_sm90, "launch", run)
    monkeypatch.setattr(direct_sm90, "descriptor", Descriptor)
    monkeypatch.setattr(direct_sm90, "DTYPES", names["DTYPES"])


def with_pointers(arg: Any) -> Any:
    """Tensors as pointers, also those in tuples."""
    if isinstance(arg, tuple):
        return tuple(map(with_pointers, arg))
    return pointer(arg) if isinstance(arg, torch.Tensor) else arg


def pointer(tensor: torch.Tensor) -> Pointer:
    return Pointer(tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).numpy())


FIRST = {
    "resnet": Case(x=(2, 3, 20, 22), w=(64, 3, 7, 7), stride=2, padding=3, activation="relu"),
    "odd image": Case(x=(1, 3, 13, 15), w=(24, 3, 7, 7), stride=2, padding=3, residual=True),
    "vgg": Case(x=(1, 3, 9, 11), w=(64, 3, 3, 3), padding=1, bias="float32"),
    "alexnet": Case(x=(1, 3, 31, 29), w=(96, 3, 11, 11), stride=4, padding=2, bias="float32"),
    "lenet": Case(x=(2, 1, 14, 14), w=(20, 1, 5, 5), bias="float32", alpha=0.5),
    "four channels": Case(x=(1, 4, 12, 14), w=(64, 4, 5, 5), padding=2, stride=2, scale=True),
    "factor": Case(x=(1, 3, 9, 11), w=(64, 3, 3, 3), scale=True, activation="silu", gamma=3.0),
    "many filters": Case(x=(1, 3, 8, 8), w=(200, 3, 3, 3), padding=1),
    "rows dilated": Case(x=(1, 2, 12, 10), w=(8, 2, 3, 3), dilation=(2, 1), padding=(2, 0)),
    "one pixel": Case(x=(1, 2, 1, 1), w=(8, 2, 3, 3), padding=1),
    "empty": Case(x=(0, 3, 8, 8), w=(4, 3, 3, 3)),
}


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "tf32", "int8"])
@pytest.mark.parametrize("name", FIRST)
def test_first_layers(on_numpy: None, name: str, dtype: str) -> None:
    case = replace(FIRST[name], dtype=dtype)
    if dtype == "tf32":
        case = replace(case, dtype="float32", math="tf32")
    elif dtype == "int8":
        case = replace(case, scale=True)
    kernel = catalog.kernel("conv2d.direct.sm90")
    for x_format, out_format in (("contiguous", "contiguous"), (LAST, LAST), (LAST, "contiguous")):
        varied = replace(case, x_format=x_format, out_format=out_format)
        if kernel.load().fits(varied.problem) is not None:
            assert (name, dtype) == ("alexnet", "tf32")
            continue
        config = kernel.configs(varied.problem)[0]
        check(kernel, varied, config, integers=True)
        check(kernel, replace(varied, constant=False), {**config, "warps": 8}, integers=True)


@interpreted
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("name", ["resnet", "vgg", "alexnet", "many filters"])
def test_16_bits_become_codes(on_numpy: None, name: str, activation: str | None) -> None:
    """A factor behind the activation, then int8: through TMA and without; ties and both ends."""
    case = replace(FIRST[name], dtype="float16", out="int8", activation=activation, gamma=0.25)
    kernel = catalog.kernel("conv2d.direct.sm90")
    for x_format, out_format in (("contiguous", "contiguous"), (LAST, LAST), (LAST, "contiguous")):
        varied = replace(case, x_format=x_format, out_format=out_format)
        assert kernel.refusal(varied.problem) is None
        config = kernel.configs(varied.problem)[0]
        check(kernel, varied, config, integers=True)
        check(kernel, replace(varied, gamma=8.0), {**config, "warps": 8}, integers=True)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_infinity_beside_a_run_is_no_part_of_a_sum(on_numpy: None) -> None:
    """Words are read whole; what they hold beside the run must not count."""
    case = Case(x=(1, 3, 10, 10), w=(8, 3, 3, 3), padding=1, x_format=LAST, dtype="float16")
    problem = case.problem
    x = torch.ones(case.x, dtype=torch.float16)
    x[0, :, 4, 5] = torch.inf
    x = x.contiguous(memory_format=torch.channels_last)
    w = torch.ones(case.w, dtype=torch.float16)
    made = direct_sm90.bind(problem, {1: w})(x, out=problem.output.empty(x.device))
    assert int(made.isinf().sum()) == 3 * 3 * 8
    assert int(made.isnan().sum()) == 0


def test_refusals() -> None:
    fits = direct_sm90.fits
    case = Case(x=(1, 3, 16, 16), w=(8, 3, 3, 3), dtype="float16")
    assert fits(case.problem) is None
    refused: dict[str, Callable[[Case], Case]] = {
        "tf32": lambda c: replace(c, dtype="float32"),
        "one group": lambda c: replace(c, x=(1, 6, 16, 16), groups=2, w=(8, 3, 3, 3)),
        "strides": lambda c: replace(c, x_format="strided"),
        "dilated": lambda c: replace(c, dilation=2),
        "few channels": lambda c: replace(c, x=(1, 256, 16, 16), w=(8, 256, 3, 3)),
        "float8": lambda c: replace(c, dtype="float8_e4m3fn"),
    }
    for words, change in refused.items():
        assert words in fits(change(case).problem)
