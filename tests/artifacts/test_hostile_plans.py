"""Plans whose hashes are honest and whose words are not: refused before they do any harm."""

from __future__ import annotations

import functools
import re
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella import runtime
from tessella.artifacts.plan import Plan, from_bytes, to_bytes
from tessella.artifacts.program import Bucket, Buffer, Step
from tessella.core.errors import ArtifactError, CorruptArtifact
from tessella.core.preprocess import Preprocess
from tessella.kernels import catalog
from tests.support.normed import PreNorm, planned
from tests.support.plans.subjects import KINDS, good, subject, with_bucket


def with_step(op: str, **changes: Any) -> Plan:
    plan = good()
    bucket = plan.program.buckets[0]
    steps = tuple(replace(s, **changes) if s.op == op else s for s in bucket.steps)
    assert steps != bucket.steps
    return with_bucket(plan, steps=steps)


def with_attrs(op: str, **changes: Any) -> Plan:
    (step,) = (s for s in good().program.buckets[0].steps if s.op == op)
    return with_step(op, attrs={**step.attrs, **changes})


def refusal(plan: Plan) -> str:
    """Hashes are honest: the plan is written by us, and loaded whole, self-test and all."""
    with pytest.raises(ArtifactError) as refused:
        runtime.load(from_bytes(to_bytes(plan)))
    return str(refused.value)


def test_the_subject_itself_loads() -> None:
    with runtime.load(good()) as engine:
        assert engine(torch.zeros(3, 1, 6, 6))["scores"].shape == (3, 3)
    runtime.load(with_bucket(good()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1, -1, 1000])
def test_no_constant_is_shorter_than_its_layer(kind: str, length: int) -> None:
    """Each vector of each layer: machine code and libraries read it by the layer's channels."""
    plan = from_bytes(subject(kind).content)
    tried = 0
    for bucket in plan.program.buckets:
        for step in bucket.steps:
            for name in filter(None, step.inputs[1:]):
                weight = plan.weights.get(name)
                if weight is None or weight.dim() != 1 or step.op in ("pointwise", "fallback"):
                    continue
                count = len(weight) - 1 if length < 0 else length
                if count == 1 and step.op in ("quantize", "dequantize"):
                    continue  # one number for all is right
                weights = {**plan.weights, name: weight.new_ones(count)}
                assert re.search(
                    "has the shape|numbers", refusal(with_bucket(replace(plan, weights=weights)))
                )
                tried += 1
    assert tried > 0


# --- attributes -----------------------------------------------------------------------------------

ATTRS = {
    "padding 10⁹": ("conv2d", {"padding": [10**9, 10**9]}),
    "padding below 0": ("conv2d", {"padding": [-1, -1]}),
    "stride 0": ("conv2d", {"stride": [0, 0]}),
    "stride 10⁴⁰": ("conv2d", {"stride": [10**40, 1]}),
    "dilation 0": ("conv2d", {"dilation": [0, 0]}),
    "no groups": ("conv2d", {"groups": 0}),
    "groups -1": ("conv2d", {"groups": -1}),
    "groups in words": ("conv2d", {"groups": "one"}),
    "unknown activation": ("conv2d", {"activation": "__import__"}),
    **{f"gamma {g!r}": ("conv2d", {"gamma": g}) for g in (0.0, -1.0, 1e300, 1e-300, 10**400, "2")},
    "gamma of true": ("conv2d", {"gamma": True}),
    "gamma of nothing": ("conv2d", {"gamma": None}),
    "a gamma that the kernel has not": ("conv2d", {"gamma": 2.0}),
    "nested": ("conv2d", {"padding": {"x": [{"y": 1}]}}),
    "one more": ("conv2d", {"more": 1}),
    "a huge window": ("max_pool2d", {"kernel_size": [2**31, 2**31]}),
    "a window of nothing": ("max_pool2d", {"kernel_size": [0, 0]}),
    "steps of nothing": ("max_pool2d", {"stride": [0, 0]}),
    "an axis beyond": ("softmax", {"dim": 2**62}),
    "a huge shape": ("reshape", {"shape": [2**40, 18]}),
    "a negative shape": ("reshape", {"shape": [-2, 18]}),
    "10⁹ repeats": (
        "fallback",
        {"target": "aten::repeat", "args": [{"input": 0}, [10**9, 1, 1, 1]]},
    ),
    "ones elsewhere": (
        "fallback",
        {
            "target": "aten::new_ones",
            "args": [{"input": 0}, [10**10]],
            "kwargs": {"device": "cpu"},
        },
    ),
    "a file": ("fallback", {"target": "aten::from_file", "args": ["/etc/passwd"]}),
    "in place": ("fallback", {"target": "aten::add_.Tensor"}),
    "no target": ("fallback", {"target": None}),
    "an input beyond": ("fallback", {"args": [{"input": 10**9}, [1], [2]]}),
    "kwargs in words": ("fallback", {"kwargs": "device"}),
    "no instruction": ("pointwise", {"program": []}),
    "a program in a program": ("pointwise", {"program": [["pointwise", [0], {}]] * 2}),
    "a fallback in a program": (
        "pointwise",
        {"program": [["fallback", [0], {"target": "aten::neg"}], ["exp", [1], {}]]},
    ),
    "a read from later": ("pointwise", {"program": [["neg", [2], {}], ["exp", [1], {}]]}),
    "an unknown attribute": ("pointwise", {"program": [["neg", [0], {"x": 0}], ["exp", [1], {}]]}),
    "a result from before": ("pointwise", {"results": [0]}),
    "many instructions": ("pointwise", {"program": [["neg", [0], {}]] * 10_000}),
    "another shape": (
        "pointwise",
        {
            "program": [
                ["neg", [0], {}],
                ["mean", [1], {"dim": [3], "keepdim": True, "dtype": None}],
            ]
        },
    ),
}


