"""Kernels of a user's own, as operators that train, are found, and are compiled into plans."""

from tessella.kernels.user.cuda import cuda
from tessella.kernels.user.operator import Launch, Operator, operator

__all__ = ["Launch", "Operator", "cuda", "operator"]
