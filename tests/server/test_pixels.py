"""A plan that takes images as bytes behind the server: UINT8 tensors, and encoded files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tessella as ts
from tessella.core.spec import TensorSpec
from tessella.server import Server
from tessella.server.repository import Repository
from tests.support.engines import RECORD, WEIGHT, expected_scores
from tests.support.pictures.encoded import noise, saved

PICTURE = saved(Image.fromarray(noise(13, 21, 3)), "PNG")


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path: Path = tmp_path_factory.mktemp("plans") / "flowers.plan"
    module = nn.Sequential(nn.Flatten(), nn.Linear(192, 4, bias=False)).eval()
    with torch.no_grad():
        module[1].weight.copy_(torch.from_numpy(WEIGHT).T)
    image = TensorSpec(name="image", dtype="float32", shape=(1, 3, 8, 8))
    ts.compile(
        module, inputs=[image], batch=(1, 2, 4), target="cpu", input="uint8", preprocess=RECORD
    ).save(path)
    models = Repository({"flowers": path})
    models.load_all()
    with Server(models) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        yield client


def test_it_says_what_it_takes(http: httpx.Client) -> None:
    (image,) = http.get("/v2/models/flowers").json()["inputs"]
    assert (image["datatype"], image["shape"]) == ("UINT8", [-1, 8, 8, 3])


def test_bytes_of_pixels(http: httpx.Client) -> None:
    pixels = np.stack([RECORD.pixels(PICTURE), RECORD.pixels(PICTURE)[::-1]])
    body = json.dumps({"inputs": [{
        "name": "image", "datatype": "UINT8", "shape": [2, 8, 8, 3],
        "parameters": {"binary_data_size": pixels.nbytes},
    }]}).encode()  # fmt: skip
    answer = http.post(
        "/v2/models/flowers/infer",
        content=body + pixels.tobytes(),
        headers={"Inference-Header-Content-Length": str(len(body))},
    ).json()
    scores = np.array(answer["outputs"][0]["data"]).reshape(2, 4)
    scaled = np.stack([RECORD(PICTURE), RECORD(PICTURE)[:, ::-1]])
    np.testing.assert_allclose(scores, expected_scores(scaled), rtol=1e-4, atol=1e-5)
    raw = http.post("/v2/models/flowers/infer", content=pixels[:1].tobytes(),
                    headers={"Inference-Header-Content-Length": "0"})  # fmt: skip
    assert raw.status_code == 200
    floats = body.replace(b"UINT8", b"FP32 ")
    wrong = http.post("/v2/models/flowers/infer", content=floats + pixels.tobytes(),
                      headers={"Inference-Header-Content-Length": str(len(floats))})  # fmt: skip
    assert wrong.status_code == 400


def test_a_file_is_classified(http: httpx.Client) -> None:
    answer = http.post("/v2/models/flowers/classify?top=1", content=PICTURE)
    ((best,),) = answer.json()["predictions"]
    scores = expected_scores(RECORD(PICTURE)[None])[0]
    assert best["index"] == int(scores.argmax())
