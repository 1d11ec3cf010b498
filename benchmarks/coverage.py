"""Networks of other people, compiled and compared: ``python -m benchmarks.coverage --target cpu``.

Every classification network of torchvision, one of each of many families of timm, and four of
transformers, with random weights and small images. Each is compiled for an open batch, saved and
loaded. A network agrees if its plan is as near to the float64 answer as float32 can ask for, at a
batch size that the plan has and at one that it has not. What is already in the file is not run
again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision

import tessella as ts
from benchmarks.report import RESULTS, document, markdown, write
from tessella.compiler.pipeline import compile_graph
from tessella.compiler.settings import About, Measuring
from tessella.core.device import default_target
from tessella.core.errors import TessellaError
from tessella.core.spec import DimRange, TensorSpec
from tessella.graph import capture

BATCH = DimRange(min=1, opt=1, max=2)  # that plans are made for
SAMPLES = 3  # that they are asked for

ALLOWED = 1e-4  # of the largest value; or four times eager's own error, where that is larger
CHAOS = 1e-3  # of eager's own error: then a network amplifies rounding too much to tell anything
HEAD = ("network", "source", "agrees", "error", "eager's error", "steps", "fallback steps", "s")


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to compile, with element type and shape of each input at batch 1."""

    name: str
    source: str
    build: Callable[[], torch.nn.Module]
    inputs: Mapping[str, tuple[str, tuple[int, ...]]]


# torchvision: the size at which a network still has all its layers.
_SIZES = {"inception_v3": 96, "maxvit_t": 224, "googlenet": 64, "alexnet": 96, "vgg": 48}

# timm: a small network of each family, and its image size where 64 is not right.
FAMILIES: dict[str, tuple[str, int]] = {
    "beit": ("beit_base_patch16_224", 224),
    "byobnet": ("repvgg_a0", 64),
    "cait": ("cait_xxs24_224", 224),
    "coat": ("coat_tiny", 224),
    "convit": ("convit_tiny", 224),
    "convmixer": ("convmixer_768_32", 64),
    "convnext": ("convnext_atto", 64),
    "crossvit": ("crossvit_tiny_240", 240),
    "cspnet": ("cspresnet50", 64),
    "davit": ("davit_tiny", 224),
    "deit": ("deit3_small_patch16_224", 224),
    "densenet": ("densenet121", 64),
    "dla": ("dla34", 64),
    "dpn": ("dpn68", 64),
    "edgenext": ("edgenext_xx_small", 64),
    "efficientformer": ("efficientformer_l1", 224),
    "efficientnet": ("tf_efficientnet_b0", 64),
    "efficientvit_mit": ("efficientvit_b0", 64),
    "eva": ("eva02_tiny_patch14_224", 224),
    "fastvit": ("fastvit_t8", 64),
    "focalnet": ("focalnet_tiny_srf", 64),
    "gcvit": ("gcvit_xxtiny", 224),
    "ghostnet": ("ghostnet_100", 64),
    "hgnet": ("hgnetv2_b0", 64),
    "hiera": ("hiera_tiny_224", 224),
    "hrnet": ("hrnet_w18_small", 64),
    "inception_next": ("inception_next_atto", 64),
    "inception_v4": ("inception_v4", 96),
    "levit": ("levit_128s", 224),
    "maxxvit": ("coatnet_pico_rw_224", 224),
    "metaformer": ("poolformer_s12", 64),
    "mlp_mixer": ("mixer_s32_224", 224),
    "mobilenetv3": ("mobilenetv3_small_050", 64),
    "mobilevit": ("mobilevit_xxs", 64),
    "mvitv2": ("mvitv2_tiny", 224),
    "nfnet": ("dm_nfnet_f0", 64),
    "pit": ("pit_ti_224", 224),
    "pvt_v2": ("pvt_v2_b0", 64),
    "regnet": ("regnety_002", 64),
    "repvit": ("repvit_m0_9", 64),
    "res2net": ("res2net50_26w_4s", 64),
    "resnest": ("resnest14d", 64),
    "resnet": ("resnet26d", 64),
    "resnetv2": ("resnetv2_50", 64),
    "rexnet": ("rexnet_100", 64),
    "selecsls": ("selecsls42b", 64),
    "senet": ("legacy_seresnet18", 64),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 224),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 256),
    "tiny_vit": ("tiny_vit_5m_224", 224),
    "twins": ("twins_svt_small", 224),
    "vgg": ("vgg11_bn", 64),
    "visformer": ("visformer_tiny", 224),
    "vision_transformer": ("vit_tiny_patch16_224", 224),
    "volo": ("volo_d1_224", 224),
    "vovnet": ("ese_vovnet19b_dw", 64),
    "xception": ("legacy_xception", 96),
    "xcit": ("xcit_nano_12_p16_224", 224),
}


