"""A Caffe net as a torch module: which layers lead to the logits, in what order and shapes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tessella.core.errors import UsageError, first_line
from tessella.nn.prototxt.definition import (
    DATA_TYPES,
    DEFAULT_INPUT,
    TEST,
    TRAIN,
    Layer,
    Net,
    State,
    read,
    require_one_answer,
)
from tessella.nn.prototxt.layer_types import make, require_modest

# Layers after the logits. What they compute is the trainer's work.
LOSSES = ("SoftmaxWithLoss", "SoftmaxLoss", "Accuracy", "Silence")
WITH_OUTPUTS = ("InnerProduct", "Convolution")
IMAGE = "image"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer of a phase. Its inputs and outputs are values: an in-place layer makes a new one.

    Attributes:
        key: key of the module in ``CaffeNet.layers``.
        frees: values that no later step reads.
    """

    key: str
    layer: Layer
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    frees: tuple[str, ...] = ()

    @property
    def scores(self) -> str:
        """What a loss or a softmax reads: Caffe has the scores first, then the labels."""
        return self.inputs[0]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The steps of one phase, and the name of the logits."""

    steps: tuple[Step, ...]
    logits: str


class CaffeNet(nn.Module):
    """A network from Caffe's text: ``[N, channels, height, width]`` to logits ``[N, classes]``.

    Training mode runs the layers of phase TRAIN, evaluation mode those of phase TEST.
    """

    def __init__(self, layers: dict[str, nn.Module], training: Plan, inference: Plan) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.training_plan, self.inference_plan = training, inference

    def forward(self, x: Tensor) -> Tensor:
        plan = self.training_plan if self.training else self.inference_plan
        values = {IMAGE: x}
        for step in plan.steps:
            y = self.layers[step.key](*[values[name] for name in step.inputs])
            values.update((name, y) for name in step.outputs)
            for name in step.frees:
                del values[name]
        logits = values[plan.logits]
        return logits.flatten(1) if logits.ndim > 2 else logits


def build(text: str, *, classes: int, channels: int, height: int, width: int) -> CaffeNet:
    """The network of a prototxt with fresh weights, drawn as its fillers say.

    The last layer with weights is the classifier: its ``num_output`` becomes ``classes``, and may
    be missing. Auxiliary classifiers and all else that the logits do not need are left out.

    Raises:
        UsageError: the text is not valid or not supported; the message names layer and line.
    """
    net = read(text)
    require_one_answer(net)
    _check_weights_unshared(net)
    shape = torch.Size([1, channels, height, width])
    keys: dict[int, str] = {}
    modules: dict[str, nn.Module] = {}
    plans = []
    for state in (TRAIN, TEST):
        plan = _plan(net, state, keys)
        found = _make_modules(plan, modules, shape, classes)
        if found.numel() != classes:
            raise UsageError(
                f"the network does not return {classes} logits (phase {state.phase})",
                seen=f"{plan.steps[-1].layer} returns {list(found)}",
                fix="end with an InnerProduct layer, or pool globally before the end",
            )
        plans.append(plan)
    return CaffeNet(modules, *plans)


def _check_weights_unshared(net: Net) -> None:
    named = Counter(
        name
        for layer in net.layers
        for param in layer.message.messages("param")
        if (name := param.take("name", str)) is not None
    )
    if shared := sorted(name for name, count in named.items() if count > 1):
        raise UsageError(
            "layers that share their weights are not supported", seen=", ".join(shared)
        )


# --- which steps, in one phase ------------------------------------------------------------------


def _plan(net: Net, state: State, keys: dict[int, str]) -> Plan:
    """The steps that lead to the logits in ``state``; ``keys`` gathers the modules' names."""
    current = {(net.inputs or (DEFAULT_INPUT,))[0]: IMAGE}
    made: Counter[str] = Counter()
    steps: list[Step] = []
    losses: list[Step] = []
    for layer in net.layers:
        if not layer.exists_in(state):
            continue
        if layer.type in DATA_TYPES:
            current.update(dict.fromkeys(layer.tops[:1], IMAGE))
            continue
        if not layer.bottoms:
            raise layer.message.error("it reads no blob", fix="name the blob that it reads: bottom")
        labels = layer.bottoms[1:] if layer.type in LOSSES else ()
        if missing := [b for b in layer.bottoms if b not in current and b not in labels]:
            raise layer.message.error(
                "it reads a blob that no layer before it makes",
                seen=", ".join(missing),
                fix=f"correct its bottom (phase {state.phase})",
            )
        inputs = tuple(current[b] for b in layer.bottoms if b in current)
        outputs = []
        for top in layer.tops:
            made[top] += 1
            outputs.append(f"{top}#{made[top]}")
            current[top] = outputs[-1]
        step = Step(key="", layer=layer, inputs=inputs, outputs=tuple(outputs))
        (losses if layer.type in LOSSES else steps).append(step)
    logits = _logits(steps, losses, state)
    needed = _needed(steps, logits)
    return Plan(steps=_with_frees([_keyed(s, keys) for s in needed], logits), logits=logits)


