"""The names under which people set a recipe's fields: in Python, in files, on the command line."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tessella.artifacts.run import Augment, Recipe, Solver
from tessella.core.errors import ArtifactError, UsageError
from tessella.core.policies import Policy
from tessella.core.record import from_plain, to_plain

FIELDS = tuple(f.name for f in fields(Recipe))
NESTED = {
    "augment": tuple(f.name for f in fields(Augment)),
    "policy": tuple(f.name for f in fields(Policy)),
    "solver": tuple(f.name for f in fields(Solver)),
}

_NEAR = 0.8  # of difflib's ratio: below, "foo" is near to "floor"

# What other libraries call our settings.
SYNONYMS = {
    "learning_rate": "lr", "base_lr": "lr", "optimizer": "solver", "optim": "solver",
    "schedule": "policy", "scheduler": "policy", "lr_policy": "policy", "lr_scheduler": "policy",
    "bs": "batch_size", "wd": "weight_decay", "augmentation": "augment", "checkpoint": "init",
    "weights": "init", "pretrained": "init", "early_stopping": "patience", "amp": "precision",
    "dtype": "precision", "num_workers": "workers", "devices": "gpus",
    "num_nodes": "nodes", "nnodes": "nodes", "fsdp": "shard",
    "smoothing": "label_smoothing", "hflip": "flip",
    "num_epochs": "epochs", "warmup_epochs": "warmup",
    "ema_decay": "ema", "layerwise_decay": "layer_decay", "freeze_layers": "freeze",
    "accumulation_steps": "accumulate", "gradient_accumulation_steps": "accumulate",
    "gradient_checkpointing": "recompute", "max_grad_norm": "clip", "gradient_clip_val": "clip",
    "grad_clip": "clip",
}  # fmt: skip


def spelled_out(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with short forms (``lr``, a solver's or policy's name alone) as recipe fields.

    Raises:
        UsageError: a recipe has no such setting; the error names the most similar one.
    """
    out = {name: to_plain(value) for name, value in settings.items()}
    for group in ("solver", "policy"):
        if isinstance(out.get(group), str):
            out[group] = {"name": out[group]}
    if "lr" in out and isinstance(out.get("solver", {}), dict):
        out["solver"] = {**out.get("solver", {}), "lr": out.pop("lr")}
    for group, known in {"": FIELDS, **NESTED}.items():
        inner = out.get(group) if group else out
        if isinstance(inner, dict) and (unknown := [name for name in inner if name not in known]):
            raise UsageError(
                f"unknown {group or 'training'} setting",
                seen=", ".join(
                    name if inner[name] is None else f"{name}={inner[name]!r}" for name in unknown
                )[:200],
                fix="; ".join(_meant(name, group) for name in unknown),
            )
    return out


def recipe_from(settings: Mapping[str, Any]) -> Recipe:
    """A recipe from keyword settings; nested records may be given as dicts."""
    plain = spelled_out(settings)
    try:
        return from_plain(Recipe, plain, where="recipe")
    except ArtifactError as error:
        if isinstance(error.__cause__, UsageError):  # a record's own words are the clearest
            raise error.__cause__ from None
        raise UsageError(error.wrong, seen=error.seen, fix="correct the setting") from error


def path_of(name: str) -> str:
    """A setting's place in a recipe: ``solver.lr`` of ``lr`` and of ``solver.lr``.

    Raises:
        UsageError: a recipe has no such setting.
    """
    short = {"lr": "solver.lr", **{group: f"{group}.name" for group in ("solver", "policy")}}
    path = short.get(name, name)
    group, dot, inner = path.partition(".")
    if not (dot and inner and group == "network_options"):
        spelled_out({group: {inner: None}} if dot else {path: None})
        if group in NESTED and not dot:
            raise UsageError(
                f"{group} is a record of several settings",
                seen=name,
                fix=f"name one of them, such as {group}.{NESTED[group][0]}",
            )
    return path


def hint_of(path: str) -> Any:
    """The type of the setting at ``path``, without None where it may be None; Any if unknown."""
    kind: Any = Recipe
    for name in path.split("."):
        if not hasattr(kind, "__dataclass_fields__"):
            return Any
        kind = typing.get_type_hints(kind)[name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
    return kind


def with_value(settings: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Spelled-out settings with another value at ``path``."""
    group, dot, inner = path.partition(".")
    if not dot:
        return {**settings, path: value}
    return {**settings, group: {**(settings.get(group) or {}), inner: value}}


def _meant(name: str, group: str) -> str:
    """Advice for an unknown name: the most similar setting, as it has to be written."""
    written = {f: f"{g}={{{f!r}: …}}" for g in NESTED for f in NESTED[g] if f != "name"}
    written |= {name: name for name in ("lr", *FIELDS)}
    plain = name.lower().strip("-").replace("-", "_")
    plain = SYNONYMS.get(plain, plain)
    if group and (near := difflib.get_close_matches(plain, NESTED[group], n=1, cutoff=_NEAR)):
        return f"use {near[0]!r}"
    if near := difflib.get_close_matches(plain, written, n=1, cutoff=_NEAR):
        return f"use {written[near[0]]}"
    return f"use one of {', '.join(NESTED[group] if group else FIELDS)}"
