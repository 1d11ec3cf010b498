"""Does the plan compute what the network computes? Every bucket is asked before it is handed out.

The expected answers are the captured graph's, interpreted in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tessella.artifacts.program import Bucket
from tessella.compiler.choices.choose_kernels import Choice, Tuner, constants_of, is_rough
from tessella.compiler.execution import bound
from tessella.core.device import torch_device
from tessella.core.errors import CompileError, first_line
from tessella.core.events import Emit, phase
from tessella.device.float32_math import float32_math
from tessella.execution.bucket import BoundBucket
from tessella.graph.graph import Dim, Graph
from tessella.graph.interpret import interpret
from tessella.graph.value import shape_at
from tessella.search.inspection import Exact, Places, deviates, exact_answers
from tessella.tasks.finished import Align, as_it_is

Tensors = dict[str, torch.Tensor]

# precision → (largest error over largest reference value, least cosine)
TOLERANCES: dict[str, tuple[float, float]] = {
    "fp32": (1e-4, 0.999999),
    "tf32": (5e-3, 0.9999),
    "fp16": (1e-2, 0.9999),
    "bf16": (5e-2, 0.999),
    # against the rounded network, in steps of its last values, 127 to the largest: two, as a value
    # between two steps falls either way by float32's last bit
    "int8": (2 / 127, 0.999),
    "fp8": (1.5e-1, 0.99),
}
NAMED = 3  # layers that an error names
GOOD_SNR_DB = 30.0  # of a rounded layer: errors of a thirtieth
LEAST_COSINE = 0.95  # of a rounded network's answers with those of the network
SAMPLES = 3  # different samples in the check, where the batch may vary
NOISE_MARGIN = 4  # how much worse than plain float32 a plan may be where float32 itself is bad
# How much worse than torch's own operators in the plan's types a plan may be, where these are bad:
# it rounds less often, and sums in another order. And up to how many times the tolerance at all.
# RegNet-Y 400MF, random weights, float16: a plan is off by 1.4e-2, torch's operators by 1.36e-2.
NARROW_MARGIN, MOST_NARROW = 2, 5
# Where a deep network is rounded to int8, 16-bit values between two steps fall either way, in torch
# as in a plan, and each that falls moves others: a larger tolerance is multiplied by MOST_NARROW.
ROUNDED_TOLERANCE = 0.1
# Rounding moves some of a detector's boxes far: float32 alone moved those of RF-DETR-S in fp8 by
# 0.37 of the largest value, where mAP lost 0.2 points. Answers of zeros are off by 1: too much.
MOST_TOLERANCE = 0.99
# What float32 alone moves by more is no rounding, but a choice: which rows a top-k takes of ties.
# Other random inputs may be clearer: so many are tried.
OTHERWISE, SEEDS = 0.05, 3
# Of a tolerance, where kernels round more than plain sums do: other samples may be worse. So were
# three of an Inception-v3 with random weights: 1.5e-4, where one was within 1e-4.
ROUGH_SHARE = 0.5
NO_NOISE = 3e-6  # an error of float32 at which another order of sums cannot matter
LAST_BITS = 4e-6  # of a float32, which sums in another order change
INDEPENDENT = 1e-4  # of the largest value: what other samples may change of an answer


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Inputs, normal(0, 1) as a preprocessing record makes them or given, and the right answers.

    Attributes:
        noise: the larger error of the network's own float32 interpretation, in two orders of sums.
            A deep network amplifies rounding, and a plan cannot be asked for more digits than
            float32 has there.
        narrow: the error of torch's own operators in the plan's element types; 0 if not asked.
        own: the precision that the network itself has, by the narrowest type that it computes in.
        is_rounded: whether the answers are those of a network rounded to int8 or fp8.
        align: brings an output into the order of the right one, where rows are sorted by a score.
    """

    inputs: Tensors
    outputs: Tensors
    noise: float
    narrow: float = 0.0
    own: str = "fp32"
    is_rounded: bool = False
    align: Align = as_it_is

    def at(self, batch: int) -> Expected:
        """The same samples, repeated or cut to another batch size."""
        return replace(
            self, inputs=_resized(self.inputs, batch), outputs=_resized(self.outputs, batch)
        )

    def tolerance(self, precision: str) -> float:
        """The largest error over the largest value that a plan of this precision may have."""
        least = max(TOLERANCES[p][0] for p in (precision, self.own))
        return max(least, self._noisy(least))

    def least_cosine(self, precision: str) -> float:
        """As for ``tolerance``: the angle of an error of that size."""
        allowed = [TOLERANCES[p] for p in (precision, self.own)]
        noisy = 1 - self._noisy(max(error for error, _ in allowed)) ** 2 / 2
        return min(noisy, *(cosine for _, cosine in allowed))

    def _noisy(self, least: float) -> float:
        """The error that rounding alone makes in this network, with a margin."""
        tolerance = max(least, ROUNDED_TOLERANCE) if self.is_rounded else least
        narrow = min(NARROW_MARGIN * self.narrow, MOST_NARROW * tolerance)
        return min(MOST_TOLERANCE, max(NOISE_MARGIN * self.noise, narrow))

    def least(self, batch: int) -> Expected:
        """Without samples that are there twice, for a plan whose smallest batch this is."""
        return self.at(min(batch, *(len(t) for t in self.inputs.values())))

    def tensors(self) -> Tensors:
        """As a plan records them: ``input.NAME`` and ``output.NAME``."""
        inputs = {f"input.{name}": tensor for name, tensor in self.inputs.items()}
        return inputs | {f"output.{name}": tensor for name, tensor in self.outputs.items()}


