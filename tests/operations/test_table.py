"""Rows say the same as the references beside them, and as those who read plans without torch."""

from __future__ import annotations

import inspect

import pytest

from tessella.artifacts.program import PAIRS
from tessella.operations import epilogue
from tessella.operations.operation import Operation
from tessella.operations.table import OPERATIONS

KINDS = inspect.Parameter


def parts(row: Operation, names: tuple[str, ...]) -> set[str]:
    """What the row's epilogues have of these names."""
    return {f"{prefix}{name}" for prefix in row.epilogues for name in names}


@pytest.mark.parametrize("row", OPERATIONS.values(), ids=OPERATIONS)
def test_a_reference_takes_what_its_row_says(row: Operation) -> None:
    taken = inspect.signature(row.reference).parameters.values()
    tensors = [p.name for p in taken if p.kind is KINDS.POSITIONAL_OR_KEYWORD]
    others = {p.name: p for p in taken if p.kind is KINDS.KEYWORD_ONLY}
    if any(p.kind is KINDS.VAR_KEYWORD for p in taken):
        return  # it hands everything to another operation's reference
    inside = parts(row, epilogue.TENSORS)
    if not row.variadic and not row.name.endswith(("_dgrad", "_wgrad")):  # named by the field
        assert tensors == [n for n in row.operands if n not in inside]
    numbers = parts(row, tuple(epilogue.NUMBERS))
    attributes = {*row.attributes, *row.defaults} - {*row.hints} - numbers
    assert set(others) == attributes | {f"{prefix}epilogue" for prefix in row.epilogues}
    for name in attributes - {*row.defaults}:
        assert row.attributes.count(name) == 1
    for name, value in row.defaults.items():
        if name in others and others[name].default is not KINDS.empty:
            assert others[name].default == value


def test_what_may_be_left_out_is_an_operand_or_an_attribute() -> None:
    for row in OPERATIONS.values():
        assert {*row.optional} <= {*row.inputs}
        assert {*row.hints} <= {*row.attributes, *row.defaults}
        assert len({*row.operands}) == len(row.operands)


def test_plans_are_read_with_the_same_pairs() -> None:
    """A plan's reader compares batch sizes without torch, so it has names of its own."""
    assert {name for name, row in OPERATIONS.items() if row.pair} == PAIRS
    for row in OPERATIONS.values():
        assert {*(row.pair or ())} <= OPERATIONS.keys()
