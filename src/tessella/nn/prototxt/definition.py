"""A Caffe net as its text defines it: inputs, layers, and which layers exist in which state."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.errors import UsageError
from tessella.nn.prototxt.text_format import Message, Word, parse

# Types of the older ``layers { type: CONVOLUTION }``, by their newer names.
V1_TYPES = {
    "BNLL": "BNLL", "CONCAT": "Concat", "CONVOLUTION": "Convolution", "DATA": "Data",
    "DROPOUT": "Dropout", "DUMMY_DATA": "DummyData", "ELTWISE": "Eltwise", "FLATTEN": "Flatten",
    "HDF5_DATA": "HDF5Data", "IMAGE_DATA": "ImageData", "INNER_PRODUCT": "InnerProduct",
    "LRN": "LRN", "MEMORY_DATA": "MemoryData", "POOLING": "Pooling", "POWER": "Power",
    "RELU": "ReLU", "SIGMOID": "Sigmoid", "SILENCE": "Silence", "SOFTMAX": "Softmax",
    "SOFTMAX_LOSS": "SoftmaxWithLoss", "SPLIT": "Split", "TANH": "TanH", "ACCURACY": "Accuracy",
}  # fmt: skip

DATA_TYPES = (
    "Input", "Data", "ImageData", "HDF5Data", "MemoryData", "DummyData", "WindowData",
)  # fmt: skip

MAX_LAYERS = 2000  # each takes milliseconds; the deepest nets of Caffe's time have 1,000

# The blob that is the image where a text declares no input, as in DIGITS.
DEFAULT_INPUT = "data"


@dataclass(frozen=True, kw_only=True)
class State:
    """The phase and the stages that include and exclude rules refer to."""

    phase: str
    stages: tuple[str, ...]


# DIGITS keeps three nets in one text by the stages train, val and deploy.
TRAIN = State(phase="TRAIN", stages=("train",))
TEST = State(phase="TEST", stages=("deploy",))


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer for a drawing.

    Attributes:
        name, type: as in the text; an older type name is replaced by the newer one.
        bottoms, tops: the blobs that the layer reads and writes.
        parameters: the settings as written, lists joined by commas.
        phases: phases in which the layer exists: ``TRAIN``, ``TEST`` or both.
        line: the layer's first line in the text.
    """

    name: str
    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    parameters: dict[str, str]
    phases: tuple[str, ...]
    line: int


@dataclass(frozen=True, kw_only=True)
class Layer:
    name: str
    type: str
    bottoms: tuple[str, ...]
    tops: tuple[str, ...]
    message: Message

    def __str__(self) -> str:
        return f"layer {self.name!r} (line {self.message.line})"

    def exists_in(self, state: State) -> bool:
        """Whether the layer exists: one of its include rules fits, if any, and no exclude rule."""
        include = self.message.messages("include")
        exclude = self.message.messages("exclude")
        included = not include or any(_fits(rule, state) for rule in include)
        return included and not any(_fits(rule, state) for rule in exclude)


@dataclass(frozen=True, kw_only=True)
class Net:
    """``inputs``: blobs declared by ``input:``; the image is the first of them."""

    inputs: tuple[str, ...]
    layers: tuple[Layer, ...]
    shape: tuple[int, int, int] | None


def _fits(rule: Message, state: State) -> bool:
    phase = rule.choose("phase", state.phase, ("TRAIN", "TEST"))
    required, excluded = rule.take_all("stage", str), rule.take_all("not_stage", str)
    rule.finish("min_level", "max_level")
    return (
        phase == state.phase
        and all(stage in state.stages for stage in required)
        and not any(stage in state.stages for stage in excluded)
    )


