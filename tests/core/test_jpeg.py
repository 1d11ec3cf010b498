"""Which JPEG files a GPU may decode."""

from __future__ import annotations

import io

import cv2
import numpy as np
import pytest
from PIL import Image

from tessella.core.jpeg import Frame, frame_of

RNG = np.random.default_rng(0)


def jpeg(height: int = 21, width: int = 34, mode: str = "RGB", **how) -> bytes:
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    out = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, shape, np.uint8), mode).save(out, "JPEG", **how)
    return out.getvalue()


@pytest.mark.parametrize(
    ("subsampling", "across", "down", "chroma"),
    [("4:4:4", 1, 1, (21, 34)), ("4:2:2", 2, 1, (21, 17)), ("4:2:0", 2, 2, (11, 17))],
)
def test_frames(subsampling, across, down, chroma):
    frame = frame_of(jpeg(subsampling=subsampling))
    assert frame == Frame(21, 34, across, down)
    assert frame.chroma == chroma


def test_grey():
    frame = frame_of(jpeg(mode="L"))
    assert frame == Frame(21, 34, 0, 0)
    assert frame.chroma == (0, 0)


@pytest.mark.filterwarnings("ignore:'mode' parameter:DeprecationWarning")
def test_what_the_host_decodes():
    turned = Image.Exif()
    turned[0x0112] = 6
    picture = RNG.integers(0, 256, (20, 30, 3), np.uint8)
    upright = (cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440)
    large = bytearray(jpeg())
    frame = large.index(b"\xff\xc0")
    large[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # height and width
    others = {
        "progressive": jpeg(progressive=True),
        "may be turned": jpeg(exif=turned),
        "four inks": jpeg(mode="CMYK"),
        "halved downwards alone": cv2.imencode(".jpg", picture, upright)[1].tobytes(),
        "RGB by name": jpeg(keep_rgb=True),
        "of grey samples in twos": jpeg(mode="L", subsampling="4:2:0"),
        "narrow": jpeg(width=4),
        "large by its header": bytes(large),
        "a PNG": cv2.imencode(".png", picture)[1].tobytes(),
        "nothing": b"",
    }
    assert {name for name, content in others.items() if frame_of(content)} == set()


def test_adobes_marker():
    """It may say that three components are no YCbCr, which libjpeg believes."""
    plain = jpeg()
    for transform, wanted in ((0, None), (1, Frame(21, 34, 2, 2))):
        segment = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])
        without_jfif = plain[:2] + segment + plain[20:]
        assert plain[2:4] == b"\xff\xe0"
        with Image.open(io.BytesIO(without_jfif)) as picture:
            assert picture.info["adobe_transform"] == transform
        assert frame_of(without_jfif) == wanted


def test_any_cut_and_any_byte():
    content = jpeg()
    head = content.index(b"\xff\xda")
    assert all(frame_of(content[:end]) is None for end in range(head + 4))
    for place in range(2, head):
        for value in (0, 255, content[place] ^ 1):
            changed = content[:place] + bytes([value]) + content[place + 1 :]
            frame = frame_of(changed)
            assert frame is None or min(frame.height, frame.width) > 0
