"""Programs of element-wise operations: by our generated kernel and by torch, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tessella.core.errors import CompileError
from tessella.kernels import catalog
from tessella.kernels.pointwise import generated, generated_several, sequence
from tessella.kernels.pointwise.axes import common_axes
from tessella.kernels.pointwise.walk import refusal
from tessella.operations.pointwise_program import CODES, ELEMENTWISE, ROWS, parse, text
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import Format, TensorMeta
from tessella.search.inspection import exact_answers
from tests.kernels import test_pool
from tests.kernels.compile_only import compile_all

# lanes beyond the edge compute with zeros, which NumPy, but no GPU, remarks on
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CPU = torch.device("cpu")
# the interpreter cuts float32 to bfloat16 where a GPU rounds
TOLERANCES = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 1e-2}
SUM = {"scalar": None, "alpha": 1}
PAIR = {"scalar": None}

Step = tuple[str, tuple[int | None, ...], dict[str, Any]]
Shape = tuple[int, ...]


def problem(
    inputs: Sequence[TensorMeta],
    *program: Step,
    results: tuple[int, ...] = (),
    format: Format = "contiguous",
    constant: tuple[int, ...] = (),
) -> Problem:
    """The last instruction's value is the result; element types follow from torch."""
    results = results or (len(inputs) + len(program) - 1,)
    attrs = {"program": program, "results": results}
    made = operation("pointwise").call([m.empty(torch.device("meta")) for m in inputs], attrs)
    outputs = tuple(
        TensorMeta(
            shape=tuple(t.shape),
            dtype=str(t.dtype).removeprefix("torch."),
            format=format if t.dim() == 4 else "contiguous",
        )
        for t in made
    )
    return Problem(
        op="pointwise", inputs=tuple(inputs), outputs=outputs, attrs=attrs, constant=constant
    )


def meta(*shape: int, dtype: str = "float32", format: Format = "contiguous") -> TensorMeta:
    return TensorMeta(shape=shape, dtype=dtype, format=format)