def torchvision_networks() -> Iterator[Network]:
    for name in torchvision.models.list_models(module=torchvision.models):
        size = next((s for prefix, s in _SIZES.items() if name.startswith(prefix)), 64)
        extra: dict[str, Any] = {}
        if name.startswith("vit_"):
            size = 4 * int(name.split("_")[-1])
            extra["image_size"] = size
        if name in ("googlenet", "inception_v3"):
            extra |= {"init_weights": False, "aux_logits": False}

        def build(name: str = name, extra: dict[str, Any] = extra) -> torch.nn.Module:
            network: torch.nn.Module = torchvision.models.get_model(name, weights=None, **extra)
            return network

        yield _images(name, "torchvision", build, size)


def timm_networks() -> Iterator[Network]:
    for family, (name, size) in FAMILIES.items():

        def build(name: str = name) -> torch.nn.Module:
            network: torch.nn.Module = timm.create_model(name, pretrained=False)
            return network

        yield _images(name, f"timm, {family}", build, size)


def transformers_networks() -> Iterator[Network]:
    """Base models of transformers with fewer layers; none where it is not installed."""
    try:
        import transformers as hf
    except ImportError:
        return
    few = {"num_hidden_layers": 2}
    image = {"pixel_values": ("float32", (1, 3, 64, 64))}
    swin = {"pixel_values": ("float32", (1, 3, 224, 224))}
    words = dict.fromkeys(("input_ids", "attention_mask"), ("int64", (1, 32)))
    for name, make, config, inputs in (
        ("bert", hf.BertForSequenceClassification, hf.BertConfig(**few), words),
        ("vit", hf.ViTForImageClassification, hf.ViTConfig(image_size=64, **few), image),
        ("swin", hf.SwinForImageClassification, hf.SwinConfig(), swin),
        ("convnext", hf.ConvNextForImageClassification, hf.ConvNextConfig(), image),
    ):

        def build(make: Any = make, config: Any = config, names: Any = tuple(inputs)) -> Logits:
            return Logits(make(config), names)

        yield Network(name=name, source="transformers", build=build, inputs=inputs)


class Logits(torch.nn.Module):
    """A model of transformers as a function of tensors."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def _images(name: str, source: str, build: Callable[[], torch.nn.Module], size: int) -> Network:
    inputs = {"image": ("float32", (1, 3, size, size))}
    return Network(name=name, source=source, build=build, inputs=inputs)


def networks() -> list[Network]:
    return [*transformers_networks(), *timm_networks(), *torchvision_networks()]


def measure(network: Network, target: str) -> dict[str, Any]:
    """One row: the kinds of the plan's steps, and the distance of its answers from float64.

    A deep network of random weights may be chaotic, as no trained one is: then its normalizations
    are given small factors, with which each block changes less.
    """
    for factor in (1.0, 0.3):
        torch.manual_seed(0)
        module = alive(network.build(), network, factor)
        eager, exact = answers(copy.deepcopy(module), feeds(network, SAMPLES))
        own = float((eager - exact).abs().max() / exact.abs().max())
        if own < CHAOS:
            break
    return _compared(network, target, module, exact, own) | {"norm_factor": factor}


def answers(
    module: torch.nn.Module, inputs: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The answers of eager PyTorch and those in float64; the module stays in float64."""
    with torch.inference_mode():
        eager = module(*inputs.values())
        module.double()
        return eager, module(*(t.double() if t.is_floating_point() else t for t in inputs.values()))


def _compared(
    network: Network, target: str, module: torch.nn.Module, exact: torch.Tensor, own: float
) -> dict[str, Any]:
    start = time.perf_counter()
    specs = [
        TensorSpec(name=name, dtype=dtype, shape=(BATCH, *shape[1:]))
        for name, (dtype, shape) in network.inputs.items()
    ]
    plan = compile_graph(
        capture(module, specs, name=network.name),
        target=target,
        batch=BATCH,
        samples=feeds(network, 1),
        about=About(
            built_from=network.name,
            rebuild=f"python -m benchmarks.coverage --target {target} --only {network.name}",
        ),
        measuring=Measuring(budget_s=0.0),  # which kernels are fastest does not matter here
    )
    with tempfile.TemporaryDirectory() as folder:
        plan.save(path := Path(folder) / "network.plan")
        with ts.load(path) as engine:
            given = feeds(network, SAMPLES)
            whole = engine(**given)["output"]
            first = engine(**{name: t[:2] for name, t in given.items()})["output"]
    largest = exact.abs().max()
    error = max(float((made - exact[: len(made)]).abs().max()) for made in (whole, first))
    error /= float(largest)
    steps = plan.program.buckets[0].steps
    fallbacks = Counter(s.attrs["target"] for s in steps if s.op == "fallback")
    varied = float((exact - exact.mean(0)).abs().max() / largest)
    return {
        "network": network.name,
        "source": network.source,
        "agrees": own < CHAOS and error < max(ALLOWED, 4 * own) and varied > 1e-4,
        "error": error,
        "eager_error": own,
        "varies": varied,
        "steps": len(steps),
        "fallbacks": dict(fallbacks),
        "seconds": round(time.perf_counter() - start, 1),
    }


