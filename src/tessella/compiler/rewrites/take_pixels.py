"""Images as bytes: the network's float32 image becomes uint8 pixels, and a first step scales them.

Four times fewer bytes come over the bus, and the host has no arithmetic to do. Decoding, resizing
and cropping stay there.
"""

from __future__ import annotations

from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess, gain_and_offset
from tessella.graph.graph import Graph, Node, Value


def apply(graph: Graph, record: Preprocess) -> int:
    """Let the graph take uint8 [N, H, W, C], as decoders give them, under the same name.

    Raises:
        UsageError: the record is of 16 bits, or no input is its image.
    """
    if record.depth != 8:
        raise UsageError(
            "uint8 pixels need a record of 8 bits a sample",
            seen=f"depth {record.depth}",
            fix="compile with input='float32'",
        )
    images = [v for v in graph.inputs if v.dtype == "float32" and v.shape[1:] == record.input_shape]
    if not images:
        raise UsageError(
            "no input is the image that the preprocessing record makes",
            seen=f"{', '.join(map(repr, graph.inputs))}; the record makes {record.input_shape}",
            fix="compile with input='float32', or with the record of this network",
        )
    image = images[0]
    pixels = Value(image.name, "uint8", (image.shape[0], *record.pixel_shape))
    graph.inputs[graph.inputs.index(image)] = pixels
    image.name = graph.fresh_name(f"{pixels.name}.scaled")
    gain, offset = (tuple(map(float, t)) for t in gain_and_offset(record))
    attrs = {"gain": gain, "offset": offset, "dtype": "float32"}
    graph.nodes.insert_first(Node("image_to_tensor", (pixels,), (image,), attrs))
    return 1
