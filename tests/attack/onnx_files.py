"""Attacks on the reader of ONNX files: the onnx package's own node tests, spoilt.

What a file is spoilt with: other numbers, names, operators, types and shapes; tensors whose data
are elsewhere; functions, loops and branches around everything; and bytes. A file that is read must
give what ONNX Runtime gives, where that reads it, too.
"""

from __future__ import annotations

import functools
import math
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tessella.core.errors import TessellaError, UnboundInput
from tessella.core.spec import DimRange
from tessella.graph import Graph, interpret
from tessella.graph.graph import shape_at
from tessella.graph.onnx import read
from tests.support.onnx_backend import array, cases

MOST_ELEMENTS = 1 << 22  # of a tensor in a network whose answer is computed here
TOLERANCE = 1e-3  # of the largest value: what is looked for are other answers, not roundings
LARGEST_FILE = 50_000
TWO = DimRange(min=2, opt=2, max=2)

INTEGERS = (
    0, 1, 2, 3, 4, 7, 16, 100, 513, 4096, 65536, -1, -2, -3, -7, 2**20, 2**24, 2**30, 2**31 - 1,
    2**31, 2**40, 2**62, 2**63 - 1, -(2**31), -(2**62), -(2**63),
)  # fmt: skip
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 3e38, -3e38, math.inf, -math.inf, math.nan, 1e-9)
WORDS = (
    b"", b"x", b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID", b"linear", b"cubic", b"nearest",
    b"reflect", b"edge", b"wrap", b"constant", b"asymmetric", b"align_corners", b"floor", b"ceil",
    b"tf_crop_and_resize", b"half_pixel", b"\xff\xfe", b"a" * 3000, b"\x1b[2J", b"CRD", b"tanh",
    b"none", b"LEFT", b"not_larger", b"border", b"bicubic", b"max", b"ij,jk->ik", b"ii->i", b"...",
)  # fmt: skip
TYPES = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 22, 99, -1)
UNSAID = ("softcap", "periodic")  # ONNX does not say what they mean below 0, or beyond 1
PLACES = ("/etc/passwd", "../x", "x", "", "/proc/self/mem", "/dev/zero", "a/../../x", "link", "w")


@functools.cache
def _cases() -> tuple[Any, ...]:
    return tuple(c for c in cases() if c.model.ByteSize() < LARGEST_FILE)


@functools.cache
def original(number: int) -> ModelProto:
    """A model to be spoilt, with the inputs that decide shapes made constants of the file."""
    case = _cases()[number]
    model = ModelProto.FromString(case.model.SerializeToString())
    given = [numpy_helper.to_array(i) if isinstance(i, TensorProto) else np.asarray(i)
             for i in case.data_sets[0][0]]  # fmt: skip
    feeds = dict(zip([v.name for v in model.graph.input], given, strict=True))
    while True:
        try:
            read(model.SerializeToString())
        except UnboundInput as error:
            kept = [v for v in model.graph.input if v.name != error.input]
            model.graph.initializer.append(numpy_helper.from_array(feeds[error.input], error.input))
            del model.graph.input[:]
            model.graph.input.extend(kept)
            continue
        except TessellaError:
            pass
        return model


def prepare() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _cases()


def case(seed: int, index: int) -> tuple[str, Callable[[], str]]:
    """The file of this number: the same one for the same seed."""
    rng = random.Random(f"{seed}/{index}")
    number = index if rng.random() < 0.7 else rng.randrange(len(_cases()))
    number %= len(_cases())
    model, done = ModelProto.FromString(original(number).SerializeToString()), []
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        spoil = rng.choice(SPOILING)
        try:
            spoil(rng, model)
        except Exception:  # there is nothing of this sort in the file, or it is spoilt already
            continue
        done.append(spoil.__name__)
    content = model.SerializeToString()
    if rng.random() < 0.15:
        spoil_bytes = rng.choice((_flipped, _cut, _inserted, _repeated))
        content = spoil_bytes(rng, content)
        done.append(spoil_bytes.__name__)
    inside = rng.random() < 0.3
    return (
        f"{_cases()[number].name.removeprefix('test_')} {' '.join(done) or 'as it is'}",
        functools.partial(outcome, content, inside),
    )


