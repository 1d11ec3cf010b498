"""Winograd's minimal filtering: the matrices of F(m, r), exact, and what they do on the host.

An m-sample output of an r-tap filter takes n = m + r − 1 products instead of m·r:
``y = Aᵀ[(G g) ⊙ (Bᵀ d)]``, in two dimensions ``Y = Aᵀ[(G g Gᵀ) ⊙ (Bᵀ d B)]A`` (Lavin and Gray, Fast
Algorithms for Convolutional Neural Networks, 2015). The matrices come from Toom and Cook's
multiplication of polynomials, evaluated at n − 1 points and at infinity, and transposed.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fractions import Fraction

Matrix = tuple[tuple[Fraction, ...], ...]
Coefficients = tuple[tuple[float, ...], ...]

# Of the points with small numerators these lose least: F(4, 3) in float32 deviates 2.2e-6 of the
# largest result (128 channels, normal numbers), with 0, ±1, ±2 it is 6.2e-6.
POINTS = {
    3: ("0", "1"),
    4: ("0", "1", "-1"),
    6: ("0", "1", "-1", "1/2", "-2"),
    8: ("0", "1", "-1", "2", "-2", "1/2", "-1/2"),
}


@dataclass(frozen=True, kw_only=True)
class Transform:
    """F(m, r) in exact numbers.

    Attributes:
        m: outputs of a tile, along one axis.
        r: taps of the filter.
        at: Aᵀ [m, n], products to outputs.
        g: G [n, r], filter to products.
        bt: Bᵀ [n, n], input to products.
    """

    m: int
    r: int
    at: Matrix
    g: Matrix
    bt: Matrix

    @property
    def n(self) -> int:
        """Inputs of a tile along one axis, and products."""
        return len(self.bt)


@functools.cache
def transform(m: int, r: int) -> Transform:
    """F(m, r), its rows scaled by powers of two so that 16-bit types hold what they make.

    Row i of Bᵀ is multiplied by a power of two that brings its length near 1, and row i of G
    divided by it: both exact, so accuracy stays and range is gained.
    """
    n = m + r - 1
    points = [Fraction(point) for point in POINTS[n]]
    at = tuple(zip(*_vandermonde(points, m), strict=True))
    inverse = _inverse(_vandermonde(points, n))
    bt, g = [], []
    for column, row in zip(zip(*inverse, strict=True), _vandermonde(points, r), strict=True):
        scale = Fraction(2) ** -round(math.log2(math.hypot(*map(float, column))))
        bt.append(tuple(v * scale for v in column))
        g.append(tuple(v / scale for v in row))
    return Transform(m=m, r=r, at=at, g=tuple(g), bt=tuple(bt))


def coefficients(matrix: Matrix) -> Coefficients:
    """The matrix in floating point, as kernels want it."""
    return tuple(tuple(map(float, row)) for row in matrix)


def _vandermonde(points: list[Fraction], length: int) -> list[list[Fraction]]:
    """Values of 1, x, x², … at each point, and at infinity: the leading coefficient alone."""
    finite = [[point**j for j in range(length)] for point in points]
    return [*finite, [Fraction(int(j == length - 1)) for j in range(length)]]


def _inverse(matrix: list[list[Fraction]]) -> list[list[Fraction]]:
    """Gauss and Jordan's elimination, exact."""
    n = len(matrix)
    rows = [[*row, *(Fraction(int(i == j)) for j in range(n))] for i, row in enumerate(matrix)]
    for c in range(n):
        pivot = next(i for i in range(c, n) if rows[i][c])
        rows[c], rows[pivot] = rows[pivot], rows[c]
        rows[c] = [v / rows[c][c] for v in rows[c]]
        for i in range(n):
            if i != c:
                rows[i] = [v - rows[i][c] * w for v, w in zip(rows[i], rows[c], strict=True)]
    return [row[n:] for row in rows]
