"""What is wrong with a training whose network does no better than guessing, and what to change."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from tessella.artifacts.defaults import FEW, batch_of_few, defaults
from tessella.artifacts.run import Augment, Recipe

SIGMAS = 3.0  # beyond what guessing scatters by: then something has been learned
FAR = 3.0  # times the default rate, or a third of it: worth naming first
# With these, after 30 epochs of 450 in batches of 16, a ResNet-18 got 47 % of 990 pictures of five
# shapes on coloured grounds right, mirrored too 63 %, and 33 % without; in batches of 64 38 % and
# 36 %, one seed each. Textures lose by them (defaults)
TRIED = {"rotation": 20, "scale": 0.2, "color": 0.2}
# validation so far below training, and below this share of it: overfitted
GAP, SHARE = 0.3, 0.6


def diagnosis(
    recipe: Recipe,
    measured: Mapping[str, float],
    *,
    train_counts: Sequence[int],
    val_counts: Sequence[int] | None,
) -> str | None:
    """A note for people where a network does no better than guessing or overfits, else None.

    Args:
        measured: ``train/accuracy`` and, with a validation split, ``val/accuracy``, at the end.
        train_counts, val_counts: images of each class; None without a validation split.
    """
    train = measured["train/accuracy"]  # of the steps since the last validation
    seen = max(1, round(sum(train_counts) * min(1.0, recipe.val_interval)))
    guessed = _guessing(recipe, train_counts)
    learns = train > _beyond(guessed, seen)
    if val_counts is None:
        return None if learns else _learned_nothing(recipe, train, guessed, seen, train_counts)
    val, blind = measured["val/accuracy"], _guessing(recipe, val_counts)
    luck = _beyond(blind, sum(val_counts))
    if val > luck:
        return (
            _overfits(recipe, train, val, train_counts)
            if val < min(train - GAP, SHARE * train)
            else None
        )
    if learns and luck >= 1.0:  # so few images that even all of them right prove nothing
        return None
    if learns and train - val > GAP / 2:
        return _overfits(recipe, train, val, train_counts, blind)
    return _learned_nothing(recipe, val, blind, sum(val_counts), train_counts)


def _guessing(recipe: Recipe, counts: Sequence[int]) -> float:
    """Accuracy of guessing: the most frequent class, or any class where weights are balanced."""
    if recipe.class_weights == "balanced":
        return 1 / len(counts)
    return max(counts) / sum(counts)


def _beyond(guessed: float, images: int, sigmas: float = SIGMAS) -> float:
    return guessed + sigmas * math.sqrt(guessed * (1 - guessed) / images)


def _overfits(
    recipe: Recipe, train: float, val: float, counts: Sequence[int], guessed: float | None = None
) -> str:
    changes, parts = _augmentation(recipe.augment), recipe.processes * recipe.accumulate
    few = parts * batch_of_few(sum(counts) // parts)
    if FEW <= few < recipe.batch_size:  # of fewer, norms have no statistics
        changes = f"batches of {few} (--batch-size {few}), for more steps, with {changes}"
    usual, fixes = _usual_rate(recipe), [changes, "more images"]
    if recipe.solver.name in ("sgd", "nesterov") or not _near(recipe, usual):
        fixes.insert(0, f"the default solver ({_usual(recipe)})")
    else:
        fixes.append("more weight decay")
    no_more = "" if guessed is None else f", no more than guessing ({_percent(guessed)})"
    doubt = "" if guessed is None else "; and check that the labels belong to the images"
    return (
        f"{_percent(train)} of the training images are classified correctly and {_percent(val)} "
        f"of the validation images{no_more}: the network overfits. Try {_any_of(fixes)}{doubt}"
    )


def _learned_nothing(
    recipe: Recipe, right: float, guessed: float, images: int, counts: Sequence[int]
) -> str | None:
    """What to change where of so many images no more are right than by guessing."""
    if recipe.quantize != "none":  # it goes on from a network that has learned
        return None
    rate, usual = recipe.solver.lr, _usual_rate(recipe)
    if _near(recipe, usual):
        fixes = [f"lr={rate / 10:g}", f"lr={rate * 10:g}", "more epochs"]
        if recipe.precision in ("fp8", "fp16"):
            fixes.insert(2, "precision bf16")
        fix = f"Try {_any_of(fixes)}; and check that the labels belong to the images"
    else:
        side = "above" if rate > usual else "below"
        fix = (
            f"The learning rate {rate:g} is far {side} the default of {recipe.solver.name} here: "
            f"set lr={usual:g}"
        )
    if max(counts) > 1.5 * sum(counts) / len(counts) and recipe.class_weights == "none":
        fix += "; class_weights='balanced' evens out the classes"
    if right > _beyond(guessed, images, 1):
        said = f"{images} images do not tell whether the network has learned anything"
    else:
        said = "the network has learned nothing"
    return (
        f"{said}: {_percent(right)} of the images are classified "
        f"correctly, guessing gets {_percent(guessed)}. {fix}"
    )


def _augmentation(augment: Augment) -> str:
    """Advice: the augmentations that are off, with the setting that adds them, or stronger ones."""
    off = {name: value for name, value in TRIED.items() if not getattr(augment, name)}
    if not off:
        return "mixup, or stronger augmentation"
    plain = Augment()
    own = {n: v for n, v in vars(augment).items() if v != getattr(plain, n)}
    setting = json.dumps({"augment": own | off})
    flips = "" if augment.flip else "; flip, where a mirrored picture means the same"
    return f"augmentation ({', '.join(off)}, as in --recipe '{setting}'{flips})"


def _usual_rate(recipe: Recipe) -> float:
    """The default rate of the recipe's own solver."""
    name, size = recipe.solver.name, recipe.batch_size
    return defaults(recipe.network, batch_size=size, init=recipe.init, solver=name).solver.lr


def _usual(recipe: Recipe) -> str:
    usual = defaults(recipe.network, batch_size=recipe.batch_size, init=recipe.init).solver
    return f"{usual.name}, lr={usual.lr:g}"


def _near(recipe: Recipe, usual: float) -> bool:
    return usual / FAR <= recipe.solver.lr <= usual * FAR


def _any_of(fixes: Sequence[str]) -> str:
    return f"{', '.join(fixes[:-1])} or {fixes[-1]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