def _any(rng: random.Random) -> ModelProto:
    model: ModelProto = rng.choice(_cases()).model
    return model


# --- what is spoilt -------------------------------------------------------------------------------


def _nodes(graph: onnx.GraphProto) -> list[NodeProto]:
    found = list(graph.node)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += _nodes(attribute.g)
    return found


def _attributes(model: ModelProto) -> list[AttributeProto]:
    return [a for n in _nodes(model.graph) for a in n.attribute]


def _tensors(model: ModelProto) -> list[TensorProto]:
    return [*model.graph.initializer, *(a.t for a in _attributes(model) if a.HasField("t"))]


def attribute(rng: random.Random, model: ModelProto) -> None:
    """Another number or word in an attribute."""
    chosen = rng.choice([a for a in _attributes(model) if a.name not in UNSAID])
    if chosen.type == AttributeProto.INT:
        chosen.i = rng.choice((*INTEGERS, chosen.i + 1, chosen.i - 1))
    elif chosen.type == AttributeProto.INTS:
        _one_of(rng, chosen.ints, INTEGERS)
    elif chosen.type == AttributeProto.FLOAT:
        chosen.f = rng.choice(FLOATS)
    elif chosen.type == AttributeProto.FLOATS:
        _one_of(rng, chosen.floats, FLOATS)
    elif chosen.type == AttributeProto.STRING:
        chosen.s = rng.choice(WORDS)
    elif chosen.type == AttributeProto.STRINGS:
        _one_of(rng, chosen.strings, WORDS)


def _one_of(rng: random.Random, listed: Any, values: Any) -> None:
    """Another element, one more, one less, or very many."""
    kind = rng.randrange(5)
    if kind == 0:
        listed.append(rng.choice(values))
    elif kind == 1:
        del listed[rng.randrange(len(listed))]
    elif kind == 2 and rng.random() < 0.3:
        listed.extend([rng.choice(values)] * 2000)
    else:
        listed[rng.randrange(len(listed))] = rng.choice(values)


def another_attribute(rng: random.Random, model: ModelProto) -> None:
    """One from another model, or none, or of another type."""
    node = rng.choice(_nodes(model.graph))
    if node.attribute and rng.random() < 0.4:
        del node.attribute[rng.randrange(len(node.attribute))]
        return
    others = _attributes(_any(rng))
    added = rng.choice(others) if others and rng.random() < 0.7 else helper.make_attribute(
        rng.choice(("axis", "axes", "to", "group", "pads", "value", "kernel_shape", "x")),
        rng.choice((1, 1.5, "x", [1, 2], [1.5])),
    )  # fmt: skip
    node.attribute.append(added)
    if node.attribute[:-1] and rng.random() < 0.5:
        node.attribute[-1].name = node.attribute[0].name
        del node.attribute[0]


def constant(rng: random.Random, model: ModelProto) -> None:
    """Other numbers in a tensor that is given."""
    chosen = rng.choice(_tensors(model))
    given = np.array(numpy_helper.to_array(chosen))
    values = FLOATS if given.dtype.kind == "f" else INTEGERS
    with np.errstate(all="ignore"):
        given.reshape(-1)[rng.randrange(given.size)] = rng.choice(values)
    chosen.CopyFrom(numpy_helper.from_array(given, chosen.name))


def described(rng: random.Random, model: ModelProto) -> None:
    """A tensor with other dimensions or another type than its data have."""
    chosen = rng.choice(_tensors(model))
    if rng.random() < 0.3:
        chosen.data_type = rng.choice(TYPES)
    elif rng.random() < 0.7:
        _one_of(rng, chosen.dims, INTEGERS)
    else:
        chosen.raw_data = chosen.raw_data[: rng.randrange(len(chosen.raw_data) + 1)]


def elsewhere(rng: random.Random, model: ModelProto) -> None:
    """A tensor whose data are said to be in another file."""
    chosen = rng.choice(_tensors(model))
    chosen.ClearField("raw_data")
    chosen.data_location = TensorProto.EXTERNAL
    entries = {"location": rng.choice(PLACES)}
    for key in ("offset", "length"):
        if rng.random() < 0.5:
            entries[key] = str(rng.choice((*INTEGERS, "x", "1e9", "٣")))
    for key, value in entries.items():
        chosen.external_data.add(key=key, value=value)


