"""ONNX operators that stay out of graphs, and why."""

from __future__ import annotations

_DATA = "the shape of its result depends on the data"
_RANDOM = "it draws random numbers"
_SEQUENCE = "a graph holds tensors: no sequences, no optional values"
_STRING = "a graph holds numbers: no strings"
_TRAINING = "it updates weights in training"
_BITS = "answers are checked in float64, where its bits are others"
_FEW = "rare, and not written yet"

_REASONS = {
    "NonZero NonMaxSuppression Unique": _DATA,
    "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike": _RANDOM,
    "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt": _SEQUENCE,
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength": _SEQUENCE,
    "SequenceMap SplitToSequence": _SEQUENCE,
    "RegexFullMatch StringConcat StringNormalizer StringSplit TfIdfVectorizer": _STRING,
    "Adagrad Adam Gradient Momentum": _TRAINING,
    "BitCast": _BITS,
    "ImageDecoder": "images are decoded before they reach a network",
    "MaxRoiPool MelWeightMatrix TensorScatter": _FEW,
}

REFUSED: dict[str, str] = {
    name: reason for names, reason in _REASONS.items() for name in names.split()
}