def _resized(tensors: Mapping[str, torch.Tensor], batch: int) -> Tensors:
    return {n: t[torch.arange(batch) % len(t)].contiguous() for n, t in tensors.items()}


def expected(
    graph: Graph,
    smallest: int,
    largest: int,
    samples: Mapping[str, torch.Tensor] | None = None,
    *,
    target: str,
    align: Align = as_it_is,
) -> Expected:
    """The check's samples and answers.

    Args:
        align: as in ``Expected``.
        target: where the network is interpreted: 128 images through a ResNet-50 in float64 take
            two processor cores 22 s.
        samples: inputs by name, for networks that random ones do not fit; as many as there are.

    Raises:
        CompileError: the network does not run, or an answer is not finite, or depends on the other
            samples of the batch.
    """
    free = any(isinstance(d, Dim) for v in graph.inputs for d in v.shape)
    batch = min(SAMPLES, largest) if free else smallest
    tried = []
    for seed in range(1 if samples else SEEDS):
        inputs = _resized(samples, batch) if samples else _random_inputs(graph, batch, seed)
        outputs = _exact(graph, inputs, target, asks_finite=not samples)
        single = interpreted(graph, inputs, target)
        noise = _noise(graph, inputs, outputs, single, target, align)
        tried.append((noise, inputs, outputs, single))
        if noise <= OTHERWISE:
            break
    noise, inputs, outputs, single = min(tried, key=lambda one: one[0])
    # of whole numbers, classes, one that falls the other way is as far off as all of them
    if NOISE_MARGIN * noise > 1 and all(t.is_floating_point() for t in outputs.values()):
        raise CompileError(
            "what the network answers hangs on the last bits of float32, so no plan can be checked",
            seen=f"two orders of the same sums are {noise:.1f} of the largest value apart",
            fix="give inputs of which it is sure, samples={name: array}, or weights that have "
            "learned: of fresh ones, scores are ties, and which rows a top-k takes is chance",
        )
    if batch > 1:
        _require_independent_samples(graph, inputs, outputs, single, target, align)
    own = _own_precision(graph)
    return Expected(inputs=inputs, outputs=outputs, noise=noise, own=own, align=align)


def _exact(graph: Graph, inputs: Tensors, target: str, *, asks_finite: bool) -> Tensors:
    """The answers; raises ``CompileError`` if there are none, or some that are not finite."""
    try:
        outputs = _answers(graph, inputs, target)
    except (RuntimeError, IndexError, ZeroDivisionError) as error:  # torch's, of one operation
        raise CompileError(
            "the network does not run on the inputs that its plan would be checked with",
            seen=first_line(error),
            fix="give some that it runs on: samples={name: array}",
        ) from error
    for name, answer in outputs.items():
        if asks_finite and not torch.isfinite(answer).all():
            raise CompileError(
                f"output {name!r} of the network is not finite",
                seen="NaN or infinity for normal(0, 1) inputs",
                fix="check the network's weights; where other inputs are right, give them: "
                "samples={name: array}",
            )
    return outputs


