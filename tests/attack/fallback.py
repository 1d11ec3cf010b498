"""Attacks on fallback steps: every operator that may run, called as a plan's step calls it.

What a call is spoilt with: other types, extreme numbers, other shapes and element types, places
that are not there, numbers that are none. Shapes are asked first, as by the runtime when a plan is
loaded; a result that no buffer could hold ends there.
"""

from __future__ import annotations

import functools
import json
import math
import random
import re
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch

from tessella.core.memory import is_out_of_memory
from tessella.kernels.fallback import aten
from tessella.operations import shapes
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import TensorMeta
from tessella.operations.torch_operators.allowed import ALLOWED
from tessella.operations.torch_operators.operators import refusal
from tests.attack.operators import calls

LARGEST_BYTES = 64 << 20  # of a result that is computed here

INTEGERS = (
    0, 1, 2, 3, 5, 7, 9, 16, 100, 4096, 65536, -1, -2, -3, -7, 2**20, 2**30, 2**31 - 1, 2**31,
    2**32, 2**62, 2**63 - 1, 2**63, -(2**31), -(2**31) - 1, -(2**63), True,
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, 1e300, 1e-9, 3e9, -3e9)
WORDS = (
    "sum", "mean", "prod", "add", "multiply", "amax", "amin", "floor", "trunc", "ortho", "forward",
    "backward", "reflect", "constant", "replicate", "circular", "same", "valid", "ij", "xy",
    "linear", "nearest", "lower", "fro", "nuc", "U", "L", "reduced", "complete", "r", "tanh",
    "none", "left", "right", "gesvd", "", "x", "a" * 300, "i,i->", "ii->i", "...,...->...",
)  # fmt: skip
DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
    "bool", "complex64", "complex128", "float8_e4m3fn", "uint64", "uint16",
)  # fmt: skip
SHAPES = (
    (), (0,), (1,), (3,), (5,), (3, 4), (4, 4), (0, 4), (1, 1), (2, 3, 4), (1, 2, 5, 5), (3, 0, 2),
    (1, 2, 4, 4, 4), (1,) * 8, (64,), (2, 1, 3), (1,) * 20, (33, 65),
)  # fmt: skip
CONSTANTS = (
    {"dtype": "float32"}, {"dtype": "int64"}, {"dtype": "bool"}, {"dtype": "complex64"},
    {"dtype": "quint8"}, {"memory_format": "channels_last"}, {"memory_format": "preserve_format"},
    {"memory_format": "contiguous_format"}, {"layout": "strided"}, {"layout": "sparse_coo"},
    {"layout": "_mkldnn"}, {"device": "cuda"}, {"input": 9}, {"input": -1}, {}, {"float": "nan"},
    {"float": "inf"}, {"float": "-inf"}, {"float": "1e400"},
)  # fmt: skip


@functools.cache
def targets() -> tuple[tuple[str, ...], ...]:
    """The overloads that may run, by operator."""
    found = []
    for name in sorted(ALLOWED):
        namespace, short = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        overloads = packet.overloads() if packet is not None else []
        asked = (name if o == "default" else f"{name}.{o}" for o in overloads)
        found.append(tuple(t for t in asked if refusal(t) is None))
    return tuple(f for f in found if f)


Case = tuple[str, Callable[[], str]]


def prepare() -> None:
    """What the first call does once, some seconds: torch's rules for shapes are imported."""
    outcome("aten::diff", [torch.zeros(4, 4)], [{"input": 0}], {})


