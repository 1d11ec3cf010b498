"""Layout: which values are channels_last, and where a copy changes the format.

Convolutions decide; what works element by element or pools follows its input; everything else is
contiguous. Values that some operation returns as a view with any strides are ``strided``.
"""

from __future__ import annotations

from typing import Literal

from tessella.graph.graph import Graph, Node, Value, attrs_at, shape_at
from tessella.kernels.transform.views import format_of
from tessella.operations.pointwise_program import has_pool, has_rows
from tessella.operations.rearrangement import innermost
from tessella.operations.tensor_meta import Format, TensorMeta

Layout = Literal["contiguous", "channels_last"]
Formats = dict[str, Format]  # by value name; contiguous if absent
CONVOLUTIONS = ("conv2d", "conv3d")
BATCH = 11  # to ask what follows it: a size that few other axes have

# fmt: off
FOLLOWS = frozenset((
    "batch_norm", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "cat", "to", "mean", "sum",
    "add", "sub", "mul", "div", "pow", "relu", "relu6", "sigmoid", "tanh", "silu", "gelu",
    "hardswish", "hardsigmoid", "mish", "leaky_relu", "elu", "clamp", "exp", "log", "sqrt", "rsqrt",
    "reciprocal", "neg", "abs", "erf", "sin", "cos", "pointwise", "quantize",
    "dequantize", "interpolate", "pad", "conv_transpose2d", "conv_transpose3d",
))
SMALLER = frozenset(("mean", "sum", "interpolate", "pad"))  # no kernel of theirs takes volumes so
DENSE = frozenset((
    "conv2d", "linear", "matmul", "layer_norm", "softmax", "log_softmax", "reshape", "embedding",
    "clone", "local_response_norm", "group_norm", "rms_norm", "conv1d",
    "group_factors", "maximum", "minimum", "prelu", "softplus", "amax", "amin", "user",
    "image_to_tensor", "lstm", "gru", "rnn", "peak_boxes",
    "deformable_attention", "nms",
))
# fmt: on
# torch's operators whose results are dense, whatever they read
DENSE_OPERATORS = frozenset(("aten::gather", "aten::topk"))


def apply(graph: Graph, layout: Layout) -> Formats:
    """Give every value a format; inserts ``to`` nodes where a convolution needs another one."""
    formats: Formats = {}
    converted: dict[Value, Value] = {}
    for node in list(graph.nodes):
        if node.op in CONVOLUTIONS and layout == "channels_last":
            images = {name: node.get(name) for name in ("input", "residual")}
            node.rebind(
                **{n: _channels_last(graph, node, v, formats, converted) for n, v in images.items()}
            )
        for value in node.outputs:
            formats[value.name] = _format(node, value, formats, graph, layout)
    return formats


def _format(node: Node, value: Value, formats: Formats, graph: Graph, layout: Layout) -> Format:
    if node.op in CONVOLUTIONS:
        return layout
    if node.op == "pointwise" and has_rows(node.attrs["program"]):
        return "contiguous"
    if node.op == "permute" and node["input"] not in graph.constants:
        return format_of(formats.get(node["input"].name, "contiguous"), node.attrs["dims"])
    if node.op == "reshape" and formats.get(node["input"].name) == "strided":
        return "strided" if _cuts_heads(graph, node, formats) else "contiguous"
    if node.op == "rearrange":
        return _of_rows(node, formats, layout)
    if node.op == "fallback" and node.attrs["target"] in DENSE_OPERATORS:
        return "contiguous"
    axes = len(value.shape)
    if axes == 5 and node.op in SMALLER:
        return "contiguous"
    if node.op not in FOLLOWS:
        return "contiguous" if node.op in DENSE else "strided"
    leads = any(
        v is not None
        and v not in graph.constants
        and len(v.shape) == axes
        and formats.get(v.name) == "channels_last"
        for v in node.inputs
    )
    return "channels_last" if leads and axes in (4, 5) else "contiguous"


