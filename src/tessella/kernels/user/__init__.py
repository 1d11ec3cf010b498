"""Kernels of a user's own, as operators that train, are found, and are compiled into plans."""

from tessella.device.cuda import cuda
from tessella.kernels.user.launches import Launch
from tessella.kernels.user.operator import Operator, operator

__all__ = ["Launch", "Operator", "cuda", "operator"]
