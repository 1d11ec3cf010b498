"""Two plans side by side: how their manifests, steps, times and memory differ.

Nothing runs here: the times are those that the plans' tuning records hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessella.artifacts.outline import Constant, Outline
from tessella.artifacts.program import Bucket, Step
from tessella.core.record import to_plain

Change = Literal["same", "changed", "added", "removed"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A field of the manifests that differs; ``name`` is the field's path, None a missing field."""

    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class StepView:
    """One plan's side of a step.

    Attributes:
        kernel: the kernel's id, with the operator where that is torch's or the user's own.
        inputs: names of values and constants.
        outputs: element type, shape and format of each value that it makes.
        time_us: median time of the kernel in tuning; None where nothing was measured.
    """

    op: str
    kernel: str
    config: dict[str, Any]
    attrs: dict[str, Any]
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    time_us: float | None


@dataclass(frozen=True, kw_only=True)
class StepPair:
    """A step of one plan and the step of the other that makes the same value.

    Attributes:
        name: the step's first output, in ``b`` where ``b`` has the step.
        differs: fields of ``StepView`` that are not equal, time aside.
        ratio: time in ``b`` over time in ``a``: below 1, ``b`` is faster.
    """

    change: Change
    name: str
    layer: str
    a: StepView | None
    b: StepView | None
    differs: tuple[str, ...] = ()
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class BucketPair:
    """Both plans' programs for one batch size; every tuple holds a's value, then b's.

    Attributes:
        steps: in ``b``'s order; removed steps stand where they stood in ``a``.
        total_us: sum of the steps' times; None where one of them was not measured.
        ratio: ``b`` over ``a`` of the total.
    """

    batch: int
    steps: tuple[StepPair, ...]
    total_us: tuple[float | None, float | None]
    ratio: float | None
    arena_bytes: tuple[int, int]
    peak_bytes: tuple[int, int]

    def count(self, change: Change) -> int:
        return sum(step.change == change for step in self.steps)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between two plans; every tuple holds a's value, then b's.

    Attributes:
        differences: fields of the manifests that differ.
        buckets: for the batch sizes that both have; ``only_a``, ``only_b``: the others.
        weight_bytes: size of all constants.
        weights: how many constants are equal bit for bit, differ, are only in a, are only in b.
    """

    differences: tuple[Difference, ...]
    buckets: tuple[BucketPair, ...]
    only_a: tuple[int, ...]
    only_b: tuple[int, ...]
    weight_bytes: tuple[int, int]
    weights: dict[str, int]

    @property
    def same(self) -> bool:
        """Whether nothing differs, except for measured times."""
        steps = all(b.count("same") == len(b.steps) for b in self.buckets)
        memory = all(
            b.arena_bytes[0] == b.arena_bytes[1] and b.peak_bytes[0] == b.peak_bytes[1]
            for b in self.buckets
        )
        batches = not self.only_a and not self.only_b
        weights = sum(self.weights.values()) == self.weights["equal"]
        return not self.differences and batches and steps and memory and weights


def compare(a: Outline, b: Outline) -> Comparison:
    """What differs between two plans, as ``load_outline`` reads them.

    Steps are matched by their layer and output first; the remaining ones by layer and operation, in
    order (a step that an activation was fused into has another output); the rest by their output.
    """
    first = {bucket.batch: bucket for bucket in a.program.buckets}
    second = {bucket.batch: bucket for bucket in b.program.buckets}
    return Comparison(
        differences=_differences(a, b),
        buckets=tuple(
            _bucket(first[n], second[n], _times(a, n), _times(b, n))
            for n in sorted(first.keys() & second.keys())
        ),
        only_a=tuple(sorted(first.keys() - second.keys())),
        only_b=tuple(sorted(second.keys() - first.keys())),
        weight_bytes=(_nbytes(a.weights), _nbytes(b.weights)),
        weights=_weights(a.weights, b.weights),
    )


def _differences(a: Outline, b: Outline) -> tuple[Difference, ...]:
    first, second = _flat(_manifest(a)), _flat(_manifest(b))
    return tuple(
        Difference(name=name, a=first.get(name), b=second.get(name))
        for name in dict.fromkeys((*first, *second))
        if first.get(name) != second.get(name)
    )


def _manifest(plan: Outline) -> dict[str, Any]:
    """The manifest without the members' hashes, and with each library listed once."""
    plain: dict[str, Any] = to_plain(plan.manifest)
    del plain["members"]
    if plan.others:
        plain["targets"] = list(plan.targets)
    libraries = plan.manifest.fingerprint.libraries
    plain["built_with"] = {k: v for k, v in plain["built_with"].items() if k not in libraries}
    return plain


