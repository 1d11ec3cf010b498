"""The pages as HTML and the pictures as PNG, over HTTP from a running studio."""

import io
import itertools
import json
import re
import shlex
import shutil
import time
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tessella.artifacts.dataset import Dataset
from tessella.core.preprocess import Preprocess, decode, fit, read_pixels
from tessella.jobs.store import Store
from tessella.studio.theme import SITE
from tests.support.cli import context
from tests.support.pictures.encoded import png, saved
from tests.support.pictures.hostile import tiff_of
from tests.support.studio.browsing import PAGES
from tests.support.studio.workspaces import HOSTILE, make_dataset, make_front, make_run


@pytest.mark.parametrize("path", PAGES)
def test_every_page_renders_escaped_and_asks_no_other_machine(client, path):
    response = client.get(path)
    assert response.status_code == 200
    assert "What went wrong" not in response.text
    assert "<img src=x" not in response.text
    outside = set(re.findall(r"""["'(=]\s*(?:https?:)?//[^"')\s]+""", response.text))
    assert not {u for u in outside if "www.w3.org" not in u and "127.0.0.1" not in u}


def test_the_documents_are_a_click_away(client):
    """Where they were built: ``make check`` does, and ``make wheel`` takes them along."""
    there = SITE is not None
    assert ("/site/index.html" in client.get("/").text) == there
    page = client.get("/site/index.html")
    assert (page.status_code == 200) == there
    if there:
        assert 'src="http' not in page.text
        assert client.get("/site/tour.html").status_code == 200


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


BAD = {
    "/data?dataset=../../etc": "out of the workspace",
    "/data?dataset=datasets/none": "there is no",
    "/data?job=none": "no such job",
    "/data?like=datasets/none": "there is no",
    "/image?dataset=../../etc&split=val": "out of the workspace",
    "/image?dataset=datasets/digits&split=test": "no such split",
    "/image?dataset=datasets/digits&split=val&index=80": "no such image",
    "/image?dataset=datasets/digits&split=val&index=-1": "no such image",
    "/plan?like=plans/none.plan": "no such file",
    "/train?dataset=datasets/none": "there is no",
    "/train?run=runs/none": "There is no run",
    "/train?run=runs/first&epochs=inf": "epochs are a number",
    "/train?run=runs/first&epochs=-3": "epochs are a number",
    "/monitor?run=/etc": "out of the workspace",
    "/monitor?run=runs/none": "There is no run",
    "/monitor?job=none": "no such job",
    "/explore?run=runs/none": "There is no run",
    "/explore?run=runs/first&checkpoint=runs/first/checkpoints/step-9": "There is no checkpoint",
    "/plan?plan=plans/none.plan": "no such file",
    "/plan?plan=plans/broken.plan": "not a plan",
    "/plan?job=none": "no such job",
    "/diff?a=plans/digits.plan&b=plans/none.plan": "no such file",
    "/diff?a=plans/digits.plan&b=plans/broken.plan": "not a plan",
    "/compare?run=runs/first&run=runs/none": "There is no run",
    "/compare?group=none": "no sweep",
    "/search?sweep=sweeps/none": "no such file",
    "/search?sweep=../../etc": "out of the workspace",
    "/search?like=runs/first": "no such file",
    "/search?dataset=datasets/none": "there is no",
    "/evaluate?run=runs/none": "There is no run",
    "/evaluate?run=runs/first&split=none": "has no split",
    "/evaluate?run=runs/first&against=runs/none": "There is no checkpoint",
}


@pytest.mark.parametrize(("path", "words"), BAD.items())
def test_a_bad_reference_is_told_on_its_page_with_what_to_do(client, path, words):
    response = client.get(path)
    assert response.status_code == 404
    text = response.text
    assert "What went wrong" in text
    assert words.lower() in text.lower()
    assert re.search("(Choose|Open) ", text)
    assert "Traceback" not in text