def sparse(rng: random.Random, model: ModelProto) -> None:
    added = model.graph.sparse_initializer.add()
    added.values.CopyFrom(rng.choice(_tensors(model)))
    added.indices.CopyFrom(rng.choice(_tensors(model)))
    added.dims.append(rng.choice(INTEGERS))


def shape(rng: random.Random, model: ModelProto) -> None:
    """An input or output of another shape or type."""
    info = rng.choice([*model.graph.input, *model.graph.output])
    kind = info.type.tensor_type
    if rng.random() < 0.3:
        kind.elem_type = rng.choice(TYPES)
    elif rng.random() < 0.2:
        kind.ClearField("shape")
    elif kind.shape.dim and rng.random() < 0.8:
        chosen = rng.choice(kind.shape.dim)
        if rng.random() < 0.3:
            chosen.dim_param = "N"
        else:
            chosen.dim_value = rng.choice(INTEGERS)
    else:
        kind.shape.dim.add().dim_value = rng.choice(INTEGERS)


def open_batch(rng: random.Random, model: ModelProto) -> None:
    for info in model.graph.input:
        info.type.tensor_type.shape.dim[0].dim_param = "N"


def rewired(rng: random.Random, model: ModelProto) -> None:
    """An input, an output or a result under another name: missing, twice, or in a circle."""
    nodes = _nodes(model.graph)
    names = [n for node in nodes for n in (*node.input, *node.output)] + ["", "ghost"]
    names += [v.name for v in (*model.graph.input, *model.graph.initializer)]
    node = rng.choice(nodes)
    listed = node.input if rng.random() < 0.7 else node.output
    kind = rng.randrange(4)
    if kind == 0:
        listed.append(rng.choice(names))
    elif kind == 1:
        del listed[rng.randrange(len(listed))]
    else:
        listed[rng.randrange(len(listed))] = rng.choice(names)


def operator(rng: random.Random, model: ModelProto) -> None:
    """The same inputs for another operator."""
    node = rng.choice(_nodes(model.graph))
    other = rng.choice(_nodes(_any(rng).graph))
    node.op_type = other.op_type
    if rng.random() < 0.5:
        del node.attribute[:]
        node.attribute.extend(other.attribute)


def version(rng: random.Random, model: ModelProto) -> None:
    model.opset_import[0].version = rng.choice((*range(1, 30), *INTEGERS))
    if rng.random() < 0.2:
        model.opset_import.add(domain=rng.choice(("", "x", "ai.onnx.ml")), version=18)


def order(rng: random.Random, model: ModelProto) -> None:
    nodes = list(model.graph.node) * rng.choice((1, 1, 2))
    rng.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def functions(rng: random.Random, model: ModelProto) -> None:
    """The first node through functions that call each other, many times or in a circle."""
    node = rng.choice(model.graph.node)
    depth, times = rng.choice((1, 2, 3, 12, 20, 30, 60, 400)), rng.choice((1, 1, 2, 3))
    circle = rng.random() < 0.15
    inner = NodeProto()
    inner.CopyFrom(node)
    names, results = [f"i{k}" for k in range(len(node.input))], list(node.output)
    for level in range(depth):
        body = []
        for k in range(times):
            call = NodeProto()
            if level < depth - 1 or circle:
                call.domain, call.op_type = "local", f"F{(level + 1) % depth}"
            else:
                call.CopyFrom(inner)
            last = k == times - 1
            del call.input[:], call.output[:]
            call.input.extend(names)
            call.output.extend(results if last else [f"{r}_{k}" for r in results])
            body.append(call)
        model.functions.append(
            helper.make_function(
                "local",
                f"F{level}",
                names,
                results,
                body,
                [helper.make_opsetid("local", 1), *model.opset_import],
            )
        )
    del node.attribute[:]
    node.domain, node.op_type = "local", "F0"
    model.opset_import.add(domain="local", version=1)
    model.ir_version = max(8, model.ir_version)


