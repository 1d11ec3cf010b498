"""Default settings of a training: solver, learning rate, policy, label smoothing.

Each family of networks and kind of start has a row, chosen by a measurement; all measurements are
in ``benchmarks/results/defaults.json``. The table lies beside ``Recipe`` as the command line,
the API and the studio's form all read it. A run's ``run.json`` holds what was chosen, in full.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from tessella.artifacts.run import Augment, Recipe, Solver, SolverName
from tessella.core.policies import Policy, PolicyName

Family = Literal[
    "lenet",
    "normalized",
    "plain",
    "convnext",
    "transformer",
    "unet",
    "unet3d",
    "detector",
    "d_fine_n",
    "rf_detr",
]
GROUPS = ("solver", "policy", "augment")  # the records of a recipe that are filled in

BATCH = 32  # of the measurements
PLACES = 64 * 224 * 224  # pixels or voxels of a step, where an answer belongs to places
LEAST_BATCH = 2
# Of a U-Net, pictures of an epoch for each of a step: with 500 pictures of digits and 24 epochs of
# each, batches of 8 gave a mean IoU of 0.69 and of 64 one of 0.17 (see ``RANDOM``); with 18 volumes
# and 30 epochs, batches of 2 a Dice of 0.97 and of 16 one of 0.41 and 0.60 (6e-3). Of a detector
# too: CenterNet on 300 pictures of digits, 20 epochs, batches of 8 gave a mAP of 0.40 (0.68 at an
# overlap of one half) and of 64 one of 0.24 (0.47), one seed each.
STEPS, FEW = 60, 8
# An epoch: with fewer a network learns little in it. 100 pictures of digits (32², 597 judge),
# 8 epochs, two seeds: ResNet-18 in batches of 64 13.6 and 11.4 %, of 16 85.1 and 88.9 (in a plain
# loop of AdamW 1e-3 and OneCycle 86.9, 89.3), of 8 86.3 (one seed); LeNet of 64 88.9 and 89.8, of
# 16 92.8 and 91.6, of 8 92.5 and 91.8.
LEAST_STEPS = 16
# What the default makes sure of. 500 glyphs, ResNet-18, 8 epochs, one seed: batches of 64, seven
# steps an epoch, 21.0 %, of 16 12.0.
USUAL_STEPS = 6
LEAST_OF_FEW = 4  # of one image a batch norm learns nothing, and of one value torch refuses it
_ANCHORED = r"d_fine_[nsm]|rf_detr_[nsm]|retinanet_\w+|mask_rcnn"
_DETECTOR = rf"centernet|{_ANCHORED}"
WARMUP = 0.1  # of a policy other than onecycle
SMOOTHING = 0.1

# Networks by how they start, the first that fits. Without normalization, or with GoogLeNet's small
# initial weights, a high rate kills them; a file of the user's may be anything, so it gets the
# careful row.
_PLAIN = r"alexnet|googlenet|vgg\d+|timm/vgg\d+(?!_bn)(\..*)?|.*\.py(:.*)?|.*\.prototxt"
_UNET = r"unet|unet_backbone"
_CONVNEXT = r"timm/(.*_)?convnext(v2)?([\d_].*)?"
_TRANSFORMER = (
    r"timm/(.*_)?(vit|deit|swin|swinv2|beit|eva|cait|xcit|mixer|gmixer|gmlp|resmlp|pit|pvt|twins|"
    r"coat|crossvit|convit|levit|mvit|hiera|davit|tnt|visformer|sequencer|volo|nest|jx|flexivit|"
    r"naflexvit|maxvit|maxxvit|coatnet|gcvit|nextvit|focalnet|poolformer|"
    r"metaformer|caformer|convformer|edgenext|deit3|beitv2|eva02|samvit|aimv2)([\d_].*)?"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The best settings of AdamW for a family, with batches of ``BATCH`` images.

    Attributes:
        most: the rate above which no batch raises it, where a larger one was never tried.
    """

    lr: float
    weight_decay: float
    warmup: float
    most: float = math.inf


