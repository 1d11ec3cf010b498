"""When an epilogue may be computed in float16 (``sixteen_bit_device``) as right as in float32."""

from __future__ import annotations

from tessella.operations.problem import Problem

LEAST_GAMMA, MOST_GAMMA = 2.0**-7, 2.0**14


def in_sixteen_bits(problem: Problem) -> bool:
    """Whether an activation may be computed in float16: GELU of an e4m3 result, with a factor that
    float16 holds, and that takes numbers too large for float16 beyond e4m3's largest.
    """
    epilogue = problem.epilogue
    gelu = epilogue.activation == "gelu" and problem.output.dtype == "float8_e4m3fn"
    return gelu and LEAST_GAMMA <= epilogue.gamma <= MOST_GAMMA
