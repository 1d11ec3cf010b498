"""The ways in which a step can run, which of them a recipe takes, and why.

A way decides who runs the network's forward and backward pass: torch's own calls one by one, code
that torch.compile makes of them, or ours, with norms and activations fused. Where a norm, a
GELU or a depthwise convolution has a kernel of ours, torch.compile's code calls it, too; and on one
GPU the pass of either becomes a CUDA graph. Weights, checkpoints and the solver are the same in
all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from tessella.artifacts.checkpoint import Answering
from tessella.artifacts.run import Recipe
from tessella.nn.fused import can_fuse, compiled, fused
from tessella.tasks import LossSettings

Loss = Callable[[Tensor, Any, LossSettings], Tensor]
Way = Literal["eager", "compile", "fused"]
WAYS: tuple[Way, ...] = ("eager", "fused", "compile")  # in the order in which they are told
NAMES: dict[Way, str] = {
    "eager": "torch, call by call",
    "compile": "torch.compile, with our kernels in its code",
    "fused": "norms, activations and depthwise convolutions fused",
}
COMPILER = "inductor"  # torch.compile's own


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The way of a training's steps, and why it is that one."""

    way: Way
    why: str


def usual_way(recipe: Recipe, device: torch.device) -> Choice:
    """The way of a recipe where nothing is measured: as it says, fused on a GPU, else eager."""
    if recipe.compile:
        return Choice(way="compile", why="the recipe says compile")
    if recipe.fuse is not None:
        said = f"the recipe says fuse={recipe.fuse}"
        return Choice(way="fused" if recipe.fuse else "eager", why=said)
    if (
        recipe.precision == "fp8"
        and device.type == "cuda"
        and not refusal("compile", recipe, device)
    ):
        return Choice(way="compile", why="casts to fp8 are fused with what makes the numbers")
    why_not = refusal("fused", recipe, device)
    if why_not is None:
        return Choice(way="fused", why="the usual one on a GPU")
    return Choice(way="eager", why=f"nothing is fused: {why_not}")


def refusal(way: Way, recipe: Recipe, device: torch.device) -> str | None:
    """Why a recipe's steps cannot run in this way; None where they can."""
    if way == "eager":
        return None
    if recipe.backend != "torch":
        return f"the layers are those of backend={recipe.backend!r}"
    if recipe.shard and recipe.processes > 1:
        return "blocks gather their weights in the middle of a step"
    if recipe.quantize != "none":
        return "its roundings run operation by operation"
    if recipe.sync_norms and recipe.processes > 1:
        return "norms exchange their statistics in the middle of a step"
    if way == "compile":
        if recipe.deterministic:
            return "the order of sums in its code is chosen by measuring"
        if recipe.grow_from < 1:
            return "grow_from changes the images' size, and each would be compiled for"
        if device.type == "cpu":
            found = shutil.which(os.environ.get("CXX", "g++"))  # where torch looks, too
            return "there is no C++ compiler" if found is None else None
    else:
        if device.type != "cuda":
            return "our kernels for it run on a GPU"
        if recipe.recompute:
            return "recompute does not keep all values"
    return None if can_fuse() else "Triton is not installed"


def called_loss(loss: Loss, way: Way, answers: Answering) -> Loss:
    """What a step calls for its loss: one of many places is torch.compile's code where the network
    is, since it is large. Of volumes of 128³ it takes 25 passes over memory otherwise."""
    if way != "compile" or answers not in ("pixels", "voxels"):
        return loss
    return cast(Loss, torch.compile(loss, dynamic=False))


def called(module: nn.Module, way: Way) -> nn.Module:
    """The module that a step calls instead of ``module``: another form of the same weights."""
    if way == "fused":
        return fused(module)
    if way == "compile":
        return compiled(module, COMPILER)
    return module
