"""Networks that are timed whole, with random weights, on which speed does not depend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from tessella.core.spec import DimRange, TensorSpec
from tessella.nn import zoo

FRAMES = 100  # of a sequence of sound


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A network with its inputs, by position, at one batch size."""

    name: str
    module: torch.nn.Module
    inputs: tuple[TensorSpec, ...]

    def sample(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Random images, random tokens, and a mask that hides none."""
        return tuple(_sample(spec, device) for spec in self.inputs)


def workload(name: str, batch: int) -> Workload:
    """A network of the zoo, any classifier of torchvision, or one of ``OTHERS``."""
    torch.manual_seed(0)
    if name in OTHERS:
        return OTHERS[name](batch)
    if name not in zoo.names():
        return _torchvision(name, batch)
    network = zoo.network(name, classes=10 if name == "lenet" else 1000)
    shape = (network.channels, network.height, network.width)
    module = _tamed(zoo.build(network)).eval()
    return Workload(name=name, module=module, inputs=(_image(batch, *shape),))


def _tamed(module: torch.nn.Module) -> torch.nn.Module:
    """The network with scaled residual blocks: values of 50 random ones overflow float16."""
    for block in module.modules():
        if isinstance(norm := getattr(block, "bn3", None), torch.nn.BatchNorm2d):
            torch.nn.init.constant_(norm.weight, 0.2)
    return module


def _vit_b_16(batch: int) -> Workload:
    import torchvision

    module = torchvision.models.vit_b_16(weights=None).eval()
    torch.nn.init.normal_(module.heads.head.weight, std=0.02)  # zeros: any plan would be right
    return Workload(name="vit_b_16", module=module, inputs=(_image(batch, 3, 224, 224),))


def _torchvision(name: str, batch: int) -> Workload:
    import torchvision

    size = 299 if name == "inception_v3" else 224
    made = _tamed(torchvision.models.get_model(name, weights=None))
    _normalize(made, torch.randn(32, 3, size, size))
    return Workload(name=name, module=made.eval(), inputs=(_image(batch, 3, size, size),))


def _normalize(module: torch.nn.Module, images: torch.Tensor) -> None:
    """Give batch norms the statistics of these images, so that no value overflows float16."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        module.train()(images)


def _bert(name: str, layers: int, heads: int, tokens: int, batch: int) -> Workload:
    """BERT with heads of 64 numbers."""
    import transformers

    config = transformers.BertConfig(
        hidden_size=64 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=256 * heads,
    )
    names = ("input_ids", "attention_mask")
    module = _Encoder(transformers.BertModel(config, add_pooling_layer=False)).eval()
    specs = tuple(TensorSpec(name=n, dtype="int64", shape=(batch, tokens)) for n in names)
    return Workload(name=name, module=module, inputs=specs)


class _Encoder(torch.nn.Module):
    """transformers' BERT as a function of tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden


class _Recurrent(torch.nn.Module):
    """Two recurrent layers over frames of 80 numbers, and a linear layer, as in recognizers."""

    def __init__(self, cell: type[torch.nn.LSTM] | type[torch.nn.GRU], units: int) -> None:
        super().__init__()
        self.layers = cell(80, units, 2, batch_first=True)
        self.head = torch.nn.Linear(units, 32)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.layers(frames)[0])
        return scores


def _recurrent(cell: type[torch.nn.LSTM] | type[torch.nn.GRU], units: int, batch: int) -> Workload:
    sizes = DimRange(min=1, opt=batch, max=batch)
    frames = TensorSpec(name="frames", dtype="float32", shape=(sizes, FRAMES, 80))
    module = _Recurrent(cell, units).eval()
    return Workload(name=f"{cell.__name__.lower()}_{units}", module=module, inputs=(frames,))


OTHERS: dict[str, Callable[[int], Workload]] = {
    "vit_b_16": _vit_b_16,
    "bert_large": partial(_bert, "bert_large", 24, 16, 384),
    "bert_base_s128": partial(_bert, "bert_base_s128", 12, 12, 128),
    "lstm_64": partial(_recurrent, torch.nn.LSTM, 64),
    "lstm_256": partial(_recurrent, torch.nn.LSTM, 256),
    "lstm_512": partial(_recurrent, torch.nn.LSTM, 512),
    "gru_256": partial(_recurrent, torch.nn.GRU, 256),
}


def _image(batch: int, *shape: int) -> TensorSpec:
    """An image input for any batch up to this one, as in ``tessella compile``."""
    sizes = DimRange(min=1, opt=batch, max=batch)
    return TensorSpec(name="image", dtype="float32", shape=(sizes, *shape))


def _sample(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    shape = spec.at(spec.batch.opt)
    if spec.dtype == "float32":
        return torch.randn(shape, device=device)
    if spec.name == "attention_mask":
        return torch.ones(shape, dtype=torch.int64, device=device)
    return torch.randint(0, 1000, shape, device=device)
