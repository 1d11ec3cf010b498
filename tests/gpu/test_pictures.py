"""JPEG files decoded on the GPU: the host's pixels, to the bit, where its own decoders work."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.artifacts.run import Augment
from tessella.core.errors import KernelError
from tessella.core.jpeg import frame_of
from tessella.core.preprocess import Preprocess, centre_crop, fitted, normalize
from tessella.data import ImportSettings, loading
from tessella.data.importing import import_images
from tessella.device.nvjpeg import JpegDecoder, has_nvjpeg
from tessella.kernels.pictures.decode import PictureDecoder
from tessella.server.decoding_process import DecodingProcess
from tessella.server.jpegs import frames_of, gpu_decode
from tessella.training.evaluate import predict_split
from tessella.training.feed import Feed
from tests.support.changed import CASES, most_off, off_the_host

DEVICE = torch.device("cuda")
SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not has_nvjpeg(), reason="needs nvJPEG"),
]


def files(count: int) -> list[bytes]:
    """Noise and gradients of many sizes, qualities and samplings; some grey."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(count):
        height, width = (int(side) for side in rng.integers(9, 700, 2))
        slope = np.add.outer(np.arange(height), np.arange(width))[:, :, None] * rng.random(3)
        pixels = slope + rng.normal(0, rng.choice([2, 60]), (height, width, 3))
        picture = Image.fromarray((pixels % 256).astype(np.uint8))
        out = io.BytesIO()
        how = {"quality": int(rng.integers(20, 100)), "subsampling": SUBSAMPLINGS[number % 3]}
        if number % 8 == 7:
            picture, how = picture.convert("L"), {}
        picture.save(out, "JPEG", **how)
        made.append(out.getvalue())
    return made


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("resize", ["squash", "crop", "fill", "half_crop"])
def test_pixels_are_the_hosts(resize, channels):
    if JpegDecoder(DEVICE).backend != JpegDecoder.HARDWARE:
        pytest.skip("this GPU has no JPEG decoders of its own")
    record = Preprocess(height=120, width=200, channels=channels, resize=resize)
    some = files(64)
    made = PictureDecoder(record, DEVICE)(some, [frame_of(content) for content in some])
    assert made.is_cuda
    for content, pixels in zip(some, made.cpu().numpy(), strict=True):
        assert np.array_equal(pixels, fitted(content, record)), frame_of(content)


def test_kernels_that_decode_are_near():
    """On GPUs without decoders of their own the cosine transform rounds otherwise."""
    record = Preprocess(height=120, width=200, resize="crop")
    some = files(48)
    decoder = PictureDecoder(record, DEVICE, hardware=False)
    made = decoder(some, [frame_of(content) for content in some]).cpu().numpy()
    distance = [
        np.abs(pixels.astype(int) - fitted(content, record)).max()
        for content, pixels in zip(some, made, strict=True)
    ]
    assert max(distance) <= 8


def test_a_batch_is_decoded_in_parts(monkeypatch):
    record = Preprocess(height=32, width=32)
    some = files(20)
    frames = [frame_of(content) for content in some]
    whole = PictureDecoder(record, DEVICE)(some, frames)
    monkeypatch.setattr("tessella.kernels.pictures.decode.MOST_PIXELS", 400_000)
    assert torch.equal(PictureDecoder(record, DEVICE)(some, frames), whole)


def test_a_training_sees_the_same_batches(tmp_path, monkeypatch):
    """JPEG files and others mixed; cut, mirrored, and in the same order as decoded by the host."""
    monkeypatch.setattr(loading, "DECODE_ONCE_BYTES", 0)
    for number, content in enumerate(files(90)):
        folder = tmp_path / "pictures" / str(number % 3)
        folder.mkdir(parents=True, exist_ok=True)
        Path(folder / f"{number}.jpg").write_bytes(content)
        if number % 5 == 0:
            Image.open(io.BytesIO(content)).save(folder / f"{number}.png")
    settings = ImportSettings(size=64, crop=48, holdout=0.0, store="original")
    import_images(tmp_path / "pictures", tmp_path / "set", settings)
    dataset = Dataset(tmp_path / "set")
    feed = Feed(dataset.preprocess, DEVICE, torch.channels_last, decodes=True)

    def fed(decodes: bool) -> list[torch.Tensor]:
        stream = loading.batches(
            dataset.train,
            dataset.preprocess,
            batch_size=16,
            augment=Augment(flip=True),
            training=True,
            workers=3,
            for_gpu=True,
            decodes=decodes,
        )
        return [made.images.clone() for made in feed.stream(stream)]

    ours, hosts = fed(True), fed(False)
    exact = JpegDecoder(DEVICE).backend == JpegDecoder.HARDWARE
    for one, other in zip(ours, hosts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0 if exact else 0.2)
    answers = [
        predict_split(
            lambda batch: feed(batch).images.mean((2, 3)), dataset.train, dataset.preprocess, 3,
            batch_size=16, workers=3, decodes=decodes,
        )
        for decodes in (True, False)
    ]  # fmt: skip
    np.testing.assert_allclose(*answers, rtol=0, atol=1e-6 if exact else 0.2)


@pytest.mark.parametrize("pixels", [True, False])
@pytest.mark.parametrize(("crop", "apart"), [(None, False), ((40, 24), False), (None, True)])
def test_a_server_gives_the_network_what_the_host_does(pixels, crop, apart, monkeypatch):
    record = Preprocess(height=64, width=48, channels=3, crop=crop, mean=(0.4,), std=(0.2,))
    every = files(24)
    decode = (DecodingProcess if apart else gpu_decode)(record, DEVICE, pixels=pixels)
    kept = []
    for some in (every[:3], every, every[20:], every[5:17]):  # batches share their memory
        if len(some) == 12:  # in several parts
            monkeypatch.setattr("tessella.kernels.pictures.decode.MOST_PIXELS", 400_000)
        frames = frames_of(some)
        assert frames is not None
        fit = np.stack([centre_crop(fitted(content, record), record) for content in some])
        kept.append((decode(some, frames), fit if pixels else normalize(fit, record)))
    for made, wanted in kept:
        assert made.shape == wanted.shape
        assert made.dtype == wanted.dtype
        if JpegDecoder(DEVICE).backend == JpegDecoder.HARDWARE:
            assert np.array_equal(made, wanted)


@pytest.mark.parametrize("name", list(CASES))
def test_changes_are_the_hosts(name):
    assert off_the_host(name, DEVICE, count=64) < most_off(name)


def test_a_damaged_file_is_refused():
    content = files(1)[0]
    record = Preprocess(height=64, width=48, channels=3)
    place = content.index(b"\xff\xc4") + 4  # the table of a code, whose counts cannot be
    broken = content[:place] + b"\xff" * 17 + content[place + 17 :]
    frames = frames_of([broken])
    assert frames is not None
    with pytest.raises(KernelError):
        gpu_decode(record, DEVICE, pixels=True)([broken], frames)
    good = gpu_decode(record, DEVICE, pixels=True)([content], frames)
    assert np.abs(good[0].astype(int) - fitted(content, record)).max() <= 4
