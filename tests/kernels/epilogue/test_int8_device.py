"""The machine text of 8-bit epilogues, interpreted on the CPU: every int8, and floats at the ties.

A few PTX instructions on 32-bit words; ``$i`` are the operands in the order of the constraints.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tessella.kernels.epilogue import int8_device, sixteen_bit_device
from tessella.kernels.epilogue.int8 import LARGEST_BETA, LARGEST_SCALE, refusal, small_sums, vectors
from tessella.kernels.epilogue.sixteen_bit import MOST_SILU_GAMMA
from tessella.operations import problems
from tessella.operations.epilogue import Epilogue
from tessella.operations.tensor_meta import TensorMeta
from tests.support.emulators import gluon_on_numpy, gluon_roles


def text_of(function: Any) -> str:
    (text,) = (c for c in function.fn.__code__.co_consts if isinstance(c, str) and "{\n" in c)
    return text


SIXTEEN_BIT = {
    "max.f16x2": np.fmax,
    "max.NaN.f16x2": np.maximum,
    "fma.rn.f16x2": lambda a, b, c: a * b + c,
    "mul.rn.f16x2": np.multiply,
    "ex2.approx.f16x2": np.exp2,
}


def ptx(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the instructions of one block; registers hold 32-bit words, floats as their bits."""
    registers = dict(operands)

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 16)) if name.startswith("0x") else registers[name]

    def floats(name: str) -> np.ndarray:
        return np.asarray(value(name)).view(np.float32)

    for op, arguments in re.findall(r"^\s*([a-z]\w*\.[\w.]+) (.*);$", text, re.MULTILINE):
        target, *sources = [a.strip() for a in arguments.split(",")]
        if op == "mov.b32":
            made = value(sources[0])
        elif op == "min.s16x2":
            a, b = (np.broadcast_to(value(n), registers["$1"].shape) for n in sources)
            made = np.minimum(a.copy().view(np.int16), b.copy().view(np.int16)).view(np.uint32)
        elif op in ("xor.b32", "or.b32"):
            function = np.bitwise_xor if op == "xor.b32" else np.bitwise_or
            made = function(value(sources[0]), value(sources[1]))
        elif op == "cvt.rn.f16x2.f32":  # the first source is the upper half
            high, low = (floats(n).astype(np.float16) for n in sources)
            made = np.stack([low, high], -1).view(np.uint32)[..., 0]
        elif op.endswith("f16x2"):
            wide = [np.broadcast_to(value(n), registers["$1"].shape).copy() for n in sources]
            made = SIXTEEN_BIT[op](*(w.view(np.float16).astype(np.float64) for w in wide))
            made = made.astype(np.float16).view(np.uint32)
        elif op == "prmt.b32":
            a, b, selector = map(value, sources)
            pool = [
                (word >> np.uint32(8 * i)) & np.uint32(255) for word in (a, b) for i in range(4)
            ]
            made = sum(
                pool[int(selector) >> 4 * i & 7] << np.uint32(8 * i) for i in range(4)
            ).astype(np.uint32)  # fmt: skip
        else:
            function = {"add.rn.f32": np.add, "max.f32": np.fmax, "min.f32": np.fmin}[op]
            made = function(*map(floats, sources)).astype(np.float32).view(np.uint32)
        registers[target] = made
    return registers


def test_every_int8_becomes_its_float() -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(-1, 4)
    made = ptx(text_of(int8_device.float_of_int8), {"$4": values.view(np.uint32).ravel()})
    floats = np.stack([made[f"${i}"].view(np.float32) for i in range(4)], axis=1)
    assert np.array_equal(floats, values.astype(np.float32))


def test_floats_round_half_to_even_and_saturate() -> None:
    steps = torch.arange(-140, 140, 0.125)
    near = torch.cat([steps, torch.nextafter(steps, steps + 1), torch.nextafter(steps, steps - 1)])
    far = torch.tensor([1e9, -1e9, float("inf"), float("-inf"), -0.0, 3e-39, 127.5, -128.5])
    x = torch.cat([near, far]).reshape(-1, 4)
    operands = {f"${i + 1}": x[:, i].numpy().view(np.uint32) for i in range(4)}
    made = ptx(text_of(int8_device.int8_of_float), operands)["$0"]
    right = x.double().round().clamp(-128, 127).to(torch.int8)
    assert np.array_equal(made.view(np.int8).reshape(-1, 4), right.numpy())


