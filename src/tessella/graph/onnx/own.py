"""Operations of ours that ONNX can only say in many operators whose sizes depend on the data.

A file has each as a function of the domain ``DOMAIN``, whose body is those operators: who does not
know it runs the body, and who reads it back here knows the operation by its name.
"""

from __future__ import annotations

from tessella.graph.onnx.call import Call, Result, Translator

DOMAIN = "tessella"
# By operation: its attributes with their types, of which those that are None are left out.
ATTRIBUTES: dict[str, dict[str, type]] = {
    "nms": {"iou_threshold": float, "score_threshold": float, "most": int},
    "pyramid_roi_align": {"sizes": list, "strides": list, "side": int, "samples": int},
}
OPTIONAL = ("score_threshold",)
INPUTS = {"nms": (2, 3), "pyramid_roi_align": (3, 3)}  # how many, at least and at most


def function_name(op: str, number: int) -> str:
    """Each call has a function of its own, since bodies hold sizes."""
    return f"{op}_{number}"


def operation_of(domain: str, function: str) -> str | None:
    """Which operation a function stands for; None: it is not one of these."""
    op, _, number = function.rpartition("_")
    return op if domain == DOMAIN and op in ATTRIBUTES and number.isdecimal() else None


def _same(op: str) -> Translator:
    def translated(call: Call) -> Result:
        least, most = INPUTS[op]
        if not least <= len(call.inputs) <= most:
            raise call.wrong(f"it has {least} to {most} inputs", seen=len(call.inputs))
        attrs = {name: call.attrs.get(name) for name in ATTRIBUTES[op]}
        for name, kind in ATTRIBUTES[op].items():
            left_out = attrs[name] is None and name in OPTIONAL
            if not left_out and type(attrs[name]) is not kind:
                raise call.wrong(f"{name} is no {kind.__name__}", seen=attrs[name])
        call.modest(*(v for v in attrs.values() if isinstance(v, int)))
        attrs = {n: tuple(v) if isinstance(v, list) else v for n, v in attrs.items()}
        return call.emit(op, *call.values(), **attrs)

    return translated


OWN: dict[str, Translator] = {op: _same(op) for op in ATTRIBUTES}