def _flat(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{above}{name}.")
        else:
            flat[f"{above}{name}"] = value
    return flat


def _times(plan: Outline, batch: int) -> dict[str, float | None]:
    """Times of the chosen kernels at one batch size, by the first output of their steps."""
    return {c.step: c.time_us for c in plan.tuning if c.chosen and c.batch == batch}


def _bucket(
    a: Bucket, b: Bucket, a_times: dict[str, float | None], b_times: dict[str, float | None]
) -> BucketPair:
    first = [_view(a, step, a_times) for step in a.steps]
    second = [_view(b, step, b_times) for step in b.steps]
    partner = _matched(a.steps, b.steps)
    left = set(range(len(a.steps))) - set(partner.values())
    pairs: list[StepPair] = []

    def removed(before: int) -> None:
        for index in sorted(i for i in left if i < before):
            left.remove(index)
            step = a.steps[index]
            pairs.append(
                StepPair(
                    change="removed",
                    name=step.outputs[0],
                    layer=step.layer,
                    a=first[index],
                    b=None,
                )
            )

    for index, step in enumerate(b.steps):
        if index in partner:
            removed(partner[index])
        was = first[partner[index]] if index in partner else None
        pairs.append(_pair(step, was, second[index]))
    removed(len(a.steps))
    totals = (_total(first), _total(second))
    return BucketPair(
        batch=b.batch,
        steps=tuple(pairs),
        total_us=totals,
        ratio=_ratio(*totals),
        arena_bytes=(a.arena_bytes, b.arena_bytes),
        peak_bytes=(a.peak_bytes, b.peak_bytes),
    )


def _view(bucket: Bucket, step: Step, times: dict[str, float | None]) -> StepView:
    buffers = {b.name: b for b in bucket.buffers}
    made = [buffers[name] for name in step.outputs]
    return StepView(
        op=step.op,
        kernel=step.title,
        config=step.config,
        attrs=step.attrs,
        inputs=step.inputs,
        outputs=tuple(f"{m.dtype}{list(m.shape)} {m.format}" for m in made),
        time_us=times.get(step.outputs[0]),
    )


def _matched(a: tuple[Step, ...], b: tuple[Step, ...]) -> dict[int, int]:
    """The step of ``a``, by index, for each step of ``b`` that has one; see ``compare``.

    The output's name alone decides last: ``conv2d.1`` is another layer in another network.
    """
    keys: tuple[Callable[[Step], tuple[str, ...] | None], ...] = (
        lambda step: (step.layer, step.outputs[0]),
        lambda step: (step.layer, step.op) if step.layer else None,
        lambda step: (step.op, step.outputs[0]),
    )
    partner: dict[int, int] = {}
    for key in keys:
        taken = set(partner.values())
        waiting: dict[tuple[str, ...] | None, list[int]] = {}
        for i, step in enumerate(a):
            if i not in taken:
                waiting.setdefault(key(step), []).append(i)
        waiting.pop(None, None)
        for i, step in enumerate(b):
            if i not in partner and waiting.get(key(step)):
                partner[i] = waiting[key(step)].pop(0)
    return partner


def _pair(step: Step, a: StepView | None, b: StepView) -> StepPair:
    if a is None:
        return StepPair(change="added", name=step.outputs[0], layer=step.layer, a=None, b=b)
    fields = ("op", "kernel", "config", "attrs", "inputs", "outputs")
    differs = tuple(f for f in fields if getattr(a, f) != getattr(b, f))
    return StepPair(
        change="changed" if differs else "same",
        name=step.outputs[0],
        layer=step.layer,
        a=a,
        b=b,
        differs=differs,
        ratio=_ratio(a.time_us, b.time_us),
    )


def _total(steps: list[StepView]) -> float | None:
    times = [s.time_us for s in steps if s.time_us is not None]
    return sum(times) if len(times) == len(steps) else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None or a <= 0 else b / a


def _nbytes(tensors: Mapping[str, Constant]) -> int:
    return sum(t.nbytes for t in tensors.values())


def _weights(a: Mapping[str, Constant], b: Mapping[str, Constant]) -> dict[str, int]:
    shared = a.keys() & b.keys()
    equal = sum(a[name] == b[name] for name in shared)
    return {
        "equal": equal,
        "changed": len(shared) - equal,
        "only_a": len(a.keys() - shared),
        "only_b": len(b.keys() - shared),
    }