def _own_precision(graph: Graph) -> str:
    types = {v.dtype for v in graph.values()}
    return "bf16" if "bfloat16" in types else "fp16" if "float16" in types else "fp32"


def _noise(
    graph: Graph, inputs: Tensors, outputs: Tensors, single: Tensors, target: str, align: Align
) -> float:
    """How far float32 alone (``single``) is from the answers, in the worse of two orders of sums.

    Where it is exact enough in the one, the other is not asked: that could only be more lenient.
    """
    noise = max(_errors(single, outputs, align))
    if noise < NO_NOISE:
        return noise
    other = interpreted(graph, _channels_last(inputs), target)
    return max(noise, *_errors(other, outputs, align))


def _errors(made: Tensors, right: Tensors, align: Align) -> list[float]:
    return [_error(align(name, made[name], answer), answer) for name, answer in right.items()]


def interpreted(
    graph: Graph, inputs: Tensors, target: str, upcast: torch.dtype | None = None
) -> Tensors:
    """``interpret`` on the target's device, its outputs on the CPU."""
    device = torch_device(target)
    with float32_math("ieee"):
        made = interpret(graph, {n: t.to(device) for n, t in inputs.items()}, upcast=upcast)
    return {name: tensor.cpu() for name, tensor in made.items()}


def rounded(
    answers: Expected,
    graph: Graph,
    emit: Emit,
    *,
    target: str,
    alike: bool = True,
    snr_db: Mapping[str, float] | None = None,
) -> Expected:
    """The answers of a network whose layers are pruned, or round to int8 or fp8: a plan's too.

    Args:
        alike: they have to be like those of the network.
        snr_db: of single layers, by name; the error names the worst.

    Raises:
        RoundedAway: they have little to do with those of the network.
    """
    worst = sorted((snr_db or {}).items(), key=lambda layer: layer[1])[:NAMED]
    layers = ", ".join(f"{name} {snr:.1f} dB" for name, snr in worst) or "none"
    if worst and worst[0][1] >= GOOD_SNR_DB:
        layers += " (no layer is bad by itself: what all round adds up)"
    outputs = _answers(graph, answers.inputs, target)
    for name, answer in outputs.items():
        right = answers.outputs[name]
        answer = answers.align(name, answer, right)
        cosine, snr = _cosine(answer, right), _snr_db(answer, right)
        emit(phase("rounding", f"output {name}: {snr:.1f} dB, cosine {cosine:.4f}"))
        if alike and not cosine >= LEAST_COSINE:
            raise RoundedAway(
                "rounding to int8 or fp8 changes what the network says",
                seen=f"output {name!r}: cosine {cosine:.3f}, {snr:.1f} dB; "
                f"the worst layers: {layers}",
                fix="calibrate with more data or another method, or give those layers another"
                " precision (--layer NAME=fp32, precisions={NAME: 'fp32'})",
            )
    single = interpreted(graph, answers.inputs, target)
    noise = _noise(graph, answers.inputs, outputs, single, target, answers.align)
    moved = interpreted(_otherwise(graph), _moved(answers.inputs), target)
    most = MOST_NARROW * ROUNDED_TOLERANCE / NOISE_MARGIN  # so that some tolerance is left
    noise = max(noise, min(most, *_errors(moved, outputs, answers.align)))
    return replace(answers, outputs=outputs, noise=noise, is_rounded=True)


def deviation_db(made: Tensors, answers: Expected) -> float:
    """The power of the answers over that of other outputs' deviation from them, in decibels, of the
    output that deviates most. Integers, what is zero anyway, and what is not finite, are not asked.
    """
    found = [math.inf]
    for name, right in answers.outputs.items():
        if right.is_floating_point() and right.any() and right.isfinite().all():
            found.append(_snr_db(answers.align(name, made[name], right), right))
    return min(found)


class RoundedAway(CompileError):
    """Layers in int8 or fp8 say something else than the network: some do not suit that."""