def alive(module: torch.nn.Module, network: Network, factor: float = 1.0) -> torch.nn.Module:
    """The module in evaluation mode, with statistics in its batch norms, as after training.

    With initial statistics the signal of a deep network fades, and then everything would agree. The
    same holds for matrices of zeros and for residual branches with factors near zero.
    """
    for parameter in module.parameters():
        largest = parameter.detach().abs().max()
        if largest == 0 and parameter.dim() > 1:
            parameter.data.normal_(std=0.02)
        elif 0 < largest < 0.01 and parameter.numel() > 1:
            if parameter.dim() > 1:  # alike in each column it would cancel what a norm has centred
                parameter.data.mul_(0.1 / largest)
            else:
                parameter.data.add_(0.5)
    norms = [m for m in module.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
        if norm.weight is not None and factor != 1:
            norm.weight.data.fill_(factor)
    if norms:
        module.train()
        with torch.no_grad():
            module(*feeds(network, 4).values())
    return module.eval()


def feeds(network: Network, batch: int) -> dict[str, torch.Tensor]:
    """Random images or tokens, with a mask that hides a third of all samples but the first."""
    generator = torch.Generator().manual_seed(batch)
    made = {}
    for name, (dtype, (_, *shape)) in network.inputs.items():
        if dtype == "float32":
            made[name] = torch.randn(batch, *shape, generator=generator)
        elif name.endswith("mask"):
            made[name] = torch.ones(batch, *shape, dtype=torch.int64)
            made[name][1:, -shape[-1] // 3 :] = 0
        else:
            made[name] = torch.randint(0, 1000, (batch, *shape), generator=generator)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=default_target())
    parser.add_argument("--only", default="", help="part of a network's or source's name")
    parser.add_argument("--out")
    args = parser.parse_args()
    path = Path(args.out or RESULTS / f"coverage-{args.target}.json")
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(row["network"], row["source"]) for row in rows}
    for network in networks():
        if (network.name, network.source) in done or not (
            args.only in network.name or args.only in network.source
        ):
            continue
        try:
            row = measure(network, args.target)
        except TessellaError as error:
            row = _failed(network, str(error))
        except Exception as error:  # somebody's network: the table tells what came out of it
            traceback.print_exc()
            row = _failed(network, f"{type(error).__name__}: {error}"[:300])
        rows.append(row)
        write(path, document(args.target, rows))  # what was measured is kept
        print(*line(row), sep="  ", flush=True)
        gc.collect()
    print(markdown(HEAD, [line(row) for row in rows]))
    print(summary(rows), f"wrote {path}", sep="\n")


def _failed(network: Network, reason: str) -> dict[str, Any]:
    return {
        "network": network.name,
        "source": network.source,
        "agrees": False,
        "reason": reason,
    }


def line(row: Mapping[str, Any]) -> list[object]:
    if "reason" in row:
        return [row["network"], row["source"], row["reason"], *[""] * (len(HEAD) - 3)]
    fallbacks = ", ".join(f"{n}× {t.removeprefix('aten::')}" for t, n in row["fallbacks"].items())
    errors = [f"{row[k]:.1e}" for k in ("error", "eager_error")]
    agrees = "yes" if row["agrees"] else "NO"
    start = [row["network"], row["source"], agrees, *errors]
    return [*start, row["steps"], fallbacks or "none", row["seconds"]]


def summary(rows: list[dict[str, Any]]) -> str:
    counts = Counter((row["source"].split(",")[0], row["agrees"]) for row in rows)
    sources = dict.fromkeys(source for source, _ in counts)
    return "; ".join(
        f"{s}: {counts[s, True]} of {counts[s, True] + counts[s, False]} agree" for s in sources
    )


if __name__ == "__main__":
    main()
