"""Problems of a convolution's gradients."""

from __future__ import annotations

from typing import Any

from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta


def problem(
    op: str,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: int = 1,
    *,
    dtype: str = "float16",
    made: str | None = None,
    format: Any = "channels_last",
    weight_format: Any = "channels_last",
    constant: tuple[int, ...] = (),
) -> Problem:
    out = [
        (n + 2 * p - d * (r - 1) - 1) // s + 1
        for n, r, s, p, d in zip(x[2:], weight[2:], stride, padding, dilation)
    ]
    metas = {
        "x": TensorMeta(shape=x, dtype=dtype, format=format),
        "weight": TensorMeta(shape=weight, dtype=dtype, format=weight_format),
        "dy": TensorMeta(shape=(x[0], weight[0], *out), dtype=dtype, format=format),
    }
    reads, makes = ("weight", "x") if op.endswith("dgrad") else ("x", "weight")
    output = TensorMeta(shape=metas[makes].shape, dtype=made or dtype, format=metas[makes].format)
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    more = {"input_size": x} if op.endswith("dgrad") else {"kernel_size": weight[2:]}
    return Problem(
        op=op,
        inputs=(metas["dy"], metas[reads]),
        outputs=(output,),
        attrs={**attrs, **more},
        constant=constant,
    )