@pytest.fixture
def damaged(studio):
    """Artifacts that were truncated or overwritten, beside those that are well."""
    root = studio.root
    runs = [root / "runs" / name for name in ("no-events", "no-checkpoint", "no-recipe")]
    for path in runs:
        make_run(path, dataset="datasets/digits", epochs=1, steps=2)
    data, front = root / "datasets" / "damaged", root / "plans" / "damaged.front"
    make_dataset(data)
    make_front(front, built_from="runs/first")
    plan = front.with_suffix(".plan")
    for path in (
        runs[0] / "events.jsonl", runs[1] / "checkpoints/step-00000002/checkpoint.json",
        runs[2] / "run.json", data / "dataset.json", front / "front.json", front / "0.plan",
    ):  # fmt: skip
        path.write_bytes(b'{"kind": 3,\n' + path.read_bytes()[:40] + b"\n\n")
    yield
    for path in (*runs, data, front):
        shutil.rmtree(path)
    plan.unlink()


def test_damage_breaks_no_page_and_is_told_where_it_matters(client, damaged):
    for path in PAGES:
        assert client.get(path).status_code == 200, path
    for path in (
        "/monitor?run=runs/no-events", "/monitor?run=runs/no-recipe",
        "/explore?run=runs/no-checkpoint", "/explore?run=runs/no-recipe",
        "/compare?run=runs/no-events", "/data?dataset=datasets/damaged",
        "/plan?plan=plans/damaged.front/0.plan",
    ):  # fmt: skip
        response = client.get(path)
        assert response.status_code == 404, path
        assert "What went wrong" in response.text
    assert "front.json is not valid JSON" in client.get("/plan?plan=plans/damaged.plan").text


def test_a_plan_of_a_search_shows_what_it_costs(client):
    text = client.get("/plan?plan=plans/small.plan").text
    for words in (
        "What precision buys", "41.2 dB", "answers changed of 80", "95 % lie between",
        "cannot resolve 3 points", "1  chosen", "plans%2Fsmall.front%2F0.plan",
    ):  # fmt: skip
        assert words in text, words
    assert "split=val&index=0" in text.replace("&amp;", "&").replace("\\u0026", "&")
    assert "Keep this plan as" not in text
    point = client.get("/plan?plan=plans/small.front/0.plan").text
    assert "Keep this plan as" in point


def test_a_trace_is_sent_and_nothing_else(client, studio):
    folder = studio.root / ".studio" / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{'ab' * 12}.json").write_text("{}")
    assert client.get(f"/pictures/trace/{'ab' * 12}").json() == {}
    for key in ("ab", "..%2f..%2ftoken", "cd" * 12):
        assert client.get(f"/pictures/trace/{key}").status_code == 404


def test_a_run_without_a_checkpoint_is_not_explored_as_another_one(client, studio):
    young = studio.root / "runs" / "young"
    make_run(young, dataset="datasets/digits", epochs=1, steps=2)
    shutil.rmtree(young / "checkpoints")
    assert "There is no checkpoint yet" in client.get("/explore?run=runs/young").text
    shutil.rmtree(young)
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


@pytest.mark.parametrize(
    "change",
    [
        {"channels": 1_000_000_000},
        {"channels": 0},
        {"channels": -1},
        {"height": 2_049},
        {"width": 0},
        {"crop": "axb"},
        {"crop": "0"},
        {"crop": "9" * 5_000},
        {"crop": "²"},
        {"crop": "8x8x8"},
        {"crop": "33x8"},
        {"source": "path:" + "x" * 5_000},
        {"source": "path:a\0b"},
        {"source": "path:/dev/zero"},
        {"source": "upload:" + "x" * 5_000},
        {"source": "nothing"},
    ],
)
def test_every_number_and_name_of_a_preview_has_bounds(client, tmp_path, change):
    path = tmp_path / "small.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    good = {"source": f"path:{path}", "height": 32, "width": 32, "mode": "crop", "crop": "24x28"}
    shown = client.get("/pictures/resize", params=good)
    assert np.asarray(Image.open(io.BytesIO(shown.content))).shape == (24, 28, 3)
    start = time.perf_counter()
    response = client.get("/pictures/resize", params=good | change)
    assert response.status_code == 400, response.text
    assert "Traceback" not in response.json()["error"]
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("digits", ["9" * 30, "9" * 5_000, "-1", "1e9", "٣"])
@pytest.mark.parametrize(
    "path",
    [
        "/pictures/example?dataset=datasets/digits&split=val&index={}",
        "/pictures/resize?source=x&height={}&width=8&mode=crop",
        "/pictures/resize?source=x&height=8&width=8&mode=crop&channels={}",
        "/pictures/own/layers/key/{}.png",
        "/data?dataset=datasets/digits&page={}",
        "/data?dataset=datasets/digits&label={}",
        "/data?dataset={}",
    ],
)
def test_numbers_and_names_of_any_length_break_nothing(client, path, digits):
    response = client.get(path.format(digits))
    if path.startswith("/pictures"):
        assert response.status_code in (400, 404, 422), response.text
    assert response.status_code < 500, response.text


