"""Inputs that are row numbers of a table, as words of a text are: they are checked before a step
reads the table. On a GPU a number beyond it ends the process's context, and with it every engine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tessella.artifacts.program import Bucket, Program
from tessella.core.errors import InputError

# Operations whose results hold their inputs' numbers and nothing else. After others (a slice, a
# sum) it is not known which numbers of an input are read, or with what value.
KEEPS = frozenset({"reshape", "permute", "rearrange", "expand", "to", "clone", "cat"})


def tables(program: Program, weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """By name of an input whose numbers are rows of tables: how many rows the smallest one has."""
    bucket: Bucket = program.buckets[0]  # the others compute the same
    origins = {name: {name} for name in program.inputs}  # of a value: the inputs that it holds
    rows: dict[str, int] = {}
    for step in bucket.steps:
        read = [origins.get(name, set()) for name in step.inputs if name is not None]
        if step.op in KEEPS:
            origins[step.outputs[0]] = set().union(*read)
        elif step.op == "embedding":
            _, table = step.inputs
            if table is None or table not in weights:
                continue
            for name in read[0]:
                count = len(weights[table])
                rows[name] = min(count, rows.get(name, count))
    return rows


def require_rows(name: str, numbers: torch.Tensor, rows: int) -> None:
    """Refuse numbers that are no rows of a table; floating ones are none before they are rounded.

    Raises:
        InputError: the smallest or the largest number lies outside of it.
    """
    if numbers.is_floating_point() or numbers.dtype == torch.bool or not numbers.numel():
        return
    low, high = (int(end) for end in torch.aminmax(numbers))
    if low < 0 or high >= rows:
        raise InputError(
            "an input holds a value that the network cannot take",
            seen=f"{name!r} from {low} to {high}",
            fix=f"send row numbers of its table, from 0 to {rows - 1}",
        )
