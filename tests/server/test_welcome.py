"""What people see first: the pages, and lines of curl that work as they stand."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from tessella.server import Server
from tests.support.engines import LABELS, Echo, Pair, Scores, expected_scores, repository

README = Path(__file__).parents[2] / "README.md"
TOKEN = "a-long-and-random-token"
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A file of the name that the lines have."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def run(line: str, folder: Path, **environment: str) -> dict[str, object]:
    """The JSON that a shell command prints."""
    answer = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        timeout=60,
        check=True,
    )
    return json.loads(answer.stdout)


def seen(picture: Path) -> np.ndarray:
    pixels = np.asarray(Image.open(picture)).transpose(2, 0, 1)[None] / 255
    return (pixels - 0.5) / 0.25


@pytest.mark.parametrize("token", [None, TOKEN])
def test_each_model_s_line_works_as_it_stands(token: str | None, picture: Path) -> None:
    models = repository({"flowers": Scores(), "pair": Pair(), "echo": Echo()})
    access = {"Authorization": f"Bearer {token}"} if token else {}
    with (
        Server(models, token=token) as server,
        httpx.Client(base_url=server.url, headers=access, timeout=60) as http,
    ):
        shown = http.get("/v2/models").json()["models"]
        page = http.get("/").text
        lines = {model["name"]: model["curl"] for model in shown}
        assert list(lines) == ["flowers", "pair", "echo"]
        assert [unescape(pre) for pre in re.findall(r"<pre>(.*?)</pre>", page)] == [*lines.values()]
        assert ("<form" in page) == (token is None)
        answers = {n: run(line, picture.parent, TOKEN=TOKEN) for n, line in lines.items()}
    assert shown[0]["labels"] == list(LABELS)
    best = int(expected_scores(seen(picture))[0].argmax())
    assert answers["flowers"]["predictions"][0][0]["label"] == LABELS[best]
    assert answers["pair"]["outputs"][0]["data"] == [0] * 6
    assert len(answers["echo"]["outputs"]) == len(Echo.NAMES)


def test_the_readme_s_line_classifies_a_picture(picture: Path) -> None:
    lines = [line for line in README.read_text().splitlines() if line.startswith("curl ")]
    assert len(lines) == 1
    with Server(repository({"flowers": Scores()})) as server:
        line = lines[0].replace("localhost:8000", server.url).replace("photo.jpg", str(picture))
        answer = run(line, picture.parent)
    assert len(answer["predictions"][0]) == 3


def test_pages_escape_what_a_plan_s_author_wrote(picture: Path) -> None:
    hostile = Scores()
    hostile.labels = ("<script>alert(1)</script>", "b", "c", "d")
    hostile.inputs = (replace(hostile.inputs[0], name="'; rm <b> $(id)"),)
    hostile.preprocess = None
    with Server(repository({"flowers": hostile})) as server:
        page = httpx.get(server.url)
        (model,) = httpx.get(f"{server.url}/v2/models").json()["models"]
        docs = httpx.get(f"{server.url}/docs")
        odd = httpx.get(server.url, headers={"Host": "localhost:<b>$(id)"})
    assert "<script" not in page.text
    assert "<b>" not in page.text + odd.text
    for answer in (page, docs):
        assert answer.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "/v2/models/{model}/infer" in docs.text
    sent = subprocess.run(
        ["bash", "-c", model["curl"].partition("|")[0]], capture_output=True, check=True
    ).stdout
    header = json.loads(sent[: len(sent) - 768])
    assert header["inputs"][0]["name"] == hostile.inputs[0].name


@pytest.mark.parametrize("binary", [True, False])
def test_scores_come_with_labels_when_asked(http: httpx.Client, binary: bool) -> None:
    entry = {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "data": [0.5] * 192}
    for asked in (True, False):
        parameters = {"labels": asked, "binary_data_output": binary}
        answer = http.post(
            "/v2/models/flowers/infer", json={"inputs": [entry], "parameters": parameters}
        )
        length = int(answer.headers.get("inference-header-content-length", len(answer.content)))
        document = json.loads(answer.content[:length])
        assert document.get("parameters") == ({"labels": list(LABELS)} if asked else None)
    wrong = {"inputs": [entry], "parameters": {"labels": "yes"}}
    assert http.post("/v2/models/flowers/infer", json=wrong).status_code == 400


def test_what_is_not_there_says_where_to_look() -> None:
    with (
        Server(repository({"flowers": Scores()})) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for path in ("/models", "/v2/models/roses"):
            answer = http.get(path)
            assert answer.status_code == 404
            assert "GET /v2/models" in answer.json()["error"]
