"""No machine code for a CPU reads or writes a byte beside its tensors and tables.

Each kernel runs where the page behind them, and then the page before them, may not be touched. A
byte beside one would end the process: so they run in one of its own, which says what it tries. At
its end that process shows that such a byte does end it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tessella.core.dtype import FLOATS
from tessella.device.x86 import code
from tessella.kernels import catalog
from tessella.kernels.attention import heads
from tessella.operations import problems
from tessella.operations.problem import Problem
from tessella.operations.table import operation
from tessella.operations.tensor_meta import TensorMeta, meta_of
from tessella.search.find import bind
from tests.support.guard_pages import guarded
from tests.support.problems import attentions, groups, looks, pools, rearrangements, recurrent
from tests.support.problems.direct_convolutions import problem as convolution

CPU = torch.device("cpu")
RESIDUALS = 3  # the position of a convolution's residual
Tensors = list[torch.Tensor | None]


def main() -> None:
    """Run every case on ordinary tensors, then between pages; at last leave a tensor."""
    torch.set_num_threads(1)
    for row, problem, given in cases():
        print(row.id, *map(str, problem.given), flush=True)
        assert row.refusal(problem) is None, row.refusal(problem)
        configs = row.configs(problem)
        for config in (configs[0], *configs[1:][-1:]):
            right = answers(row, problem, given, config)
            for at_end in (True, False):
                with guarded(at_end=at_end):
                    moved = [None if t is None else copied(t) for t in given]
                    made = answers(row, problem, moved, config)
                assert all(map(torch.equal, made, right)), (config, at_end)
    with guarded(at_end=True):
        problem = gelu(64)
        row = catalog.kernel(f"gelu.{code.require_instructions().name}")
        call, buffers = bind(row, problem, {}, CPU)
        print("beyond", flush=True)
        call(torch.zeros(63), **buffers)


def answers(
    row: catalog.Kernel, problem: Problem, given: Tensors, config: dict[str, Any]
) -> list[torch.Tensor]:
    constants = {i: t for i in problem.constant if (t := given[i]) is not None}
    heads.rows_of_bytes.cache_clear()  # what is known of a mask lies between no pages
    call, buffers = bind(row, problem, constants, CPU, config)
    inputs = [copied(t) for i, t in enumerate(given) if t is not None and i not in constants]
    made = call(*inputs, **buffers)
    return [made] if isinstance(made, torch.Tensor) else list(made)


def copied(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)


def cases() -> Iterator[tuple[catalog.Kernel, Problem, Tensors]]:
    """Every kernel of the widest instruction set here, with rests of its vectors and tiles."""
    here = code.require_instructions().name
    for problem, given in asked():
        for row in catalog.candidates(problem.op, "cpu"):
            if vectors_of(row) == here and row.refusal(problem) is None:
                yield row, problem, given


def vectors_of(row: catalog.Kernel) -> str | None:
    """The instruction set whose vectors a row's code is of."""
    extended = code.EXTENDED.get(str(row.isa))
    return row.isa if extended is None else extended.name


def asked() -> Iterator[tuple[Problem, Tensors]]:
    drawn = [*images(), *products(), *programs()]
    yield from ((p, [None if m is None else numbers(m) for m in p.inputs]) for p in drawn)
    yield quantization(16 * 1024 + 5)
    yield from others()
    for case in (
        attentions.Case(dtype="float32", fused=True, queries=19, width=37),
        attentions.Case(dtype="float32", queries=7, keys=17, width=32, value_width=96,
                        mask=(2, 1, 1, 17)),
        attentions.Case(dtype="float32", n=1, queries=6, keys=5, width=32, mask=(1, 1, 1, 5),
                        mask_dtype="float32"),
        attentions.Case(dtype="bfloat16", queries=33, keys=17, width=34, value_width=70,
                        mask=(2, 1, 1, 17)),
    ):  # fmt: skip
        problem, tensors = attentions.draw(case)
        yield problem, [*tensors]
        if case.mask is not None and case.queries > 1:  # and a constant with a row for each query
            rows = replace(case, mask=(1, case.heads, case.queries, case.keys))
            problem, tensors = attentions.draw(rows)
            yield replace(problem, constant=(3,)), [*tensors]
    for op, attrs in recurrent.ATTRS.items():
        for ways, samples in ((1, 1), (2, 5)):
            row = operation(op)
            named = recurrent.operands(op, ways, samples, 48, "bias_ih", "bias_hh")
            given = row.ordered(**named)
            both = {"direction": ("forward", "bidirectional")[ways - 1], **attrs[0]}
            made = row.call(given, both)
            metas = (tuple(None if t is None else meta_of(t) for t in ts) for ts in (given, made))
            constant = row.positions(name for name in recurrent.WEIGHTS if name in named)
            inputs, outputs = metas
            yield Problem(
                op=op, inputs=inputs, outputs=tuple(m for m in outputs if m is not None),
                attrs=both, constant=constant,
            ), [*given]  # fmt: skip


