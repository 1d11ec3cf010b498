"""Does the plan compute what the network computes? Every bucket is asked before it is handed out.

The expected answers are the captured graph's, interpreted in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tessella.compiler.execution import bound
from tessella.compiler.passes.choose_kernels import Choice, Tuner
from tessella.core.device import torch_device
from tessella.core.errors import CompileError
from tessella.core.events import Emit, phase
from tessella.graph.graph import Dim, Graph
from tessella.graph.interpret import interpret
from tessella.kernels.float32_math import float32_math

Tensors = dict[str, torch.Tensor]

# precision → (largest error over largest reference value, least cosine)
TOLERANCES: dict[str, tuple[float, float]] = {
    "fp32": (1e-4, 0.999999),
    "tf32": (5e-3, 0.9999),
    "fp16": (1e-2, 0.9999),
    "bf16": (5e-2, 0.999),
}
SAMPLES = 3  # different samples in the check, where the batch may vary
NOISE_MARGIN = 4  # how much worse than plain float32 a plan may be where float32 itself is bad


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Random inputs, normal(0, 1) as a preprocessing record makes them, and the right answers.

    Attributes:
        noise: the larger error of the network's own float32 interpretation, in two orders of sums.
            A deep network amplifies rounding, and a plan cannot be asked for more digits than
            float32 has there.
    """

    inputs: Tensors
    outputs: Tensors
    noise: float

    def at(self, batch: int) -> Expected:
        """The same samples, repeated or cut to another batch size."""
        return replace(
            self, inputs=_resized(self.inputs, batch), outputs=_resized(self.outputs, batch)
        )

    def tolerance(self, precision: str) -> float:
        """The largest error over the largest value that a plan of this precision may have."""
        return max(TOLERANCES[precision][0], NOISE_MARGIN * self.noise)

    def tensors(self) -> Tensors:
        """As a plan records them: ``input.NAME`` and ``output.NAME``."""
        inputs = {f"input.{name}": tensor for name, tensor in self.inputs.items()}
        return inputs | {f"output.{name}": tensor for name, tensor in self.outputs.items()}


def _resized(tensors: Tensors, batch: int) -> Tensors:
    return {n: t[torch.arange(batch) % len(t)].contiguous() for n, t in tensors.items()}


def expected(graph: Graph, smallest: int, largest: int) -> Expected:
    """The check's samples and answers.

    Raises:
        CompileError: an answer is not finite, or depends on the other samples of the batch.
    """
    batch = max(smallest, min(SAMPLES, largest))
    inputs = _random_inputs(graph, batch)
    outputs = _answers(graph, inputs)
    for name, answer in outputs.items():
        if not torch.isfinite(answer).all():
            raise CompileError(
                f"output {name!r} of the network is not finite",
                seen="NaN or infinity for normal(0, 1) inputs",
                fix="check the network's weights",
            )
    if batch > 1:
        _require_independent_samples(graph, inputs, outputs)
    noise = max(
        _error(single[name], answer)
        for single in (interpret(graph, inputs), interpret(graph, _channels_last(inputs)))
        for name, answer in outputs.items()
    )
    return Expected(inputs=inputs, outputs=outputs, noise=noise)


def _channels_last(inputs: Tensors) -> Tensors:
    """The same images in the other format: torch then adds up in another order."""
    return {
        name: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
        for name, t in inputs.items()
    }


def _random_inputs(graph: Graph, batch: int) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    inputs: Tensors = {}
    for value in graph.at_batch(batch).inputs:
        shape, dtype = tuple(int(d) for d in value.shape), getattr(torch, value.dtype)
        if dtype.is_floating_point:
            inputs[value.name] = torch.randn(shape, generator=generator).to(dtype)
        else:  # small numbers, which are also valid rows of an embedding
            inputs[value.name] = torch.randint(0, 2, shape, generator=generator).to(dtype)
    return inputs


def _answers(graph: Graph, inputs: Tensors) -> Tensors:
    made = interpret(graph, inputs, upcast=torch.float64)
    return {v.name: made[v.name].to(getattr(torch, v.dtype)) for v in graph.outputs}