def loops(rng: random.Random, model: ModelProto) -> None:
    """All nodes inside of loops in loops, with as many turns as there are words for."""
    turns = rng.choice((1, 2, 3, 100, 512, 513, *INTEGERS))
    nodes = list(model.graph.node)
    for level in range(rng.choice((1, 1, 2, 3, 12, 40))):
        true = helper.make_node("Identity", [f"go{level}"], [f"on{level}"])
        flag = [helper.make_tensor_value_info(n, TensorProto.BOOL, [])
                for n in (f"go{level}", f"on{level}")]  # fmt: skip
        number = helper.make_tensor_value_info(f"i{level}", TensorProto.INT64, [])
        state, kept = (
            helper.make_tensor_value_info(f"{n}{level}", TensorProto.BOOL, []) for n in "sk"
        )
        true_again = helper.make_node("Identity", [f"go{level}"], [kept.name])
        rows = list(model.graph.output) if level == 0 and rng.random() < 0.5 else []
        body = helper.make_graph(
            [true, true_again, *nodes], "body", [number, flag[0], state], [flag[1], kept, *rows]
        )
        made = [f"last{level}", *(f"rows_{v.name}" for v in rows)]
        nodes = [helper.make_node("Loop", ["turns", "true", "true"], made, body=body)]
        if rows:
            model.graph.output[0].name = made[1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(turns), "turns"))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))


def branches(rng: random.Random, model: ModelProto) -> None:
    """All nodes in a branch in a branch."""
    nodes, outputs = list(model.graph.node), list(model.graph.output)
    for level in range(rng.choice((1, 2, 5, 20, 33, 60))):
        body = helper.make_graph(nodes, f"b{level}", [], outputs)
        nodes = [
            helper.make_node(
                "If", ["true"], [v.name for v in outputs], then_branch=body, else_branch=body
            )
        ]
        if model.ByteSize() * 2 ** (level + 1) > 1 << 20:
            break
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "true"))


def giant(rng: random.Random, model: ModelProto) -> None:
    """A constant that is described in a few bytes, in the place of an input or beside it."""
    node = rng.choice(model.graph.node)
    sizes = [
        rng.choice((1, 2, 3, 2**10, 2**20, 2**31, 2**40, 2**62))
        for _ in range(rng.choice((1, 2, 3)))
    ]
    name, made = f"giant{len(model.graph.node)}", []
    size = numpy_helper.from_array(np.array(sizes), f"{name}_size")
    one = numpy_helper.from_array(np.array(1.0, np.float32), f"{name}_one")
    number = numpy_helper.from_array(np.array(sizes[0]), f"{name}_number")
    zero, step = (numpy_helper.from_array(np.array(n), f"{name}_{n}") for n in (0, 1))
    model.graph.initializer.extend([size, one, number, zero, step])
    kind = rng.randrange(6)
    if kind == 0:
        made = [helper.make_node("ConstantOfShape", [size.name], [name])]
    elif kind == 1:
        made = [helper.make_node("Expand", [one.name, size.name], [name])]
    elif kind == 2:
        made = [helper.make_node("Range", [zero.name, number.name, step.name], [name])]
    elif kind == 3:
        made = [
            helper.make_node("ConstantOfShape", [size.name], [f"{name}_thin"]),
            helper.make_node("Tile", [f"{name}_thin", size.name], [name]),
        ]
    elif kind == 4:  # twice as long each time
        made = [helper.make_node("Identity", [size.name], [f"{name}_0"])]
        count = rng.choice((8, 22, 60))
        made += [
            helper.make_node("Concat", [f"{name}_{k}"] * 2, [f"{name}_{k + 1}"], axis=0)
            for k in range(count)
        ]
        made += [helper.make_node("Identity", [f"{name}_{count}"], [name])]
    else:  # a shape that follows the batch, twice as long each time
        source = model.graph.input[0].name
        made = [helper.make_node("Shape", [source], [f"{name}_0"])]
        count = rng.choice((8, 22, 60))
        made += [
            helper.make_node(rng.choice(("Concat", "Concat", "Mul")), [f"{name}_{k}"] * 2,
                             [f"{name}_{k + 1}"])
            for k in range(count)
        ]  # fmt: skip
        for n in made:
            if n.op_type == "Concat":
                n.attribute.append(helper.make_attribute("axis", 0))
        made += [helper.make_node("Identity", [f"{name}_{count}"], [name])]
    for n in reversed(made):
        model.graph.node.insert(0, n)
    if rng.random() < 0.8:
        node.input[rng.randrange(len(node.input))] = name