# Accuracy on the validation split of glyphs / textures / digits (``benchmarks.pictures``), with
# OneCycle. ResNet-18, 8 epochs, 4 seeds (digits 1): 1e-3 90.3 / 65.0 / 99.2, 1.5e-3 with smoothed
# labels 92.4 / 63.4 / 98.9, without 93.1 / 61.5 / 99.2, 2e-3 93.1 / 57.9 / 98.9. ConvNeXt-Atto,
# 16 epochs: 5e-4 28.8 / 13.8 / 98.6, 7e-4 smoothed 34.2 / 14.6, 1e-3 29.8 / 9.2 / 98.9. ViT-Ti, 12
# epochs: 2.5e-4 4.5 / 45.0 / 75.2, 5e-4 3.3 / 40.0 / 78.0, 1e-3 3.7 / 27.9 / 82.7; by all our
# defaults (two seeds, no glyphs) 2.5e-4 46.3 / 78.3, 3.5e-4 44.2 / 81.2, 5e-4 41.0 / 83.0. On
# glyphs in 12 epochs GoogLeNet 3e-4 18, 1e-3 8; LeNet 3e-4 41, 1e-3 67, 2e-3 78.
# Centralized gradients (``Solver.centralize``) gain on glyphs and lose on textures, so they are no
# default. ResNet-18 of a quarter, of half and of all its channels, the row above without and with
# them, 1,000 pictures more judge: glyphs 34.2 and 20.3 → 46.3 and 27.8 (two seeds), 75.6 → 82.5,
# and 94.0 with all; textures 43.2 → 40.4, 57.9 → 55.0.
# Mean IoU of U-Nets of digits scattered on textures / striped shapes (``benchmarks.scattered``):
# width 16, 300 pictures, batches of 16, 24 epochs 1.5e-3 14.7 / 40.7, 3e-3 16.1 / 43.0, 6e-3 16.7 /
# 40.3; the digits with 40 epochs in small batches 29, with 3e-3 68; width 32, 2,000 pictures,
# batches of 32, 24 epochs 90.6, with 3e-3 91.9, 6e-3 92.6. Digits in 48² pixels, width 16, three
# levels below the first: 500 pictures, 24 epochs in batches of 8 3e-3 62, 6e-3 69; 1,500 pictures,
# 14 epochs in batches of 32 3e-3 57, 6e-3 78, 1.2e-2 63. Dice of ``unet3d``, width 8, three levels,
# on 18 volumes of 48³ (``benchmarks.made_volumes``) in batches of 2, 30 epochs, one seed each: 3e-3
# 65, 6e-3 97, 1.2e-2 99. Detectors but CenterNet: ``retinanet_r18`` on 200 pictures of 64² with
# three digits, batches of 8, 6 epochs, one seed: mAP@50 1.4 with 7.5e-4 (what "normalized" gives),
# 9.2 with 2e-4, training's loss 1.44 and 0.94. ``d_fine_n`` on 1,600 pictures of 128² with up to
# three digits on plain ground, batches of 16, 585 steps, one seed: mAP 1.8 with 9.4e-5, 10.5 with
# 2.8e-4, 44.6 with 8.5e-4, and no larger one was tried. ``rf_detr_n`` with a backbone 192 wide and
# two groups of queries, 16 pictures of 96² with digits of three classes, batches of 4, 100 steps, a
# constant rate, one seed, judged on the same 16: mAP 16.0 with 1e-4, 23.5 with 2.8e-4 and 4.9 with
# 8.5e-4, whose loss stood still from step 50 on (8.6, 8.3, 8.2; with 2.8e-4 9.0, 7.7, 7.2). That of
# 2.8e-4 is without dropout, which changed its loss by less than 0.1; nothing between was tried, and
# not the whole network. For the others it is what their authors take; ``d_fine_s`` learned such
# digits to a mAP of 96 with 4e-4 in batches of 16.
RANDOM: dict[Family, Row] = {
    "lenet": Row(lr=2e-3, weight_decay=0.05, warmup=0.3),
    "normalized": Row(lr=1.5e-3, weight_decay=0.05, warmup=0.3),
    "plain": Row(lr=3e-4, weight_decay=0.05, warmup=0.3),
    "convnext": Row(lr=7e-4, weight_decay=0.05, warmup=0.3),
    "transformer": Row(lr=3.5e-4, weight_decay=0.05, warmup=0.3),
    "unet": Row(lr=6e-3, weight_decay=0.05, warmup=0.3),
    "unet3d": Row(lr=6e-3, weight_decay=0.05, warmup=0.3),
    "detector": Row(lr=4e-4, weight_decay=0.05, warmup=0.3),
    "d_fine_n": Row(lr=1.2e-3, weight_decay=0.05, warmup=0.3, most=8.5e-4),
    "rf_detr": Row(lr=4e-4, weight_decay=0.05, warmup=0.3, most=2.8e-4),
}
# ResNet-18 after glyphs on 500 textures, 100 of them held out, 8 epochs, two seeds: 1.5e-4 41.0 %,
# 5e-4 43.5, 1e-3 47.5 (42 and 53), 1.5e-3 45.0; in a plain loop 5e-4 43.0, 1e-3 49.5. Not measured:
# all others, a third or less of the rates above, as is usual where weights are to be kept.
PRETRAINED: dict[Family, Row] = {
    "lenet": Row(lr=5e-4, weight_decay=0.05, warmup=0.1),
    "normalized": Row(lr=1e-3, weight_decay=0.05, warmup=0.1),
    "plain": Row(lr=1e-4, weight_decay=0.05, warmup=0.1),
    "convnext": Row(lr=1e-4, weight_decay=0.05, warmup=0.1),
    "transformer": Row(lr=1e-4, weight_decay=0.05, warmup=0.1),
    "unet": Row(lr=5e-4, weight_decay=0.05, warmup=0.1),
    "unet3d": Row(lr=5e-4, weight_decay=0.05, warmup=0.1),
    "detector": Row(lr=2e-4, weight_decay=0.05, warmup=0.1),
    "d_fine_n": Row(lr=2e-4, weight_decay=0.05, warmup=0.1),
    "rf_detr": Row(lr=2e-4, weight_decay=0.05, warmup=0.1),
}

