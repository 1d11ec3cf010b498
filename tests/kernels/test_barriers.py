"""Barriers that a kernel leaves valid where something else may come: found in texts of kernels."""

from __future__ import annotations

import pytest

from tests.support.kernels.barriers import left_valid_in

# As attention once was: ``%turns`` for a form in which nobody takes turns.
KERNEL = """
    %ring = ttg.local_alloc : () -> !ttg.memdesc<4x64xf16, #shared, #smem, mutable> loc(#loc1)
    %made = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc2)
    %full = ttg.memdesc_index %made[%c0] : !ttg.memdesc<> -> !ttg.memdesc<1xi64> loc(#loc2)
    ttng.init_barrier %full, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc2)
    %turns = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared, #smem, mutable> loc(#loc3)
    %turn = ttg.memdesc_index %turns[%c0] : !ttg.memdesc<> -> !ttg.memdesc<1xi64> loc(#loc3)
    ttng.init_barrier %turn, 1 : !ttg.memdesc<1xi64, #shared, #smem, mutable> loc(#loc3)
    END
"""


LOOP = """scf.for %i = %c0 to %n step %c1 : i32 {
    %one = ttg.memdesc_index %made[%i] : !ttg.memdesc<> -> !ttg.memdesc<1xi64> loc(#loc4)
    ttng.wait_barrier %one, %phase : !ttg.memdesc<1xi64> loc(#loc4)
    } loc(#loc4)
    """


@pytest.mark.parametrize(
    ("end", "left"),
    [
        ("ttg.warp_specialize(%ring, %made) attributes {}", ["%turns"]),
        ("ttg.warp_specialize(%ring, %made, %turns) attributes {}", []),
        ("ttng.inval_barrier %full : !ttg.memdesc<1xi64>", ["%turns"]),
        ("ttng.wait_barrier %full, %phase : !ttg.memdesc<1xi64>", ["%made", "%turns"]),
        ("ttng.inval_barrier %turn : !ttg.memdesc<1xi64>", ["%made"]),
        (LOOP + "ttng.wait_barrier %turn, %phase : !ttg.memdesc<1xi64> loc(#loc4)", ["%turns"]),
        (LOOP + '%sum = "tt.reduce"(%x) <{axis = 1 : i32}> ({', ["%made", "%turns"]),
        (
            """%full2 = ttg.memdesc_index %made[%c1] : !ttg.memdesc<> -> !ttg.memdesc<1xi64>
            ttng.init_barrier %full2, 1 : !ttg.memdesc<1xi64>
            ttng.inval_barrier %full2 : !ttg.memdesc<1xi64>
            ttng.inval_barrier %turn : !ttg.memdesc<1xi64>""",
            ["%made"],
        ),
    ],
)
def test_barriers_are_kept_to_the_end_or_invalidated(end: str, left: list[str]) -> None:
    assert left_valid_in(KERNEL.replace("END", end)) == left