def test_sums_to_2_to_the_22_survive_the_addition() -> None:
    x = torch.tensor([-(2**22), -(2**22) + 1, -1, 0, 1, 12345, 2**22 - 1, 2**22], dtype=torch.int32)
    assert torch.equal((x + 0x4B400000).view(torch.float32) - 12582912.0, x.float())


def test_every_int8_becomes_a_float_at_its_place() -> None:
    values = np.arange(-128, 128, dtype=np.int8).reshape(-1, 4)
    made = ptx(text_of(int8_device.float_of_shifted_int8), {"$4": values.view(np.uint32).ravel()})
    floats = np.stack([made[f"${i}"].view(np.float32) for i in range(4)], axis=1)
    assert np.array_equal(floats - 2**15 - 128, values.astype(np.float32))


def test_int8_is_the_low_bits_and_128_is_127() -> None:
    numbers = torch.arange(-128, 129).repeat(4)[:1024].reshape(-1, 4)
    x = numbers.float() + 1.5 * 2**23
    operands = {f"${i + 1}": x[:, i].numpy().view(np.uint32).copy() for i in range(4)}
    made = ptx(text_of(int8_device.pack_int8), operands)["$0"]
    assert np.array_equal(made.view(np.int8).reshape(-1, 4), numbers.clamp(max=127).numpy())


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("beta", [None, 1.0, 0.37])
@pytest.mark.parametrize("folds", [False, True])
def test_int8_is_the_rounded_epilogue(
    folds: bool, beta: float | None, activation: str | None, small: bool
) -> None:
    """Within a hundredth of a step of float64, at every scale that layers have."""
    generator = np.random.default_rng(0)
    sums = generator.integers(-(2**22), 2**22, (64, 128)).astype(np.int32)
    scale = (10.0 ** generator.uniform(-5, -1, (1, 128))).astype(np.float32)
    bias = generator.uniform(-200, 200, (1, 128)).astype(np.float32)
    residual = None if beta is None else generator.integers(-128, 128, (64, 128)).astype(np.int8)
    alpha, gamma = 0.5, 1.5
    right = alpha * scale.astype(np.float64) * sums + bias
    if residual is not None and beta is not None:
        right += beta * residual.astype(np.float64)
    right = gamma * (np.maximum(right, 0) if activation == "relu" else right)

    s, b, a, w, g = scale, bias, alpha, beta or 1.0, gamma
    if folds:
        epilogue = Epilogue(
            scale=torch.tensor(scale[0]), bias=torch.tensor(bias[0]), activation=activation,
            alpha=alpha, beta=w, gamma=gamma,
        )  # fmt: skip
        one, two = vectors(epilogue, adds=beta is not None, small=small)
        s, b, a, w, g = one.numpy()[None], two.numpy()[None], 1.0, w * gamma, None
    made = gluon_roles.call(
        int8_device.quantize_sums, *(None if t is None else t.view(gluon_on_numpy.Array) for t in (
            sums, s, b, residual)), a, w, g, folds, small, activation
    )  # fmt: skip
    clamped = np.clip(right, 0 if activation == "relu" else -128, 127)
    assert made.dtype == np.int8
    assert np.abs(made - clamped).max() <= 0.51


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("largest", [LARGEST_SCALE, 1.0])
def test_small_sums_want_small_scales(largest: float, activation: str | None) -> None:
    """Sums whose results are in range, at the largest scales: there the offset's rounding shows."""
    generator = np.random.default_rng(0)
    scale = (largest * generator.uniform(0.5, 1, (1, 128))).astype(np.float32)
    sums = np.rint(generator.uniform(-140, 140, (256, 128)) / scale).astype(np.int32)
    bias = generator.uniform(-9, 9, (1, 128)).astype(np.float32)
    given = torch.tensor(scale[0]), torch.tensor(bias[0])
    epilogue = Epilogue(scale=given[0], bias=given[1], activation=activation)
    one, two = (t.numpy()[None] for t in vectors(epilogue, small=True))
    made = gluon_roles.call(
        int8_device.quantize_sums, *(t.view(gluon_on_numpy.Array) for t in (sums, one, two)), None,
        1.0, 1.0, None, True, True, activation,
    )  # fmt: skip
    right = scale.astype(np.float64) * sums + bias
    right = np.clip(right, 0 if activation == "relu" else -128, 127)
    error = float(np.abs(made - right).max())
    x = TensorMeta(shape=(4, 64), dtype="int8")
    weight, vector = replace(x, shape=(128, 64)), TensorMeta(shape=(128,), dtype="float32")
    settings = {"activation": activation, "out_dtype": "int8", "constant": (1, 2, 4)}
    problem = problems.linear(x, weight, vector, None, vector, **settings)
    is_small = small_sums(problem, {2: given[1], 4: given[0]}, 64)
    assert is_small == (largest == LARGEST_SCALE) == (error <= 0.52)
    assert not small_sums(problem, {2: given[1]}, 64)  # a scale that is not known
    assert not small_sums(problem, {2: given[1], 4: given[0]}, 257)


