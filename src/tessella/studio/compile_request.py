"""The choices of the plan page's form, and the build request that its fields amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tessella.artifacts.build import ROUNDED, BuildRequest
from tessella.artifacts.outline import Outline
from tessella.core.architectures import ARCHITECTURES, GPU_TARGETS, has
from tessella.core.dtype import plain_precision
from tessella.core.errors import UsageError
from tessella.studio.workspace import plain_name

How = Literal["one", "budget", "lock"]

TARGETS = {
    "cpu": "cpu",
    **{name: f"{name} ({ARCHITECTURES[name].chips})" for name in GPU_TARGETS},
    "reference": "reference",
}
_TF32 = tuple(name for name in GPU_TARGETS if has(name, "tf32_mma"))
_BF16 = tuple(name for name in GPU_TARGETS if has(name, "bf16_mma"))
_FP8 = tuple(name for name in GPU_TARGETS if has(name, "fp8_mma"))
WAYS: dict[How, tuple[str, str]] = {
    "one": ("Precision", "Every layer in the precision that you choose."),
    "budget": ("Budget", "The fastest plan that loses at most so many points of its task's score: "
               "each layer gets a precision of its own, judged by your data."),
    "lock": ("Like a plan", "Decided as another plan was: nothing is measured, and the same "
             "checkpoint gives the same bytes."),
}  # fmt: skip
# What a precision is, and the targets on which it is worth choosing.
PRECISIONS = {
    "fp32": (tuple(TARGETS), "IEEE float32: the most exact."),
    "tf32": (_TF32, "float32 values, multiplied by tensor cores with 10 bits of mantissa."),
    "bf16": (("cpu", *_BF16, "reference"), "Half the memory; the range of float32, 8 bits."),
    "fp16": (tuple(TARGETS), "Half the memory; 11 bits, values to 65,504."),
    "int8": (tuple(TARGETS), "A quarter of the memory; scales from calibration."),
    "fp8": (_FP8, "A quarter of the memory; e4m3, scales from calibration."),
}
# The precisions that a budget may be spent on, by target.
LEAST = {
    target: tuple(
        name
        for name, (targets, _) in PRECISIONS.items()
        if target in targets and name != "tf32" and (name != "fp16" or target in GPU_TARGETS)
    )
    for target in TARGETS
}
METHODS = {
    "mse": "The threshold with the least mean-square error.",
    "entropy": "The threshold whose levels tell least less than the values do.",
    "percentile": "All but the largest 0.01 % of the values.",
    "min-max": "The largest value that was seen.",
}
USUAL_METHOD, USUAL_SAMPLES = "mse", 512  # the command's defaults, left out of it
CACHE = ".studio/timings.jsonl"  # of builds with a time limit
# Settings that a way of choosing precisions does not use.
UNUSED: dict[How, tuple[str, ...]] = {
    "one": ("budget", "data", "lock"), "budget": ("lock",), "lock": ("budget", "data"),
}  # fmt: skip


def joined(target: str, also: str | None) -> str:
    """The chosen target and those that a person typed beside it, as a request has them."""
    return ",".join((target, *(t for t in (also or "").replace(" ", "").split(",") if t)))


def precisions_for(targets: Sequence[str], how: How) -> tuple[str, ...]:
    """The precisions worth choosing on all of these targets, or to spend a budget on."""
    return tuple(
        name
        for name, (suits, _) in PRECISIONS.items()
        if all(name in LEAST[t] if how == "budget" else t in suits for t in targets)
    )


def requested(how: How, name: str, **settings: Any) -> BuildRequest:
    """The request whose command builds the plan that the form describes.

    Args:
        how: one precision, a budget, or a plan to follow.
        name: of the plan; if empty, made of the source and the precision.
        settings: fields of the request; those that ``how`` does not use are left out.

    Raises:
        UsageError: a setting is missing or impossible.
    """
    chosen = {k: v for k, v in settings.items() if v is not None and k not in UNUSED[how]}
    if how == "budget" and "budget" not in chosen:
        raise UsageError("a budget is points that may be lost", seen="none", fix="give some")
    if how == "lock" and "lock" not in chosen:
        raise UsageError("there is no plan to follow", fix="choose one, or another way")
    chosen["out"] = f"plans/{named(how, name, chosen)}.plan"
    if how == "budget":
        chosen["front"] = chosen["out"].removesuffix(".plan") + ".front"
    if "time_limit_s" in chosen:
        chosen["cache"] = CACHE
    return BuildRequest(**chosen)


def named(how: How, name: str, settings: Mapping[str, Any]) -> str:
    """The typed name, or one made of the source and the precision."""
    if name:
        return plain_name(name)
    ending = {"budget": "-budget", "lock": "-again"}.get(how, "")
    if how == "one" and settings.get("precision", "fp32") != "fp32":
        ending = f"-{settings['precision']}"
    return plain_name(Path(settings["source"]).name) + ending


def followed(plan: Outline) -> dict[str, object]:
    """The settings of a request that following a plan decides, besides the kernels."""
    manifest = plan.manifest
    judged = manifest.receipt is not None
    first = manifest.main_input
    span = first.batch
    sizes = (span.min,) if span.min == span.max else (span.min, span.opt, span.max)
    return {
        "target": ",".join(plan.targets),
        # the lock of a plan that a budget chose holds the precision of each layer
        "precision": "fp32" if judged else manifest.precision,
        "precisions": None if judged else dict(manifest.precisions) or None,
        "batch": sizes,
        "input": "uint8" if first.dtype == "uint8" and manifest.preprocess else "float32",
    }


def rounds(plan: Outline) -> bool:
    """Whether building the plan again needs a calibration."""
    manifest = plan.manifest
    used = {manifest.precision, *map(plain_precision, manifest.precisions.values())}
    return bool(used & set(ROUNDED))


def describe_followed(plan: Outline) -> str:
    """The settings that following a plan decides, in a line for people."""
    manifest = plan.manifest
    first = manifest.main_input
    kinds = "a precision for each layer" if manifest.receipt else manifest.precision
    return f"{', '.join(plan.targets)}, {kinds}, batch {first.batch}, {first.dtype}"