def _require_independent_samples(graph: Graph, inputs: Tensors, outputs: Tensors) -> None:
    """Engines pad and split batches, which is right only if samples do not see each other."""
    others = {n: torch.cat([t[:1], t[1:].flip(0) * 0]) for n, t in inputs.items()}
    for name, answer in _answers(graph, others).items():
        if (
            answer.shape[:1] != outputs[name].shape[:1]
            or _error(answer[:1], outputs[name][:1]) > 1e-4
        ):
            raise CompileError(
                "the network's answer for one sample depends on the others in its batch",
                seen=f"output {name!r} changes with the other samples",
                fix="compile it for batch=1",
            )


def check(
    choices: Sequence[Choice],
    graph: Graph,
    reference: Graph,
    wanted: Expected,
    tuner: Tuner,
    precision: str,
) -> None:
    """Run one bucket's steps and compare its outputs with the right answers.

    Args:
        graph: the compiled graph at the bucket's batch size.
        reference: the optimized graph before its precision was lowered, for naming the wrong step.
        wanted: inputs and answers of the bucket's batch size.

    Raises:
        CompileError: an output is out of tolerance; names the first step that deviates.
    """
    made = _run(choices, wanted.inputs, tuner)
    wrong = [
        f"output {v.name!r}: {reason}"
        for v in graph.outputs
        if (reason := _deviation(made[v.name], wanted.outputs[v.name], wanted, precision))
    ]
    if wrong:
        where = _first_wrong_step(choices, made, reference, wanted, precision)
        raise CompileError(
            f"the plan does not compute what the network computes ({precision})",
            seen=f"{'; '.join(wrong)}. {where}",
            fix="compile with another precision, or report the step's kernel",
        )


def _run(choices: Sequence[Choice], inputs: Tensors, tuner: Tuner) -> Tensors:
    """Every value of the bucket by name; none is freed or overwritten."""
    device = torch_device(tuner.target)
    live = {n: t.to(device) for n, t in inputs.items()}
    with torch.inference_mode(), float32_math(tuner.math):
        for step in bound(choices, tuner):
            made = step.run(*[live[v.name] for v in step.reads])
            live.update((v.name, t) for v, t in zip(step.node.outputs, made, strict=True))
    return live


def _first_wrong_step(
    choices: Sequence[Choice], made: Tensors, reference: Graph, wanted: Expected, precision: str
) -> str:
    every = Graph(
        reference.name,
        reference.inputs,
        [v for n in reference.nodes for v in n.outputs],
        reference.nodes,
        reference.constants,
    )
    right = _answers(every, wanted.inputs)
    for choice in choices:
        for value in choice.node.outputs:
            if value.name in right:
                reason = _deviation(made[value.name], right[value.name], wanted, precision)
                if reason:
                    layer = f" ({choice.node.layer})" if choice.node.layer else ""
                    return f"First wrong step: {value.name} by {choice.kernel}{layer}: {reason}"
    return "Each step is right by itself: a pass changed the network"


def _deviation(
    made: torch.Tensor, right: torch.Tensor, wanted: Expected, precision: str
) -> str | None:
    """Why ``made`` is out of tolerance, or None."""
    tolerance, least_cosine = wanted.tolerance(precision), TOLERANCES[precision][1]
    if tuple(made.shape) != tuple(right.shape):
        return f"shape {tuple(made.shape)} instead of {tuple(right.shape)}"
    error = _error(made, right)
    if not error <= tolerance:
        return f"error {error:.2e} of the largest value, allowed {tolerance:.1e}"
    cosine = _cosine(made, right)
    if not cosine >= least_cosine:
        return f"cosine {cosine:.6f}, allowed {least_cosine}"
    return None


def _error(made: torch.Tensor, right: torch.Tensor) -> float:
    """Largest absolute error over the largest absolute reference value."""
    made, right = made.double().cpu(), right.double()
    return float((made - right).abs().max() / right.abs().max().clamp_min(1e-30))


def _cosine(made: torch.Tensor, right: torch.Tensor) -> float:
    made, right = made.double().cpu().flatten(), right.double().flatten()
    scale = right.abs().max()  # so that squares of tiny values do not vanish
    if scale == 0:
        return 1.0 if not made.any() else 0.0
    made, right = made / scale, right / scale
    return float(made @ right / (made.norm() * right.norm()))