def images() -> Iterator[Problem]:
    """Convolutions, whole and as slices of wider images, and pools."""
    three = {"kernel": (3, 3), "padding": (1, 1)}
    for shape, channels, window in (
        ((2, 12, 5, 7), 37, {}),
        ((1, 20, 13, 11), 40, {"kernel": (5, 3), "padding": (2, 0), "stride": (2, 2)}),
        ((1, 32, 9, 10), 48, three),
        ((1, 32, 9, 10), 24, three),
        ((1, 32, 6, 7), 16, {}),
        ((1, 64, 3, 3), 67, {}),
        ((2, 21, 3, 3), 5, {}),
        ((1, 32, 6, 7), 37, {}),
        ((1, 64, 5, 21), 33, {**three, "stride": (2, 1)}),
        ((2, 40, 9, 7), 40, {**three, "groups": 40}),
        ((1, 48, 9, 7), 72, {**three, "groups": 3}),
        ((1, 24, 11, 6), 24, {**three, "groups": 24, "stride": (2, 2)}),
    ):
        p = convolution(shape, channels, activation="silu", **window)
        added = convolution(shape, channels, residual=True, **window)
        yield from (p, replace(added, dying=(RESIDUALS,)), sliced(added), in_int8(added))
        yield in_bfloat16(sliced(added))
    volumes = {"kernel": (3, 3, 3), "padding": (1, 1, 1), "residual": True}
    p = convolution((1, 16, 3, 6, 5), 32, **volumes)
    yield from (p, sliced(p), groups.problem((2, 48, 3, 5, 7), 6, dtype="float32"))
    few = {**three, "stride": (2, 2), "residual": True}  # channels, whose lines are spread
    yield in_bfloat16(convolution((1, 3, 9, 67), 33, **few))
    for op, window in pools.WINDOWS.values():
        for channels in (20, 43):
            yield pools.problem(op, (2, channels, 9, 14), window)
    for dtype in ("int8", "uint8", "bfloat16"):
        p = pools.problem("max_pool2d", (2, 51, 9, 14), pools.maximum(), dtype)
        yield replace(p, attrs={**p.attrs, "non_negative": True})
    yield convolution((1, 3, 7, 9), 16, "bfloat16", kernel=(3, 3), padding=(1, 1))
    planes = TensorMeta(shape=(2, 3, 5, 7), dtype="float32")
    pixels = replace(planes, format="channels_last")
    yield Problem(op="to", inputs=(planes,), outputs=(pixels,), attrs={"dtype": "float32"})
    yield pools.problem("adaptive_avg_pool2d", (2, 51, 9, 14), {"output_size": (1, 1)}, "bfloat16")
    for op, window in (("avg_pool2d", pools.mean()), ("max_pool2d", pools.maximum())):
        yield pools.problem(op, (2, 51, 9, 14), window, "bfloat16")


def sliced(p: Problem) -> Problem:
    """The same, with the last channels of wider images."""

    def part(meta: TensorMeta) -> TensorMeta:
        images, channels, *rest = meta.shape
        return replace(meta, shape=(images, channels + 16, *rest)).part(1, channels)

    x, weight, bias, residual = p.inputs
    assert x is not None
    assert residual is not None
    return replace(p, inputs=(part(x), weight, bias, part(residual)), outputs=(part(p.output),))


