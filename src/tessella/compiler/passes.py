"""The pipeline from a captured graph to a plan, as one table: ``PASSES``, in the order they run.

Whoever needs a part of it runs that part: ``run(graph, request, until="mark")``. What a build asks
for is one record, ``Request``; it decides which passes run, and what they are given. As text the
table is docs/passes.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict, Unpack, get_args

from tessella.artifacts.build import Input
from tessella.compiler import precision as precision_of
from tessella.compiler.calibration import Calibration
from tessella.compiler.choices import (
    choose_kernels,
    fuse_chains,
    join_in_place,
    overwrite_residuals,
    plan_memory,
    race_close_calls,
    race_in_place,
)
from tessella.compiler.precision import Assignment
from tessella.compiler.rewrites import (
    assign_layout,
    dead_code,
    drop_no_ops,
    fold_batch_norm,
    fold_constants,
    fold_floors,
    fold_scales,
    fuse_attention,
    fuse_epilogue,
    fuse_pointwise,
    fuse_rearrangements,
    fuse_requantization,
    fuse_siblings,
    insert_quantization,
    join_branches,
    join_sums,
    keep_pixels,
    lower_precision,
    lower_quantization,
    mark_non_negative,
    mark_sparse_weights,
    mark_wide_sums,
    move_permutes,
    move_reshapes,
    pad_channels,
    prune_weights,
    resize_later,
    round_weights,
    share_masks,
    split_group_norms,
    swap_means,
    take_pixels,
    turn_residuals,
    widen_results,
)
from tessella.core.architectures import has, is_gpu
from tessella.core.errors import UsageError
from tessella.core.preprocess import Preprocess
from tessella.device.machine import aimed_at
from tessella.graph.check import check
from tessella.graph.graph import Graph
from tessella.kernels import catalog


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a build asks of the passes.

    Attributes:
        target: ``cpu``, a GPU's (``sm_90``) or ``reference``.
        precision, precisions, calibration: as for ``compile_graph``.
        input, preprocess: ``uint8`` and the record, for a plan that takes images as bytes.
        assignment: what the precisions come to; known once the graph is optimized.
        quantized: whether layers are to be int8 or fp8, or a file rounds by itself; known then.
    """

    target: str
    precision: str = "fp32"
    precisions: Mapping[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None
    input: Input = "float32"
    preprocess: Preprocess | None = None
    assignment: Assignment | None = None
    quantized: bool = False

    def __post_init__(self) -> None:
        if self.input not in get_args(Input):
            raise UsageError("unknown kind of input", seen=self.input, fix="use float32 or uint8")
        if self.input == "uint8" and self.preprocess is None:
            raise UsageError(
                "uint8 images need a preprocessing record, which says how they are scaled",
                fix="compile from a checkpoint, or give preprocess=Preprocess(...)",
            )

    @property
    def calibration_here(self) -> Calibration | None:
        """The calibration as it suits the target."""
        return self.calibration and self.calibration.suiting(self.target)

    @property
    def decided(self) -> Assignment:
        """The assignment, for passes behind those of ``UNASSIGNED``."""
        if self.assignment is None:
            raise ValueError("precisions are assigned once the graph is optimized")
        return self.assignment

    def assigned(self, optimized: Graph, assignment: Assignment | None = None) -> Request:
        """With a precision for each node of an optimized graph, or the one that is given."""
        if assignment is None:
            assignment = precision_of.assign(
                optimized, self.precision, self.precisions, self.target, self.calibration
            )
        rounds = any(n.op in ("quantize", "dequantize") for n in optimized.nodes)
        return replace(self, assignment=assignment, quantized=bool(assignment.kinds) or rounds)


def request_for(optimized: Graph, assignment: Assignment, calibration: Calibration | None = None
                ) -> Request:  # fmt: skip
    """The request that this assignment of an optimized graph answers."""
    request = Request(target=assignment.target, calibration=calibration)
    return request.assigned(optimized, assignment)


# --- when passes run: each says it in its first line, as a condition -----------------------------


def always(request: Request) -> bool:
    """always"""
    return True


def takes_pixels(request: Request) -> bool:
    """images come as bytes"""
    return request.input == "uint8"


def prunes(request: Request) -> bool:
    """layers are to be sparse"""
    return bool(request.decided.pruned)


def rounds(request: Request) -> bool:
    """layers are to be int8 or fp8"""
    return bool(request.decided.kinds) and request.calibration is not None


def quantizes(request: Request) -> bool:
    """layers are to be int8 or fp8, or the file rounds"""
    return request.quantized


def quantizes_on_gpu(request: Request) -> bool:
    """layers are to be int8 or fp8, or the file rounds; on a GPU"""
    return request.quantized and on_gpu(request)


def quantizes_on_cpu(request: Request) -> bool:
    """layers are to be int8 or fp8, or the file rounds; on cpu"""
    return request.quantized and on_cpu(request)


def narrows(request: Request) -> bool:
    """values are to have 16 bits"""
    return request.decided.rest != "float32" or bool(request.decided.dtypes)


def multiplies_tf32(request: Request) -> bool:
    """float32 is multiplied as TF32"""
    return request.precision == "tf32" and has(request.target, "tf32_mma")


def on_gpu(request: Request) -> bool:
    """on a GPU"""
    return is_gpu(request.target)


def has_no_chains(request: Request) -> bool:
    """on a GPU without Hopper's products"""
    return on_gpu(request) and not has(request.target, "wgmma")


def keeps_pixels(request: Request) -> bool:
    """on a GPU, or layers are to be int8 or fp8, or the file rounds"""
    return on_gpu(request) or request.quantized


def on_cpu(request: Request) -> bool:
    """on cpu"""
    return request.target == "cpu"


def knows_floors(request: Request) -> bool:
    """on cpu, or with Hopper's products"""
    return on_cpu(request) or has(request.target, "wgmma")


def skips_zeros(request: Request) -> bool:
    """the target has kernels for 2:4 sparse weights"""
    return any(row.sparse and row.runs_on(request.target) for row in catalog.rows())


# --- the table -----------------------------------------------------------------------------------


def _nothing(request: Request) -> dict[str, Any]:
    return {}


def _target(request: Request) -> dict[str, Any]:
    return {"target": request.target}


@dataclass(frozen=True)
class Pass:
    """One step of the pipeline.

    Attributes:
        stage: where it stands; a key of ``STAGES``.
        apply: in the stages of rewrites, changes a graph and returns how many rewrites it made.
        why: what it is good for.
        when: whether a build needs it, by its first line.
        given: what else ``apply`` gets.
    """

    stage: str
    apply: Callable[..., Any]
    why: str
    when: Callable[[Request], bool] = always
    given: Callable[[Request], dict[str, Any]] = _nothing

    @property
    def name(self) -> str:
        return self.apply.__module__.rpartition(".")[2]


STAGES = {  # in order, with what happens there
    "input": "rewrites of the captured graph",
    "optimize": "rewrites that suit every target and precision",
    "prune": "rewrites by the precision of each layer",
    "round": "the same: the graph says where it rounds",
    "lower": "the same: layers compute with what was rounded",
    "narrow": "the same: 16-bit values",
    "fuse": "what is left between the layers goes into fewer steps",
    "mark": "what kernels want to know",
    "layout": "variants of the graph are measured whole, and the fastest is taken",
    "kernels": "for each batch size, on concrete shapes: kernels are measured",
    "join": "the same: at the first size; the others have its slices, where they can",
    "choose": "the same: steps that know of each other",
    "memory": "the same: the program",
}
UNASSIGNED = ("input", "optimize")  # the precision of each layer is a matter of what they leave

# fmt: off
PASSES = (
    Pass("input", take_pixels.apply, "images come as bytes, and the first step scales them",
         takes_pixels, lambda r: {"record": r.preprocess}),
    Pass("optimize", fold_constants.apply, "what depends on constants only is computed once, here"),
    Pass("optimize", drop_no_ops.apply,
         "a copy or a reshape of a reshape would hide what could be fused"),
    Pass("optimize", fuse_attention.apply,
         "products of all queries with all keys need not be in memory"),
    Pass("optimize", share_masks.apply, "a mask that all queries share is one row of it"),
    Pass("optimize", fold_scales.apply,
         "a factor a channel before a sum is a change of the layer's weights"),
    Pass("optimize", turn_residuals.apply,
         "what is added behind a permute is added before it, by the layer"),
    Pass("optimize", move_permutes.apply,
         "permutes that meet cancel, and rows need not be turned for a layer"),
    Pass("optimize", fold_batch_norm.apply,
         "a batch norm after a convolution is a change of its weights"),
    Pass("optimize", swap_means.apply,
         "a mean of few channels, a product of few pixels: both are linear"),
    Pass("optimize", resize_later.apply,
         "maps that are made one size and mixed are mixed while they have fewer pixels"),
    Pass("optimize", fuse_epilogue.apply,
         "bias, residual and activation while the result is in registers"),
    Pass("optimize", join_branches.apply,
         "a 1×1 convolution beside one of 3×3, whose results are added, is its middle tap"),
    Pass("optimize", move_reshapes.apply,
         "element-wise operations meet in one shape, and are one step then"),
    Pass("optimize", dead_code.apply, "what the rewrites left over costs memory and time"),
    Pass("prune", prune_weights.apply, "two of each four weights are left",
         prunes, lambda r: {"layers": r.decided.pruned}),
    Pass("round", insert_quantization.apply,
         "layers read int8 or fp8, in the scales of the calibration",
         rounds, lambda r: {"kinds": r.decided.kinds, "calibration": r.calibration_here,
                            "floors": has(r.target, "wgmma")}),
    Pass("lower", lower_quantization.apply, "products of int8 or fp8, rounded in place", quantizes),
    Pass("lower", pad_channels.apply, "tensor cores take 16 channels at a time", quantizes_on_gpu),
    Pass("narrow", lower_precision.apply,
         "16-bit values: half the memory, and what tensor cores multiply",
         narrows, lambda r: {"dtype": r.decided.rest, "layers": r.decided.dtypes}),
    Pass("fuse", fold_floors.apply,
         "a factor and a sum behind a layer's ReLU are its weights and that one's floor",
         knows_floors, _target),
    Pass("fuse", fuse_requantization.apply,
         "layers write quantized values, behind their activation", given=_target),
    Pass("fuse", keep_pixels.apply,
         "channels_last maps are rows of pixels, and become them without a copy", keeps_pixels),
    Pass("fuse", fuse_rearrangements.apply,
         "what reshapes and rolls copy moves once, and is a step"),
    Pass("fuse", split_group_norms.apply,
         "what a norm does to channels joins what follows it, behind statistics of their own",
         given=_target),
    Pass("fuse", fuse_pointwise.apply, "a chain of small operations passes memory once",
         given=_target),
    Pass("fuse", widen_results.apply,
         "sums are float32: scores are not rounded first, and widened then", on_gpu, _target),
    Pass("mark", round_weights.apply, "tensor cores cut off what TF32 does not have",
         multiplies_tf32),
    Pass("mark", mark_non_negative.apply, "8- and 16-bit numbers from zero on, as integers",
         on_cpu),
    Pass("mark", mark_wide_sums.apply, "int8 weights whose products leave AVX2's sums of 16 bits",
         quantizes_on_cpu),
    Pass("mark", mark_sparse_weights.apply, "2:4 weights, for kernels that skip their zeros",
         skips_zeros),
    Pass("layout", fuse_siblings.apply,
         "taken if the whole program is then measured faster: one large product for several"),
    Pass("layout", join_sums.apply,
         "the same: a sum of two convolutions of one tap as one of both inputs", has_no_chains),
    Pass("layout", assign_layout.apply,
         "channels_last regions around convolutions, or none: the faster wins"),
    Pass("kernels", choose_kernels.apply,
         "every kernel that fits is measured, and the fastest is taken"),
    Pass("join", join_in_place.apply,
         "parts of concatenations are written where these want them, if that is faster"),
    Pass("choose", fuse_chains.apply,
         "two layers in a row, or a layer and its pooling or norm, as one step if that is faster"),
    Pass("choose", overwrite_residuals.apply,
         "a sum is made where its residual lies, if nothing else needs that"),
    Pass("choose", race_close_calls.apply,
         "kernels within noise of each other: the faster whole program decides"),
    Pass("choose", race_in_place.apply,
         "short steps' kernels and configurations, tried where they will run", on_gpu),
    Pass("memory", plan_memory.apply, "lifetimes, and one arena for the live values"),
)
# fmt: on


def of_stage(*stages: str) -> list[Pass]:
    """The passes of some stages, in order."""
    return [step for step in PASSES if step.stage in stages]


def by_name(name: str) -> Pass:
    (step,) = (step for step in PASSES if step.name == name)
    return step


# --- running it ----------------------------------------------------------------------------------


class Part(TypedDict, total=False):
    """A part of the pipeline: all stages from the first one to ``mark``, but for what is said here.

    Attributes:
        after: the stage behind which it begins.
        until: the last stage.
        without: stages that are left out.
    """

    after: str | None
    until: str
    without: Collection[str]


def steps(graph: Graph, request: Request, **part: Unpack[Part]) -> Iterator[tuple[Pass, int]]:
    """Change ``graph`` by one rewrite after another; yields each, when it is done, with its count.

    ``graph.check`` runs before the first, after each that changed something, and at the end.

    Args:
        request: without an assignment, the precisions are assigned when they are needed.
        part: the stages that run.
    """
    names, after, without = list(STAGES), part.get("after"), part.get("without", ())
    first = 0 if after is None else names.index(after) + 1
    last = names.index(part.get("until", "mark"))
    check(graph)
    for step in of_stage(*(s for s in names[first : last + 1] if s not in without)):
        if request.assignment is None and step.stage not in UNASSIGNED:
            request = request.assigned(graph)
        if not step.when(request):
            continue
        with aimed_at(request.target):
            count = step.apply(graph, **step.given(request))
        if count:  # most find nothing to do: a check after each took a fifth of a small build
            check(graph)
        yield step, count
    check(graph)


def run(graph: Graph, request: Request, **part: Unpack[Part]) -> Graph:
    """A copy of the graph after these stages; see ``steps``."""
    graph = graph.copy()
    for _ in steps(graph, request, **part):
        pass
    return graph
