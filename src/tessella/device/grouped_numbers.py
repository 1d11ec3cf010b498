"""Integers that a kernel takes in tuples, and whose values it is not compiled for.

Triton makes other machine code where an integer is one or divisible by 16, unless
``do_not_specialize`` names its parameter; of the integers in a tuple it does so always (3.6 to
3.9). Where sizes and strides are to be arguments, so that the layers of a network share a kernel,
each would have to be a parameter of its own: 24 of them in one case.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from triton import JITFunction
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend


def unspecialized(kernel: Any) -> Any:
    """Decorates a decorated kernel: ``do_not_specialize`` holds for integers in tuples, too."""
    if not isinstance(kernel, JITFunction):  # interpreted, not compiled
        return kernel
    named = [parameter.num for parameter in kernel.params if parameter.do_not_specialize]

    def create_binder() -> tuple[Any, ...]:
        *rest, bind = kernel.create_binder()

        def bind_unspecialized(*args: Any, **options: Any) -> tuple[Any, list[Any], Any]:
            bound, specialization, options = bind(*args, **options)
            values = list(bound.values())
            for number in named:
                specialization[number] = _type_alone(values[number])
            return bound, specialization, options

        return *rest, bind_unspecialized

    kernel.device_caches = defaultdict(create_binder)
    return kernel


def _type_alone(value: Any) -> tuple[Any, Any]:
    """The types of an argument, nested as it is, and nothing that its value would change."""
    if isinstance(value, tuple):
        types, keys = zip(*map(_type_alone, value), strict=True)
        return types, keys
    type_and_key: tuple[Any, Any] = native_specialize_impl(BaseBackend, value, False, False, False)
    return type_and_key
