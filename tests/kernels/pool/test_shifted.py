"""Max pooling as maxima of shifted images: torch's result to the last bit, on what networks pool
and on whatever else there may be."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tessella.kernels import catalog
from tessella.kernels.pool import shifted
from tessella.kernels.pool.spans import levels, moves
from tessella.operations.problem import Problem
from tessella.operations.tensor_meta import Format, TensorMeta
from tessella.search import find as search
from tests.support.problems.pools import maximum, problem
from tests.support.problems.shifted_pools import NETWORKS, SAME, numbers, pooled, problems

CPU = torch.device("cpu")
POISON = 101
ROW = catalog.kernel("max_pool2d.shifted")


def agrees(asked: Problem, *more: dict[str, int], seed: int = 0) -> None:
    """Each configuration, twice, whatever lay in its buffers."""
    assert ROW.refusal(asked) is None
    x = numbers(asked.inputs[0], seed)
    before, right = x.clone(), pooled(asked, x)
    for config in (*ROW.configs(asked), *more):
        scratch = {}
        if needed := ROW.workspace_bytes(asked, config):
            scratch["workspace"] = torch.full((needed,), 127, dtype=torch.uint8)
        call = shifted.bind(asked, {}, **config)
        for _ in range(2):
            out = asked.output.empty(CPU).fill_(POISON)
            assert call(x, out=out, **scratch) is out
            assert asked.output.matches(out)
            torch.testing.assert_close(out, right, rtol=0, atol=0, equal_nan=True)
            scratch = {name: t.clone().fill_(126) for name, t in scratch.items()}
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("case", NETWORKS)
def test_what_networks_pool(case: str, dtype: str) -> None:
    size, window = NETWORKS[case]
    for format in ("channels_last", "contiguous"):
        asked = problem("max_pool2d", (2, 9, size, size), window, dtype, format)
        agrees(asked, {"images": 1, "rows": 5}, {"images": 2, "rows": 4})


@given(problems(), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2**31))
@settings(max_examples=250, deadline=None)
def test_any_window(asked: Problem, images: int, rows: int, seed: int) -> None:
    agrees(asked, {"images": images, "rows": min(rows, asked.output.shape[2])}, seed=seed)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 7), st.integers(0, 20), st.data())
@settings(max_examples=300, deadline=None)
def test_an_axis(length: int, kernel: int, stride: int, padding: int, data: st.DataObject) -> None:
    """Every place is made once, read only afterwards, and has seen its window and no more."""
    padding = min(padding, kernel // 2)
    assume(length + 2 * padding >= kernel)
    whole = (length + 2 * padding - kernel) // stride + 1
    begin = data.draw(st.integers(0, whole - 1))
    count = data.draw(st.integers(1, whole - begin))
    first = begin * stride - padding
    line: list[set[int]] = [{i} for i in range(length)]
    for level in levels(length=length, kernel=kernel, stride=stride, first=first, count=count):
        assert len(line) == level.source_count
        made: list[set[int] | None] = [None] * level.count
        for move in moves(level):
            for i in range(move.count):
                seen = made[move.into + i] if move.again else set()
                assert seen is not None
                assert move.again or made[move.into + i] is None
                found = [line[source + level.step * i] for source in move.sources]
                made[move.into + i] = seen.union(*found)
        line = [one or set() for one in made]
    windows = [range(first + i * stride, first + i * stride + kernel) for i in range(count)]
    assert line == [set(window) & set(range(length)) for window in windows]


def test_large_windows_take_few_levels() -> None:
    found = levels(length=13, kernel=13, stride=1, first=-6, count=13)
    assert [tuple(level.taps) for level in found] == [(0, 1), (0, 2), (0, 4), (0, 5)]
    (direct,) = levels(length=112, kernel=3, stride=2, first=-1, count=56)
    assert direct.taps == range(3)


def test_a_window_in_the_padding_alone_is_left_out_by_torch() -> None:
    """With ceil_mode a last window could begin behind the image: then it is not counted."""
    window = maximum((2, 2), (3, 3), (1, 1), ceil_mode=True)
    asked = problem("max_pool2d", (1, 2, 3, 6), window)
    assert asked.output.shape == (1, 2, 2, 3)
    agrees(asked)


def test_slices_of_a_larger_image_are_read() -> None:
    whole = TensorMeta(shape=(2, 40, 9, 14), dtype="float32", format="channels_last")
    part = whole.part(1, 20)
    asked = replace(problem("max_pool2d", part.shape, SAME), inputs=(part,))
    assert ROW.refusal(asked) is None
    x = numbers(whole)[:, 20:]
    assert part.matches(x)
    config = ROW.configs(asked)[0]
    call, buffers = search.bind(ROW, asked, {}, CPU, config)
    made = call(x, **buffers)
    torch.testing.assert_close(made, pooled(asked, x), rtol=0, atol=0, equal_nan=True)


def test_its_places_may_lie_anywhere_and_change() -> None:
    """In an arena, at other offsets from call to call."""
    asked = problem("max_pool2d", (2, 20, 9, 14), SAME)
    (config, *_), elements = ROW.configs(asked), 2 * 20 * 9 * 14
    needed = ROW.workspace_bytes(asked, config)
    call, strides = shifted.bind(asked, {}, **config), asked.output.dense_strides
    arena = torch.empty(100_000, dtype=torch.uint8)
    for begin in (0, 64, 128):
        x, out = (
            arena[at : at + 4 * elements].view(torch.float32).as_strided(
                asked.output.shape, strides, (at // 4)
            )
            for at in (begin, begin + 32_000)
        )  # fmt: skip
        x.copy_(numbers(asked.inputs[0], begin))
        call(x, out=out, workspace=arena[begin + 64_000 :][:needed])
        torch.testing.assert_close(out, pooled(asked, x), rtol=0, atol=0, equal_nan=True)


def test_threads_with_buffers_of_their_own_do_not_meet() -> None:
    asked = problem("max_pool2d", (2, 20, 9, 14), SAME)
    config = ROW.configs(asked)[0]
    call, wrong = shifted.bind(asked, {}, **config), []

    def work(seed: int) -> None:
        x, out = numbers(asked.inputs[0], seed), asked.output.empty(CPU)
        scratch = torch.empty(ROW.workspace_bytes(asked, config), dtype=torch.uint8)
        right = pooled(asked, x)
        for _ in range(100):
            call(x, out=out.fill_(POISON), workspace=scratch)
            if not torch.equal(out.nan_to_num(7), right.nan_to_num(7)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inside_and_outside_of_inference_mode() -> None:
    asked = problem("max_pool2d", (2, 20, 9, 14), SAME)
    x, call = numbers(asked.inputs[0]), shifted.bind(asked, {})
    buffers = {
        "out": asked.output.empty(CPU),
        "workspace": torch.empty(ROW.workspace_bytes(asked, {}), dtype=torch.uint8),
    }
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            made = call(x, **buffers)
        torch.testing.assert_close(made, pooled(asked, x), rtol=0, atol=0, equal_nan=True)
    with torch.inference_mode():  # an engine's arena may have been made inside
        made = call(x, **{name: torch.empty_like(t) for name, t in buffers.items()})
    torch.testing.assert_close(made, pooled(asked, x), rtol=0, atol=0, equal_nan=True)


def test_a_window_of_one_pixel_copies() -> None:
    asked = problem("max_pool2d", (2, 3, 5, 4), maximum((1, 1), (1, 1), (0, 0)))
    assert ROW.workspace_bytes(asked, ROW.configs(asked)[0]) == 0
    agrees(asked)


def test_large_images_are_pooled_in_tiles() -> None:
    asked = problem("max_pool2d", (3, 64, 112, 112), maximum())
    first, whole, _ = ROW.configs(asked)
    assert first == {"images": 1, "rows": 28}
    assert whole == {"images": 3, "rows": 56}
    assert 4 * ROW.workspace_bytes(asked, first) < ROW.workspace_bytes(asked, whole)


IMAGE = (2, 20, 9, 14)
REFUSED: dict[str, tuple[Problem, str]] = {
    "an empty batch": (problem("max_pool2d", (0, 2, 9, 9), maximum()), "nothing to pool"),
    "gaps": (problem("max_pool2d", IMAGE, maximum(dilation=(2, 1))), "dilated by (2, 1)"),
    "no batch": (problem("max_pool2d", IMAGE[1:], maximum()), "four axes, not 3"),
    "many passes": (
        problem("max_pool2d", (1, 1, 80, 80), maximum((80, 80), (80, 80), (0, 0))), "160 passes",
    ),
    "unknown strides": (
        replace(
            problem("max_pool2d", IMAGE, maximum()),
            inputs=(TensorMeta(shape=IMAGE, dtype="float32", format="strided"),),
        ), "strides must be known",
    ),
    "another format": (
        replace(
            problem("max_pool2d", IMAGE, SAME), outputs=(TensorMeta(shape=IMAGE, dtype="float32"),)
        ), "one format",
    ),
    "another type": (
        replace(
            problem("max_pool2d", IMAGE, SAME),
            outputs=(TensorMeta(shape=IMAGE, dtype="int8", format="channels_last"),),
        ), "cannot make int8 of float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "why"), REFUSED.values(), ids=REFUSED)
def test_what_it_cannot_do_is_told(asked: Problem, why: str) -> None:
    assert why in str(ROW.refusal(asked))


def test_it_takes_part() -> None:
    asked = problem("max_pool2d", (1, 16, 14, 14), SAME)
    trials = search.find(asked, {}, target="cpu", options=search.SearchOptions(budget_s=0.01))
    mine = next(trial for trial in trials if trial.kernel == ROW.id)
    assert (mine.refused, mine.time_us is not None) == (None, True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", NETWORKS)
@pytest.mark.parametrize("format", ["channels_last", "contiguous"])
def test_numbers_from_zero_on_are_ordered_as_their_bits(
    case: str, dtype: str, format: Format
) -> None:
    """Infinity among them, and zeros of both signs."""
    size, window = NETWORKS[case]
    plain = problem("max_pool2d", (2, 9, size, size), window, dtype, format)
    asked = replace(plain, attrs={**plain.attrs, "non_negative": True})
    x = numbers(asked.inputs[0]).abs().nan_to_num(3.0, posinf=torch.inf)
    x[x < 9] *= -0.0
    assert (x.signbit() & (x == 0)).any()
    right = pooled(plain, x)
    for config in (*ROW.configs(asked), {"images": 1, "rows": 5}):
        call, buffers = search.bind(ROW, asked, {}, CPU, config)
        buffers["out"].fill_(POISON)
        assert torch.equal(call(x, **buffers), right)
