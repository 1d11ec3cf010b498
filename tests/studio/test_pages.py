"""The pages as HTML and the pictures as PNG, over HTTP from a running studio."""

import io
import re

import httpx
import numpy as np
import pytest
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.core.preprocess import Preprocess, decode, fit, read_pixels
from tests.studio.made import HOSTILE

PAGES = (
    "/",
    "/data",
    "/data?dataset=datasets/digits",
    "/train",
    "/train?dataset=datasets/digits&run=runs/first",
    "/monitor",
    "/monitor?run=runs/second",
    "/explore",
    "/explore?run=runs/first",
    "/plan",
    "/plan?plan=plans/digits.plan",
    "/plan?source=runs/first",
)


@pytest.mark.parametrize("path", PAGES)
def test_every_page_renders_escaped_and_asks_no_other_machine(client, path):
    response = client.get(path)
    assert response.status_code == 200
    assert "What went wrong" not in response.text
    assert "<img src=x" not in response.text
    outside = set(re.findall(r"""["'(=]\s*(?:https?:)?//[^"')\s]+""", response.text))
    assert not {u for u in outside if "www.w3.org" not in u and "127.0.0.1" not in u}


@pytest.mark.parametrize("path", [*PAGES, "/pictures/example", "/static/studio.js", "/nowhere"])
def test_no_page_without_the_token(studio, path):
    response = httpx.get(studio.url + path)
    assert response.status_code == 401
    assert "digits" not in response.text


def test_the_socket_is_closed_to_strangers(studio, client):
    url = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"
    assert httpx.get(studio.url + url).status_code == 401
    assert client.get(url).status_code == 200
    assert client.post(url, headers={"origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "path", ["/data?dataset=../../etc", "/monitor?run=/etc", "/plan?plan=plans/broken.plan"]
)
def test_a_bad_reference_is_told_in_words(client, path):
    response = client.get(path)
    assert response.status_code == 500
    assert "What went wrong" in response.text
    assert "Traceback" not in response.text


def test_a_run_without_a_checkpoint_is_not_explored_as_another_one(client):
    assert "There is no checkpoint yet" in client.get("/explore?run=runs/none").text
    assert "There is no checkpoint yet" not in client.get("/explore?run=runs/first").text


def test_a_thumbnail_is_the_stored_image(client, studio):
    dataset = Dataset(studio.root / "datasets" / "digits")
    query = {"dataset": "datasets/digits", "split": "val", "index": 7}
    response = client.get("/pictures/example", params=query)
    assert response.headers["content-type"] == "image/png"
    stored = decode(dataset.val[7].content, dataset.preprocess)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(response.content))), stored[:, :, 0])


@pytest.mark.parametrize(
    "query",
    [
        {"dataset": "../x", "split": "val", "index": 0},
        {"dataset": "datasets/digits", "split": "val", "index": 100_000},
        {"dataset": "datasets/digits", "split": "../train", "index": 0},
    ],
)
def test_a_wrong_thumbnail_is_an_error_with_words(client, query):
    response = client.get("/pictures/example", params=query)
    assert response.status_code == 400
    assert "Traceback" not in response.json()["error"]


@pytest.mark.parametrize("name", ["..%2f..%2ftoken", "x.png%00", "layers.json", "..%2ftoken.png"])
def test_own_pictures_are_pictures_only(client, name):
    response = client.get(f"/pictures/own/layers/key/{name}")
    assert response.status_code in (400, 404)


@pytest.mark.parametrize("mode", ["squash", "crop", "fill", "half_crop"])
def test_the_resize_preview_is_what_an_import_stores(client, tmp_path, mode):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (60, 100, 3), dtype=np.uint8)
    path = tmp_path / "wide.png"
    Image.fromarray(pixels).save(path)
    query = {"source": f"path:{path}", "height": 32, "width": 40, "mode": mode, "channels": 1}
    shown = np.asarray(Image.open(io.BytesIO(client.get("/pictures/resize", params=query).content)))
    record = Preprocess(height=32, width=40, channels=1, resize=mode)
    expected = fit(decode(path.read_bytes(), record), record)
    assert read_pixels(path.read_bytes()).shape == (60, 100, 3)
    assert np.array_equal(shown, expected[:, :, 0])


def test_a_hostile_class_is_only_text(client):
    text = client.get("/data?dataset=datasets/digits").text
    assert HOSTILE not in text
    assert "onerror=alert(1)" in text  # it is there, as text
