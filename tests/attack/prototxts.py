"""Attacks on Caffe's texts: other numbers, words and braces; lines gone, twice, or very many.

A network that is made must return as many logits as it was asked for.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable

import torch

from tessella.core.errors import TessellaError
from tessella.nn import prototxt
from tests.support import prototxts

TEXTS = tuple(sorted((n, t) for n, t in vars(prototxts).items() if n.isupper() and "layer" in t))
CLASSES = 3
NUMBERS = (
    "0", "-1", "1", "2", "3", "7", "64", "100000", "2147483647", "2147483648", "9" * 30,
    "9" * 5000, "0x7fffffff", "0x" + "f" * 3000, "1e999", "-1e30", "nan", "-inf", "0.5", "1.5f",
    "1e-30", "true",
)  # fmt: skip
WORDS = (
    "MAX", "AVE", "SUM", "PROD", "TRAIN", "TEST", "true", "WITHIN_CHANNEL", "x", "layer", "layers",
    "param", "type", "top", "bottom", "kernel_size", "pad", "stride", "group", "axis", "num_output",
    "dropout_ratio", "local_size", "dim", "global_pooling", "include", "shape", "dilation",
)  # fmt: skip
STRINGS = (
    '""', '"data"', '"conv1"', '"training"', '"forward"', '"a.b"', '"\\n"', '"\\x41"', "'x'", '"é"',
    '"BatchNorm"', '"Scale"', '"Softmax"', '"Reshape"', '"Flatten"', '"Concat"', '"Eltwise"',
    '"PReLU"', '"Pooling"', '"InnerProduct"', '"LRN"', '"Dropout"', '"Python"', '"msra"',
    '"gaussian"', '"' + "a" * 5000 + '"', '"_modules"', '"\x1b[2J"',
)  # fmt: skip
_PART = re.compile(r'"[^"\n]*"|-?\d[\w.]*|[A-Za-z_]\w*|[{}:]')


def prepare() -> None:
    for name, text in TEXTS:
        assert outcome(text) in ("answered", "refused"), name


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The text of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    name, text = TEXTS[index % len(TEXTS)]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        text = _spoilt(rng, text)
    return name, functools.partial(outcome, text)


def _spoilt(rng: random.Random, text: str) -> str:
    kind = rng.randrange(12)
    lines = text.split("\n")
    if kind == 0:
        del lines[rng.randrange(len(lines))]
    elif kind == 1:
        lines.insert(rng.randrange(len(lines)), rng.choice(lines))
    elif kind == 2:
        rng.shuffle(lines)
    elif kind == 3:
        place = rng.randrange(len(lines))
        lines[place:place] = [lines[place]] * rng.choice((30, 300, 3000, 100_000))
    elif kind == 4:
        return text[: rng.randrange(len(text))]
    elif kind == 5:
        place = rng.randrange(len(text))
        deep = rng.choice((10, 40, 3000))
        more = rng.choice(("a {" * deep + "}" * deep, "[" * deep, "\0", "\ud800", "#", "<", "}"))
        return text[:place] + more + text[place:]
    else:
        parts = list(_PART.finditer(text))
        part = rng.choice(parts)
        word = part.group()
        same = STRINGS if word[0] == '"' else NUMBERS if word[-1].isdigit() else WORDS
        now = rng.choice(same if rng.random() < 0.85 else (*STRINGS, *NUMBERS, *WORDS))
        return text[: part.start()] + now + text[part.end() :]
    return "\n".join(lines)


def outcome(text: str) -> str:
    """``refused``, or ``answered`` with logits of the right number."""
    try:
        channels, height, width = prototxt.input_shape(text) or (1, 28, 28)
        summaries = prototxt.layers(text)
        str(summaries).encode("utf-8", "backslashreplace")
        sizes = {"channels": min(channels, 8), "height": min(height, 99), "width": min(width, 99)}
        module = prototxt.build(text, classes=CLASSES, **sizes)
    except TessellaError as error:
        str(error).encode("utf-8", "backslashreplace")
        return "refused"
    x = torch.empty(2, *sizes.values(), device="meta")
    made = module.to("meta").eval()(x)
    return "answered" if made.shape == (2, CLASSES) else f"differs: {list(made.shape)}"
