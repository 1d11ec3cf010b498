"""receipt: what a plan's precisions cost in accuracy, on which samples; a part of its manifest."""

from __future__ import annotations

from dataclasses import dataclass

from tessella.core.errors import UsageError

MAX_FLIPS = 1000  # that are written down; ``Receipt.flipped`` counts all
SHOWN = 20  # that are printed with a plan


@dataclass(frozen=True, kw_only=True)
class Flip:
    """A sample whose answer is another one than in float32.

    Attributes:
        index: its place in the data; path: of its file, empty where it has none.
        label, before, after: what is right, what float32 answers, what the plan answers.
        probability_before, probability: of these two answers, softmax of the scores.
    """

    index: int
    path: str
    label: str
    before: str
    after: str
    probability_before: float
    probability: float

    def __str__(self) -> str:
        return (
            f"{self.path or self.index}: {self.label}; {self.before} "
            f"({self.probability_before:.3f}) → {self.after} ({self.probability:.3f})"
        )


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """A plan judged by labelled samples that it was not calibrated with, beside the float32 plan.

    Attributes:
        metric: its name; higher is better.
        samples: how many judged it.
        before, after: the metric of the float32 plan, and of this one.
        loss: percentage points below float32; low, high: where it lies with 95 % confidence.
        p_value: how likely right answers are lost and won this unevenly by chance alone (McNemar's
            exact test); None for metrics that do not count answers.
        budget: the points that it was allowed to lose.
        flipped: answers that changed; flips: the first ``MAX_FLIPS`` of them.
    """

    metric: str
    samples: int
    before: float
    after: float
    loss: float
    low: float
    high: float
    p_value: float | None
    budget: float
    flipped: int
    flips: tuple[Flip, ...] = ()

    def __post_init__(self) -> None:
        listed = len(self.flips) == min(self.flipped, MAX_FLIPS)
        if not listed or not 0 < self.samples >= self.flipped or self.low > self.high:
            raise UsageError(
                "a receipt that contradicts itself",
                seen=f"{self.flipped} flips, {len(self.flips)} listed, of {self.samples} samples, "
                f"{self.low} to {self.high} points",
            )

    @property
    def resolved(self) -> bool:
        """Whether the samples suffice to say that the loss is within the budget."""
        return self.high <= self.budget

    def __str__(self) -> str:
        lines = [
            f"{self.metric}: {100 * self.after:.2f} on {self.samples:,} samples, "
            f"{100 * self.before:.2f} in float32: loses {self.loss:.2f} points "
            f"({self.low:.2f} to {self.high:.2f} with 95 % confidence), "
            f"allowed {self.budget:g}; {self.flipped} answers changed"
            f"{'' if self.p_value is None else f', p = {self.p_value:.2g}'}"
        ]
        lines += [f"  {flip}" for flip in self.flips[:SHOWN]]
        if self.flipped > SHOWN:
            lines.append(f"  … {self.flipped - SHOWN} more")
        return "\n".join(lines)