def tensors(asked: Problem, device: torch.device = CPU) -> list[torch.Tensor]:
    """Numbers for every input, positive where they are constant (a variance)."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for position, one in enumerate(asked.inputs):
        tensor = one.empty(device)
        values = torch.randn(one.shape, generator=generator)
        if not tensor.is_floating_point():
            values = torch.randint(-100, 100, one.shape, generator=generator)
        made.append(tensor.copy_(values.abs() + 0.5 if position in asked.constant else values))
    return made


def run(module: Any, asked: Problem, inputs: Sequence[torch.Tensor], **config: Any) -> list[Any]:
    constants = {i: inputs[i] for i in asked.constant}
    call = module.bind(asked, constants, **config)
    free = [t for i, t in enumerate(inputs) if i not in constants]
    if not module.WRITES_OUT:
        return list(call(*free))
    return [call(*free, out=asked.output.empty(inputs[0].device).fill_(77))]


def agrees(asked: Problem, inputs: Sequence[torch.Tensor] | None = None) -> None:
    """Every configuration of the generated kernel, and torch's sequence, give float64's answer."""
    inputs = inputs or tensors(asked)
    assert refusal(asked) is None
    assert (generated.fits(asked) is None) == (len(asked.outputs) == 1)
    assert (generated_several.fits(asked) is None) == (len(asked.outputs) > 1)
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    right = operation(asked.op).call(wide, asked.attrs)
    module = generated if len(asked.outputs) == 1 else generated_several
    runs = [run(module, asked, inputs, **config) for config in module.configs(asked)]
    if asked.op == "pointwise" and len(asked.outputs) == 1:
        runs.append(run(sequence, asked, inputs))
    for made in runs:
        for one, exact, told in zip(made, right, asked.outputs, strict=True):
            assert told.matches(one)
            if exact.numel():
                deviates = (one.double() - exact).abs().max()
                if told.dtype == "int8":  # codes: a tie may fall either way
                    assert deviates <= 1
                    assert (one == exact).double().mean() > 0.9
                else:
                    assert deviates <= TOLERANCES[told.dtype] * exact.abs().max()


V = meta(24)
BATCH_NORM: Step = ("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5})


def image(n: int = 2, c: int = 24, h: int = 5, w: int = 7, **more: Any) -> TensorMeta:
    return meta(n, c, h, w, **more)


def norm_relu(dtype: str = "float32", format: Format = "contiguous", n: int = 2) -> Problem:
    x = image(n, dtype=dtype, format=format)
    steps = BATCH_NORM, ("relu", (5,), {})
    return problem([x, V, V, V, V], *steps, format=format, constant=(1, 2, 3, 4))


def gate(dtype: str, format: Format) -> Problem:
    """hardsigmoid(g) · x + x, a squeeze-and-excitation with what follows."""
    x, g = image(dtype=dtype, format=format), image(h=1, w=1, dtype=dtype)
    steps = ("hardsigmoid", (1,), {}), ("mul", (0, 2), PAIR), ("add", (3, 0), SUM)
    return problem([x, g], *steps, format=format)


def add_norm(dtype: str, columns: int = 33) -> Problem:
    """The sum too: what the next residual adds to."""
    x, w = meta(3, 5, columns, dtype=dtype), meta(columns, dtype=dtype)
    steps = (
        ("add", (0, 1), SUM),
        ("layer_norm", (4, 2, 3), {"normalized_shape": (columns,), "eps": 1e-5}),
    )
    return problem([x, x, w, w], *steps, results=(5, 4), constant=(2, 3))


def codes(
    dtype: str, scale: Shape = (), zero: Shape | None = None, format: Format = "contiguous"
) -> Problem:
    """relu(dequantize(int8) + x) as int8: what lies between two layers on codes."""
    x, y = image(dtype="int8", format=format), image(dtype=dtype, format=format)
    zeros = [] if zero is None else [meta(*zero, dtype="int8")]
    reads = (2, 3) if zeros else (2,)
    n = 3 + len(zeros)
    return problem(
        [x, y, meta(*scale), *zeros],
        ("dequantize", (0, *reads), {"axis": 1, "dtype": dtype}),
        ("add", (n, 1), SUM),
        ("relu", (n + 1,), {}),
        ("quantize", (n + 2, *reads), {"axis": 1, "dtype": "int8"}),
        format=format,
        constant=(2, *reads[1:]),
    )


X = meta(4, 6, 10)
LAST = "channels_last"
CASES: dict[str, Problem] = {
    **{f"norm+relu {d} {f}": norm_relu(d, f) for d in TOLERANCES for f in ("contiguous", LAST)},
    **{f"gate {d} {f}": gate(d, f) for d in ("float32", "float16") for f in ("contiguous", LAST)},
    **{f"add+norm {d}": add_norm(d) for d in TOLERANCES},
    "rows of 1": add_norm("float32", 1),
    "an empty batch": norm_relu(n=0),
    "one number": problem([meta()], ("exp", (0,), {}), ("neg", (1,), {})),
    "flat, of odd size": problem([meta(1031)], ("silu", (0,), {}), ("mul", (1, 0), PAIR)),
    **{f"codes {d} {f}": codes(d, format=f) for d in TOLERANCES for f in ("contiguous", LAST)},
    "codes, a scale a channel": codes("float32", (24,), format=LAST),
    "codes, a zero point": codes("float32", (1,), (1,)),
    "codes, a zero a channel": codes("float16", (), (24,), format=LAST),
    "codes of a row": problem(
        [meta(3, 40), meta(40), meta()],
        ("layer_norm", (0, 1, None), {"normalized_shape": (40,), "eps": 1e-5}),
        ("quantize", (3, 2), {"axis": 0, "dtype": "int8"}), constant=(1, 2),
    ),
    "a number and its codes": problem(
        [X, meta()], ("tanh", (0,), {}), ("quantize", (2, 1), {"axis": 0, "dtype": "int8"}),
        results=(3, 2), constant=(1,),
    ),
    "a norm and its codes": problem(
        [meta(3, 40, dtype="float16"), *[meta(40, dtype="float16")] * 2, meta()],
        ("layer_norm", (0, 1, 2), {"normalized_shape": (40,), "eps": 1e-5}),
        ("quantize", (4, 3), {"axis": 0, "dtype": "int8"}), results=(5, 4), constant=(1, 2, 3),
    ),
    "a number for all": problem([X, meta()], ("mul", (0, 1), PAIR), ("tanh", (2,), {})),
    "rows and columns": problem(
        [meta(7, 1), meta(1, 9)], ("add", (0, 1), SUM), ("exp", (0,), {}), ("div", (2, 3), PAIR)
    ),
    "positions": problem([X, meta(1, 6, 10)], ("add", (0, 1), SUM), ("gelu", (2,), {})),
    "axes that do not join": problem(
        [meta(2, 3, 4, 5), meta(2, 1, 4, 1), meta(3, 1, 5)],
        *(("mul", (0, 1), PAIR), ("sub", (3, 2), {"scalar": None, "alpha": 2})),
    ),
    "another format out": problem(
        [image(c=3), meta(3, 1, 1)], ("mul", (0, 1), PAIR), ("to", (2,), {"dtype": "float16"}),
        format=LAST,
    ),
    "two formats in": problem(
        [image(), image(format=LAST)], ("add", (0, 1), SUM), ("relu", (2,), {}), format=LAST
    ),
    "integers in": problem(
        [meta(3, 50, dtype="uint8")], ("to", (0,), {"dtype": "float32"}),
        ("div", (1, None), {"scalar": 255.0}),
    ),
    "rounded on the way": problem(
        [X], ("exp", (0,), {}), ("to", (1,), {"dtype": "float16"}),
        ("to", (2,), {"dtype": "float32"}), ("log", (3,), {}),
    ),
    "a cast alone": problem([X], ("to", (0,), {"dtype": "float32"})),
    "masked softmax": problem(
        [meta(2, 3, 9, 9), meta(2, 1, 1, 9)], ("mul", (0, None), {"scalar": 0.125}),
        ("add", (2, 1), SUM), ("softmax", (3,), {"dim": -1, "dtype": None}),
    ),
    "a norm by hand": problem(
        [X, meta(10)], ("mean", (0,), {"dim": [-1], "keepdim": True, "dtype": None}),
        ("sub", (0, 2), SUM), ("pow", (3, None), {"scalar": 2}),
        ("mean", (4,), {"dim": [2], "keepdim": True, "dtype": None}),
        ("add", (5, None), {"scalar": 1e-6, "alpha": 1}), ("rsqrt", (6,), {}),
        ("mul", (3, 7), PAIR), ("mul", (8, 1), PAIR), results=(9, 6),
    ),
    "rms norm": problem(
        [X, meta(10)], ("rms_norm", (0, 1), {"normalized_shape": (10,), "eps": 1e-6}),
        ("sigmoid", (2,), {}),
    ),
    "extremes": problem(
        [X], ("amax", (0,), {"dim": [-1], "keepdim": True}),
        ("amin", (0,), {"dim": [-1], "keepdim": True}), ("sub", (1, 2), SUM),
        ("sum", (0,), {"dim": [-1], "keepdim": True, "dtype": None}),
        ("div", (4, 3), PAIR),
    ),
}  # fmt: skip


@pytest.mark.parametrize("asked", CASES.values(), ids=CASES)
def test_agrees_with_float64(asked: Problem) -> None:
    agrees(asked)


def test_slices_are_read_and_written() -> None:
    whole = image(c=48, format=LAST)
    asked = gate("float32", LAST)
    part = whole.part(1, 24)
    assert part.strides is not None
    agrees(replace(asked, inputs=(part, asked.inputs[1]), outputs=(part,)))


# what a function of one number is asked with, beside NaN
NUMBERS = [0.0, 1e-9, -1e-9, 0.02, -0.02, 0.3, -0.3, 1.0, -1.0, 2.9, -2.9, 7.0, -7.0, 30.0, -30.0]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
    "leaky_relu": [{"negative_slope": 0.1}],
    "elu": [{"alpha": 1.5, "scale": 1.1, "input_scale": 0.7}],
    "softplus": [{"beta": 2.0, "threshold": 20.0}],
    "clamp": [{"min": -1, "max": None}, {"min": None, "max": 0.5}, {"min": -0.5, "max": 0.5}],
    "to": [{"dtype": "float16"}, {"dtype": "bfloat16"}, {"dtype": "float32"}],
    "pow": [{"scalar": n} for n in (-1, -0.5, 0.5, 1, 2, 3, 4)],
    "add": [{"scalar": 0.3, "alpha": 2}],
    "sub": [{"scalar": 0.3, "alpha": 2}],
    **{op: [{"scalar": 0.3}] for op in ("mul", "div", "maximum", "minimum")},
}
POSITIVE = ("log", "sqrt", "rsqrt", "pow")


@pytest.mark.parametrize("op", sorted(ELEMENTWISE - {"batch_norm"}))
def test_functions(op: str) -> None:
    """Alone, as the catalog's rows run them."""
    x = torch.tensor(NUMBERS)
    x = x.abs() + 0.1 if op in POSITIVE else x[1:] if op == "reciprocal" else x
    for attrs in SETTINGS.get(op, [{}]):
        dtype = attrs.get("dtype", "float32")
        one = TensorMeta(shape=tuple(x.shape), dtype="float32")
        inputs = (one, None) if "scalar" in attrs else (one,)
        asked = Problem(op=op, inputs=inputs, outputs=(replace(one, dtype=dtype),), attrs=attrs)
        assert generated.fits(asked) is None, attrs
        (config, *_) = generated.configs(asked)
        (made,) = run(generated, asked, [x], **config)
        (right,) = operation(op).call([x.double(), None][: len(inputs)], attrs)
        close = {"rtol": 1e-2 if dtype == "bfloat16" else 2e-6, "atol": 3e-7}
        torch.testing.assert_close(made.double(), right.double(), **close)
        (made,) = run(generated, asked, [x * torch.nan], **config)
        assert made.isnan().all(), attrs


