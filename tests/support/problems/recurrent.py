"""Problems of recurrent layers, and whether kernels agree with the reference in float64."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tessella.core.device import torch_device
from tessella.device.float32_math import float32_math
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import meta_of
from tessella.search.find import bind

GATES = {"lstm": 4, "gru": 3, "rnn": 1}
ATTRS: dict[str, list[dict[str, Any]]] = {
    "lstm": [{}],
    "gru": [{"reset_after": True}, {"reset_after": False}],
    "rnn": [{"nonlinearity": "tanh"}, {"nonlinearity": "relu"}],
}
# cuDNN's tanh on an H200: 1.14e-5 in five steps of an RNN
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def operands(op: str, ways: int, n: int, h: int, *parts: str) -> dict[str, torch.Tensor]:
    """Operands of a layer of 5 steps, 7 inputs; ``parts`` are those that may be left out."""
    rows, inputs = GATES[op] * h, 7
    handed = 3 if "weight_hr" in parts else h
    shapes = {
        "input": (5, n, inputs),
        "weight_ih": (ways, rows, inputs),
        "weight_hh": (ways, rows, handed),
        "bias_ih": (ways, rows),
        "bias_hh": (ways, rows),
        "weight_hr": (ways, handed, h),
        "h_0": (ways, n, handed),
        "c_0": (ways, n, h),
    }
    made = {
        name: torch.randn(shape) / (4 if name.startswith("weight") else 1)
        for name, shape in shapes.items()
        if name in parts or name in ("input", "weight_ih", "weight_hh")
    }
    if "lengths" in parts:
        made["lengths"] = torch.arange(n) * 2 % 7  # none, some, and more steps than there are
    return made


SOME = [
    (),
    ("bias_ih", "bias_hh"),
    ("bias_hh", "h_0", "c_0"),
    ("bias_ih", "bias_hh", "h_0", "lengths"),
    ("bias_ih", "bias_hh", "weight_hr", "c_0"),
]
CASES = [
    (op, attrs, direction, parts)
    for op, parts, direction in itertools.product(
        GATES, SOME, ("forward", "reverse", "bidirectional")
    )
    for attrs in ATTRS[op]
    if op == "lstm" or "weight_hr" not in parts
]


def kernels_that_agree(
    n: int, dtype: torch.dtype, isa: str | None = None, target: str = "cpu"
) -> set[str]:
    """The kernels of an instruction set, or of none, that took some problem, all of them right."""
    fitted, device = set(), torch_device(target)
    for op, attrs, direction, parts in CASES:
        torch.manual_seed(0)
        row, ways = operation(op), 1 + (direction == "bidirectional")
        parts = tuple(p for p in parts if p in row.operands)
        exact = {
            name: t.to(dtype) if t.is_floating_point() else t
            for name, t in operands(op, ways, n, 32, *parts).items()
        }
        attrs = {"direction": direction, **attrs}
        wide = {m: t.double() if t.is_floating_point() else t for m, t in exact.items()}
        right = row.call(row.ordered(**wide), attrs)
        given = row.ordered(**exact)
        asked = Problem(
            op=op,
            inputs=tuple(None if t is None else meta_of(t) for t in given),
            outputs=tuple(meta_of(t.to(dtype)) for t in right),
            attrs=attrs,
            constant=row.positions(name for name in WEIGHTS if name in exact),
        )
        given = [None if t is None else t.to(device) for t in given]
        known = {i: t for i in asked.constant if (t := given[i]) is not None}
        rest = [t for i, t in enumerate(given) if t is not None and i not in known]
        for kernel in catalog.candidates(op, target):
            if kernel.last_resort or kernel.isa != isa or kernel.refusal(asked) is not None:
                continue
            fitted.add(kernel.id)
            for config in kernel.configs(asked):
                call, _ = bind(kernel, asked, known, device, config)
                with float32_math("ieee"):
                    for _ in range(2):  # nothing of a run is left for the next
                        made = call(*rest)
                for ours, theirs, meta in zip(made, right, asked.outputs, strict=True):
                    assert meta.matches(ours), (kernel.id, asked)
                    error = float(
                        (ours.cpu().double() - theirs).abs().max() / max(1, theirs.abs().max())
                    )
                    # cuDNN's gates lose 2.3e-5 in float32 on an H100, at a batch of 15
                    allowed = TOLERANCES[dtype] * (1 if target == "cpu" else 2)
                    assert error <= allowed, (kernel.id, config, asked)
    return fitted