def in_bfloat16(p: Problem) -> Problem:
    inputs = [None if m is None else replace(m, dtype="bfloat16") for m in p.inputs]
    return replace(p, inputs=tuple(inputs), outputs=(replace(p.output, dtype="bfloat16"),))


def in_int8(p: Problem) -> Problem:
    """The same of codes, which makes codes."""
    x, weight, bias, residual = p.inputs
    assert x is not None
    assert weight is not None
    scale = TensorMeta(shape=weight.shape[:1], dtype="float32")
    codes = [None if m is None else replace(m, dtype="int8") for m in (x, weight, residual)]
    return replace(
        p,
        inputs=(codes[0], codes[1], bias, codes[2], scale),
        outputs=(replace(p.output, dtype="int8"),),
        attrs={**p.attrs, "dtype": "int8"},
        constant=(1, 2, 4),
    )


def products() -> Iterator[Problem]:
    for rows, channels, made in (
        ((1,), 40, 48),
        ((3, 7), 772, 91),
        ((3, 11), 32, 91),
        ((5,), 8, 1000),
        ((5, 7), 37, 5),
    ):
        for dtype in ("float32", "int8"):
            x, weight = (TensorMeta(shape=s, dtype=dtype) for s in ((*rows, channels),
                                                                   (made, channels)))  # fmt: skip
            vector = TensorMeta(shape=(made,), dtype="float32")
            if dtype == "float32":
                p = problems.linear(x, weight, vector, activation="gelu", constant=(1, 2))
                yield from (p, in_bfloat16(p))
            else:
                yield problems.linear(x, weight, vector, None, vector, constant=(1, 2, 4))


def programs() -> Iterator[Problem]:
    program = (("add", (0, 1), {"alpha": 1}), ("mul", (3, 2), {}), ("tanh", (4,), {}))
    for columns in (1, 7, 8, 43):
        plain = TensorMeta(shape=(5, columns), dtype="float32")
        for second in ((5, columns), (1, columns), (5, 1)):
            inputs = plain, TensorMeta(shape=second, dtype="float32"), plain
            yield Problem(
                op="pointwise", inputs=inputs, outputs=(plain,),
                attrs={"program": program, "results": (5,)},
            )  # fmt: skip
        yield gelu(5, columns)
        vector = TensorMeta(shape=(columns,), dtype="float32")
        norm = Problem(
            op="layer_norm", inputs=(plain, vector, vector), outputs=(plain,),
            attrs={"normalized_shape": (columns,), "eps": 1e-5}, constant=(1, 2),
        )  # fmt: skip
        narrow = replace(plain, dtype="bfloat16")
        yield from (norm, replace(norm, inputs=(narrow, vector, vector), outputs=(narrow,)))


def gelu(*shape: int) -> Problem:
    x = TensorMeta(shape=shape, dtype="float32")
    return Problem(op="gelu", inputs=(x,), outputs=(x,), attrs={"approximate": "none"})


def quantization(count: int) -> tuple[Problem, Tensors]:
    x, scale = (TensorMeta(shape=s, dtype="float32") for s in ((count,), ()))
    p = Problem(
        op="quantize", inputs=(x, scale, None), outputs=(replace(x, dtype="int8"),),
        attrs={"axis": 0, "dtype": "int8"}, constant=(1,),
    )  # fmt: skip
    return p, [numbers(x), torch.tensor(0.02), None]


