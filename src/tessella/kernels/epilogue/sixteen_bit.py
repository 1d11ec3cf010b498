"""When an activation may have 16 bits (``sixteen_bit_device``): 8 are as right as from float32."""

from __future__ import annotations

from tessella.operations.problem import Problem

LEAST_GAMMA, MOST_GAMMA = 2.0**-7, 2.0**14
# of a SiLU in int8: its numbers reach 2, and an error of 2⁻¹¹ of the argument's half is a sixth of
# a step at most, at arguments of -10
MOST_SILU_GAMMA = 64.0


def in_sixteen_bits(problem: Problem) -> bool:
    """Whether an activation may have 16 bits: GELU of an e4m3 result, with a factor that float16
    holds, and that takes numbers too large for float16 beyond e4m3's largest; SiLU of an int8 one.
    """
    epilogue, made = problem.epilogue, problem.output.dtype
    if epilogue.activation == "silu" and made == "int8":
        return epilogue.gamma <= MOST_SILU_GAMMA
    gelu = epilogue.activation == "gelu" and made == "float8_e4m3fn"
    return gelu and LEAST_GAMMA <= epilogue.gamma <= MOST_GAMMA
