"""Encoded images: the plan's own preprocessing, classification with labels, and hostile files."""

from __future__ import annotations

import base64
import io
import struct
import zlib

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tessella.server import Limits, Server
from tessella.server.classification import best, ranked
from tests.support.engines import LABELS, RECORD, Scores, expected_scores, repository

PIXELS = np.random.default_rng(4).integers(0, 256, size=(13, 21, 3), dtype=np.uint8)


def png(pixels: np.ndarray = PIXELS) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def reference(files: list[bytes]) -> np.ndarray:
    return expected_scores(np.stack([RECORD(f) for f in files]))


def order(scores: np.ndarray) -> list[int]:
    return np.argsort(-scores).tolist()


def test_a_raw_body_is_classified(http: httpx.Client) -> None:
    answer = http.post("/v2/models/flowers/classify?top=2", content=png())
    scores = reference([png()])[0]
    (found,) = answer.json()["predictions"]
    assert [p["index"] for p in found] == order(scores)[:2]
    assert [p["label"] for p in found] == [LABELS[i] for i in order(scores)[:2]]
    np.testing.assert_allclose([p["score"] for p in found], np.sort(scores)[::-1][:2], rtol=1e-4)
    softmax = torch.from_numpy(np.sort(scores)[::-1].astype(np.float64)).softmax(0)
    np.testing.assert_allclose([p["probability"] for p in found], softmax[:2], rtol=1e-4)


def test_uploaded_files_are_classified_in_order(http: httpx.Client) -> None:
    files = [png(), png(PIXELS[::-1].copy())]
    parts = [("image", (f"../../{i}.png", f, "image/png")) for i, f in enumerate(files)]
    answer = http.post("/v2/models/flowers/classify", files=parts, data={"note": "x"})
    found = answer.json()["predictions"]
    assert [[p["index"] for p in f] for f in found] == [order(s) for s in reference(files)]


@pytest.mark.parametrize(
    "query", ["top=0", "top=-1", "top=x", "top=1e3", "top=٣", "top=" + "9" * 30]
)
def test_top_is_a_number(http: httpx.Client, query: str) -> None:
    answer = http.post(f"/v2/models/flowers/classify?{query}", content=png())
    assert answer.status_code == 400
    assert "top is not a number" in answer.json()["error"]


def test_base64_in_json(http: httpx.Client) -> None:
    files = [png(), png(PIXELS[:8, :8].copy())]
    data = [base64.b64encode(f).decode() for f in files]
    entry = {"name": "image", "datatype": "BYTES", "shape": [2], "data": data}
    wanted = {"name": "scores", "parameters": {"classification": 1}}
    answer = http.post(
        "/v2/models/flowers/infer", json={"inputs": [entry], "outputs": [wanted]}
    ).json()
    output = answer["outputs"][0]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 1])
    top = [order(s)[0] for s in reference(files)]
    assert [t.split(":", 2)[1:] for t in output["data"]] == [[str(i), LABELS[i]] for i in top]


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        crc = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (b"", "empty"),
        (b"<svg onload=alert(1)>", "not an image"),
        (png()[:-40], "read"),
        (bomb(9_000, 9_000), "more than 67,108,864 pixels"),
        (bomb(30_000, 30_000), "more than 67,108,864 pixels"),
        (bomb(1 << 30, 1 << 30), "pixels"),
        (b"II*\0" + bytes(100), "read"),
    ],
)
def test_hostile_files(http: httpx.Client, file: bytes, what: str) -> None:
    answer = http.post("/v2/models/flowers/classify", content=file)
    assert answer.status_code == 400, answer.text
    assert what in answer.json()["error"]
    assert http.post("/v2/models/flowers/classify", content=png()).status_code == 200


def test_one_bad_file_names_itself(http: httpx.Client) -> None:
    parts = [("image", png()), ("image", b"no"), ("image", png())]
    answer = http.post("/v2/models/flowers/classify", files=parts)
    assert answer.status_code == 400
    assert "image[1]" in answer.json()["error"]


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"--x\r\n"),
        ("multipart/form-data; boundary=x", b"nonsense"),
        ("multipart/form-data; boundary=x", b"--x--\r\n"),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n',
        ),
    ],
)
def test_multipart_that_holds_no_file(http: httpx.Client, content_type: str, body: bytes) -> None:
    answer = http.post(
        "/v2/models/flowers/classify", content=body, headers={"Content-Type": content_type}
    )
    assert answer.status_code == 400, answer.text
    assert "multipart" in answer.json()["error"]


def test_many_small_files_that_would_fill_the_memory() -> None:
    limits = Limits(body_bytes=100_000)
    parts = [("image", png(PIXELS[:1, :1].copy()))] * 131  # 131 × 768 bytes unfolded
    with Server(repository({"flowers": Scores()}, limits=limits), limits=limits) as server:
        url = f"{server.url}/v2/models/flowers/classify"
        assert httpx.post(url, files=parts[:130], verify=False).status_code == 200
        answer = httpx.post(url, files=parts, verify=False)
    assert answer.status_code == 400
    assert "at most 130 samples" in answer.json()["error"]


def test_a_model_without_an_image_input(http: httpx.Client) -> None:
    answer = http.post("/v2/models/pair/classify", content=png())
    assert answer.status_code == 400
    assert "does not take one image" in answer.json()["error"]


def test_the_best_classes() -> None:
    scores = np.array([[0.1, 0.7, 0.7, np.nan], [3, -1, np.inf, 2]], np.float32)
    assert best(scores, 3).tolist() == [[1, 2, 0], [2, 0, 3]]
    assert best(scores, 99).shape == (2, 4)
    assert ranked(scores[:, :2], 1, ("a", "b:c")) == [["0.699999988:1:b:c"], ["3:0:a"]]
    assert ranked(scores[:, :2], 1, ("too", "many", "labels")) == [["0.699999988:1"], ["3:0"]]
    assert ranked(np.array([[1, 5]], np.int32), 1, ()) == [["5:1"]]
    assert best(np.arange(12).reshape(1, 3, 4), 1).tolist() == [[11]]