def others() -> Iterator[tuple[Problem, Tensors]]:
    """The way back, points around boxes, parts of a whole, a picture in planes, to int8 and to
    bfloat16, and a picture's bytes.
    """
    p, (_, scale, _) = quantization(1029)
    back = replace(
        p, op="dequantize", inputs=(p.output, *p.inputs[1:]), outputs=(p["input"],),
        attrs={"axis": 0, "dtype": "float32"},
    )  # fmt: skip
    yield back, [numbers(p.output), scale, None]
    zero = torch.tensor(-128, dtype=torch.int8)
    for each in (p, back):
        shifted = replace(each, inputs=(*each.inputs[:2], meta_of(zero)), constant=(1, 2))
        yield shifted, [numbers(each["input"]), scale, zero]
    seen = looks.asked(images=2, queries=3, heads=2, depth=21, sizes=(3, 4, 2, 1), points=(5, 8))
    yield seen, [*looks.drawn(seen)]
    parts = [TensorMeta(shape=(2, c, 3, 5), dtype="float32", format="channels_last")
             for c in (16, 23)]  # fmt: skip
    joined = replace(parts[0], shape=(2, 39, 3, 5))
    larger: dict[str, Any] = {"size": (6, 10), "scale_factor": None, "mode": "nearest"}
    larger |= {"align_corners": None, "antialias": False}
    for channels, dtype in ((51, "float32"), (37, "int8")):  # AVX-512 masks the second
        x = TensorMeta(shape=(2, channels, 3, 5), dtype=dtype, format="channels_last")
        made = replace(x, shape=(2, channels, 6, 10))
        enlarged = Problem(op="interpolate", inputs=(x,), outputs=(made,), attrs=larger)
        wide = [replace(m, shape=(2, channels + 9, *m.shape[2:])) for m in (x, made)]
        x, made = (m.part(1, channels) for m in wide)
        for each in (enlarged, replace(enlarged, inputs=(x,), outputs=(made,))):
            yield each, [numbers(m) for m in each.given]
    yield (
        Problem(op="cat", inputs=tuple(parts), outputs=(joined,), attrs={"dim": 1}),
        [numbers(m) for m in parts],
    )
    for shuffled in (rearrangements.shuffle(2, 90, 5, "channels_last", dtype="bfloat16"),
                     rearrangements.windows(2, 14, 7, 37, 3)):  # fmt: skip
        yield shuffled, [numbers(m) for m in shuffled.given]
    vector, narrow = (TensorMeta(shape=(43,), dtype="float32"),
                      TensorMeta(shape=(5, 43), dtype="bfloat16"))  # fmt: skip
    program = (("batch_norm", (0, 1, 2, 3, 4), {"eps": 1e-5}), ("relu", (5,), {}))
    normed = Problem(
        op="pointwise", inputs=(narrow, *[vector] * 4), outputs=(narrow,),
        attrs={"program": program, "results": (6,)}, constant=(1, 2, 3, 4),
    )  # fmt: skip
    yield normed, [numbers(narrow), *(numbers(vector).abs() for _ in range(4))]
    image = TensorMeta(shape=(2, 3, 7, 9), dtype="float32")
    made = replace(image, dtype="int8", format="channels_last")
    yield replace(p, inputs=(image, *p.inputs[1:]), outputs=(made,)), [numbers(image), scale, None]
    made = replace(made, dtype="bfloat16")
    attrs = {"dtype": "bfloat16"}
    yield Problem(op="to", inputs=(image,), outputs=(made,), attrs=attrs), [numbers(image)]
    pixels = TensorMeta(shape=(2, 7, 9, 3), dtype="uint8")
    for dtype in ("float32", "bfloat16"):
        attrs = {"gain": [0.5, 2.0, 3.0], "offset": [1.0, -1.0, 0.25], "dtype": dtype}
        planes = (replace(made, dtype=dtype),)
        p = Problem(op="image_to_tensor", inputs=(pixels,), outputs=planes, attrs=attrs)
        yield p, [numbers(pixels)]


def numbers(meta: TensorMeta) -> torch.Tensor:
    """Small numbers: sums of int8 stay in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(meta.shape, generator=generator)
    if meta.dtype not in FLOATS:
        drawn = (drawn * 15).round().abs().clamp(max=60)
    return meta.empty(CPU).copy_(drawn)


@pytest.mark.instructions
def test_nothing_beside_tensors_and_tables_is_touched() -> None:
    if (here := code.instructions()) is None or (why := code.refusal(here.name)):
        pytest.skip(f"no machine code of ours runs here: {why if here else ''}")
    ran = subprocess.run(
        [sys.executable, "-m", __name__],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    tried = ran.stdout.splitlines()
    assert tried[-1:] == ["beyond"], (tried[-1:], ran.returncode, ran.stderr[-1500:])
    assert ran.returncode == -signal.SIGSEGV
    rows = [row for row in catalog.KERNELS if vectors_of(row) == here.name]
    modules = {row.module for row in rows if code.refusal(str(row.isa)) is None}
    assert {catalog.kernel(line.split()[0]).module for line in tried[:-1]} == modules


if __name__ == "__main__":
    main()