def test_a_residual_of_many_steps_is_refused() -> None:
    x = TensorMeta(shape=(4, 64), dtype="int8")
    settings = {"out_dtype": "int8", "constant": (1, 2)}
    vector = TensorMeta(shape=(64,), dtype="float32")
    layer = functools.partial(problems.linear, x, replace(x, shape=(64, 64)), vector, x, vector)
    assert refusal(layer(beta=LARGEST_BETA, **settings)) is None
    assert "steps" in (refusal(layer(beta=2 * LARGEST_BETA, **settings)) or "")
    assert "steps" in (refusal(layer(beta=2.0, gamma=2 * LARGEST_BETA, **settings)) or "")


@pytest.mark.parametrize("gamma", [1.0, 37.0, 112.0])
def test_gelu_in_sixteen_bits_is_right_to_e4m3(gamma: float) -> None:
    """Beside rounding the exact number: hardly a result differs, and no more noise is made."""
    x = np.concatenate([np.random.default_rng(0).normal(0, s, 50_000) for s in (0.3, 1, 3)])
    x = np.concatenate([x, [0.0, -0.0, 1e5, -1e5, np.inf, -np.inf, 5.5, -5.5]])
    pairs = x.astype(np.float32).reshape(-1, 2)
    operands = {f"${i + 1}": pairs[:, i].copy().view(np.uint32) for i in range(2)}
    factor = np.full(len(pairs), gamma, np.float32).view(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        made = ptx(text_of(sixteen_bit_device.gelu), {**operands, "$3": factor, "$4": factor})["$0"]
    results = torch.from_numpy(made.view(np.float16).astype(np.float32)).clamp(-448, 448)
    results = results.to(torch.float8_e4m3fn).double()
    right = F.gelu(torch.from_numpy(x)).nan_to_num(0).mul(gamma).clamp(-448, 448)
    rounded = right.to(torch.float8_e4m3fn).double()
    step = 2.0 ** (right.abs().clamp(min=2.0**-6).log2().floor() - 3)
    assert float(((results - right).abs() / step).max()) <= 0.66
    assert float((results != rounded).double().mean()) <= 0.012
    noise, least = ((c - right).square().mean().sqrt() for c in (results, rounded))
    assert float(noise) <= 1.001 * float(least)


def test_gelu_in_sixteen_bits_keeps_not_a_number() -> None:
    given = np.array([np.nan, 1.0], np.float32).view(np.uint32)
    one = np.array([1.0], np.float32).view(np.uint32)
    operands = {"$1": given[:1], "$2": given[1:], "$3": one, "$4": one}
    low, high = ptx(text_of(sixteen_bit_device.gelu), operands)["$0"].view(np.float16)
    assert np.isnan(low)
    assert high == pytest.approx(0.8413, abs=1e-3)


@pytest.mark.parametrize("off", [2.0**-11, -(2.0**-11)])
@pytest.mark.parametrize("gamma", [None, 12.0, MOST_SILU_GAMMA])
def test_silu_by_one_special_function_is_right_to_int8(
    gamma: float | None, off: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of the error that PTX allows tanh: less than a fifth of a step beside rounding."""

    def tanh(text: str, _: str, given: list[np.ndarray], **settings: object) -> np.ndarray:
        assert text == "tanh.approx.f32 $0, $1;"
        return (np.tanh(given[0].astype(np.float64)) * (1 + off)).clip(-1, 1).astype(np.float32)

    device = SimpleNamespace(inline_asm_elementwise=tanh, float32=None)
    monkeypatch.setattr(sixteen_bit_device, "gl", device)
    factor = gamma or 1.0
    x = np.linspace(-12, 127 / factor, 20_001).astype(np.float32)
    made = sixteen_bit_device.silu.fn(x, gamma)
    right = factor * F.silu(torch.from_numpy(x).double()).numpy()
    assert np.abs(made - right).max() <= 0.2
