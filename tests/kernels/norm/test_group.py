"""Statistics of group norms in Triton's interpreter, beside float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tessella.kernels.norm import group
from tests.support.problems.groups import PROBLEMS, check, problem

TILES = [{"rows": 8, "warps": 1, "chunks": 1}, {"rows": 4, "warps": 1, "chunks": 4}]


@pytest.mark.parametrize("config", TILES, ids=repr)
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_normalized_is_as_in_float64(name, config):
    """Of one launch and of two; chunks that end early, a group of few and of all channels."""
    check(PROBLEMS[name], config)


@pytest.mark.parametrize("config", TILES, ids=repr)
def test_nothing_cancels_far_from_zero(config):
    check(problem((1, 32, 13, 13), 4, dtype="float32"), config, far=1000.0)


def test_configurations_cut_pixels_into_chunks_of_which_none_is_empty(monkeypatch):
    monkeypatch.setattr(group, "multiprocessors", lambda: 132)
    for shape in ((1, 32, 128, 128, 128), (1, 320, 8, 8, 8), (8, 256, 100, 136), (1, 1, 3, 3)):
        asked = problem(shape, shape[1])
        pixels = group._sizes(asked)[2]
        for config in group.configs(asked):
            per_chunk = group.round_up(group.ceil_div(pixels, config["chunks"]), config["rows"])
            assert (config["chunks"] - 1) * per_chunk < pixels


def test_it_says_what_it_does_not_take():
    asked = PROBLEMS["images"]
    assert "float64" in group.fits(problem((1, 8, 3, 3), 2, dtype="float64"))
    assert "channels a group" in group.fits(problem((1, 2048, 3, 3), 1))
    assert "dense" in group.fits(
        replace(asked, inputs=(replace(asked.inputs[0], format="strided"), *asked.inputs[1:]))
    )
    assert problem((1, 8, 3, 3), 3).misfit == "3 groups of 8 channels"