def _logits(steps: list[Step], losses: list[Step], state: State) -> str:
    """The input of the last softmax loss, else of a final softmax, else the last value."""
    read_by_layers = {name for step in steps for name in step.inputs}
    ends = [s for s in steps if s.outputs and not read_by_layers.intersection(s.outputs)]
    scored = [s.scores for s in losses if s.layer.type in LOSSES[:2]]
    softmax = [s for s in ends if s.layer.type == "Softmax"]
    if scored:
        return scored[-1]
    if softmax:
        return softmax[-1].scores
    if not ends:
        raise UsageError(
            f"the network has no layer in phase {state.phase}", fix="check include and exclude"
        )
    return ends[-1].outputs[0]


def _needed(steps: list[Step], logits: str) -> list[Step]:
    live, needed = {logits}, []
    for step in reversed(steps):
        if live.intersection(step.outputs):
            live.update(step.inputs)
            needed.append(step)
    return needed[::-1]


def _with_frees(steps: list[Step], logits: str) -> tuple[Step, ...]:
    """The steps with the values that each of them frees, so that activations do not pile up."""
    kept, freeing = {logits}, []
    for step in reversed(steps):
        frees = [v for v in dict.fromkeys(step.inputs + step.outputs) if v not in kept]
        kept.update(frees)
        freeing.append(replace(step, frees=tuple(frees)))
    return tuple(freeing[::-1])


_EMPTY = nn.ModuleDict()  # its own attributes, such as _modules, are no names for layers


def _keyed(step: Step, keys: dict[int, str]) -> Step:
    """The step with its module's key: the layer's name as an identifier, one for both phases."""
    identity = id(step.layer)
    if identity not in keys:
        name = re.sub(r"\W", "_", step.layer.name)
        while hasattr(_EMPTY, name) or name in keys.values():
            name = f"{name}_{step.layer.message.line}"
        keys[identity] = name
    return replace(step, key=keys[identity])


# --- modules and shapes -------------------------------------------------------------------------


def _make_modules(
    plan: Plan, modules: dict[str, nn.Module], image: torch.Size, classes: int
) -> torch.Size:
    """Add the plan's modules to ``modules``, made for their inputs; returns the logits' shape."""
    shapes, weights = {IMAGE: image}, 0
    with_outputs = [s for s in plan.steps if s.layer.type in WITH_OUTPUTS]
    for step in plan.steps:
        inputs = [shapes[name] for name in step.inputs]
        if step.key not in modules:
            is_classifier = bool(with_outputs) and step is with_outputs[-1]
            modules[step.key] = make(step.layer, inputs, classes=classes if is_classifier else None)
            weights += sum(p.numel() for p in modules[step.key].parameters())
            require_modest(step.layer, weights)
        shape = _output_shape(modules[step.key], step.layer, inputs)
        shapes.update((name, shape) for name in step.outputs)
    return shapes[plan.logits]


def _output_shape(module: nn.Module, layer: Layer, inputs: list[torch.Size]) -> torch.Size:
    """The output's shape, from running the module on the meta device."""
    weights = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
    xs = tuple(torch.empty(shape, device="meta") for shape in inputs)
    module.eval()
    try:
        shape: torch.Size = torch.func.functional_call(module, weights, xs).shape
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise layer.message.error(
            "the layer cannot take its input",
            seen=f"{[list(s) for s in inputs]}: {first_line(error)}",
            fix="use a larger input size, or correct the layers before it",
        ) from error
    module.train()
    return shape
