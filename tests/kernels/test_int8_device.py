"""The 8-bit conversions' machine text, interpreted on the CPU: every int8, and floats at the ties.

Five PTX instructions on 32-bit words; ``$i`` are the operands in the order of the constraints.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from tessella.kernels import int8_device


def text_of(function: Any) -> str:
    (text,) = (c for c in function.fn.__code__.co_consts if isinstance(c, str) and "{\n" in c)
    return text


def ptx(text: str, operands: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Runs the instructions of one block; registers hold 32-bit words, floats as their bits."""
    registers = dict(operands)

    def value(name: str) -> np.ndarray:
        if name.startswith("0f"):
            return np.uint32(int(name[2:], 16))
        return np.uint32(int(name, 16)) if name.startswith("0x") else registers[name]

    def floats(name: str) -> np.ndarray:
        return np.asarray(value(name)).view(np.float32)

    for op, arguments in re.findall(r"^\s*([a-z]+\.[\w.]+) (.*);$", text, re.MULTILINE):
        target, *sources = [a.strip() for a in arguments.split(",")]
        if op == "xor.b32":
            made = value(sources[0]) ^ value(sources[1])
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