@pytest.mark.parametrize("op", ["maximum", "minimum", "add"])
def test_not_a_number_on_either_side_stays_so(op: str) -> None:
    x, nan = torch.ones(8), torch.full((8,), torch.nan)
    asked = problem([meta(8), meta(8)], (op, (0, 1), SUM if op == "add" else PAIR))
    for inputs in ([x, nan], [nan, x]):
        (made,) = run(generated, asked, inputs, **generated.configs(asked)[0])
        assert made.isnan().all()


# operation → input, attributes; along the last axes of it
ALONG: dict[str, tuple[str, list[Shape], dict[str, Any]]] = {
    "softmax": ("softmax", [(4, 33)], {"dim": 1, "dtype": None}),
    "log_softmax": ("log_softmax", [(2, 4, 7)], {"dim": -1, "dtype": None}),
    "norm of two axes": (
        "layer_norm", [(5, 4, 6), (4, 6), (4, 6)], {"normalized_shape": (4, 6), "eps": 1e-5},
    ),
    "mean of all": ("mean", [(3, 4, 5)], {"dim": None, "keepdim": False, "dtype": None}),
    "mean of the last": ("mean", [(3, 4, 5)], {"dim": (1, 2), "keepdim": True, "dtype": None}),
    "sum": ("sum", [(3, 4, 5)], {"dim": (-1,), "keepdim": False, "dtype": None}),
    "amax": ("amax", [(3, 4, 5)], {"dim": (2, 1), "keepdim": False}),
    "pool": ("adaptive_avg_pool2d", [(3, 4, 5, 6)], {"output_size": (1, 1)}),
    "norm of channels": ("batch_norm", [(3, 24, 5), *[(24,)] * 4], {"eps": 1e-5}),
}  # fmt: skip


