"""Copying weights from a checkpoint into a module: all of them, or those that fit."""

from __future__ import annotations

from torch import nn

from tessella.artifacts.checkpoint import Checkpoint
from tessella.core.errors import CorruptArtifact, UsageError
from tessella.nn.zoo.build import build


def load(checkpoint: Checkpoint, *, trust_code: bool = False) -> nn.Module:
    """The checkpoint's network with its weights, in evaluation mode, on the CPU.

    Raises:
        CorruptArtifact: the weights are not those of the network that the checkpoint names.
        UsageError: the checkpoint brings code that is not trusted (see ``build``), or a network
            that rounds.
    """
    if checkpoint.is_quantized:
        raise UsageError(
            "this checkpoint's network rounds as its INT8 plan does, and is no plain module",
            seen=checkpoint.path,
            fix="compile it, or look into the checkpoint that its training began with",
        )
    module = build(checkpoint.info.network, trust_code=trust_code)
    weights = checkpoint.weights()
    own = module.state_dict()
    wrong = [f"{name} is missing" for name in own.keys() - weights.keys()]
    wrong += [f"{name} is unknown" for name in weights.keys() - own.keys()]
    wrong += [
        f"{name} has shape {list(weights[name].shape)} instead of {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if wrong:
        raise CorruptArtifact(
            f"the weights do not fit the network {checkpoint.info.network.name}",
            seen=f"{'; '.join(sorted(wrong)[:5])} ({len(wrong)} in all) in {checkpoint.path}",
            fix="restore the checkpoint, or use the library versions that it was trained with",
        )
    module.load_state_dict(weights)
    return module.eval()


def init_from(module: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Copy every weight of a checkpoint whose name and shape fit: a start for fine-tuning.

    Returns:
        The weights that keep their initial values, by name, each with the reason: usually the head.

    Raises:
        UsageError: not one parameter fits.
    """
    weights = checkpoint.weights()
    left_out = {}
    fitting = {}
    for name, own in module.state_dict().items():
        if name not in weights:
            left_out[name] = "not in the checkpoint"
        elif weights[name].shape != own.shape:
            here, there = list(own.shape), list(weights[name].shape)
            left_out[name] = f"shape {here} here, {there} in the checkpoint"
        else:
            fitting[name] = weights[name]
    if not fitting.keys() & {name for name, _ in module.named_parameters()}:
        raise UsageError(
            "no weight of the checkpoint fits this network",
            seen=f"{checkpoint.info.network.name} in {checkpoint.path}",
            fix="choose a checkpoint of the same architecture",
        )
    module.load_state_dict(fitting, strict=False)
    return left_out