def narrowed(answers: Expected, graph: Graph, *, target: str) -> Expected:
    """With the error that torch's operators make in this graph, whose values have 16 bits or 8.

    A deep network amplifies rounding: RegNet-Y 400MF with random weights is off by more than a
    hundredth in float16 whoever computes it. Where torch makes NaN or infinity, it is no measure.
    """
    made = interpreted(graph, answers.inputs, target)
    narrow = max(_errors(made, answers.outputs, answers.align), default=0.0)
    return replace(answers, narrow=narrow if math.isfinite(narrow) else 0.0)


def _moved(inputs: Tensors) -> Tensors:
    """The same inputs but for float32's last bits: some values between two steps then fall the
    other way, and show how far a network carries that.

    MobileNetV3-L with random weights: interpreted in float32 not one falls otherwise than in
    float64; by kernels 5 of a million do in the first layers, and 7 of 10 in the tenth block.
    """
    return {n: t * (1 + LAST_BITS) if t.is_floating_point() else t for n, t in inputs.items()}


def _otherwise(graph: Graph) -> Graph:
    """The same network but for the last bits of its biases and factors.

    A picture that the first step rounds has lost those of its own: of a trained DenseNet-121 every
    step was right by its own inputs, 10 of 409,600 numbers of the sixth block fell otherwise, and a
    fifth of the last ones did, by up to 5.
    """
    made = graph.copy()
    made.constants = {
        value: t * (1 + LAST_BITS) if t.is_floating_point() and t.dim() < 2 else t
        for value, t in made.constants.items()
    }
    return made


def _channels_last(inputs: Tensors) -> Tensors:
    """The same images in the other format: torch then adds up in another order."""
    return {
        name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
        for name, t in inputs.items()
    }