def _of_rows(node: Node, formats: Formats, layout: Layout) -> Format:
    """What lies together before lies together after a ``rearrange``, if that may be channels."""
    x, result = node["input"], node.output
    if layout == "contiguous" or len(result.shape) != 4:
        return "contiguous"
    shape, format = shape_at(x.shape, BATCH), formats.get(x.name, "contiguous")
    meta = TensorMeta(shape=shape, dtype=x.dtype, format=format)
    channels = innermost(meta, attrs_at(node.attrs, BATCH)) == 1
    return "channels_last" if channels else "contiguous"


def _cuts_heads(graph: Graph, node: Node, formats: Formats) -> bool:
    """Whether a reshape is a view of its input's strides, and attention reads it.

    Queries, keys and values that one layer makes are such slices: attention reads them there.
    """
    if not (_only_cuts(node) or _keeps_columns(graph, node, formats)):
        return False
    turned = graph.users(node.output)
    if {n.op for n in turned} != {"permute"}:
        return False
    readers = [reader for turn in turned for reader in graph.users(turn.output)]
    return {n.op for n in readers} == {"scaled_dot_product_attention"} and not {
        node.output,
        *(turn.output for turn in turned),
    } & set(graph.outputs)


def _only_cuts(node: Node) -> bool:
    """Whether each axis is cut by itself, which is a view of any strides."""
    sizes = list(node.output.shape)
    for size in node["input"].shape:
        cut = sizes.pop(0) if sizes else None
        while cut != size and isinstance(cut, int) and isinstance(size, int) and sizes:
            if not isinstance(sizes[0], int) or not 0 < cut < size:
                return False
            cut *= sizes.pop(0)
        if cut != size:
            return False
    return not sizes


def _keeps_columns(graph: Graph, node: Node, formats: Formats) -> bool:
    """Whether part of each row of a dense value becomes whole axes.

    The rows lie in equal distances, so they may be grouped in any way.
    """
    part = node["input"]
    maker = graph.producer(part)
    if maker is None or maker.op != "split" or maker.attrs["dim"] != len(part.shape) - 1:
        return False
    if formats.get(maker["input"].name, "contiguous") != "contiguous":
        return False
    left = part.shape[-1]
    for size in reversed(node.output.shape):
        if left == 1 or not (isinstance(left, int) and isinstance(size, int)) or left % size:
            break
        left //= size
    return left == 1


def _channels_last(
    graph: Graph, node: Node, value: Value | None, formats: Formats, converted: dict[Value, Value]
) -> Value | None:
    """``value`` in channels_last: itself, or a copy that is made once."""
    if value is None or formats.get(value.name) == "channels_last":
        return value
    one = value.shape[1] == 1 or all(size == 1 for size in value.shape[2:])
    if one and formats.get(value.name) != "strided":
        return value  # one channel or one pixel: both formats have the same bytes
    cast = graph.producer(value)
    if cast is not None and _writes_any_format(cast) and graph.only_reader(value) is node:
        formats[value.name] = "channels_last"  # it passes all elements anyway
        return value
    if _is_part_of_pixels(cast, formats):
        return value  # some kernels read it where it lies
    if value not in converted:
        made = Value(graph.fresh_name(f"{value.name}.channels_last"), value.dtype, value.shape)
        copy = Node(op="to", inputs=(value,), outputs=(made,), attrs={"dtype": value.dtype})
        graph.nodes.insert_before(node, copy)
        formats[made.name] = "channels_last"
        converted[value] = made
    return converted[value]


def _writes_any_format(node: Node) -> bool:
    if node.op == "pointwise":
        program = node.attrs["program"]
        return len(node.outputs) == 1 and not has_rows(program) and not has_pool(program)
    return node.op in ("to", "image_to_tensor", "quantize", "dequantize", "rearrange")


def _is_part_of_pixels(node: Node | None, formats: Formats) -> bool:
    """Whether a node cuts the channels of a value that is channels_last."""
    if node is None or node.op != "split" or node.attrs["dim"] != 1:
        return False
    return formats.get(node["input"].name) == "channels_last"