@pytest.mark.parametrize("name", ATTRS)
def test_hostile_attributes(name: str) -> None:
    op, changes = ATTRS[name]
    assert re.search("cannot be bound|cannot run|program", refusal(with_attrs(op, **changes)))


@pytest.mark.parametrize("changes", [
    {"gamma": 0.0}, {"gamma": True}, {"gamma": "2"}, {"gamma": None}, {"gamma": 10**400},
    {"gamma": 2.0}, {"dtype": "int8"}, {"dtype": "int8", "gamma": 2.0}, {"dtype": "Tensor"},
    {"dtype": "no such type"}, {"dtype": ["int8"]}, {"dtype": 1},
], ids=lambda changes: str(changes)[:40])  # fmt: skip
def test_hostile_attributes_of_attention(changes: dict[str, Any]) -> None:
    plan = from_bytes(subject("slices").content)
    bucket = plan.program.buckets[0]
    steps = tuple(
        replace(s, attrs={**s.attrs, **changes}) if s.op == "scaled_dot_product_attention" else s
        for s in bucket.steps
    )
    assert steps != bucket.steps
    assert re.search("cannot be bound|cannot run|program", refusal(with_bucket(plan, steps=steps)))


@functools.cache
def normed() -> Plan:
    """A plan whose linear and its norm are one step, that the reference carries out."""
    with pytest.MonkeyPatch.context() as patch:
        return planned(PreNorm(), patch)


@pytest.mark.parametrize("changes", [
    {"results": ["norm"]}, {"results": ["norm", "norm"]}, {"results": ["norm", "codes"]},
    {"results": ["norm", "sum", "sum"]}, {"results": "norm"}, {"results": [["norm"], "sum"]},
    {"results": None}, {"eps": -1.0}, {"eps": None}, {"eps": "0"}, {"eps": 10**400},
    {"gamma": 0.0}, {"dtype": "no such type"}, {"dtype": "float32"}, {"dtype": ["int8"]},
    {"normalized_shape": [1]},
], ids=lambda changes: str(changes)[:40])  # fmt: skip
def test_hostile_attributes_of_a_norm_in_a_layer(changes: dict[str, Any]) -> None:
    plan = normed()
    bucket = plan.program.buckets[0]
    steps = tuple(
        replace(s, attrs={**s.attrs, **changes}) if s.op == "linear_norm" else s
        for s in bucket.steps
    )
    assert steps != bucket.steps
    assert re.search("cannot be bound|cannot run|program", refusal(with_bucket(plan, steps=steps)))


def test_hostile_operands_of_a_norm_in_a_layer() -> None:
    plan = normed()
    bucket = plan.program.buckets[0]
    (first, *_) = (s for s in bucket.steps if s.op == "linear_norm")
    for position, name in ((5, first.inputs[1]), (6, None), (5, None), (1, first.inputs[2])):
        inputs = list(first.inputs)
        inputs[position] = name
        steps = tuple(replace(s, inputs=tuple(inputs)) if s is first else s for s in bucket.steps)
        assert re.search(
            "cannot be bound|cannot run|program", refusal(with_bucket(plan, steps=steps))
        )


