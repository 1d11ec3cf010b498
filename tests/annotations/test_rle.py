"""Run lengths and outlines, byte for byte those of pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as reference

from tessella.annotations import rle


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_masks_are_written_and_read_as_the_peer_does(rng):
    for _ in range(200):
        height, width = rng.integers(1, 60, 2)
        mask = (rng.random((height, width)) < rng.random()).astype(np.uint8)
        expected = reference.encode(np.asfortranarray(mask))
        counts = rle.counts_of(mask)
        assert rle.compressed(counts) == expected["counts"]
        np.testing.assert_array_equal(rle.expanded(expected["counts"]), counts)
        np.testing.assert_array_equal(rle.mask_of(counts, height, width), mask)
        assert rle.box_of(counts, height) == tuple(reference.toBbox(expected)) or not mask.any()
        assert rle.fits(expected["counts"], height, width)
        assert not rle.fits(expected["counts"], height, width + 1)
        top, left = rng.integers(0, height), rng.integers(0, width)
        part = mask[top : rng.integers(top, height) + 1, left : rng.integers(left, width) + 1]
        alone = np.zeros_like(mask)
        alone[top : top + part.shape[0], left : left + part.shape[1]] = part
        expected = reference.encode(np.asfortranarray(alone))
        made = rle.of_part(part, int(top), int(left), int(height), int(width))
        assert rle.compressed(made) == expected["counts"]
        above, before, rows, columns = rng.integers([-9, -9, 1, 1], 60)
        wide = np.zeros((height + 140, width + 140), np.uint8)
        wide[70 : 70 + height, 70 : 70 + width] = mask
        seen = wide[70 + above :, 70 + before :][:rows, :columns]
        whole = np.zeros((rows, columns), np.uint8)
        whole[: seen.shape[0], : seen.shape[1]] = seen
        window = (int(above), int(before), int(rows), int(columns))
        shown = rle.seen_in(rle.counts_of(mask), int(height), window)
        np.testing.assert_array_equal(shown, rle.counts_of(whole))


def test_counts_of_any_size_come_back(rng):
    for bits in range(1, 34):
        counts = rng.integers(0, 1 << bits, 50)
        np.testing.assert_array_equal(rle.expanded(rle.compressed(counts)), counts)
    assert rle.compressed(np.array([], np.int64)) == b""
    several = [rng.integers(0, 999, length) for length in (1, 2, 3, 4, 9, 1, 60)]
    texts = [rle.compressed(counts) for counts in several]
    for made, counts in zip(rle.expanded_each(texts), several, strict=True):
        np.testing.assert_array_equal(made, counts)
    assert rle.expanded_each([]) == []
    unended = bytes([texts[4][0] | 32])  # goes on in the next text
    with pytest.raises(ValueError, match="not run lengths"):
        rle.expanded_each([unended, *texts])


def test_runs_that_touch_or_are_empty_are_none_of_their_own(rng):
    for _ in range(100):
        begins = np.sort(rng.integers(0, 60, 12))
        ends = np.minimum(begins + rng.integers(0, 9, 12), np.append(begins[1:], 60))
        mask = np.zeros(60, np.uint8)
        for begin, end in zip(begins, ends, strict=True):
            mask[begin:end] = 1
        made = rle.of_runs(begins, ends, 60)
        np.testing.assert_array_equal(made, rle.counts_of(mask.reshape(6, 10).ravel()[None].T))


def test_outlines_are_drawn_as_the_peer_draws_them(rng):
    for trial in range(600):
        height, width = rng.integers(2, 80, 2)
        corners = rng.integers(3, 12)
        sides = np.tile([width, height], corners)
        outline = rng.random(2 * corners) * sides * 1.4 - sides * 0.2  # some of it outside
        outline = np.round(outline) if trial % 3 == 0 else outline
        drawn = reference.frPyObjects([outline.tolist()], int(height), int(width))
        assert rle.compressed(rle.of_polygons([outline], height, width)) == drawn[0]["counts"]
    several = [rng.random(8) * 40 for _ in range(3)]
    union = reference.merge(reference.frPyObjects([p.tolist() for p in several], 40, 40))
    assert rle.compressed(rle.of_polygons(several, 40, 40)) == union["counts"]


@pytest.mark.parametrize("text", [b"", b"~", b"P", b"\xff", b"o" * 40, b"0" * 3 + b"P" * 9 + b"0"])
def test_text_that_is_no_run_lengths(text):
    assert not rle.fits(text, 5, 5)


def test_text_that_is_too_long_is_not_even_read(monkeypatch):
    monkeypatch.setattr(rle, "MAX_TEXT", 100)
    monkeypatch.setattr(rle, "expanded", lambda text: pytest.fail("it was read"))
    assert not rle.fits(b"0" * 101, 5, 5)