# Another solver of the user's choice: its rate as a multiple of AdamW's, and its weight decay.
OTHERS: dict[SolverName, tuple[float, float]] = {
    "sgd": (25.0, 5e-4),
    "nesterov": (25.0, 5e-4),
    "adam": (1.0, 1e-4),
    "rmsprop": (0.25, 1e-4),
    "adagrad": (5.0, 1e-4),
    "adadelta": (500.0, 1e-4),
}


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """The settings of a training that its user has not set."""

    solver: Solver
    policy: Policy
    augment: Augment
    label_smoothing: float


def family(network: str) -> Family:
    """The family that a network's name indicates; no module is built."""
    name = network.lower()
    patterns: dict[Family, str] = {
        "lenet": "lenet", "plain": _PLAIN, "convnext": _CONVNEXT, "transformer": _TRANSFORMER,
        "unet": _UNET, "unet3d": "unet3d", "d_fine_n": "d_fine_n", "rf_detr": r"rf_detr_[nsm]",
        "detector": _ANCHORED,
    }  # fmt: skip
    return next((f for f, names in patterns.items() if re.fullmatch(names, name)), "normalized")


def defaults(
    network: str,
    *,
    batch_size: int,
    init: str = "random",
    solver: SolverName = "adamw",
    policy: PolicyName = "onecycle",
) -> Defaults:
    """The default settings for a network.

    Args:
        batch_size: images a step. The rate grows with its root (with ``sgd`` and ``nesterov`` in
            proportion), up to four times that of 32 images; a U-Net's does not shrink with
            it, since even a few of its images have many thousands of answers.
        init: as in ``Recipe``: weights that have learned something get a lower rate.
        solver, policy: the user's choices.
    """
    kind = family(network)
    if kind in ("detector", "d_fine_n", "rf_detr") and solver in ("sgd", "nesterov"):
        kind = "normalized"  # some 0.01 in batches of 8, as torchvision trains RetinaNet
    row = (RANDOM if init == "random" else PRETRAINED)[kind]
    times, decay = OTHERS.get(solver, (1.0, row.weight_decay))
    scale = batch_size / BATCH
    scale = min(4.0, scale if solver in ("sgd", "nesterov") else math.sqrt(scale))
    scale = max(1.0, scale) if family(network) in ("unet", "unet3d") else scale
    rate = min(row.lr * scale, row.most) * times
    return Defaults(
        solver=Solver(name=solver, lr=float(f"{rate:.2g}"), weight_decay=decay),
        policy=Policy(name=policy, warmup=row.warmup if policy == "onecycle" else WARMUP),
        augment=Augment(),
        label_smoothing=SMOOTHING,
    )