def _random_inputs(graph: Graph, batch: int, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    inputs: Tensors = {}
    concrete = graph.at_batch(batch)
    images = {n["input"] for n in concrete.nodes if n.op == "image_to_tensor"}
    for value in concrete.inputs:
        shape, dtype = shape_at(value.shape, batch), getattr(torch, value.dtype)
        if value in images:
            inputs[value.name] = torch.randint(0, 256, shape, generator=generator, dtype=dtype)
        elif dtype.is_floating_point:
            inputs[value.name] = torch.randn(shape, generator=generator).to(dtype)
        else:  # small numbers, which are also valid rows of an embedding
            inputs[value.name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return inputs


def _answers(graph: Graph, inputs: Tensors, target: str) -> Tensors:
    made = interpreted(graph, inputs, target, upcast=torch.float64)
    return {v.name: made[v.name].to(getattr(torch, v.dtype)) for v in graph.outputs}


def _require_independent_samples(
    graph: Graph,
    inputs: Tensors,
    outputs: Tensors,
    single: Tensors,
    target: str,
    align: Align,
) -> None:
    """Engines pad and split batches, which is right only if samples do not see each other.

    What float32 tells (``single`` is its answer) is not asked of float64, which takes three times
    as long.
    """
    others = {n: torch.cat([t[:1], torch.zeros_like(t[1:])]) for n, t in inputs.items()}
    if _changed_answers(interpreted(graph, others, target), single, align):
        changed = _changed_answers(_answers(graph, others, target), outputs, align)
        if changed:
            raise CompileError(
                "the network's answer for one sample depends on the others in its batch",
                seen=f"output {changed[0]!r} changes with the other samples",
                fix="compile it for batch=1",
            )


def _changed_answers(made: Tensors, before: Tensors, align: Align) -> list[str]:
    """The outputs whose first sample has changed, or whose number of rows has."""
    return [
        name
        for name, answer in before.items()
        if made[name].shape[:1] != answer.shape[:1]
        or not _error(align(name, made[name][:1], answer[:1]), answer[:1]) <= INDEPENDENT
    ]


def check(
    choices: Sequence[Choice],
    bucket: Bucket,
    graph: Graph,
    reference: Graph,
    answers: Expected,
    tuner: Tuner,
    precision: str,
) -> None:
    """Run one bucket's steps and compare its outputs with the right answers.

    Args:
        choices: the bucket's.
        graph: the compiled graph at the bucket's batch size.
        reference: the optimized graph before its precision was lowered, for naming the wrong step.
        answers: inputs and answers of the bucket's batch size.

    Raises:
        WrongKernel: an output is out of tolerance, and one step's kernel is by itself.
        RoughKernels: an output is out of tolerance or near it, and some kernels round more than
            plain sums do.
        CompileError: an output is out of tolerance; names the first step that deviates.
    """
    steps = bound(graph, bucket, tuner)
    inputs = [answers.inputs[v.name].to(torch_device(tuner.target)) for v in graph.inputs]
    with torch.inference_mode(), float32_math(tuner.math):
        outputs = steps(inputs)
    rough = sorted({choice.kernel for choice in choices if is_rough(choice)})

    def deviating(share: float) -> list[str]:
        pairs = ((v.name, made, answers.outputs[v.name]) for v, made in zip(graph.outputs, outputs))
        told = ((pair[0], _deviation(*pair, answers, precision, share)) for pair in pairs)
        return [f"output {name!r}: {reason}" for name, reason in told if reason]

    wrong = deviating(1.0)
    near = deviating(ROUGH_SHARE) if rough and precision in ("fp32", "tf32") else []
    if not wrong and not near:
        return
    made = _every_value(steps, graph, inputs, tuner) if wrong else {}
    if wrong and (culprit := _wrong_kernel(choices, made, tuner)):
        raise WrongKernel(*culprit)
    if rough:
        raise RoughKernels(rough, "; ".join(wrong or near), bearable=not wrong)
    where = _first_wrong_step(choices, made, reference, answers, precision, tuner.target)
    raise CompileError(
        f"the plan does not compute what the network computes ({precision})",
        seen=f"{'; '.join(wrong)}. {where}",
        fix="give that layer another precision (--layer NAME=fp32, precisions={NAME: 'fp32'}), "
        "or all of them, or report the step's kernel",
    )


def check_interpreted(graph: Graph, answers: Expected, precision: str) -> None:
    """Compare a compiled graph with the right answers by the meaning of its steps, on the CPU.

    For a machine that is not here: no kernel runs, so what the passes made of the network is
    checked, and nothing else.

    Raises:
        CompileError: an output is out of tolerance.
    """
    made = interpreted(graph, answers.inputs, "cpu")
    wrong = [
        f"output {v.name!r}: {reason}"
        for v in graph.outputs
        if (reason := _deviation(v.name, made[v.name], answers.outputs[v.name], answers, precision))
    ]
    if wrong:
        raise CompileError(
            f"the plan would not compute what the network computes ({precision})",
            seen="; ".join(wrong),
            fix="give some layers another precision (--layer NAME=fp32), or all of them",
        )


class RoughKernels(CompileError):
    """Right by themselves, some kernels round more than the network bears: Inception-v4's random
    weights, by which float32 is off by 1.9e-4, made 1.06e-3 of Winograd's. It is ``bearable`` if
    the check's samples are within their tolerance."""

    def __init__(self, kernels: Sequence[str], seen: str, *, bearable: bool) -> None:
        wrong = f"kernels {', '.join(kernels)} round more than this network bears"
        super().__init__(wrong, seen=seen, fix="report it: others should have been taken")
        self.kernels, self.bearable = kernels, bearable


class WrongKernel(CompileError):
    """A kernel that does not compute its operation on the numbers of this network.

    Attributes:
        choice: the step that it was chosen for.
        reason: how far it is off.
    """

    def __init__(self, choice: Choice, reason: str) -> None:
        super().__init__(
            f"kernel {choice.kernel} does not compute {choice.node.op}",
            seen=f"{choice.node.outputs[0].name}: {reason}",
            fix="report the kernel",
        )
        self.choice, self.reason = choice, reason


def _wrong_kernel(
    choices: Sequence[Choice], made: Tensors, tuner: Tuner
) -> tuple[Choice, str] | None:
    """The first step that is wrong by itself, on the inputs that it got; and how far."""
    for choice in choices:
        if choice.node.op in ("fallback", "user"):
            continue  # torch's own operator, or the user's: nothing competes
        constants = constants_of(choice.node, choice.problem, tuner.constants)
        inputs = [made[v.name] for v in choice.node.inputs if v and v.name not in tuner.constants]
        outputs = [made[v.name] for v in choice.node.outputs]
        exact = exact_answers(choice.problem, constants, inputs)
        if any(map(_overflows, outputs, exact)):
            return None  # no kernel's fault: its element type cannot hold the numbers
        if reason := deviates(choice.problem, outputs, exact):
            return choice, reason
    return None


def _overflows(made: torch.Tensor, exact: Exact) -> bool:
    """Whether exact numbers, which are finite, are too large for the result's element type."""
    if isinstance(exact, Places) or not made.is_floating_point() or not exact.numel():
        return False
    return bool(exact[exact.isfinite()].abs().gt(torch.finfo(made.dtype).max).any())


def _every_value(
    steps: BoundBucket, graph: Graph, inputs: Sequence[torch.Tensor], tuner: Tuner
) -> Tensors:
    """What a run makes and reads, by name: as it was then, overwritten later or not."""
    made = {v.name: tensor for v, tensor in zip(graph.inputs, inputs, strict=True)}
    with torch.inference_mode(), float32_math(tuner.math):
        for bound_step, tensors in steps.stepwise(inputs):
            made |= zip(bound_step.step.outputs, (t.clone() for t in tensors), strict=True)
    return made


def _first_wrong_step(
    choices: Sequence[Choice],
    made: Tensors,
    reference: Graph,
    answers: Expected,
    precision: str,
    target: str,
) -> str:
    every = reference.copy()
    every.outputs = [v for n in every.nodes for v in n.outputs]
    right = _answers(every, answers.inputs, target)
    for choice in choices:
        for value in choice.node.outputs:
            if value.name in right:
                pair = made[value.name], right[value.name]
                reason = _deviation(value.name, *pair, answers, precision)
                if reason:
                    layer = f" ({choice.node.layer})" if choice.node.layer else ""
                    return f"First wrong step: {value.name} by {choice.kernel}{layer}: {reason}"
    return "Each step is right by itself: a pass changed the network"


def _deviation(
    name: str,
    made: torch.Tensor,
    right: torch.Tensor,
    answers: Expected,
    precision: str,
    share: float = 1.0,
) -> str | None:
    """Why ``made`` is out of tolerance, or out of a share of it, or None."""
    tolerance, least_cosine = share * answers.tolerance(precision), answers.least_cosine(precision)
    if tuple(made.shape) != tuple(right.shape):
        return f"shape {tuple(made.shape)} instead of {tuple(right.shape)}"
    if torch.isfinite(right).all() and not torch.isfinite(made).all():
        return f"NaN or infinity: {precision} cannot hold its values"
    made = answers.align(name, made, right)
    error = _error(made, right)
    if not error <= tolerance:
        return f"error {error:.2e} of the largest value, allowed {tolerance:.1e}"
    cosine = _cosine(made, right)
    if not cosine >= least_cosine:
        return f"cosine {cosine:.6f}, allowed {least_cosine}"
    return None


def _error(made: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute error over the largest absolute reference value."""
    if not right.numel():
        return 0.0
    made, right = _comparable(made, right)
    return float((made - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _comparable(made: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in float64, with zeros where both are the same infinity, or NaN: as in a mask."""
    made, right = made.double().cpu(), right.double()
    same = ((made == right) | (made.isnan() & right.isnan())) & ~right.isfinite()
    return made.masked_fill(same, 0.0), right.masked_fill(same, 0.0)


def _snr_db(made: torch.Tensor, right: torch.Tensor) -> float:
    """The power of the answer over that of the error, in decibels."""
    noise = (made.double() - right.double()).square().sum()
    return float(10 * torch.log10(right.double().square().sum() / noise.clamp_min(1e-30)))


def _cosine(made: torch.Tensor, right: torch.Tensor) -> float:
    made, right = (t.flatten() for t in _comparable(made, right))
    if not right.numel():
        return 1.0
    scale = right.abs().max()  # so that squares of tiny values do not vanish
    if scale == 0:
        return 1.0 if not made.any() else 0.0
    made, right = made / scale, right / scale
    return float(made @ right / (made.norm() * right.norm()))
