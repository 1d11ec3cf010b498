"""Every kernel of recurrent layers that runs on a CPU, beside the reference in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import meta_of
from tessella.search.find import bind
from tests.support.instructions import isa as isa

CPU = torch.device("cpu")
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
ATTRS: dict[str, list[dict[str, Any]]] = {
    "lstm": [{}],
    "gru": [{"reset_after": True}, {"reset_after": False}],
    "rnn": [{"nonlinearity": "tanh"}, {"nonlinearity": "relu"}],
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("n", [1, 4, 15])
def test_agrees_with_the_reference(n: int, dtype: torch.dtype) -> None:
    fitted = kernels_that_agree(n, dtype, isa=None)
    assert fitted >= {"lstm.steps", "gru.steps", "rnn.steps"}
    assert dtype != torch.float32 or "lstm.onednn" in fitted


@pytest.mark.parametrize("n", [1, 4, 15])
def test_machine_code_agrees_with_the_reference(n: int, isa: InstructionSet) -> None:
    fitted = kernels_that_agree(n, torch.float32, isa.name)
    assert fitted == {f"lstm.{isa.name}", f"gru.{isa.name}", f"rnn.{isa.name}"}


def kernels_that_agree(n: int, dtype: torch.dtype, isa: str | None) -> set[str]:
    """The kernels of an instruction set, or of none, that took some problem, all of them right."""
    fitted = set()
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
        known = {i: given[i] for i in asked.constant}
        rest = [t for i, t in enumerate(given) if t is not None and i not in known]
        for kernel in catalog.candidates(op, "cpu"):
            if kernel.last_resort or kernel.isa != isa or kernel.refusal(asked) is not None:
                continue
            fitted.add(kernel.id)
            for config in kernel.configs(asked):
                call, _ = bind(kernel, asked, known, CPU, config)
                for _ in range(2):  # nothing of a run is left for the next
                    made = call(*rest)
                for ours, theirs, meta in zip(made, right, asked.outputs, strict=True):
                    assert meta.matches(ours), (kernel.id, asked)
                    error = float((ours.double() - theirs).abs().max() / max(1, theirs.abs().max()))
                    assert error <= TOLERANCES[dtype], (kernel.id, config, asked)
    return fitted


def test_machine_code_spreads_nans_and_takes_threads(isa: InstructionSet) -> None:
    """Samples in blocks of two sizes on two threads; a NaN stays in its sample."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    for op, attrs in (("lstm", {}), ("gru", ATTRS["gru"][0]), ("rnn", ATTRS["rnn"][1])):
        row = operation(op)
        given = operands(op, 2, 13, 96, "bias_ih", "bias_hh")
        given["input"][2, 5, 0] = torch.nan
        given["input"][1, 4] = 1e30
        operands_in_order = row.ordered(**given)
        attrs = {"direction": "bidirectional", **attrs}
        right = row.call(operands_in_order, attrs)
        asked = Problem(
            op=op,
            inputs=tuple(None if t is None else meta_of(t) for t in operands_in_order),
            outputs=tuple(map(meta_of, right)),
            attrs=attrs,
            constant=row.positions(name for name in WEIGHTS if name in given),
        )
        known = {i: operands_in_order[i] for i in asked.constant}
        try:
            torch.set_num_threads(2)
            call, _ = bind(catalog.kernel(f"{op}.{isa.name}"), asked, known, CPU)
            made = call(given["input"])
        finally:
            torch.set_num_threads(threads)
        assert made[0][:, 5].isnan().any()
        for ours, theirs in zip(made, right, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)