def case(seed: int, index: int) -> Case:
    """The call of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    overloads = targets()[index % len(targets())]
    target = rng.choice(overloads)
    tensors, args, kwargs = honest(rng, target)
    for _ in range(rng.choice((0, 1, 1, 1, 1, 2))):
        spoil(rng, tensors, args, kwargs)
    shown = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors]
    label = f"{target} {json.dumps([args, kwargs], default=str)[:400]} of {' '.join(shown)}"
    return label, functools.partial(outcome, target, tensors, args, kwargs)


def outcome(target: str, tensors: list[Any], args: list[Any], kwargs: dict[str, Any]) -> str:
    """Whether a step like this is refused, or what it answers, in a few letters."""
    metas = tuple(
        TensorMeta(shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch.")) for t in tensors
    )
    attrs = {"target": target, "args": args, "kwargs": kwargs}
    try:
        made = shapes.made("fallback", metas, attrs)
        outputs = tuple(TensorMeta(shape=shape, dtype=dtype) for dtype, shape in made)
        if sum(m.nbytes for m in outputs) > LARGEST_BYTES:
            return "refused"
        problem = Problem(op="fallback", inputs=metas, outputs=outputs, attrs=attrs)
        if aten.fits(problem) is not None:
            return "refused"
        with torch.inference_mode():
            results = aten.bind(problem, {})(*tensors)
    except Exception as error:  # the runtime tells all of them as one of ours
        return "memory" if is_out_of_memory(error) else "refused"
    held = sha256()
    for result in results if isinstance(results, list | tuple) else [results]:
        plain = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result
        same = plain.nan_to_num(nan=0.5) if plain.dtype.itemsize > 1 else plain
        flat = torch.empty(same.numel(), dtype=same.dtype).copy_(same.reshape(-1))
        held.update(flat.view(torch.uint8).numpy().tobytes())
    return f"answered {held.hexdigest()[:12]}"


# --- calls that are accepted ----------------------------------------------------------------------


@functools.cache
def _calls() -> dict[str, list[str]]:
    return calls()


def honest(rng: random.Random, target: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Tensors, and the templates of a call that the operator should accept."""
    short = target.split("::")[1]
    if lines := _calls().get(short):
        return _parsed(rng, rng.choice(lines))
    namespace, name = target.split("::")
    name, _, overload = name.partition(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    shape = rng.choice(((4, 4), (4, 4), (2, 4, 4), (1, 4, 4, 4), (4,)))
    letter = rng.choice("ffffib")
    tensors: list[Any] = []
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.has_default_value() and rng.random() < 0.6:
            if not argument.kwarg_only:
                break
            continue
        value = _plain(rng, argument.name, str(argument.real_type), letter, shape, tensors)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tensors, args, kwargs


def _plain(
    rng: random.Random, name: str, kind: str, letter: str, shape: Any, tensors: list[Any]
) -> Any:
    """A value of a schema's type that often fits."""
    if kind.startswith("Optional["):
        return None if rng.random() < 0.4 else _plain(rng, name, kind[9:-1], letter, shape, tensors)
    if kind.startswith("List["):
        count = len(shape) if name in ("shape", "size") else rng.choice((1, 1, 2))
        return [_plain(rng, name, kind[5:-1], letter, shape, tensors) for _ in range(count)]
    if kind == "Tensor":
        if name in ("mask", "condition"):
            letter = "b"
        tensors.append(_tensor(rng, letter, shape, 4))
        return {"input": len(tensors) - 1}
    if kind == "int":
        return rng.choice((0, 1, -1) if "dim" in name or "axis" in name else (1, 2, 4))
    if kind in ("number", "float"):
        return rng.choice((1, 2, 0.5, -1, 3.0))
    if kind == "bool":
        return rng.random() < 0.5
    if kind == "str":
        return rng.choice(WORDS)
    key = {"ScalarType": "dtype", "MemoryFormat": "memory_format", "Layout": "layout"}.get(kind)
    fitting = [c for c in CONSTANTS if key in c]
    return rng.choice(fitting) if fitting else None


def _parsed(rng: random.Random, line: str) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """A line of ``operators.CALLS``."""
    tensors: list[Any] = []
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    at = 0
    decode = json.JSONDecoder().raw_decode

    def value() -> Any:
        nonlocal at
        while line[at] == " ":
            at += 1
        if found := re.compile(r"([fcbpzi])\(([\d,]*)\)(?:<(\d+))?").match(line, at):
            at = found.end()
            shape = tuple(int(n) for n in found[2].split(",") if n)
            tensors.append(_tensor(rng, found[1], shape, int(found[3] or 4)))
            return {"input": len(tensors) - 1}
        if line[at] == "[" and re.compile(r"\[[fcbpzi]\(").match(line, at):
            items = []
            while line[at] != "]":
                at += 1
                items.append(value())
            at += 1
            return items
        read, at = decode(line, at)
        return read

    while at < len(line):
        named = re.compile(r" *(\w+)=").match(line, at)
        if named:
            at = named.end()
            kwargs[named[1]] = value()
        else:
            args.append(value())
    return tensors, args, kwargs


def _tensor(rng: random.Random, letter: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if letter == "i":
        return torch.randint(0, max(below, 1), shape, generator=generator)
    if letter == "b":
        return torch.rand(shape, generator=generator) < 0.5
    if letter == "c":
        return torch.randn(shape, generator=generator, dtype=torch.complex64)
    if letter == "z":
        return torch.zeros(shape)
    if letter == "p":
        root = torch.randn((*shape, *shape), generator=generator)
        return root @ root.mT + torch.eye(shape[0])
    return torch.randn(shape, generator=generator)


# --- what spoils them -----------------------------------------------------------------------------


def spoil(rng: random.Random, tensors: list[Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """One change, in place: of an argument, or of a tensor."""
    if tensors and rng.random() < 0.5:
        number = rng.randrange(len(tensors))
        tensors[number] = _spoilt(rng, tensors[number])
        return
    chance = rng.random()
    if chance < 0.05 and args:
        args.pop()
    elif chance < 0.1:
        args.append(_other(rng, None))
    elif chance < 0.15:
        name = rng.choice(("dim", "dtype", "device", "layout", "pin_memory", "out", "x", "self"))
        kwargs[name] = _other(rng, None)
    elif kwargs and chance < 0.35:
        name = rng.choice(sorted(kwargs))
        kwargs[name] = _other(rng, kwargs[name])
    elif args:
        number = rng.randrange(len(args))
        args[number] = _other(rng, args[number])


def _other(rng: random.Random, value: Any) -> Any:
    """Another value: mostly of the same type, else of any."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        changed = list(value)
        chance = rng.random()
        if chance < 0.6:
            number = rng.randrange(len(changed))
            changed[number] = _other(rng, changed[number])
        elif chance < 0.8:
            changed = rng.choice((changed[:-1], changed * 2, [*changed, changed[0]], []))
        else:
            changed = [_other(rng, value[0])] * len(value)
        return changed
    if rng.random() < 0.75:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return rng.choice((*INTEGERS, value + 1, value - 1, -value, 2 * value))
        if isinstance(value, float):
            return rng.choice((*FLOATS, {"float": "nan"}, {"float": "inf"}, {"float": "-inf"}))
        if isinstance(value, str):
            return rng.choice(WORDS)
        if isinstance(value, dict):
            return rng.choice((*CONSTANTS, {"input": 0}, {"input": 1}, 3, 1.5))
    other: Any = rng.choice((None, *INTEGERS, *FLOATS, *WORDS, *CONSTANTS, [], [0], [1, 1], [-1],
                             [2**31], [2**62, 2**62], [[]], [None], {"input": 0}, [{"input": 0}],
                             [0] * 70, [{"input": 0}] * 30))  # fmt: skip
    return other


def _spoilt(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of another shape or type, or with other numbers."""
    kind = rng.randrange(6)
    if kind == 0:
        shape = rng.choice(SHAPES)
        return torch.ones(shape, dtype=tensor.dtype)
    if kind == 1:
        return tensor.to(getattr(torch, rng.choice(DTYPES)))
    if kind == 2 and tensor.dim():
        axis = rng.randrange(tensor.dim())
        size = rng.choice((0, 1, tensor.shape[axis] + 1, 2 * tensor.shape[axis]))
        places = torch.arange(size) % max(tensor.shape[axis], 1)
        return tensor.index_select(axis, places) if tensor.shape[axis] else tensor
    if kind == 3:
        return tensor[None] if rng.random() < 0.5 or not tensor.dim() else tensor[0:1].squeeze(0)
    tensor = tensor.clone()
    if not tensor.numel() or tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point():
        values: tuple[Any, ...] = (math.nan, math.inf, -math.inf, 0.0, 1e9, -1e9, 3e38, 1e-40, 65)
    elif tensor.is_complex():
        values = (math.nan, math.inf, 0.0)
    else:
        info = torch.iinfo(tensor.dtype)
        values = (info.min, info.max, min(-1, 0) if info.min else 0, 0, 1, 100)
    if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        values = (math.nan, 0.0, 1.0)
    value = rng.choice(values)
    if kind == 4:
        return torch.full_like(tensor, value)
    tensor.view(-1)[rng.randrange(tensor.numel())] = value
    return tensor
