"""Kernels of a user's own: they compute, train, compete, and enter plans; and what is refused."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from examples.kernels import own_layer, saxpy, stencil_1d, vector_add
from tessella import compiler, graph, kernels, runtime
from tessella.artifacts.plan import Plan, load_plan
from tessella.cli import main
from tessella.core.errors import ArtifactError, CompileError, KernelError, UsageError
from tessella.core.spec import DimRange, TensorSpec
from tessella.kernels import catalog
from tessella.kernels.user import Launch, cuda, operator
from tessella.operations import user_operators as registry

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, tests/gpu does this"),
    pytest.mark.filterwarnings("ignore:.*got tensors on the CPU:RuntimeWarning"),
    # torch.export of torch 2.11 warns of itself
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


@triton.jit
def scale_kernel(x_ptr, out_ptr, factor, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, factor * tl.load(x_ptr + at, mask=at < n), mask=at < n)


def scale_launch(x: Tensor, factor: float, out: Tensor) -> Launch:
    n = out.numel()
    return Launch(
        kernel=scale_kernel, grid=(triton.cdiv(n, 64),), args=(x, out, factor, n), warps=2,
        constants={"BLOCK": 64},
    )  # fmt: skip


def like(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


@operator("tests::scale", shape=like, reference=lambda x, factor: x * factor, gradient="reference")
def scale(x: Tensor, factor: float = 2.0, *, out: Tensor) -> Launch:
    """x times a number."""
    return scale_launch(x, factor, out)


def test_it_is_a_function_of_tensors():
    x = torch.randn(3, 50)
    torch.testing.assert_close(scale(x, 3.0), 3 * x)
    torch.testing.assert_close(scale(x), 2 * x)
    torch.testing.assert_close(scale(x, factor=0.5), x / 2)
    torch.testing.assert_close(scale(x.t()), 2 * x.t())  # the kernel sees a contiguous copy
    assert scale(torch.empty(0, 4)).shape == (0, 4)
    assert scale.__doc__ == "x times a number."


def test_what_was_launched():
    scale(torch.randn(3, 50))
    seen = scale.last_launch
    assert (seen.where, seen.kernel, seen.grid, seen.block) == (
        "interpreter", "scale_kernel", (3,), (64,)
    )  # fmt: skip
    assert seen.warps == 2
    assert str(seen) == ("scale_kernel: grid 3, block 64 (2 warps) [no GPU: Triton's interpreter]")


def test_it_keeps_no_tensors():
    x = torch.randn(3, 50)
    gone = weakref.ref(x)
    scale(x)
    del x
    assert gone() is None


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(KernelError, match="not on one device"):
        saxpy.saxpy.run(1.0, torch.ones(2), torch.ones(2, device="meta"))


def test_cuda_is_compiled_without_a_gpu():
    x, weight = torch.randn(1000), torch.randn(15)
    stencil_1d.stencil(x, weight)
    seen = stencil_1d.stencil.last_launch
    assert (seen.where, seen.grid, seen.block) == ("reference", (4, 1, 1), (256,))
    assert seen.resources.shared_bytes == 4 * (256 + 14)
    assert 16 <= seen.resources.registers <= 64
    assert seen.occupancy.blocks == 8


def test_a_reference_in_a_kernels_place_is_told_once():
    kernel = cuda('extern "C" __global__ void twice(const float* x, float* y) {}', "twice")

    @operator("tests::twice", shape=torch.empty_like, reference=lambda x: 2 * x)
    def twice(x: Tensor, *, out: Tensor) -> Launch:
        return Launch(kernel=kernel, grid=(1,), block=(32,), args=(x, out))

    with pytest.warns(RuntimeWarning, match="its reference gives the result"):
        twice(torch.ones(2))
    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]


def test_gradients_are_those_of_the_references():
    x, y = torch.randn(2, 300)
    assert saxpy.saxpy.check(2.5, x, y) < 1e-6
    assert stencil_1d.stencil.check(x, torch.randn(15)) < 1e-5
    assert vector_add.vector_add.check(x, y) < 1e-6
    assert own_layer.snake.check(torch.randn(9, 8), torch.rand(8) + 0.5) < 1e-5
    assert scale.check(x, 3.0) < 1e-6
    x.requires_grad_()
    scale(x, 3.0).sum().backward()
    assert x.grad.eq(3.0).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_agrees_that_it_is_an_operator():
    x = torch.randn(4, 8, requires_grad=True)
    torch.library.opcheck(own_layer.snake._torch, (x, torch.rand(8) + 0.5))


def test_check_finds_a_wrong_value_and_a_wrong_gradient():
    @operator("tests::wrong", shape=like, reference=lambda x, factor: x * factor + 1e-2)
    def wrong(x: Tensor, factor: float, *, out: Tensor) -> Launch:
        return scale_launch(x, factor, out)

    with pytest.raises(KernelError, match="result 0 of tests::wrong"):
        wrong.check(torch.randn(8), 2.0)

    @operator(
        "tests::wrong_gradient",
        shape=like,
        reference=lambda x, factor: x * factor,
        gradient=lambda grad, x, factor: (grad, None),
    )
    def wrong_gradient(x: Tensor, factor: float, *, out: Tensor) -> Launch:
        return scale_launch(x, factor, out)

    with pytest.raises(KernelError, match="gradient 0 of tests::wrong_gradient"):
        wrong_gradient.check(torch.randn(8), 2.0)


def test_an_element_type_that_the_kernel_was_not_written_for():
    with pytest.raises(KernelError, match="does not take this element type"):
        scale(torch.ones(3).half())
    with torch.autocast("cpu", torch.bfloat16):  # in float32 then
        assert scale(torch.ones(3).bfloat16()).dtype == torch.float32


def test_it_may_be_defined_again():
    def define(factor: float):
        @operator("tests::again", shape=torch.empty_like)
        def again(x: Tensor, *, out: Tensor) -> Launch:
            return scale_launch(x, factor, out)

        return again

    assert define(2.0)(torch.ones(2)).tolist() == [2.0, 2.0]
    assert define(3.0)(torch.ones(2)).tolist() == [3.0, 3.0]


def test_without_a_gradient_it_does_not_train():
    @operator("tests::fixed", shape=like)
    def fixed(x: Tensor, factor: float, *, out: Tensor) -> Launch:
        return scale_launch(x, factor, out)

    with pytest.raises(RuntimeError, match="no autograd formula"):
        fixed(torch.ones(3, requires_grad=True), 2.0).sum().backward()


def test_a_gradient_may_use_the_outputs():
    @operator(
        "tests::inverse",
        shape=torch.empty_like,
        reference=torch.reciprocal,
        gradient=lambda grad, x, out: -grad * out * out,
    )
    def inverse(x: Tensor, *, out: Tensor) -> Launch:
        return Launch(kernel=inverse_kernel, grid=(1,), args=(x, out), constants={"N": out.numel()})

    assert inverse.check(torch.rand(8) + 1) < 1e-6


@triton.jit
def inverse_kernel(x_ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, 1.0 / tl.load(x_ptr + at))


@pytest.mark.parametrize(
    ("source", "name", "error"),
    [
        ('extern "C" __global__ void f(float* x) {}', "g", "no such kernel"),
        ("__global__ void f(float* x) {}", "f", "no such kernel"),
        ('extern "C" __global__ void f(float3 x) {}', "f", "cannot hand over"),
        ('struct S { float x; }; extern "C" __global__ void f(struct S s) {}', "f", "hand over"),
    ],
)
def test_cuda_source_that_cannot_be_called(source, name, error):
    with pytest.raises(UsageError, match=error):
        cuda(source, name)


def test_cuda_arguments_are_checked():
    kernel = cuda('extern "C" __global__ void f(float* x, /* of x */ int n) {}', "f")
    x = torch.ones(1)
    for args, error in (
        ((1, 2), "parameter list"),
        ((x, x), "parameter list"),
        ((x.half(), 2), "torch.float16 for 'float. x'"),
        ((x,), "takes 2 arguments"),
    ):
        with pytest.raises(UsageError, match=error):
            kernel.launch((1, 1, 1), (32, 1, 1), args, target="sm_90")
    broken = cuda('extern "C" __global__ void f(int n) { oops; }', "f")
    with pytest.raises(KernelError, match=r"does not compile(.|\n)*oops"):
        broken.cubin("sm_90")


def test_a_struct_of_ints_is_a_tuple():
    kernel = cuda('struct S { int a, b; }; extern "C" __global__ void f(struct S s, int c) {}', "f")
    given = [np.frombuffer(value, "int32").tolist() for value in kernel._values(((1, 2), 3))]
    assert given == [[1, 2], [3]]


def test_functions_that_cannot_be_operators():
    def without_out(x: Tensor) -> Launch: ...

    def untyped(x, *, out: Tensor) -> Launch: ...

    with pytest.raises(UsageError, match="no annotated parameter out"):
        operator("tests::a", shape=torch.empty_like)(without_out)
    with pytest.raises(UsageError, match="cannot be an operator"):
        operator("tests::b", shape=torch.empty_like)(untyped)
    with pytest.raises(UsageError, match="cannot be an operator"):
        operator("nameless", shape=torch.empty_like)(scale._function)
    with pytest.raises(UsageError, match="no reference to differentiate"):
        operator("tests::c", shape=torch.empty_like, gradient="reference")(scale._function)


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(36, 3)

    def forward(self, image: Tensor) -> Tensor:
        return scale(self.second(scale(self.first(image), -1.0).flatten(1)))


def plan_of(module: nn.Module, precision: str = "fp32", shape=(2, 3, 3)) -> Plan:
    inputs = [
        TensorSpec(name="image", dtype="float32", shape=(DimRange(min=1, opt=2, max=4), *shape))
    ]
    return compiler.compile_graph(
        graph.capture(module, inputs), target="cpu", batch=DimRange(min=1, opt=2, max=4),
        precision=precision,
        about=compiler.About(built_from="Network", rebuild="tessella compile …"),
    )  # fmt: skip


def test_a_plan_runs_it(tmp_path: Path):
    module = Network().eval()
    plan = plan_of(module)
    assert plan.manifest.imports == {"tests::scale": __name__}
    own = [step for step in plan.program.buckets[-1].steps if step.op == "user"]
    assert [step.title for step in own] == ["user.operator tests::scale"] * 2
    assert [step.attrs["args"][1] for step in own] == [-1.0, 2.0]
    engine = runtime.load(plan.save(tmp_path / "own.plan"))
    for count in (1, 3, 5):
        image = torch.randn(count, 2, 3, 3)
        torch.testing.assert_close(engine(image)["output"], module(image).detach())


def test_16_bits_only_where_its_kernels_take_them():
    steps = {s.outputs[0]: s for s in plan_of(Network().eval(), "bf16").program.buckets[-1].steps}
    types = {b.name: b.dtype for b in plan_of(Network(), "bf16").program.buckets[-1].buffers}
    assert {types[n] for n, s in steps.items() if s.op == "user"} == {"float32"}
    assert {types[n] for n, s in steps.items() if s.op == "conv2d"} == {"bfloat16"}


def test_a_plan_needs_its_operators(tmp_path: Path, monkeypatch):
    path = plan_of(Network().eval()).save(tmp_path / "own.plan")
    load_plan(path)  # reading needs nothing
    monkeypatch.setattr(registry, "OPERATORS", {})
    with pytest.raises(ArtifactError, match=r"tests::scale.*import tests.kernels.test_user"):
        runtime.load(path)


def test_the_command_line_imports_first(tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "my_layers.py").write_text(
        "from tests.kernels.test_user import rows\nrows.register('linear', algorithm='mine')"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["tessella", "--import", "my_layers", "kernels", "linear"])
    with pytest.raises(SystemExit) as done:
        main()
    catalog.unregister("linear.mine")
    del sys.modules["my_layers"]
    assert done.value.code in (0, None)
    assert "linear.mine" in capsys.readouterr().out


def test_a_plan_wants_a_reference():
    @operator("tests::opaque", shape=like)
    def opaque(x: Tensor, factor: float, *, out: Tensor) -> Launch:
        return scale_launch(x, factor, out)

    class Opaque(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return opaque(image, 2.0)

    with pytest.raises(CompileError, match="has no reference"):
        plan_of(Opaque())


# ── find ──────────────────────────────────────────────────────────────────────────────────────────


@operator(
    "tests::rows",
    shape=lambda x, weight, bias, activation: x.new_empty(*x.shape[:-1], len(weight)),
    reference=lambda x, weight, bias, activation: F.relu(F.linear(x, weight, bias)),
)
def rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu", *, out: Tensor
) -> Launch:
    n, (rows, k) = out.shape[-1], x.shape
    has_bias = bias is not None
    return Launch(
        kernel=rows_kernel, grid=(rows,), args=(x, weight, bias if has_bias else x, out),
        constants={"K": k, "N": n, "HAS_BIAS": has_bias},
    )  # fmt: skip


@triton.jit
def rows_kernel(
    x_ptr, w_ptr, b_ptr, out_ptr, K: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr
):
    row, column = tl.program_id(0), tl.arange(0, N)
    sums = tl.zeros([N], tl.float32)
    if HAS_BIAS:
        sums += tl.load(b_ptr + column)
    for k in range(K):
        sums += tl.load(x_ptr + row * K + k) * tl.load(w_ptr + column * K + k)
    tl.store(out_ptr + row * N + column, tl.maximum(sums, 0.0))


@pytest.fixture
def registered():
    def fits(problem):
        if problem.attr("activation") != "relu":
            return "fuses relu only"
        n = problem.output.shape[-1]
        return None if n & (n - 1) == 0 else "wants a power of two of outputs"

    name = rows.register("linear", algorithm="rows", fits=fits, targets=("cpu", "sm_90"))
    yield name
    catalog.unregister(name)


def test_it_competes_in_find(registered: str, tmp_path: Path):
    assert registered == "linear.rows"
    x, weight, bias = torch.randn(5, 6), torch.randn(8, 6), torch.randn(8)
    for extra in ((), (bias,)):
        found = kernels.find("linear", x, weight, *extra, activation="relu", folder=tmp_path)
        mine = {k.algorithm: k for k in found}["rows"]
        assert (mine.kernel, mine.source, mine.refused) == ("linear.rows", "user", None)
        assert mine.time_us > 0
        assert mine.max_rel_error < 1e-6
        made = kernels.linear(x, weight, *extra, activation="relu", algorithm="rows")
        torch.testing.assert_close(made, F.relu(F.linear(x, weight, *extra)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "gelu"}, "fuses relu only"),
        ({"alpha": 2.0}, "does not take alpha=2.0"),
        ({"residual": torch.zeros(5, 8)}, "takes 3 tensors"),
        ({"weight": torch.zeros(7, 6)}, "power of two"),
        ({"x": torch.zeros(5, 6).half(), "weight": torch.zeros(8, 6).half()}, "takes float32"),
    ],
)
def test_it_refuses_what_it_cannot_do(registered: str, tmp_path: Path, changes, reason):
    arguments = {"x": torch.zeros(5, 6), "weight": torch.zeros(8, 6), "activation": "relu"}
    arguments |= changes
    operands = [arguments.pop(n, None) for n in ("x", "weight", "bias", "residual")]
    found = kernels.find("linear", *operands, folder=tmp_path, budget_s=0.01, **arguments)
    assert reason in {k.algorithm: k for k in found}["rows"].refused


def test_names_of_ours_are_taken(registered: str):
    with pytest.raises(UsageError, match="there is a kernel of this name"):
        rows.register("linear", algorithm="aten")


def test_a_plan_that_took_it_says_what_to_import(registered: str, monkeypatch):
    first, last = catalog.KERNELS, catalog.BY_ID
    others = tuple(k for k in first if k.op not in ("linear", "*"))
    monkeypatch.setattr(catalog, "KERNELS", others)
    layer = nn.Sequential(nn.Linear(6, 8), nn.ReLU()).eval()
    plan = plan_of(layer, shape=(6,))
    assert plan.manifest.imports == {"linear.rows": __name__}
    x = torch.randn(3, 6)
    torch.testing.assert_close(runtime.load(plan)(x)["output"], layer(x).detach())
    monkeypatch.setattr(registry, "CANDIDATES", {})
    assert "linear.rows" not in last
    with pytest.raises(ArtifactError, match=r"linear\.rows"):
        runtime.load(plan)
