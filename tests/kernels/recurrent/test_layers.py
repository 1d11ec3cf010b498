"""Every kernel of recurrent layers that runs on a CPU, beside the reference in float64."""

from __future__ import annotations

import pytest
import torch

from tessella.device.x86.assembler import InstructionSet
from tessella.kernels import catalog
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import meta_of
from tessella.search.find import bind
from tests.support.instructions import isa as isa
from tests.support.problems.recurrent import (
    ATTRS,
    TOLERANCES,
    WEIGHTS,
    kernels_that_agree,
    operands,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("n", [1, 4, 15])
def test_agrees_with_the_reference(n: int, dtype: torch.dtype) -> None:
    fitted = kernels_that_agree(n, dtype)
    assert fitted >= {"lstm.steps", "gru.steps", "rnn.steps"}
    assert dtype != torch.float32 or "lstm.onednn" in fitted


@pytest.mark.parametrize("n", [1, 4, 15])
def test_machine_code_agrees_with_the_reference(n: int, isa: InstructionSet) -> None:
    fitted = kernels_that_agree(n, torch.float32, isa.name)
    assert fitted == {f"lstm.{isa.name}", f"gru.{isa.name}", f"rnn.{isa.name}"}


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
