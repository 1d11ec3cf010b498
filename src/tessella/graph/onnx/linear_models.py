"""``ai.onnx.ml``: linear models and scalers, as scikit-learn's exporters write them."""

from __future__ import annotations

from typing import Any

import torch

from tessella.graph.graph import Value
from tessella.graph.onnx.call import Call, Result, Translator, table
from tessella.graph.value import product

DOMAIN = "ai.onnx.ml"

# What a model of another kind can do, by the beginning of its operator's name.
ADVICE = {
    "TreeEnsemble": "trees are no products of matrices: run the file with ONNX Runtime, or train a "
    "network on what the trees answer",
    "ZipMap": "export with zipmap=False: the scores as a tensor",
    "SVM": "use a linear model, or a network, instead of a kernel over support vectors",
    "LabelEncoder": "map labels outside of the model",
}


def advice(operators: list[str]) -> str | None:
    """What to do about the first of these operators that something is known about."""
    found = (text for op in operators for name, text in ADVICE.items() if op.startswith(name))
    return next(found, None)


def _rows(call: Call) -> Value:
    """The input [N, F] as float32, in which these operators answer."""
    x = call.value(0)
    if len(x.shape) != 2 or not isinstance(x.shape[1], int):
        raise call.wrong("it takes rows of features", seen=x)
    return x if x.dtype == "float32" else call.emit("to", x, dtype="float32")


def _numbers(call: Call, name: str, *counts: int) -> torch.Tensor | None:
    """An attribute of so many numbers; None if it is left out."""
    numbers = torch.tensor(list(call.attrs.get(name, ())), dtype=torch.float32)
    if not len(numbers):
        return None
    if len(numbers) not in counts:
        raise call.wrong(f"{name} has another length", seen=f"{len(numbers)}, not {counts[0]}")
    return numbers


def _scores(call: Call, x: Value, made: int) -> Value:
    """``x · coefficientsᵀ + intercepts``, behind ``post_transform``."""
    features = int(x.shape[1])  # type: ignore[arg-type]
    weight = _numbers(call, "coefficients", made * features)
    if weight is None:
        raise call.wrong("it has no coefficients")
    added = _numbers(call, "intercepts", made)
    inputs = [x, call.tensor(weight.view(made, features))]
    scores = call.emit("linear", *inputs, None if added is None else call.tensor(added))
    kind = _text(call, "post_transform", "NONE")
    if kind == "SOFTMAX":
        return call.emit("softmax", scores, dim=1, dtype=None)
    if kind == "LOGISTIC":
        return call.emit("sigmoid", scores)
    if kind != "NONE":
        raise call.wrong("a post_transform that is not known", seen=kind)
    return scores


def _text(call: Call, name: str, default: str) -> str:
    text: Any = call.attrs.get(name, default)
    return text.decode() if isinstance(text, bytes) else str(text)


def _regressor(call: Call) -> Result:
    return _scores(call, _rows(call), int(call.attrs.get("targets", 1)))


def _classifier(call: Call) -> Result:
    """Labels [N], and scores [N, classes]."""
    call.attrs.get("multi_class")  # says how it was trained
    labels = list(call.attrs.get("classlabels_ints", ()))
    if not labels:
        raise call.wrong("its labels are strings, and a graph holds numbers: export integer labels")
    x = _rows(call)
    if len(call.attrs.get("coefficients", ())) != len(labels) * x.shape[1]:
        raise call.wrong("it has not one row of coefficients for each class")
    scores = _scores(call, x, len(labels))
    best = call.aten("argmax", scores, 1)
    return [call.aten("index_select", call.tensor(torch.tensor(labels)), 0, best), scores]


def _scaler(call: Call) -> Result:
    """``(x − offset) · scale``."""
    x = _rows(call)
    features = int(x.shape[1])  # type: ignore[arg-type]
    for name, op, more in (("offset", "sub", {"alpha": 1}), ("scale", "mul", {})):
        numbers = _numbers(call, name, features, 1)
        if numbers is not None:
            x = call.emit(op, x, call.tensor(numbers), **more)
    return x


def _normalizer(call: Call) -> Result:
    """Rows over their norm; a row of zeros stays."""
    x, kind = _rows(call), _text(call, "norm", "MAX")
    if kind == "MAX":
        norm = call.emit("amax", x, dim=(1,), keepdim=True)
    elif kind == "L1":
        norm = call.emit("sum", call.emit("abs", x), dim=(1,), keepdim=True, dtype=None)
    elif kind == "L2":
        square = call.emit("mul", x, x)
        norm = call.emit("sqrt", call.emit("sum", square, dim=(1,), keepdim=True, dtype=None))
    else:
        raise call.wrong("a norm that is not known", seen=kind)
    one = call.tensor(torch.ones(()))
    return call.emit("div", x, call.aten("where.self", call.aten("ne.Scalar", norm, 0), norm, one))


def _binarizer(call: Call) -> Result:
    above = call.aten("gt.Scalar", _rows(call), float(call.attrs.get("threshold", 0.0)))
    return call.emit("to", above, dtype="float32")


def _array_feature_extractor(call: Call) -> Result:
    """Elements of the last axis, by places: scikit-learn's exporter finds labels so."""
    x, places = call.value(0), call.value(1)
    line = call.emit("reshape", places, shape=(product(places.shape),))
    size = x.shape[-1]
    known = call.build.graph.constants.get(line)
    if known is None:
        known = call.build.graph.constants.get(places)
    if known is not None and isinstance(size, int) and not ((known >= 0) & (known < size)).all():
        raise call.wrong("an index is outside of its axis", seen=f"{known.tolist()[:8]} of {size}")
    taken = call.aten("index_select", x, len(x.shape) - 1, line)
    shape = (1, product(places.shape))
    return taken if len(x.shape) > 1 else call.emit("reshape", taken, shape=shape)


LINEAR_MODELS: dict[str, Translator] = table(
    ("LinearRegressor", _regressor),
    ("LinearClassifier", _classifier),
    ("Scaler", _scaler),
    ("Normalizer", _normalizer),
    ("Binarizer", _binarizer),
    ("ArrayFeatureExtractor", _array_feature_extractor),
)
