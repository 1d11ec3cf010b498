"""Bytes to a network's input: the very bits that the host's own preprocessing makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

from tessella.core.preprocess import Preprocess, denormalize, gain_and_offset, normalize
from tessella.device.x86 import code
from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.kernels.transform import image, image_aten
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta
from tessella.search.find import find
from tests.support.instructions import isa as isa
from tests.support.kernels.compile_only import compile_all

# (images, height, width, channels): odd sizes, more than one block of 2048, many channels
SHAPES = [(1, 1, 1, 1), (2, 5, 7, 3), (3, 31, 33, 1), (2, 40, 30, 3), (1, 9, 11, 13), (0, 4, 4, 3)]


def record_for(channels: int) -> Preprocess:
    rng = np.random.default_rng(channels)
    mean, std = rng.uniform(0, 1, channels), rng.uniform(0.05, 0.5, channels)
    return Preprocess(height=8, width=8, channels=channels, mean=tuple(mean), std=tuple(std))


def problem_of(shape: tuple[int, ...], dtype: str, format: str) -> Problem:
    n, h, w, c = shape
    gain, offset = (list(map(float, t)) for t in gain_and_offset(record_for(c)))
    return Problem(
        op="image_to_tensor",
        inputs=(TensorMeta(shape=shape, dtype="uint8"),),
        outputs=(TensorMeta(shape=(n, c, h, w), dtype=dtype, format=format),),
        attrs={"gain": gain, "offset": offset, "dtype": dtype},
    )


def pixels_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def run(module: ModuleType, problem: Problem, pixels: np.ndarray) -> torch.Tensor:
    out = problem.output.empty(torch.device("cpu")).fill_(77)
    scratch = getattr(module, "workspace_bytes", lambda _: 0)(problem)
    more = {"workspace": torch.empty(scratch, dtype=torch.uint8)} if scratch else {}
    assert module.fits(problem) is None
    made = module.bind(problem, {})(torch.from_numpy(pixels), out=out, **more)
    assert problem.output.matches(made)
    return made


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("module", "dtype"), [
    (image_aten, "float32"), (image_aten, "bfloat16"), (image_aten, "float16"),
    (image, "float32"), (image, "float16"),  # the interpreter cuts bfloat16 off: see tests/gpu
])  # fmt: skip
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_the_host(
    module: ModuleType, dtype: str, shape: tuple[int, ...], format: str
) -> None:
    pixels = pixels_of(shape)
    right = torch.from_numpy(normalize(pixels, record_for(shape[3]))).to(getattr(torch, dtype))
    assert torch.equal(run(module, problem_of(shape, dtype, format), pixels), right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_bits_of_the_host_in_machine_code(
    isa: InstructionSet, threads: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == "bfloat16" and not code.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    row = catalog.kernel(f"image_to_tensor.{isa.name}")
    for shape in ((2, 5, 7, 3), (3, 31, 33, 1), (2, 40, 30, 4), (1, 120, 160, 3), (1, 1, 16, 2)):
        p, pixels = problem_of(shape, dtype, "channels_last"), pixels_of(shape)
        assert row.refusal(p) is None
        memory = torch.full((pixels.size + 128,), 77, dtype=getattr(torch, dtype))
        n, h, w, c = shape
        out = memory[64 : 64 + pixels.size].view(n, h, w, c).permute(0, 3, 1, 2)
        row.load().bind(p, {})(torch.from_numpy(pixels), out=out)
        right = torch.from_numpy(normalize(pixels, record_for(c))).to(out.dtype)
        assert torch.equal(out, right)
        assert (memory[:64] == 77).all()
        assert (memory[64 + pixels.size :] == 77).all()
    assert "as in the image" in str(row.refusal(problem_of((1, 9, 9, 3), dtype, "contiguous")))
    assert "more than 4 vectors" in str(
        row.refusal(problem_of((1, 9, 9, 13), dtype, "channels_last"))
    )
    assert "numbers at least" in str(row.refusal(problem_of((1, 1, 1, 1), dtype, "channels_last")))
    for name in ("gain", "offset"):  # of which it loads whole vectors
        fewer = problem_of((2, 5, 7, 3), dtype, "channels_last")
        fewer.attrs[name] = fewer.attrs[name][:1]
        assert "each channel" in str(row.refusal(fewer))


def test_every_byte_of_a_real_record() -> None:
    """All 256 values with ImageNet's numbers; reference, kernel and host say the same."""
    record = Preprocess(height=16, width=16, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    pixels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, axis=3)
    gain, offset = (list(map(float, t)) for t in gain_and_offset(record))
    (made,) = operation("image_to_tensor").call(
        [torch.from_numpy(pixels)],
        {"gain": gain, "offset": offset, "dtype": "float32"},
    )
    right = normalize(pixels, record)
    assert np.array_equal(made.numpy(), right)
    assert np.array_equal(denormalize(right, record), pixels)
    exact = (pixels / 255 - np.array(record.mean)) / np.array(record.std)
    assert np.abs(right - np.moveaxis(exact, 3, 1)).max() < 5e-7


def test_the_search_runs_on_every_value() -> None:
    found = find(problem_of((2, 40, 30, 3), "bfloat16", "channels_last"), {}, target="cpu")
    (made,) = [trial for trial in found if trial.kernel == "image_to_tensor.aten"]
    assert made.refused is None
    assert made.workspace_bytes == 4 * 2 * 40 * 30 * 3


@pytest.mark.parametrize("module", [image, image_aten])
def test_what_it_does_not_take(module: ModuleType) -> None:
    right = problem_of((2, 5, 7, 3), "float32", "contiguous")
    wide = TensorMeta(shape=(2, 5, 7, 3), dtype="int32")
    views = TensorMeta(shape=(2, 5, 7, 3), dtype="uint8", format="strided")
    for other in (wide, views):
        problem = Problem(op=right.op, inputs=(other,), outputs=right.outputs, attrs=right.attrs)
        assert "dense uint8" in module.fits(problem)


def on_hopper() -> Iterator[tuple[str, Callable[[], object]]]:
    for format in ("channels_last", "contiguous"):
        problem = problem_of((1, 224, 224, 3), "float16", format)
        out = problem.output.empty(torch.device("cpu"))
        pixels = torch.zeros(1, 224, 224, 3, dtype=torch.uint8)
        yield format, lambda p=problem, o=out, x=pixels: image.bind(p, {})(x, out=o)


def test_compiled_for_hopper_product_and_sum_stay_apart() -> None:
    for launches in compile_all("tests.kernels.transform.test_image_to_tensor:on_hopper").values():
        (launch,) = launches
        assert launch["spilled_bytes"] == 0
        assert not launch["opcodes"].get("FFMA")  # it would round once where the host rounds twice