def read(text: str) -> Net:
    """The net that a text defines; raises ``UsageError`` with the line of a mistake."""
    message = parse(text)
    layers = tuple(
        _layer(m, v1=name == "layers")
        for name in ("layer", "layers")
        for m in message.messages(name)
    )
    if not layers:
        raise UsageError(
            "the network's text has no layers", seen=f"{len(text)} characters", fix="add layers"
        )
    if len(layers) > MAX_LAYERS:
        raise UsageError(
            "the network's text has too many layers",
            seen=f"{len(layers):,}, at most {MAX_LAYERS:,}",
            fix="write the network in Python (file.py:Class)",
        )
    dims = message.take_all("input_dim", int)
    shapes = [m.take_all("dim", int) for m in message.messages("input_shape")]
    net = Net(
        inputs=tuple(message.take_all("input", str)),
        layers=layers,
        shape=_image_shape(shapes[0] if shapes else dims[:4]) or _data_shape(layers),
    )
    message.take("name", str)
    message.finish("force_backward", "state", "debug_info")
    return net


def _layer(message: Message, *, v1: bool) -> Layer:
    name = message.take("name", str, default="")
    message.owner = f"layer {name!r}"
    if v1:
        word = message.take("type", Word, default=Word(""))
        if word not in V1_TYPES:
            raise message.error("the type is not supported", seen=word, fix="use a newer type")
        kind: str | None = V1_TYPES[word]
    else:
        kind = message.take("type", str)
    if not name or not kind:
        raise message.error("a layer needs a name and a type", seen=f"type {kind!r}")
    return Layer(
        name=name,
        type=kind,
        bottoms=tuple(message.take_all("bottom", str)),
        tops=tuple(message.take_all("top", str)),
        message=message,
    )


def _image_shape(dims: list[int]) -> tuple[int, int, int] | None:
    return (dims[1], dims[2], dims[3]) if len(dims) == 4 and min(dims) > 0 else None


def _data_shape(layers: tuple[Layer, ...]) -> tuple[int, int, int] | None:
    """The image's shape by the first Input layer, or three channels of a data layer's crop."""
    for layer in layers:
        if layer.type == "Input":
            for shape in layer.message.message("input_param").messages("shape"):
                return _image_shape(shape.take_all("dim", int))
        crop = layer.message.message("transform_param").take("crop_size", int, default=0)
        if layer.type in DATA_TYPES and crop > 0:
            return (3, crop, crop)
    return None


def input_shape(text: str) -> tuple[int, int, int] | None:
    """Channels, height and width that a text declares for its image, or None.

    Raises:
        UsageError: the text is that of DIGITS' DetectNet.
    """
    net = read(text)
    require_one_answer(net)
    return net.shape


def require_one_answer(net: Net) -> None:
    """Refuse DetectNet: its boxes come of layers in Python and of labels on a grid."""
    for layer in net.layers:
        module = ""
        if layer.type == "Python":
            module = layer.message.message("python_param").take("module", str, default="")
        if layer.type.startswith("DetectNet") or "detectnet" in module:
            raise layer.message.error(
                "this is DIGITS' DetectNet, whose boxes are made by code of Caffe's and not by the "
                "text",
                seen=f"{layer.type} {module}".strip(),
                fix="train a detector of today on the same KITTI folder: tessella data import "
                "FOLDER --task detection, then tessella train centernet (or d_fine_s, "
                "retinanet_r18); a body of convolutions alone is imported as a classifier",
            )


def layers(text: str) -> tuple[LayerSummary, ...]:
    """Every layer of a text in order, losses and data layers included, ready to be drawn.

    Raises:
        UsageError: the text is not valid; the message has the line.
    """
    return tuple(
        LayerSummary(
            name=layer.name,
            type=layer.type,
            bottoms=layer.bottoms,
            tops=layer.tops,
            parameters=_written(layer.message),
            phases=tuple(s.phase for s in (TRAIN, TEST) if layer.exists_in(s)),
            line=layer.message.line,
        )
        for layer in read(text).layers
    )


def _written(message: Message) -> dict[str, str]:
    """The settings in ``…_param`` messages, as written; fillers by their type."""
    written: dict[str, str] = {}
    for entry in message.entries:
        if not isinstance(entry.value, Message) or not entry.name.endswith("_param"):
            continue
        for setting in entry.value.entries:
            value = setting.value
            if isinstance(value, Message):
                value = ", ".join(str(e.value) for e in value.entries)
            before = written.get(setting.name)
            written[setting.name] = str(value) if before is None else f"{before}, {value}"
    return written