def alone(case: str) -> Problem:
    op, shapes, attrs = ALONG[case]
    (made,) = operation(op).call([torch.empty(s, device="meta") for s in shapes], attrs)
    return Problem(
        op=op,
        inputs=tuple(meta(*s) for s in shapes),
        outputs=(meta(*made.shape),),
        attrs=attrs,
        constant=tuple(range(1, len(shapes))),
    )


@pytest.mark.parametrize("case", ALONG)
def test_along_rows(case: str) -> None:
    agrees(alone(case))


def test_infinite_masks_and_rows_of_not_a_number() -> None:
    x = torch.randn(4, 9)
    x[0, 3:], x[1], x[2, 5] = -torch.inf, -torch.inf, torch.nan
    asked = problem([meta(4, 9)], ("softmax", (0,), {"dim": -1, "dtype": None}))
    (made,) = run(generated, asked, [x], **generated.configs(asked)[0])
    torch.testing.assert_close(made, torch.softmax(x, -1), equal_nan=True)
    asked = problem([meta(4, 9)], ("amax", (0,), {"dim": [-1], "keepdim": True}))
    (made,) = run(generated, asked, [x], **generated.configs(asked)[0])
    torch.testing.assert_close(made, x.amax(-1, keepdim=True), equal_nan=True)


