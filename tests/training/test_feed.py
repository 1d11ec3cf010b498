"""Batches come in order, scaled to the bit, and what is waited for them is told."""

from __future__ import annotations

import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tessella.core.errors import DataError
from tessella.core.events import silent
from tessella.core.preprocess import Preprocess, fitted, normalize
from tessella.data import loading
from tessella.data.importing import ImportSettings, import_images
from tessella.data.loading import Batch
from tessella.training import feed as feeding
from tessella.training import meter as metering
from tessella.training.evaluate import predict_split
from tessella.training.feed import Feed, loading_threads
from tessella.training.parallel import World
from tessella.training.schedule import Schedule
from tessella.training.state import TrainState
from tests.support.training import recipe

RECORD = Preprocess(
    height=5, width=7, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), depth=16
)
CPU = torch.device("cpu")


def stream(count: int, *, fail_at: int | None = None, each_s: float = 0.0):
    rng = np.random.default_rng(0)
    for i in range(count):
        if i == fail_at:
            raise DataError("an image cannot be decoded", seen=i)
        time.sleep(each_s)
        label = torch.tensor([i])
        pixels = torch.from_numpy(rng.integers(0, 1 << 16, (2, 5, 7, 3), np.uint16))
        yield Batch(pixels=pixels, record=RECORD, labels=label, indices=label)


def test_the_record_of_a_run_says_who_decodes(monkeypatch):
    """Of a GPU without decoders of its own with a warning: it does not give the host's bits."""
    told = {}
    for own in (True, False):
        monkeypatch.setattr(feeding, "has_own_decoders", lambda device, own=own: own)
        told[own] = [event.kind for event in feeding.decoding_told(True, CPU)]
    assert told == {True: ["phase"], False: ["warning"]}
    assert feeding.decoding_told(False, CPU) == []


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_each_batch_is_that_of_the_record(layout):
    feed = Feed(RECORD, CPU, layout)
    for i, (batch, fed) in enumerate(zip(stream(4), feed.stream(stream(4)), strict=True)):
        right = normalize(batch.pixels.numpy(), RECORD)
        assert np.array_equal(fed.images.numpy(), right)
        assert fed.images.is_contiguous(memory_format=layout)
        assert np.array_equal(batch.images.numpy(), right)
        assert fed.labels.tolist() == [i]


def test_the_time_of_a_step_is_not_that_of_its_compilation(monkeypatch):
    """The first report is of steps that were compiled, too."""
    now = 0.0
    monkeypatch.setattr(metering.time, "perf_counter", lambda: now)
    schedule = Schedule(recipe=recipe(Path("data")), steps_per_epoch=4)
    world, feed = World(device=CPU), Feed(RECORD, CPU, torch.contiguous_format)
    meter = metering.Meter(schedule, world, TrainState(), feed, silent)
    for step, seconds in enumerate((20.0, 0.5, 0.5, 0.6, 0.6), 1):
        now += seconds
        meter.add(step, 0.1, torch.tensor([1.0, 0.0]))
        assert meter.step_s == (20.0 if step < 3 else 0.5)


def test_an_error_comes_at_its_batch():
    fed = Feed(RECORD, CPU, torch.contiguous_format).stream(stream(5, fail_at=2))
    assert [next(fed).labels.item(), next(fed).labels.item()] == [0, 1]
    with pytest.raises(DataError, match="cannot be decoded"):
        next(fed)


def test_what_is_waited_is_told(monkeypatch):
    now_s = [0.0]

    def passes(seconds):
        now_s[0] += seconds

    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    monkeypatch.setattr("time.sleep", passes)
    feed = Feed(RECORD, CPU, torch.contiguous_format)
    for _ in feed.stream(stream(4, each_s=0.02)):
        passes(0.03)  # the step
    assert feed.waited_s == pytest.approx(4 * 0.02)


def test_threads_that_load(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    gpu = torch.device("cuda", 0)
    assert loading_threads(None, World(device=gpu)) == 16
    assert loading_threads(None, World(device=gpu, size=8, local_size=4)) == 4
    assert loading_threads(3, World(device=gpu)) == 3
    assert loading_threads(None, World(device=CPU)) == 0


def test_a_validation_leaves_jpeg_files_to_the_device(tmp_path, monkeypatch):
    """A stand-in for the GPU's decoder gives the host's pixels, cut where the host cuts them."""
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    generator = np.random.default_rng(0)
    for number in range(13):
        folder = tmp_path / "pictures" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (30, 40, 3), np.uint8)
        name = folder / f"{number}.{'png' if number == 4 else 'jpg'}"
        assert cv2.imwrite(str(name), pixels)
    settings = ImportSettings(size=24, crop=16, holdout=0.0, store="original")
    dataset = import_images(tmp_path / "pictures", tmp_path / "set", settings)
    record, decoded = dataset.preprocess, []

    def decoder(*_):
        def call(contents, frames):
            decoded.extend(frames)
            return torch.from_numpy(np.stack([fitted(content, record) for content in contents]))

        return call

    monkeypatch.setattr(feeding, "_decoder", decoder)
    monkeypatch.setattr(feeding, "require_decoding", lambda *given, fix: None)
    made = Feed(record, CPU, torch.contiguous_format, decodes=True)
    weights = torch.randn(3 * 16 * 16, 3, generator=torch.Generator().manual_seed(0))

    def rows(**how):
        return predict_split(
            lambda batch: made(batch).images.flatten(1) @ weights, dataset.train, record, 3,
            batch_size=4, workers=2, **how,
        )  # fmt: skip

    expected = rows()
    assert not decoded
    monkeypatch.setattr(loading, "fitted", None)  # the PNG file is decoded by a process there, too
    np.testing.assert_array_equal(rows(decodes=True), expected)
    assert len(decoded) == 12
