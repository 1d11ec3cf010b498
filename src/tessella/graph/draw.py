"""A graph as a picture: self-contained SVG that takes its text colour from the page around it.

A layer and the element-wise operations after it share a box. Colours are CSS variables
(``--tessella-conv``, …) with defaults that read on light and on dark.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from tessella.graph.graph import Dim, Graph, Node, Shape, Value
from tessella.graph.layout import layered
from tessella.operations.table import operation

_COLORS = {
    "conv": "#3b82f6",
    "gemm": "#8b5cf6",
    "attention": "#d946ef",
    "norm": "#14b8a6",
    "pool": "#f59e0b",
    "softmax": "#ec4899",
    "reduce": "#f97316",
    "pointwise": "#22c55e",
    "elementwise": "#22c55e",
    "transform": "#94a3b8",
    "fallback": "#ef4444",
    "user": "#eab308",
    "edge": "#64748b",  # the graph's inputs and outputs
}

_LINE, _SMALL, _PAD, _MAX_CHARS = 17, 14, 9, 34
_CHAR, _SMALL_CHAR = 7.3, 6.2  # widths of a character, in pixels, on the generous side
_STYLE = (
    "text{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "fill:currentColor;text-anchor:middle}"
    ".op{font-size:12px;font-weight:600}.more{font-size:10px;opacity:.72}"
    ".edge{fill:none;stroke:currentColor;stroke-opacity:.45;stroke-width:1.4}"
    ".tip{fill:currentColor;fill-opacity:.6}"
    "rect{fill-opacity:.16;stroke-width:1.4}"
)


@dataclass(eq=False)
class _Box:
    """One box: a node with the element-wise nodes that follow it, or an input or output."""

    kind: str
    reads: list[Value]
    titles: list[str]
    notes: list[str]
    nodes: list[Node]

    @property
    def size(self) -> tuple[float, float]:
        width = max(
            max(len(t) for t in self.titles) * _CHAR,
            max((len(n) for n in self.notes), default=0) * _SMALL_CHAR,
        )
        return width + 2 * _PAD, len(self.titles) * _LINE + len(self.notes) * _SMALL + _PAD


def svg(graph: Graph) -> str:
    """The drawing of ``graph``. Put it inline into a page, so that it takes the page's colour.

    Boxes are ``<g class="node" data-op=… data-layer=…>``; their ``<title>`` has the full names.
    """
    boxes, producer = _boxes(graph)
    index = {box: i for i, box in enumerate(boxes)}
    edges = [
        (index[producer[value]], index[box])
        for box in boxes
        for value in box.reads
        if value in producer
    ]
    plan = layered([box.size for box in boxes], edges)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plan.width:.0f} {plan.height:.0f}"'
        f' width="{plan.width:.0f}" height="{plan.height:.0f}" role="img"'
        f" aria-label={_attribute(f'The network {graph.name}')}>",
        f"<style>{_STYLE}</style>",
    ]
    lines = [_curve(*segment) for segment in plan.segments]
    lines += [f"M{x:.1f} {y0:.1f}V{y1:.1f}" for x, y0, y1 in plan.passes if y1 > y0]
    tips = [f"M{x - 3.5:.1f} {y - 6:.1f}h7L{x:.1f} {y:.1f}z" for x, y in plan.arrows]
    parts.append(f'<path class="edge" d="{"".join(lines)}"/>')
    parts.append(f'<path class="tip" d="{"".join(tips)}"/>')
    parts += [_draw(box, x, y) for box, (x, y) in zip(boxes, plan.boxes, strict=True)]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _boxes(graph: Graph) -> tuple[list[_Box], dict[Value, _Box]]:
    """All boxes in a runnable order, and the box that makes each value."""
    boxes, producer = [], {}
    for value in graph.inputs:
        producer[value] = _Box("edge", [], [value.name], [_shape(value.shape)], [])
        boxes.append(producer[value])
    for node in graph.nodes:
        reads = [v for v in node.inputs if v is not None and v not in graph.constants]
        before = producer[reads[0]] if len(reads) == 1 else None
        if (
            before is not None
            and before.nodes
            and _follows(node)
            and graph.only_reader(reads[0]) is node
            and reads[0] in before.nodes[-1].outputs
        ):
            before.nodes.append(node)
            before.titles.append(_title(node))
            box = before
        else:
            box = _Box(operation(node.op).family, reads, [_title(node)], [], [node])
            boxes.append(box)
        producer.update(dict.fromkeys(node.outputs, box))
    for box in boxes:
        if box.nodes:
            layer = next((n.layer for n in box.nodes if n.layer), "")
            shape = ", ".join(_shape(v.shape) for v in box.nodes[-1].outputs[:3])
            box.notes = [_shorten(n) for n in (layer, shape) if n]
    boxes += [_Box("edge", [v], [v.name], [_shape(v.shape)], []) for v in graph.outputs]
    for box in boxes:
        box.titles = [_shorten(t) for t in box.titles]
    return boxes, producer


def _follows(node: Node) -> bool:
    """Whether a node is drawn in the box of what it reads."""
    return operation(node.op).elementwise or node.op == "batch_norm"


def _title(node: Node) -> str:
    """The operation, with the few numbers that people look for."""
    attrs = node.attrs
    words = [node.op]
    if node.op == "fallback":
        words = [attrs["target"].removeprefix("aten::"), "(fallback)"]
    if node.op == "user":
        words = [attrs["target"]]
    if node.op == "pointwise":
        words = [", ".join(name for name, _, _ in attrs["program"])]
    filters = node["weight"].shape[2:] if node.op.startswith("conv") else ()
    kernel = attrs.get("kernel_size") or filters
    if kernel:
        words.append("×".join(str(k) for k in kernel))
    stride: tuple[int, ...] = attrs.get("stride") or ()
    if any(s != 1 for s in stride):
        words.append(f"/{stride[0]}" if len(set(stride)) == 1 else f"/{stride}")
    if attrs.get("groups", 1) != 1:
        words.append(f"groups {attrs['groups']}")
    if attrs.get("activation"):
        words.append(f"+ {attrs['activation']}")
    return " ".join(words)


def _shape(shape: Shape) -> str:
    return " × ".join(str(d) if isinstance(d, Dim) else f"{d}" for d in shape) or "scalar"


def _shorten(text: str) -> str:
    """The last characters: they tell the layers of a network apart."""
    return text if len(text) <= _MAX_CHARS else "…" + text[1 - _MAX_CHARS :]


def _draw(box: _Box, x: float, y: float) -> str:
    width, height = box.size
    color = f"var(--tessella-{box.kind}, {_COLORS[box.kind]})"
    full = "\n".join(
        f"{n.op} {', '.join(v.name for v in n.outputs)}"
        + (f" (layer {n.layer})" if n.layer else "")
        for n in box.nodes
    )
    first = box.nodes[0] if box.nodes else None
    texts, line = [], y + _PAD / 2 - 4
    for title in box.titles:
        line += _LINE
        texts.append(f'<text class="op" x="{x:.1f}" y="{line:.1f}">{_text(title)}</text>')
    for note in box.notes:
        line += _SMALL
        texts.append(f'<text class="more" x="{x:.1f}" y="{line:.1f}">{_text(note)}</text>')
    return (
        f'<g class="node" data-op={_attribute(first.op if first else "")}'
        f" data-layer={_attribute(first.layer if first else '')}>"
        f"<title>{_text(full or box.titles[0])}</title>"
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        f' rx="{height / 2 if not box.nodes else 6:.1f}"'
        f' style="fill:{color};stroke:{color}"/>' + "".join(texts) + "</g>"
    )


def _curve(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    if abs(x0 - x1) < 0.05:
        return f"M{x0:.1f} {y0:.1f}V{y1:.1f}"
    return f"M{x0:.1f} {y0:.1f}C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"


_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("�", text))


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("�", text))
