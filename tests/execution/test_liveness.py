"""Liveness against what a reader of all steps would say, one value at a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tessella.execution.liveness import Use, dying, ended, last_memory_uses, last_uses

Line = tuple[list[Use[str]], set[str]]  # steps, and which of their values must last


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Steps that read what there is and make new values."""
    names, uses = ["image"], []
    for index in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from([*names, None]), max_size=3))
        writes = [f"v{index}_{i}" for i in range(draw(st.integers(1, 2)))]
        uses.append(Use(reads, writes, draw(st.booleans())))
        names += writes
    return uses, set(draw(st.lists(st.sampled_from(names), max_size=2)))


def looked_at(uses: list[Use[str]], index: int) -> set[str]:
    return {n for n in (*uses[index].reads, *uses[index].writes) if n is not None}


def needed(uses: list[Use[str]], lasting: set[str], index: int) -> set[str]:
    """The values that a later step looks at, or whoever runs the steps."""
    return lasting.union(*(looked_at(uses, i) for i in range(index + 1, len(uses))))


def seen_through(uses: list[Use[str]], name: str) -> set[str]:
    """The value, its views, and theirs."""
    views = {name}
    for use in uses:
        if use.aliases and views & set(use.reads):
            views |= set(use.writes)
    return views


def family(uses: list[Use[str]], name: str) -> set[str]:
    """All values that may have memory in common, directly or by others."""
    found = {name}
    for _ in uses:
        for use in uses:
            together = {n for n in (*use.reads, *use.writes) if n is not None}
            if use.aliases and together & found:
                found |= together
    return found


@given(lines())
def test_a_value_ends_when_nobody_looks_at_it_any_more(
    drawn: Line,
) -> None:
    uses, lasting = drawn
    for index, names in enumerate(ended(uses, lasting)):
        assert len(names) == len(set(names))
        assert set(names) == looked_at(uses, index) - needed(uses, lasting, index)


@given(lines())
def test_memory_is_needed_as_long_as_a_view_of_it(drawn: Line) -> None:
    uses, lasting = drawn
    alone, shared = last_uses(uses, lasting), last_memory_uses(uses, lasting)
    assert shared == {n: max(alone[v] for v in seen_through(uses, n)) for n in alone}


@given(lines())
def test_an_operand_dies_with_all_who_may_share_its_memory(
    drawn: Line,
) -> None:
    uses, lasting = drawn
    for index, (use, positions) in enumerate(zip(uses, dying(uses, lasting), strict=True)):
        later = needed(uses, lasting, index)
        for position, name in enumerate(use.reads):
            others = {n for i, n in enumerate(use.reads) if i != position}
            free = name is not None and not family(uses, name) & (later | others)
            assert (position in positions) == free