def _flipped(rng: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.choice((1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content))]


def _inserted(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + rng.randbytes(rng.randrange(1, 40)) + content[place:]


def _repeated(rng: random.Random, content: bytes) -> bytes:
    """Messages in messages: the deepest that the encoding can say."""
    if rng.random() < 0.5:
        return content + content
    for _ in range(rng.choice((50, 300, 2000))):
        size, length = len(content), b""
        while size > 127:
            length += bytes([size & 127 | 128])
            size >>= 7
        content = bytes([rng.choice((0x3A, 0x0A, 0x2A))]) + length + bytes([size]) + content
    return content


SPOILING: tuple[Callable[[random.Random, ModelProto], None], ...] = (
    attribute, attribute, attribute, another_attribute, constant, constant, constant, described,
    elsewhere, sparse, shape, shape, open_batch, rewired, rewired, operator, operator, version,
    order, functions, functions, loops, branches, giant, giant,
)  # fmt: skip


# --- the judge ------------------------------------------------------------------------------------


def outcome(content: bytes, as_file: bool) -> str:
    """``refused``, ``same`` as ONNX Runtime, ``alone`` where that refuses it, or what is wrong."""
    try:
        graph = _read(content, as_file)
    except TessellaError as error:
        str(error).encode()
        text = str(error)
        return (
            f"unclear {text[:200]}" if "MemoryError" in text or "Allocator" in text else "refused"
        )
    sizes = [math.prod(shape_at(v.shape, 2)) for v in graph.values()]
    if max(sizes) > MOST_ELEMENTS or len(graph.nodes) > 2000 or len(content) > LARGEST_FILE * 4:
        return "unrun"
    feeds = {v.name: _sample(v) for v in graph.inputs}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            made = interpret(graph, feeds)
    except TessellaError:
        return "refused"
    return _compared(content, graph, feeds, made)


def _read(content: bytes, as_file: bool) -> Graph:
    if not as_file:
        return read(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.onnx"
        path.write_bytes(content)
        (path.parent / "w").write_bytes(bytes(64))
        (path.parent / "link").symlink_to("/etc/passwd")
        return read(path)


def _sample(value: Any) -> torch.Tensor:
    """Numbers between −2 and 2, or small integers from 0 on."""
    shape = shape_at(value.shape, 2)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, value.dtype)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * 4 - 2).to(dtype)
    least = int("len" in value.name)  # no sequence is empty: ONNX does not say what that gives
    return torch.randint(least, 2, shape, generator=generator).to(dtype)


def _compared(content: bytes, graph: Graph, feeds: Any, made: Any) -> str:
    """Against ONNX Runtime; where that says something else, onnx's own evaluator, too."""
    given = {n: array(t) for n, t in feeds.items()}
    have = [made[v.name].double().numpy() for v in graph.outputs]
    found: list[list[Any]] = []
    for evaluate in (_runtime, _reference):
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                wanted = evaluate(content, given)
        except Exception:  # its own types of errors
            continue
        right = [np.asarray(w) for w in wanted]
        made_of = [(v.dtype, tuple(made[v.name].shape)) for v in graph.outputs]
        if [(str(r.dtype), r.shape) for r in right] == made_of and not _difference(have, right):
            return "same"
        found.append(right)
    if len(found) < 2 or _difference(*found):
        return "alone"
    return f"differs {_difference(have, found[0]) or 'in shapes or types'}"


def _runtime(content: bytes, given: Any) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def _reference(content: bytes, given: Any) -> list[Any]:
    return list(ReferenceEvaluator(ModelProto.FromString(content)).run(None, given))


def _difference(some: list[Any], others: list[Any]) -> str | None:
    """Where two lists of results are not the same, or None. What is no number is not compared."""
    for index, (one, other) in enumerate(zip(some, others, strict=True)):
        if one.shape != other.shape:
            return f"in result {index}: {one.shape}, {other.shape}"
        left, right = one.astype(np.float64), other.astype(np.float64)
        apart = np.abs(left - right)[np.isfinite(right)]
        largest = np.abs(right[np.isfinite(right)]).max(initial=0)
        if not apart.max(initial=0) <= TOLERANCE * (1 + largest):
            return f"in result {index}: {left.flatten()[:4]}, {right.flatten()[:4]}"
    return None