def usual_batch(sides: Sequence[int]) -> int:
    """Images a step where an answer belongs to places: the larger the input, the fewer.

    64 of up to 224 × 224 pixels, 8 of 512 × 512, 2 of 128³ voxels: a power of two.

    Args:
        sides: of the input, in pixels or voxels.
    """
    fits = max(LEAST_BATCH, min(Recipe.batch_size, PLACES // math.prod(sides)))
    return 1 << (fits.bit_length() - 1)


def batch_of_few(images: int, steps: int = LEAST_STEPS) -> int:
    """The most images a step, a power of two, with which an epoch of so many has so many steps;
    ``LEAST_OF_FEW`` of too few."""
    return 1 << (max(images // steps, LEAST_OF_FEW).bit_length() - 1)


def completed(
    recipe: Recipe,
    given: Mapping[str, Any],
    *,
    smoothed: bool = True,
    sides: Sequence[int] | None = None,
    images: int | None = None,
) -> Recipe:
    """The recipe with defaults in place of the fields that its user has not set.

    Args:
        smoothed: whether the task of the dataset smooths its targets.
        sides: of the input, where the task answers for places: they decide the batch.
        images: for training, which make the batch smaller where they are few: ``FEW`` to 64 for
            answers about whole pictures, and those of a U-Net or a detector.
        given: the user's settings, by field of ``Recipe``; a record of ``GROUPS`` may be a mapping
            of some of its fields.
    """
    if sides is not None and "batch_size" not in given:
        parts = recipe.gpus * recipe.accumulate
        batch = usual_batch(sides)
        least = {"unet": FEW, "unet3d": LEAST_BATCH}.get(family(recipe.network))
        least = FEW if re.fullmatch(_DETECTOR, recipe.network) else least
        if images is not None and least is not None:
            batch = min(batch, 1 << (max(least, images // STEPS).bit_length() - 1))
        batch = max(batch, parts) // parts * parts
        recipe = replace(recipe, batch_size=batch)
    elif images is not None and "batch_size" not in given:
        parts = recipe.processes * recipe.accumulate
        few = parts * max(FEW, batch_of_few(images // parts, USUAL_STEPS))
        recipe = replace(recipe, batch_size=min(max(recipe.batch_size, parts), few))
    set_by_hand = {name: _fields_of(given.get(name)) for name in GROUPS}
    usual = defaults(
        recipe.network,
        batch_size=recipe.batch_size,
        init=recipe.init,
        solver=recipe.solver.name if "name" in set_by_hand["solver"] else "adamw",
        policy=recipe.policy.name if "name" in set_by_hand["policy"] else "onecycle",
    )
    groups: dict[str, Any] = {}
    if "label_smoothing" not in given:
        groups["label_smoothing"] = usual.label_smoothing if smoothed else 0.0
    for name, by_hand in set_by_hand.items():
        own = getattr(recipe, name)
        groups[name] = replace(getattr(usual, name), **{key: getattr(own, key) for key in by_hand})
    return replace(recipe, **groups)


def _fields_of(given: Any) -> tuple[str, ...]:
    """Names of the fields that a record (all of them) or a mapping (its keys) sets."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Mapping) else tuple(f.name for f in fields(given))


def describe_defaults(recipe: Recipe, given: Mapping[str, Any]) -> str | None:
    """One line that lists the settings left to the defaults, or None where all were set."""
    solver, policy = recipe.solver, recipe.policy
    by_hand = {name: _fields_of(given.get(name)) for name in GROUPS}
    said = []
    if not {"name", "lr"} <= set(by_hand["solver"]):
        said.append(f"{solver.name} {solver.lr:g}")
    if "weight_decay" not in by_hand["solver"]:
        said.append(f"weight decay {solver.weight_decay:g}")
    if not {"name", "warmup"} <= set(by_hand["policy"]):
        said.append(f"{policy.name} after {100 * policy.warmup:g} % warm-up")
    if "label_smoothing" not in given and recipe.label_smoothing:
        said.append(f"label smoothing {recipe.label_smoothing:g}")
    usual = vars(Augment())
    changes = {name: v for name, v in vars(recipe.augment).items() if v != usual[name]}
    if changes and "augment" not in given:
        said.append(", ".join(f"{name} {value:g}" for name, value in changes.items()))
    if not said:
        return None
    return (
        f"{', '.join(said)}: default for {recipe.network} in batches of {recipe.batch_size}; "
        f"set with --solver, --lr, --policy or --recipe"
    )