PROGRAMS = ["neg", None, {"0": "neg"}, [["neg", [0]]], [[0, [0], {}]], [["neg", 0, {}]], ["neg"]]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_what_is_no_program_is_not_even_shown(program: Any) -> None:
    assert re.search("not valid", refusal(with_attrs("pointwise", program=program)))


@pytest.mark.parametrize(
    "config", [{"more": 1}, {"tile": 2**63}, {"": {}}, {"nested": {"x": [1]}}, {"constants": None}]
)
def test_only_configurations_that_the_kernel_has(config: dict[str, Any]) -> None:
    assert re.search("does not know the configuration", refusal(with_step("conv2d", config=config)))


# --- buckets must be one network ------------------------------------------------------------------


def test_another_batch_cannot_do_something_else() -> None:
    """The self-test runs one batch size; the others must not be able to hide anything."""
    plan = good()
    one, two = plan.program.buckets
    for changes in (
        {"attrs": {"dim": -1}},
        {"kernel": "log_softmax.aten", "op": "log_softmax"},
        {"inputs": (two.steps[-1].inputs[0],), "layer": "x", "attrs": {"dim": 0}},
    ):
        steps = (*two.steps[:-1], replace(two.steps[-1], **changes))
        program = replace(plan.program, buckets=(one, replace(two, steps=steps)))
        assert re.search("program", refusal(replace(plan, program=program)))


def test_a_number_that_follows_the_batch_is_run_for_every_batch() -> None:
    plan = good()
    one, two = plan.program.buckets
    steps = tuple(
        replace(s, attrs={**s.attrs, "args": [{"input": 0}, 3]}) if s.op == "fallback" else s
        for s in two.steps
    )
    program = replace(plan.program, buckets=(one, replace(two, steps=steps)))
    assert re.search("fails its self-test", refusal(replace(plan, program=program)))


# --- memory ---------------------------------------------------------------------------------------


def moved(bucket: Bucket, name: str, offset: int | None) -> tuple[Buffer, ...]:
    assert name in {b.name for b in bucket.buffers}
    return tuple(replace(b, offset=offset) if b.name == name else b for b in bucket.buffers)


def test_live_buffers_must_not_overlap() -> None:
    plan = good()
    bucket = plan.program.buckets[0]
    (add,) = (s for s in bucket.steps if s.op == "add")
    offsets = {b.name: b.offset for b in bucket.buffers}
    one, other = add.inputs
    assert offsets[one] != offsets[other]
    assert re.search(
        "same memory at the same time",
        refusal(with_bucket(plan, buffers=moved(bucket, one, offsets[other]))),
    )
    assert re.search(
        "no place for its result", refusal(with_bucket(plan, buffers=moved(bucket, one, None)))
    )


@pytest.mark.parametrize("nbytes", [2**40, 2**40 - 64])
def test_an_arena_beyond_the_memory_of_the_machine(nbytes: int) -> None:
    assert re.search("more memory than there is", refusal(with_bucket(good(), arena_bytes=nbytes)))


def test_memory_that_a_view_still_needs_is_not_given_away() -> None:
    """frees is not believed: a view of a buffer keeps it."""
    spec = [
        Buffer(name="a", dtype="float32", shape=(1, 36), offset=0),
        Buffer(name="view", dtype="float32", shape=(36, 1)),
        Buffer(name="b", dtype="float32", shape=(1, 36), offset=0),
        Buffer(name="scores", dtype="float32", shape=(1, 36), offset=384),
    ]
    flat = Buffer(name="flat", dtype="float32", shape=(1, 36))
    back = Buffer(name="back", dtype="float32", shape=(1, 36))

    def step(kernel: str, inputs: str, output: str, *frees: str, **attrs: Any) -> Step:
        return Step(
            kernel=kernel,
            op=kernel.partition(".")[0],
            inputs=tuple(inputs.split()),
            outputs=(output,),
            attrs=attrs,
            frees=frees,
        )

    steps = (
        step("reshape.view", "image", "flat", shape=[1, 36]),
        step("relu.aten", "flat", "a"),
        step("reshape.view", "a", "view", "a", shape=[36, 1]),
        step("sigmoid.aten", "flat", "b"),
        step("reshape.view", "view", "back", shape=[1, 36]),
        step("add.aten", "back b", "scores", alpha=1, scalar=None),
    )
    plan = good()
    outputs = (replace(plan.manifest.outputs[0], shape=(1, 36)),)
    x = torch.randn(1, 1, 6, 6)
    right = {"input.image": x, "output.scores": x.relu().view(1, 36) + x.sigmoid().view(1, 36)}
    plan = replace(
        with_bucket(plan, buffers=(flat, back, *spec), steps=steps, arena_bytes=640),
        manifest=replace(plan.manifest, outputs=outputs),
        golden=right,
    )
    assert re.search("b and a lie in the same memory", refusal(plan))
    apart = (flat, back, *spec[:2], replace(spec[2], offset=192), spec[3])
    with runtime.load(with_bucket(plan, buffers=apart)) as engine:
        assert torch.equal(engine(x)["scores"], right["output.scores"])


