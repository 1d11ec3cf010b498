"""The epilogue in CUDA C++: activations, and four elements of any type from and to memory."""

from __future__ import annotations

from tessella.device.cuda_source import cuda_source

# element types as numbers of the source
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "int32": 4}
NONE = -1  # an operand that is not there
VECTORS = cuda_source(__package__, "vectors.cuh")

# epilogue.ACTIVATIONS of a float x; NaN stays NaN
_SIGMOID = "1.0f / (1.0f + __expf(-({})))"
_CLAMP6 = "({0} < 0.0f ? 0.0f : {0} > 6.0f ? 6.0f : {0})"
ACTIVATIONS: dict[str | None, str] = {
    None: "x",
    "relu": "x < 0.0f ? 0.0f : x",
    "relu6": _CLAMP6.format("x"),
    "sigmoid": _SIGMOID.format("x"),
    "tanh": "tanhf(x)",
    "silu": "x * (" + _SIGMOID.format("x") + ")",
    "gelu": "0.5f * x * (1.0f + erff(x * 0.7071067811865476f))",
    "gelu_tanh": "x * ("
    + _SIGMOID.format("1.5957691216057308f * (x + 0.044715f * x * x * x)")
    + ")",
    "hardswish": "x * " + _CLAMP6.format("(x + 3.0f)") + " * 0.16666666666666666f",
    "hardsigmoid": _CLAMP6.format("(x + 3.0f)") + " * 0.16666666666666666f",
}


def activation_source(expression: str) -> str:
    """The function ``activate`` of an expression of the float ``x``."""
    return f"__device__ __forceinline__ float activate(float x) {{ return {expression}; }}\n"
