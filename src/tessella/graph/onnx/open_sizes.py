"""Sizes for dimensions that a file leaves open: the length of a text, the sides of an image."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from tessella.core.errors import UsageError
from tessella.core.spec import TensorSpec
from tessella.graph.onnx.types import DTYPES

Place = tuple[str, int]  # an input's name, and one of its axes


def said_sizes(
    infos: Iterable[onnx.ValueInfoProto], inputs: Sequence[TensorSpec]
) -> dict[Place, int]:
    """The sizes of open dimensions, the first of each input aside, as far as ``inputs`` say them.

    A name that several dimensions of the file share has one size: who says one, says all.

    Raises:
        UsageError: the file has no such input, or it is another one; two sizes for one name.
    """
    tensors = {info.name: info.type.tensor_type for info in infos}
    sizes: dict[str | Place, int] = {}
    for spec in inputs:
        if spec.name not in tensors:
            raise UsageError(
                "the file has no such input",
                seen=spec.name,
                fix=f"name one of {', '.join(tensors)}",
            )
        tensor = tensors[spec.name]
        dims = tensor.shape.dim
        shape = [size for size in (0, *spec.shape[1:]) if isinstance(size, int)]
        wanted = [d.dim_value if d.HasField("dim_value") else None for d in dims[1:]]
        fits = len(dims) == len(shape) and all(
            w in (None, s) for w, s in zip(wanted, shape[1:], strict=True)
        )
        if not fits or DTYPES.get(tensor.elem_type) != spec.dtype:
            shown = "×".join(d.dim_param or str(d.dim_value or "?") for d in dims)
            raise UsageError(
                f"input {spec.name!r} of the file is another one",
                seen=f"{spec}, where it is {DTYPES.get(tensor.elem_type)} {shown}",
                fix="give it that type and those sizes, with a size for each name",
            )
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            key = dim.dim_param or (spec.name, axis)
            if axis and sizes.setdefault(key, size) != size:
                raise UsageError(
                    f"two sizes for {key!r}", seen=f"{sizes[key]} and {size}", fix="say one"
                )
    return {
        (name, axis): sizes[key]
        for name, tensor in tensors.items()
        for axis, dim in enumerate(tensor.shape.dim)
        if axis and (key := dim.dim_param or (name, axis)) in sizes
    }