# --- workspaces -----------------------------------------------------------------------------------


@functools.cache
def scratch_kernel() -> types.ModuleType:
    """A softmax that needs 100 bytes of workspace and writes all over it."""
    module = types.ModuleType("tests.artifacts.softmax_with_scratch")

    def bind(problem: Any, constants: Any, *, tile: int) -> Any:
        def call(x: torch.Tensor, *, out: torch.Tensor, workspace: torch.Tensor) -> None:
            workspace.fill_(255)
            torch.softmax(x, problem.attrs["dim"], out=out)

        return call

    module.fits = lambda problem: None
    module.bind = bind
    module.configs = lambda problem: ({"tile": 1}, {"tile": 2})
    module.workspace_bytes = lambda problem, tile: 100 * tile
    return module


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Plan:
    module = scratch_kernel()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    row = catalog.Kernel(
        id="softmax.scratch", op="softmax", module=module.__name__, targets=("cpu",), source="user"
    )
    monkeypatch.setitem(catalog._REGISTERED, row.id, row)
    plan = with_step("softmax", kernel=row.id, config={"tile": 1}, workspace="scratch")
    bucket = plan.program.buckets[0]
    arena = -(-bucket.arena_bytes // 64) * 64
    space = Buffer(name="scratch", dtype="uint8", shape=(100,), offset=arena)
    return with_bucket(plan, buffers=(*bucket.buffers, space), arena_bytes=arena + 128)


def with_space(plan: Plan, **changes: Any) -> Plan:
    bucket = plan.program.buckets[0]
    return with_bucket(plan, buffers=(*bucket.buffers[:-1], replace(bucket.buffers[-1], **changes)))


def with_last(plan: Plan, **changes: Any) -> Plan:
    bucket = plan.program.buckets[0]
    return with_bucket(
        plan,
        steps=tuple(replace(s, **changes) if s.op == "softmax" else s for s in bucket.steps),
    )


def test_a_workspace_in_its_place_loads(scratch: Plan) -> None:
    x = torch.randn(1, 1, 6, 6)
    with runtime.load(from_bytes(to_bytes(scratch))) as engine:
        made = engine(x)["scores"]
    with runtime.load(with_bucket(good())) as engine:
        assert torch.equal(made, engine(x)["scores"])


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"shape": (99,)}, "too little workspace"),
        ({"shape": (0,)}, "too little workspace"),
        ({"shape": (25,), "dtype": "float32"}, "program"),
        ({"shape": (10, 10)}, "program"),
        ({"offset": None}, "program"),
        ({"offset": -64}, "program"),
        ({"offset": 2**62}, "program"),
        ({"shape": (2**62,)}, "program"),
    ],
)
def test_workspaces_that_are_none(scratch: Plan, changes: dict[str, Any], wrong: str) -> None:
    assert re.search(wrong, refusal(with_space(scratch, **changes)))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"workspace": None}, "too little workspace"),
        ({"workspace": ""}, "program"),
        ({"workspace": "image"}, "program"),
        ({"workspace": "scores"}, "program"),
        ({"workspace": "nothing"}, "program"),
        ({"config": {"tile": 2}}, "too little workspace"),
        ({"config": {"tile": True}}, "does not know the configuration"),
        ({"config": {"tile": 1, "more": 0}}, "does not know the configuration"),
        ({"config": {}}, "does not know the configuration"),
    ],
)
def test_steps_with_other_workspaces(scratch: Plan, changes: dict[str, Any], wrong: str) -> None:
    assert re.search(wrong, refusal(with_last(scratch, **changes)))


