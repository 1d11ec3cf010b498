"""The epilogue on the device: what Gluon kernels do to an accumulator before they store it.

The same meaning as ``operations.epilogue``: ``cast(gamma * activation(alpha * scale * product +
bias + beta * residual))``. All functions take float32 tensors of any layout, element by
element; special functions cost one or two operations of the special-function unit, which is what
bounds an epilogue (16 results a clock and multiprocessor).
"""

from __future__ import annotations

from triton.language import PropagateNan

from tessella.device.hopper import gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
NAN = gl.constexpr(PropagateNan.ALL)  # the activations keep NaN, as torch's do; it costs nothing


@gluon.jit
def finish(
    product,
    scale,
    bias,
    residual,
    alpha,
    beta,
    gamma,
    ACTIVATION: gl.constexpr,
    dtype: gl.constexpr,
):
    """The whole epilogue of one tile.

    Args:
        product: accumulators, float32 or int32.
        scale, bias, residual: float32 (residual: any element type) in a shape that broadcasts with
            ``product`` and a layout that matches it; or None.
        alpha, beta: float32 numbers; a constexpr 1.0 costs nothing.
        gamma: a float32 number, or None for 1, which costs nothing.
        ACTIVATION: a name of ``epilogue.ACTIVATIONS`` or None; or ``floor``, as
            ``Epilogue.on_device`` says, and then there is no residual.
        dtype: the element type of the result.
    """
    x = product
    if dtype != gl.int32:  # int32 results are the bare products
        x = x.to(gl.float32)
        if scale is not None:
            x = x * (scale if _is_one(alpha) else scale * alpha)
        elif not _is_one(alpha):
            x = x * alpha
        if bias is not None:
            x = x + bias
        if residual is not None:
            r = residual.to(gl.float32)
            x = x + (r if _is_one(beta) else r * beta)
        if ACTIVATION == "floor":
            x = gl.maximum(x, beta, propagate_nan=NAN)
        else:
            x = activate(x, ACTIVATION)
        if gamma is not None:
            x = x * gamma
        x = quantize(x, dtype)
    return x


@gluon.constexpr_function
def _is_one(number):
    return isinstance(number, (int, float)) and number == 1


@gluon.jit
def channel_vector(
    pointer, offset, limit, LENGTH: gl.constexpr, LAYOUT: gl.constexpr, AXIS: gl.constexpr = 0
):  # fmt: skip
    """Elements offset … offset + LENGTH - 1 of a vector as float32; zero from ``limit`` on.

    As a row of a tile, or with AXIS 1 a column; None where there is no vector.
    Where no tile reaches beyond the vector, ``limit`` is None: without a mask, whose steps the
    compiler does not know, a thread loads neighbours at once.
    ``LAYOUT``: of the vector, for example ``gl.SliceLayout(0, layout_of_the_tile)``.
    """
    x = pointer
    if pointer is not None:
        i = offset + gl.arange(0, LENGTH, layout=LAYOUT)
        if limit is None:
            x = gl.load(pointer + i)
        else:
            x = gl.load(pointer + i, mask=i < limit, other=0.0)
        x = x.to(gl.float32).expand_dims(AXIS)
    return x


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr):
    """``epilogue.ACTIVATIONS[ACTIVATION](x)`` in float32; None gives x."""
    if ACTIVATION == "relu":
        x = gl.maximum(x, 0.0, propagate_nan=NAN)
    elif ACTIVATION == "relu6":
        x = _clamp(x, 6.0)
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "tanh":
        x = 2.0 * sigmoid(2.0 * x) - 1.0
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "gelu":
        x = gelu(x)
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh u) = sigmoid(2 u)
        x = x * sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * x * x))
    elif ACTIVATION == "hardswish":
        x = x * _clamp(x * (1.0 / 6.0) + 0.5, 1.0)
    elif ACTIVATION == "hardsigmoid":
        x = _clamp(x * (1.0 / 6.0) + 0.5, 1.0)
    else:
        gl.static_assert(ACTIVATION is None, "an activation that the epilogue does not know")
    return x


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); to a few units in the last place where the result is a normal number."""
    return _reciprocal(1.0 + gl.exp2(x * -LOG2_E))


@gluon.jit
def gelu(x):
    """x Φ(x), with 1 - Φ(z) = exp2(p(z)): relative error below 1e-4 where |x| < 4, on both sides of
    zero, and beyond an error below 2e-5, or 2e-8 |x|.

    p is the minimax polynomial of log2(1 - Φ(z)) on [0, 5.5], beyond 4 by the error of z exp2(p).
    One special function instead of erf's branch, and no cancellation for negative x. Each term is
    an instruction for every element of a tile, and what an epilogue waits for is its code.
    """
    z = gl.minimum(gl.abs(x), 5.5)
    p = 5.956769921e-03 - 3.338870592e-04 * z
    p = p * z - 4.866983742e-02
    p = p * z - 4.635416269e-01
    p = p * z - 1.149440527e00
    p = p * z - 1.000102520e00
    return gl.maximum(x, 0.0) - gl.abs(x) * gl.exp2(p)


@gluon.jit
def _clamp(x, HIGH: gl.constexpr):
    return gl.minimum(gl.maximum(x, 0.0, propagate_nan=NAN), HIGH, propagate_nan=NAN)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def quantize(x, dtype: gl.constexpr):
    """float32 → ``dtype``: int8 rounds half to even and saturates, fp8 saturates.

    int8 wants a multiple of four elements in each thread.
    """
    if dtype == gl.int8:
        y = gl.inline_asm_elementwise(
            """{
            .reg .b32 i0, i1, i2, i3, high;
            cvt.rni.s32.f32 i0, $1;
            cvt.rni.s32.f32 i1, $2;
            cvt.rni.s32.f32 i2, $3;
            cvt.rni.s32.f32 i3, $4;
            cvt.pack.sat.s8.s32.b32 high, i3, i2, 0;
            cvt.pack.sat.s8.s32.b32 $0, i1, i0, high;
            }""",
            "=r,f,f,f,f",
            [x],
            dtype=gl.int8,
            is_pure=True,
            pack=4,
        )
    else:
        y = x.to(dtype)  # to fp8: cvt.rn.satfinite
    return y