def test_hostile_examples_are_errors_with_words(client, tmp_path):
    path = tmp_path / "x.tif"
    query = {"source": f"path:{path}", "height": 32, "width": 32, "mode": "crop"}
    for content, why in [
        (tiff_of(0, 2_000_000_000), "no pixels"),
        (png(9_000, 9_000, 8, 2, b""), "more than 67,108,864 pixels"),
    ]:
        path.write_bytes(content)
        response = client.get("/pictures/resize", params=query)
        assert response.status_code == 400
        assert why in response.json()["error"]


def test_a_large_upload_is_shown_smaller(client):
    content = saved(Image.new("RGB", (5_000, 20), (1, 2, 3)), "PNG")
    told = client.post("/api/uploads", params={"name": "wide.png", "nbytes": len(content)})
    upload = told.json()["id"]
    client.put(f"/api/uploads/{upload}", params={"offset": 0}, content=content)
    shown = client.get(f"/pictures/upload/{upload}")
    assert np.asarray(Image.open(io.BytesIO(shown.content))).shape == (7, 1_667, 3)


def test_a_hostile_class_is_only_text(client):
    text = client.get("/data?dataset=datasets/digits").text
    assert HOSTILE not in text
    assert "onerror=alert(1)" in text  # it is there, as text


# Options that name what a command makes; every other word with a slash in it is there already.
MADE = ("--out", "--trace", "--front", "--cache")


def shown_commands(page: str) -> list[list[str]]:
    """The words of every command of ours on a page."""
    found = re.findall(r'"(tessella (?:[^"\\]|\\.)*)"', page)
    return [shlex.split(json.loads(f'"{line}"'))[1:] for line in found]


def test_every_shown_command_runs_as_it_stands(client, studio):
    """Each is taken by the command line's own parser, and the files that it names are there."""
    verbs = set()
    ran = {word for job in Store(studio.root / "jobs.db").jobs() for word in job.argv}
    for path in PAGES:
        for words in shown_commands(client.get(path).text):
            verbs.add(words[0])
            context(words)
            for before, word in itertools.pairwise(words):
                name = word.rpartition("=")[2]
                if "/" in name and not name.startswith("{") and before not in MADE:
                    assert (studio.root / name).exists(), words
                if before == "--out" and name not in ran:
                    assert not (studio.root / name).exists(), words
    assert verbs == {
        "train", "sweep", "compile", "diff", "evaluate", "profile", "run", "serve", "verify"
    }  # fmt: skip
    served = client.get("/plan?plan=plans/digits.plan").text
    picture = re.search(r"--data-binary @(\S+?)[\"\\]", served)
    assert read_pixels((studio.root / picture[1]).read_bytes()).shape == (28, 28, 1)


MOST_BYTES = 400 << 20


def test_a_studio_that_showed_every_page_holds_no_torch_and_little_memory(client, studio):
    """Before: 670 MB at the start, all but 150 of them torch and its libraries."""
    for path in PAGES:
        assert client.get(path).status_code == 200
    assert "libtorch" not in Path(f"/proc/{studio.pid}/maps").read_text()
    assert psutil.Process(studio.pid).memory_info().rss < MOST_BYTES