def test_a_workspace_over_what_is_read(scratch: Plan) -> None:
    """The step before leaves its result in the arena, and the workspace lies over it."""
    bucket = scratch.program.buckets[0]
    (last,) = (s for s in bucket.steps if s.op == "softmax")
    relu = Step(kernel="relu.aten", op="relu", inputs=last.inputs, outputs=("kept",), attrs={})
    steps = tuple(
        s
        for step in bucket.steps
        for s in ((relu, replace(step, inputs=("kept",))) if step is last else (step,))
    )
    space = bucket.buffers[-1]
    kept = Buffer(name="kept", dtype="float32", shape=(1, 3), offset=space.offset)
    before = tuple(replace(s, frees=()) for s in steps)
    buffers = (*bucket.buffers, kept)
    assert re.search(
        "scratch and kept lie in the same",
        refusal(with_bucket(scratch, steps=before, buffers=buffers)),
    )


# --- reading alone --------------------------------------------------------------------------------


@pytest.mark.parametrize("attrs", [{"target": None}, {"args": {}}, {"kwargs": "device"}])
def test_a_step_that_names_no_operator(attrs: dict[str, Any]) -> None:
    """It is told when the plan is read: a plan in memory can be printed."""
    with pytest.raises(CorruptArtifact, match="the operator of"):
        from_bytes(to_bytes(with_attrs("fallback", **attrs)))


def test_a_step_without_a_target() -> None:
    (step,) = (s for s in good().program.buckets[0].steps if s.op == "fallback")
    attrs = {name: value for name, value in step.attrs.items() if name != "target"}
    with pytest.raises(CorruptArtifact, match="the operator of"):
        from_bytes(to_bytes(with_step("fallback", attrs=attrs)))


def test_more_channels_than_memory() -> None:
    plan = good()
    record = Preprocess(height=6, width=6, channels=1)
    object.__setattr__(record, "channels", 10**15)
    object.__setattr__(record, "mean", (0.0,))
    object.__setattr__(record, "std", (1.0,))
    with pytest.raises(CorruptArtifact, match="the image size is too large"):
        from_bytes(to_bytes(replace(plan, manifest=replace(plan.manifest, preprocess=record))))


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*args: Any) -> None:
        raise MemoryError

    content = to_bytes(good())
    monkeypatch.setattr("tessella.artifacts.plan._tensors", none_left)
    with pytest.raises(ArtifactError, match="not enough memory"):
        from_bytes(content)


# --- what the manifest asks of the user -----------------------------------------------------------


@pytest.mark.parametrize(
    ("imports", "wrong"),
    [
        ({"nobody::needs": "os"}, "an import that no step needs"),
        ({"softmax.aten": "os; rm -rf /"}, "an import that no step needs"),
        ({"softmax.aten": "evil\x1b[2J"}, "an import that no step needs"),
        ({"softmax.aten": "a" * 10_000}, "an import that no step needs"),
        ({"softmax.aten": ""}, "an import that no step needs"),
        ({"softmax.aten": 1}, "not a string"),
        ({"softmax.aten": {"x": "y"}}, "not a string"),
        ({"softmax.aten": "this"}, "kernels of a user's own"),
    ],
)
def test_imports(imports: dict[str, Any], wrong: str) -> None:
    """Nothing is imported, and the words that a user is asked to type are a module's name."""
    plan = good()
    assert any(s.kernel == "softmax.aten" for s in plan.program.buckets[0].steps)
    assert re.search(
        wrong, refusal(replace(plan, manifest=replace(plan.manifest, imports=imports)))
    )
    assert "this" not in sys.modules


@pytest.mark.parametrize("tolerance", [-1.0, 1.1, 1e300])
def test_a_self_test_that_tests_nothing(tolerance: float) -> None:
    plan = good()
    assert re.search(
        "program", refusal(replace(plan, manifest=replace(plan.manifest, tolerance=tolerance)))
    )


def test_a_self_test_without_its_tensors() -> None:
    plan = good()
    x, y = plan.golden["input.image"], plan.golden["output.scores"]
    for golden in (
        {},
        {"input.image": x},
        {"input.image": x, "output.scores": y[:, :1]},
        {"input.image": x[:0], "output.scores": y[:0]},
        {"input.image": x, "output.scores": y.double()},
        {"input.image": x, "output.scores": y * float("nan")},
        {"input.image": x[:, :, :2], "output.scores": y},
        {"input.image": x, "output.scores": torch.cat([y, y])},
    ):
        assert re.search("fails its self-test", refusal(replace(plan, golden=golden)))


@pytest.mark.parametrize("batch", [0, -1, 2, 10**9])
def test_hostile_batches(batch: int) -> None:
    assert re.search("program|cannot be bound", refusal(with_bucket(good(), batch=batch)))