REFUSED: dict[str, tuple[Problem, str]] = {
    "strides nobody knows": (
        problem([meta(4, 4, format="strided")], ("relu", (0,), {})), "strides must be known",
    ),
    "a long row": (
        problem([meta(2, 20000)], ("softmax", (0,), {"dim": -1, "dtype": None})), "20000",
    ),
    "another axis": (problem([X], ("softmax", (0,), {"dim": 1, "dtype": None})), "last axis"),
    "a reduction that drops its axis": (
        problem([X], ("sum", (0,), {"dim": [-1], "keepdim": False, "dtype": None})), "together",
    ),
    "float64": (problem([meta(4, dtype="float64")], ("relu", (0,), {})), "16 or 32 bits"),
    "an odd power": (problem([X], ("pow", (0, None), {"scalar": 2.5})), "power"),
    "scales that are computed": (
        problem([X, meta()], ("quantize", (0, 1), {"axis": 0, "dtype": "int8"})), "constants",
    ),
    "fp8 that is read again": (
        problem(
            [X, meta()], ("quantize", (0, 1), {"axis": 0, "dtype": "float8_e4m3fn"}),
            ("dequantize", (2, 1), {"axis": 0, "dtype": "float32"}), constant=(1,),
        ), "fp8 codes",
    ),
    "integers out": (problem([X], ("to", (0,), {"dtype": "int32"})), "makes floating"),
    "statistics that are computed": (norm_relu(), "constants"),
    "many tensors": (
        problem(
            [X] * 11,
            ("add", (0, 1), SUM),
            *(("add", (9 + i, i), SUM) for i in range(2, 11)),
        ),
        "10 tensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "why"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_told(asked: Problem, why: str) -> None:
    if why == "constants":
        asked = replace(asked, constant=())
    assert why in str(refusal(asked))


# a plan is data from a stranger
HOSTILE: dict[str, tuple[Any, int, Any]] = {
    "no instruction": ([], 1, [1]),
    "not a list": ("relu", 1, [1]),
    "an operation with code": ([["user", [0], {"target": "x"}]], 1, [1]),
    "a fallback": ([["fallback", [0], {"target": "aten::from_file"}]], 1, [1]),
    "itself": ([["pointwise", [0], {}]], 1, [1]),
    "a read from later": ([["relu", [1], {}]], 1, [1]),
    "a read from before": ([["relu", [-1], {}]], 1, [1]),
    "a bool": ([["relu", [True], {}]], 1, [1]),
    "nothing read": ([["relu", [None], {}]], 1, [1]),
    "a result that is an input": ([["relu", [0], {}]], 1, [0]),
    "a result from later": ([["relu", [0], {}]], 1, [2]),
    "a result twice": ([["relu", [0], {}]], 1, [1, 1]),
    "no result": ([["relu", [0], {}]], 1, []),
    "attributes without names": ([["relu", [0], [1]]], 1, [1]),
    "four parts": ([["relu", [0], {}, 0]], 1, [1]),
    "no input": ([["relu", [0], {}]], 0, [0]),
    "a million instructions": ([["relu", [0], {}]] * 10**6, 1, [1]),
}


@pytest.mark.parametrize("case", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_are_refused(case: tuple[Any, int, Any]) -> None:
    program, inputs, results = case
    with pytest.raises(CompileError) as caught:
        parse(program, inputs, results)
    assert len(str(caught.value)) < 500


def test_a_program_for_people() -> None:
    steps = CASES["a norm by hand"].attrs
    assert text(steps["program"], steps["results"], ["%x", "w"]) == (
        "$1 = sub(%x, mean(%x, dim=[-1], keepdim=True)); "
        "$4 = add(mean(pow($1, 2), dim=[2], keepdim=True), 1e-06); "
        "$7 = mul(mul($1, rsqrt($4)), w)"
    )
    (one,) = (gate("float32", "contiguous").attrs,)
    assert text(one["program"], one["results"], ["%x", "%g"]) == (
        "add(mul(%x, hardsigmoid(%g)), %x)"
    )


def test_axes_are_joined_where_memory_lets_them() -> None:
    x = image(2, 24, 5, 7, format=LAST)
    assert common_axes(x.shape, [x, x]).sizes == (2 * 24 * 5 * 7,)
    assert common_axes(x.shape, [meta(24, 1, 1), x], lead=1).sizes == (70, 24)
    one = common_axes(x.shape, [image(h=1, w=1), x], lead=1)
    assert (one.sizes, one.strides[0]) == ((2, 35, 24), (24, 0, 1))
    rows = common_axes((4, 6, 10), [X, X], keep_last=True)
    assert (rows.rows, rows.columns) == (24, 10)


def test_torch_reuses_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of five operations of one shape needs no memory but its result's."""
    steps = [("exp", (0,), {}), *((op, (i,), {}) for i, op in enumerate(("neg", "tanh", "abs"), 1))]
    asked = problem([X], *steps)
    inputs = tensors(asked)
    out = X.empty(CPU)
    call = sequence.bind(asked, {})
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("a buffer too many"))
    call(*inputs, out=out)
    torch.testing.assert_close(out, inputs[0].exp().neg().tanh().abs())


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """For ``compile_all``: shapes as networks have them."""
    tokens, w = meta(64, 768, dtype="float16"), meta(768, dtype="float16")
    asked = {
        "norm+relu": norm_relu("float16", LAST, 64),
        "gate": gate("float16", LAST),
        "add+norm": problem(
            [tokens, tokens, w, w],
            ("add", (0, 1), SUM),
            ("layer_norm", (4, 2, 3), {"normalized_shape": (768,), "eps": 1e-5}),
            constant=(2, 3),
        ),
        "softmax": problem(
            [meta(64, 4096, dtype="float16")], ("softmax", (0,), {"dim": -1, "dtype": None})
        ),
        "a norm by hand": CASES["a norm by hand"],
        "codes": codes("float16", format=LAST),
        "a norm and its codes": problem(
            [tokens, w, w, meta()],
            ("layer_norm", (0, 1, 2), {"normalized_shape": (768,), "eps": 1e-5}),
            ("quantize", (4, 3), {"axis": 0, "dtype": "float8_e4m3fn"}),
            results=(5, 4),
            constant=(1, 2, 3),
        ),
        "codes alone": Problem(
            op="quantize",
            inputs=(tokens, meta()),
            outputs=(meta(64, 768, dtype="float8_e4m3fn"),),
            attrs={"axis": 0, "dtype": "float8_e4m3fn"},
            constant=(1,),
        ),
        "numbers of codes": Problem(
            op="dequantize",
            inputs=(meta(64, 768, dtype="float8_e4m3fn"), meta()),
            outputs=(tokens,),
            attrs={"axis": 0, "dtype": "float16"},
            constant=(1,),
        ),
        "shifted windows": problem(
            [meta(8, 64, 3, 49, 49, dtype="float16"), meta(3, 49, 49), meta(1, 64, 1, 49, 49)],
            *(("add", (0, 1), SUM), ("add", (3, 2), SUM)),
            ("softmax", (4,), {"dim": -1, "dtype": None}),
        ),
    }
    for name, one in asked.items():
        yield name, functools.partial(_launch, one, generated.configs(one)[0])
    yield from test_pool.cases()


def _launch(asked: Problem, config: Mapping[str, Any]) -> None:
    module = generated if len(asked.outputs) == 1 else generated_several
    run(module, asked, tensors(asked), **config)


def test_compiles_for_hopper_without_spills() -> None:
    found = compile_all("tests.kernels.test_pointwise:cases")
    for name, launches in found.items():
        (one,) = launches
        assert one["spilled_bytes"] == 0, name
        assert not {"LDL", "STL"} & {op for op, count in one["opcodes"].items() if count}, name


def test_every_operation_of_programs_has_rows() -> None:
    """Alone it is asked of the same kernel; only torch's sequence runs on a CPU."""
    for op in ELEMENTWISE | ROWS | CODES:
        assert catalog.kernel(f"{op}.generated").module.endswith("pointwise.generated")


def test_exact_answers_of_a_program_that_casts_stay_float64() -> None:
    """A plan of codes casts to its 16-bit type, and a norm follows with 16-bit weights."""
    meta = functools.partial(TensorMeta, dtype="float16")
    problem = Problem(
        op="pointwise",
        inputs=(TensorMeta(shape=(3, 8), dtype="float32"), meta(shape=(8,)), meta(shape=(8,))),
        outputs=(meta(shape=(3, 8)),),
        attrs={
            "program": (
                ("to", (0,), {"dtype": "float16"}),
                ("layer_norm", (3, 1, 2), {"normalized_shape": (8,), "eps": 1e-5}),
            ),
            "results": (4,),
        },
    )
    x = torch.randn(3, 8)
    weight, bias = torch.randn(2, 8).half()
    (made,) = exact_answers(problem, {1: weight, 2: bias}, (x,))
    right = torch.layer_norm(x.half().double(), (8,), weight.double(), bias.double(), eps=1e-5)
    torch.testing.assert_close(made, right)


def test_exact_answers_of_codes_are_numbers() -> None:
    meta = functools.partial(TensorMeta, shape=(9,))
    problem = Problem(
        op="quantize",
        inputs=(meta(dtype="float32"), TensorMeta(shape=(), dtype="float32")),
        outputs=(meta(dtype="float8_e4m3fn"),),
        attrs={"dtype": "float8_e4m3fn", "axis": None},
    )
    x, scale = torch.linspace(-600.0, 600.0, 9), torch.tensor(1.0)
    (made,) = exact_answers(problem, {}, (x, scale))
    assert made.dtype == torch.float64
    assert made[-1] == 448.0
