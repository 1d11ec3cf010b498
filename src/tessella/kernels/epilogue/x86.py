"""Activations in machine code for AVX-512 and AVX2: of one vector of float32 in a register.

Constants lie in memory, each as often as a vector has lanes, since instructions take their last
operand from there. NaNs spread: of minimum and maximum the processor returns the second operand if
one is a NaN, so that is the number and the first the bound.

Sources: the exponential is 2ⁿ · 2ᶠ with n rounded by adding 1.5 · 2²³, and a polynomial of degree 6
(interpolated at Chebyshev nodes, 2.5e-9) for 2ᶠ; erf is Abramowitz and Stegun, 7.1.26 (1.5e-7),
and for AVX2 the form of their 7.1.28, fitted here to the normal distribution (5e-8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from tessella.device.x86.assembler import AVX2, AVX512, Assembler, At, InstructionSet

TEMPORARIES = 4  # vectors beside the one of the numbers
MOST_CONSTANTS = 64

LOG2E = 1.44269504088896341
LOG2E_LOW = LOG2E - float(torch.tensor(LOG2E))  # what float32 leaves of it
EXP2 = (1.0, 0.6931471824645996, 0.24022650718688965, 0.05550327152013779, 0.009618056938052177,
        0.0013400427997112274, 0.00015461444854736328)  # fmt: skip
ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ERF_P = 0.3275911
# of the normal distribution below -x: one over this polynomial's 16th power
NORMAL = (1.0442737340927124, 0.05207711085677147, 0.02206282876431942, 0.0034598293714225292,
          -5.089769729238469e-06, 7.792435644660145e-05, -2.1193918655626476e-06,
          8.485260991619725e-07)  # fmt: skip
NORMAL_LARGEST = 8.0  # where that is 2e-15
# The normal distribution below -x, up to 4.5, where this polynomial ends near 0. Times x it is
# within 1.4e-3 of what is above 0.01 (rounding to bfloat16 takes 2e-3 to 4e-3), and within 7e-5 of
# the rest.
COARSE_NORMAL = (0.5000186562538147, -0.3995804786682129, 0.0053627691231667995,
                 0.048362791538238525, 0.030431900173425674, -0.038314759731292725,
                 0.015059752389788628, -0.002992002759128809, 0.0003065110940951854,
                 -1.2932689060107805e-05)  # fmt: skip
COARSE_LARGEST = 4.5
TANH_GELU = 2 * math.sqrt(2 / math.pi)
ROUNDS = 1.5 * 2**23  # added to a number it leaves no bits behind the point
LARGEST = 87.0  # e to it, and to minus it, are normal numbers
INFINITE = 100.0  # e to it, with AVX-512: huge numbers divided by it are 0
ERF_LARGEST = 80.0  # and so is what erf multiplies e to minus it with: subnormal numbers are slow
ALL_BUT_SIGN = float(torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32))  # a NaN


class Constants:
    """The numbers that some machine code takes from memory; they must live as long as it does.

    Args:
        isa: whose vectors.
        pointer: the register that holds their address from ``begin`` on.
    """

    def __init__(self, isa: InstructionSet, pointer: str = "rax") -> None:
        self._table = torch.zeros(MOST_CONSTANTS, isa.lanes, dtype=torch.float32)
        self._places: dict[object, int] = {}
        self._isa, self.pointer = isa, pointer

    def begin(self, a: Assembler) -> None:
        """Set the pointer."""
        a.set(self.pointer, self._table.data_ptr())

    def first(self, lanes: int) -> At:
        """Where a vector lies whose first lanes have all bits, and the others none."""
        bits = -(torch.arange(self._isa.lanes) < lanes).to(torch.int32)
        return self.held(("first", lanes), bits.view(torch.float32))

    def at(self, number: float) -> At:
        """Where a vector of this number lies."""
        return self.held(number, torch.tensor(number, dtype=torch.float32))

    def held(self, key: object, vector: torch.Tensor) -> At:
        """Where these numbers of a vector lie, which have a name."""
        place = self._places.setdefault(key, len(self._places))
        self._table[place] = vector
        return At(base=self.pointer, distance=place * self._isa.vector_bytes)


def activation_refusal(name: str | None) -> str | None:
    """Why ``activate`` cannot write an activation, or None."""
    return None if name is None or name in WRITTEN else f"machine code has no {name}"


def activate(
    a: Assembler,
    name: str | None,
    constants: Constants,
    x: int,
    first: int,
    *,
    coarse: bool = False,
    floor: float = 0.0,
) -> None:
    """Change the numbers of vector ``x``; vectors ``first`` to ``first + 3`` are overwritten.

    Args:
        name: of ``ACTIVATIONS``, or None: nothing is done.
        coarse: they will be rounded to bfloat16 at once, and may be off by about as much.
        floor: what ``relu`` makes of lower numbers.
    """
    if floor != 0:
        _at_least(_Vector(a, constants, x, first), floor)
    elif name is not None:
        written = {**WRITTEN, **COARSE} if coarse else WRITTEN
        written[name](_Vector(a, constants, x, first))


def exponential(
    a: Assembler, constants: Constants, y: int, made: int, n: int, f: int, mask: int = 0
) -> None:
    """Vector ``made`` = eʸ for y between -87 and 87, which stays; n and f are overwritten.

    Of a NaN it makes one with AVX-512, and 0 where the mask is; with AVX2, which has none, any
    number.
    """
    _Vector(a, constants, y, made).exponential(y, made, n, f, mask)


def to_integers(a: Assembler, constants: Constants, x: int, *, bounded: bool = False) -> None:
    """Round the numbers of a vector half to even, to int32: of more than 127 that, which int8
    saturates to anyway, since beyond 2³¹ there is none.

    Args:
        bounded: none is a NaN or leaves int32.
    """
    if not bounded:
        a.vector("vminps", x, x, constants.at(127.0))
    a.convert("vcvtps2dq", x, x)


def store_int8(
    a: Assembler, to: At, vectors: Sequence[int], spare: int, *, at_least_zero: bool = False
) -> None:
    """Store one or two vectors of int32 one after the other as int8, saturated (AVX2)."""
    x = vectors[0]
    if len(vectors) == 2:
        a.vector("vpackssdw", x, *vectors)
        a.upper_half(spare, x)
        a.in_half("vpacksswb", x, x, spare)
        a.swap_middle(x, x)
    else:
        a.upper_half(spare, x)
        a.in_half("vpackssdw", x, x, spare)
        a.in_half("vpacksswb", x, x, x)
    if at_least_zero:
        a.vector("vxorps", spare, spare, spare)
        a.in_half("vpmaxsb", x, x, spare)
    if len(vectors) == 2:
        a.store_half(to, x)
    else:
        a.store_quarter(to, x)


def load_order(a: Assembler, constants: Constants, to: int) -> None:
    """The vector that ``pack_int8`` needs."""
    order = torch.arange(16, dtype=torch.int32).reshape(4, 4).t().flatten()
    a.load_vector(to, constants.held("order", order.view(torch.float32)))


def pack_int8(
    a: Assembler,
    constants: Constants,
    vectors: Sequence[int],
    order: int,
    *,
    at_least_zero: bool = False,
) -> int:
    """One, two or four vectors of int32 one after the other as int8, saturated, in the lowest bytes
    of the vector that is returned, the first (AVX-512). All are overwritten.

    Args:
        order: the vector that ``load_order`` has filled.
    """
    x, last = vectors[0], vectors[-1]
    if len(vectors) == 4:
        _, last, third, fourth = vectors
        a.vector("vpackssdw", third, third, fourth)
    a.vector("vpackssdw", x, x, last)
    a.vector("vpacksswb", x, x, third if len(vectors) == 4 else x)
    if at_least_zero:
        a.vector("vpmaxsb", x, x, constants.at(0.0))
    a.vector("vpermd", x, order, x)
    return x


def store_packed(a: Assembler, to: At, x: int, vectors: int) -> None:
    """What ``pack_int8`` has made of so many vectors."""
    {1: a.store_quarter, 2: a.store_half, 4: a.store_vector}[vectors](to, x)


class _Vector:
    """The numbers ``x`` and four temporaries, all vectors, and instructions on them."""

    def __init__(self, a: Assembler, constants: Constants, x: int, first: int) -> None:
        self._a, self._constants, self.x = a, constants, x
        self.isa = a.instructions
        self.temporaries = tuple(range(first, first + TEMPORARIES))

    def do(self, name: str, to: int, one: int, other: int | float) -> None:
        """``to`` = ``one`` and ``other`` combined: a vector, or a float, the constant."""
        place = self._constants.at(other) if isinstance(other, float) else other
        self._a.vector(name, to, one, place)

    def load(self, to: int, constant: float) -> None:
        self._a.load_vector(to, self._constants.at(constant))

    def copy(self, to: int, source: int) -> None:
        self._a.copy_vector(to, source)

    def zero(self, to: int) -> None:
        self._a.vector("vxorps", to, to, to)

    def clamp(self, to: int, x: int, low: float, high: float, spare: int) -> None:
        """NaNs stay what they are."""
        self.load(spare, low)
        self.do("vmaxps", to, spare, x)
        self.load(spare, high)
        self.do("vminps", to, spare, to)

    def polynomial(self, made: int, x: int, coefficients: Sequence[float]) -> None:
        self.load(made, coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            self.do("vfmadd213ps", made, x, coefficient)

    def exponential(self, y: int, made: int, n: int, f: int, mask: int = 0) -> None:
        """``made`` = eʸ for y between -87 and 87, which stays; the other two are overwritten.

        With AVX-512 a NaN stays one, and of more than 89 comes infinity.
        """
        scales = self.isa == AVX512
        whole = n if scales else made
        self.do("vmulps", n, y, LOG2E)
        self.do("vaddps", n, n, ROUNDS)
        self.do("vsubps", whole, n, ROUNDS)
        self.copy(f, y)
        self.do("vfmsub132ps", f, whole, LOG2E)  # y · log2 e - n, rounded once
        self.do("vfmadd231ps", f, y, LOG2E_LOW)
        self.polynomial(made, f, EXP2)
        if scales:
            self._a.vector("vscalefps", made, made, n, mask)
            return
        self._a.shift_left(n, n, 23)  # what was added to round leaves no bit
        self.do("vpaddd", made, made, n)

    def logistic(self, y: int, numerator: int | float) -> None:
        """``x`` = numerator / (1 + e⁻ʸ); y is the first temporary, and any number."""
        a, b, c, d = self.temporaries
        assert y == a
        scales = self.isa == AVX512
        self.clamp(y, y, -INFINITE if scales else -LARGEST, LARGEST, b)
        self.zero(b)
        self.do("vsubps", y, b, y)
        self.exponential(y, b, c, d)
        if not scales:
            self.do("vsubps", c, y, y)  # 0, or a NaN, whose bits the exponent would have changed
            self.do("vaddps", b, b, c)
        self.do("vaddps", b, b, 1.0)
        if isinstance(numerator, float):
            self.load(c, numerator)
            numerator = c
        elif not scales:  # e to LARGEST is no infinity: what is divided by it must not be huge
            self.load(c, -LARGEST)
            self.do("vmaxps", numerator, c, numerator)
        self.do("vdivps", self.x, numerator, b)


def _relu(v: _Vector) -> None:
    a = v.temporaries[0]
    v.zero(a)
    v.do("vmaxps", v.x, a, v.x)


def _at_least(v: _Vector, floor: float) -> None:
    a = v.temporaries[0]
    v.load(a, floor)
    v.do("vmaxps", v.x, a, v.x)


def _relu6(v: _Vector) -> None:
    a = v.temporaries[0]
    v.clamp(v.x, v.x, 0.0, 6.0, a)


def _hardsigmoid(v: _Vector) -> None:
    a, b, *_ = v.temporaries
    v.do("vaddps", a, v.x, 3.0)
    v.clamp(a, a, 0.0, 6.0, b)
    v.do("vmulps", v.x, a, 1 / 6)


def _hardswish(v: _Vector) -> None:
    a, b, *_ = v.temporaries
    v.do("vaddps", a, v.x, 3.0)
    v.clamp(a, a, 0.0, 6.0, b)
    v.do("vmulps", a, a, 1 / 6)
    v.do("vmulps", v.x, v.x, a)


def _sigmoid(v: _Vector) -> None:
    a = v.temporaries[0]
    v.copy(a, v.x)
    v.logistic(a, 1.0)


def _silu(v: _Vector) -> None:
    a = v.temporaries[0]
    v.copy(a, v.x)
    v.logistic(a, v.x)


def _tanh(v: _Vector) -> None:
    a = v.temporaries[0]
    v.do("vaddps", a, v.x, v.x)
    v.logistic(a, 2.0)
    v.do("vsubps", v.x, v.x, 1.0)


def _gelu_tanh(v: _Vector) -> None:
    a, b, *_ = v.temporaries
    v.do("vmulps", b, v.x, v.x)
    v.do("vmulps", b, b, TANH_GELU * 0.044715)
    v.do("vaddps", b, b, TANH_GELU)
    v.do("vmulps", a, b, v.x)
    v.logistic(a, v.x)


def _gelu(v: _Vector) -> None:
    """relu(x) - |x| / 2 · erfc(|x| / √2)."""
    a, b, c, d = v.temporaries
    if v.isa == AVX2:
        v.do("vandps", a, v.x, ALL_BUT_SIGN)
        v.load(b, NORMAL_LARGEST)
        v.do("vminps", a, b, a)
        v.polynomial(b, a, NORMAL)
        for _ in range(4):
            v.do("vmulps", b, b, b)
        v.do("vdivps", a, a, b)
        v.zero(b)
        v.do("vmaxps", v.x, b, v.x)
        v.do("vsubps", v.x, v.x, a)
        return
    v.do("vmulps", a, v.x, v.x)
    v.do("vmulps", a, a, -0.5)
    v.load(b, -ERF_LARGEST)
    v.do("vmaxps", a, b, a)
    v.exponential(a, c, b, d)
    v.do("vandps", a, v.x, ALL_BUT_SIGN)
    v.load(b, LARGEST)
    v.do("vminps", a, b, a)  # infinity times 0 would be a NaN
    v.do("vmulps", b, a, ERF_P / math.sqrt(2))
    v.do("vaddps", b, b, 1.0)
    v.load(d, 1.0)
    v.do("vdivps", b, d, b)
    v.polynomial(d, b, ERF)
    v.do("vmulps", d, d, b)
    v.do("vmulps", d, d, c)
    v.do("vmulps", d, d, a)
    v.do("vmulps", d, d, 0.5)
    v.zero(b)
    v.do("vmaxps", v.x, b, v.x)
    v.do("vsubps", v.x, v.x, d)


def _coarse_gelu(v: _Vector) -> None:
    """relu(x) - |x| times the share of the normal distribution below -|x|."""
    a, b, c, _ = v.temporaries
    v.do("vandps", a, v.x, ALL_BUT_SIGN)
    v.load(b, COARSE_LARGEST)
    v.do("vminps", a, b, a)
    v.polynomial(b, a, COARSE_NORMAL)
    v.zero(c)
    v.do("vmaxps", b, c, b)  # of no number below 0 one above
    v.do("vmulps", a, a, b)
    v.zero(b)
    v.do("vmaxps", v.x, b, v.x)
    v.do("vsubps", v.x, v.x, a)


WRITTEN: dict[str, Callable[[_Vector], None]] = {
    "relu": _relu,
    "relu6": _relu6,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "tanh": _tanh,
    "gelu_tanh": _gelu_tanh,
    "gelu": _gelu,
}
COARSE = {"gelu": _coarse_gelu}
