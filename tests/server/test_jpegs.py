"""JPEG files that are decoded together beside the engine: the host's answers, each its own file.

Here the host plays the GPU; ``tests/gpu/test_pictures.py`` has the real one.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tessella.core.errors import InputError, KernelError, ServeError, UsageError
from tessella.core.jpeg import Frame
from tessella.core.task import TaskRecord
from tessella.device.nvjpeg import _address
from tessella.server import Repository, Server, decoding_process
from tessella.server.jpegs import (
    END,
    MOST_TOGETHER,
    Decoded,
    Files,
    JpegQueue,
    _read,
    decoder_for,
    frames_of,
)
from tessella.server.short_way import ShortPicture, ShortWay
from tests.support.decoding import HostPlays
from tests.support.engines import RECORD, Scores, expected_scores, repository
from tests.support.plans.linear import linear_plan

pytestmark = pytest.mark.timeout(280)
ROOT = Path(__file__).parents[2]


def jpeg(seed: int, shape: tuple[int, ...] = (13, 21, 3)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=90)
    return out.getvalue()


def damaged(seed: int) -> bytes:
    """A file whose header is sound, and that whoever decodes here will refuse."""
    return jpeg(seed)[:-2] + b"damaged\xff\xd9"


class Decoding:
    """The host's pixels; and how many files it was given at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def __call__(self, files: Sequence[bytes], frames: Sequence[Frame] | None) -> np.ndarray:
        self.sizes.append(len(files))
        assert self.may_go.wait(60)
        frames = frames or _read(files)
        if any(b"damaged" in bytes(content) for content in files):
            raise KernelError("nvJPEG cannot decode a picture of this batch", seen="status 5")
        sizes = [Image.open(io.BytesIO(content)).size[::-1] for content in files]
        assert [frame[:2] for frame in frames] == sizes
        return np.stack([RECORD(bytes(content)) for content in files])


def in_words(http: httpx.Client, content: bytes) -> httpx.Response:
    return http.post("/v2/models/flowers/classify?top=4", content=content)


def is_right(answer: httpx.Response, content: bytes) -> bool:
    (found,) = answer.json()["predictions"]
    scores = [one["score"] for one in sorted(found, key=lambda one: one["index"])]
    return np.allclose(scores, expected_scores(RECORD(content)[None])[0], rtol=1e-3, atol=1e-3)


@pytest.fixture
def decoding() -> Decoding:
    return Decoding()


@pytest.fixture
def models(decoding: Decoding) -> Repository:
    return repository({"flowers": Scores()}, decoder_for=lambda engine: decoding)


@pytest.fixture
def http(models: Repository) -> Iterator[httpx.Client]:
    with Server(models) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def posted(
    http: httpx.Client, files: list[bytes], decoding: Decoding, models: Repository
) -> list[httpx.Response]:
    """The answers to files that all have come before the first is decoded."""
    decoding.may_go.clear()
    model: Any = models.get("flowers")
    with ThreadPoolExecutor(len(files)) as clients:
        answers = clients.map(lambda content: in_words(http, content), files)
        while sum(decoding.sizes) + len(model.jpegs._waiting) < len(files):
            time.sleep(0.005)
        decoding.may_go.set()
        return list(answers)


def test_files_that_wait_are_decoded_together(
    http: httpx.Client, decoding: Decoding, models: Repository
) -> None:
    files = [jpeg(seed, (10 + seed, 12, 3)) for seed in range(12)]
    answers = posted(http, files, decoding, models)
    assert all(is_right(*pair) for pair in zip(answers, files, strict=True))
    assert sum(decoding.sizes) == 12
    assert len(decoding.sizes) <= 3, "the first went alone, and the others have waited for it"
    stages = answers[-1].headers["server-timing"]
    assert float(stages.split("decode;dur=")[1].split(",")[0]) > 0
    (told,) = http.get("/v2/models").json()["models"]
    assert told["jpeg_decoder"] == "gpu_kernels", "none that makes the host's bits"


def test_a_damaged_file_fails_alone(
    http: httpx.Client, decoding: Decoding, models: Repository
) -> None:
    files = [jpeg(0), damaged(1), jpeg(2), damaged(3)]
    answers = posted(http, files, decoding, models)
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    assert "cannot be decoded" in answers[1].json()["error"]
    assert is_right(answers[0], files[0])
    assert is_right(answers[2], files[2])


@pytest.mark.parametrize("kind", ["PNG", "cut", "progressive", "turned"])
def test_what_no_gpu_decodes_is_the_hosts(
    http: httpx.Client, decoding: Decoding, kind: str
) -> None:
    out, picture = io.BytesIO(), Image.open(io.BytesIO(jpeg(5)))
    exif = Image.Exif()
    exif[0x0112] = 6
    given = {"progressive": {"progressive": True}, "turned": {"exif": exif}}
    picture.save(out, "PNG" if kind == "PNG" else "JPEG", **given.get(kind, {}))
    content = out.getvalue()[: -40 if kind == "cut" else None]
    answer = in_words(http, content)
    if kind == "cut":
        assert answer.status_code == 400
    else:
        assert is_right(answer, content)
    assert decoding.sizes == []


PATHS = (
    "classify",
    "classify?top=2",
    "classify?top=0",
    "classify?timeout=60000000&top=1",
    "segment",
)


def test_pictures_take_the_short_way_to_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second with a head on, whatever their lengths are; what is unusual does not."""
    tall, whole = jpeg(7, (31, 12, 3)), jpeg(8)
    out = io.BytesIO()
    Image.open(io.BytesIO(whole)).save(out, "PNG")
    bodies = [whole, tall, damaged(1), whole[:-40], out.getvalue(), b"", b"x", tall]
    ran, run = list[bool](), ShortPicture.run

    def runs(self: ShortPicture) -> bool:
        ran.append(run(self))
        return ran[-1]

    def told() -> tuple[list[Any], Any]:
        engines = {"flowers": Scores()}
        models = repository(engines, decoder_for=lambda engine: Decoding())
        with Server(models) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            said = [
                http.post(f"/v2/models/flowers/{path}", content=content)
                for path in PATHS
                for content in bodies
            ]
            form = [http.post("/v2/models/flowers/classify", files={"a": whole}) for _ in range(3)]
            stats = http.get("/v2/models/flowers/stats").json()["model_stats"][0]
            engines["flowers"] = other = Scores()
            numbers = {"means": (0.0,) * 4, "deviations": (1.0,) * 4}
            task = TaskRecord(name="regression", score="r2", numbers=numbers)
            other.manifest = replace(other.manifest, task=task)
            assert http.post("/v2/repository/models/flowers/load").status_code == 200
            form.append(http.post("/v2/models/flowers/classify", content=whole))
            assert form[-1].status_code == 404
        kept = [(a.status_code, sorted(a.headers), a.text) for a in (*said, *form)]
        counts = {k: stats["inference_stats"][k]["count"] for k in ("success", "fail", "queue")}
        return kept, counts

    monkeypatch.setattr(ShortPicture, "run", runs)
    short = told()
    assert ran.count(True) == 9, "of three paths: the tall one, the damaged one, the tall one"
    monkeypatch.setattr(ShortWay, "learn", lambda *_: None)
    ran.clear()
    assert told() == short
    assert not ran


@pytest.mark.parametrize("content", [b"a file", memoryview(bytearray(b"its end: a file"))[9:]])
def test_a_decoder_is_told_where_a_file_lies(content: bytes | memoryview) -> None:
    assert ctypes.string_at(_address(content), 6) == b"a file"


def test_a_decoder_remembers_layouts_that_are_small() -> None:
    decoders = pytest.importorskip("tessella.kernels.pictures.to_host", reason="needs Triton")
    decoder = decoders.HostDecoder.__new__(decoders.HostDecoder)  # but for the GPU's part
    decoder._record, decoder._layouts = RECORD, {}
    usual = (Frame(375, 500, 2, 2),) * MOST_TOGETHER
    first = decoder._layout(usual)
    assert decoder._layout(usual) is first
    decoder._layout((Frame(16, 64_000, 2, 2),))
    assert list(decoder._layouts) == [usual]
    for width in range(100, 100 + 2 * decoders.MOST_LAYOUTS):
        decoder._layout((Frame(20, width, 1, 1),))
        assert len(decoder._layouts) <= decoders.MOST_LAYOUTS


def test_no_more_wait_than_may() -> None:
    decoding, told = Decoding(), list[Decoded]()
    decoding.may_go.clear()
    queue = JpegQueue(decoding, most_waiting=3, threads=1)
    content = [jpeg(1)]

    def submit(client: int) -> Files:
        request = Files(content, frames_of(content), told.append, client=client)
        queue.submit(request)
        return request

    submit(1)
    while not decoding.sizes:
        pass
    waiting = [submit(1) for _ in range(3)]
    with pytest.raises(ServeError, match="too many pictures") as refused:
        submit(1)
    assert refused.value.status == 503
    modest = submit(2)  # the last of who has most gives its place
    (given_up,) = told
    assert given_up.requests == [waiting.pop()]
    assert isinstance(given_up.error, ServeError)
    decoding.may_go.set()
    queue.close()
    # in equal parts, however many wait
    assert [one for decoded in told[2:] for one in decoded.requests] == [
        waiting[0],
        modest,
        waiting[1],
    ]
    with pytest.raises(ServeError):
        submit(1)


def test_a_large_request_is_decoded_alone() -> None:
    decoding, told = Decoding(), list[np.ndarray]()
    decoding.may_go.clear()
    queue = JpegQueue(decoding, most_waiting=9, threads=1)
    content = jpeg(1)
    for count in (1, 2, MOST_TOGETHER + 5, 3):
        files = [content] * count
        queue.submit(Files(files, frames_of(files), lambda decoded: told.append(decoded.made())))
        while not decoding.sizes:
            pass
    decoding.may_go.set()
    queue.close()
    assert decoding.sizes == [1, 2, MOST_TOGETHER + 5, 3]
    assert [len(made) for made in told] == [1, 2, MOST_TOGETHER + 5, 3]


def test_only_a_gpu_decodes() -> None:
    engine: Any = Scores()
    engine.device = torch.device("cpu")
    with pytest.raises(UsageError, match="needs an NVIDIA GPU"):
        decoder_for("gpu")(engine)
    with pytest.raises(UsageError, match="host or the gpu"):
        decoder_for("cpu")  # type: ignore[arg-type]


# What the engine's process of the next test imports first: a process of the host plays the GPU.
CUSTOM = """
from tessella.server import decoding_process, repository
decoding_process.DecodingProcess.module = "tests.support.decoding"
decoding_process.THREADS = 1
decoding_process.require_decoding = lambda *of, **fix: None
repository.is_gpu = lambda target: True  # engines have threads, as beside a GPU
repository.PageLocked = lambda samples: None
"""


def test_acceptors_send_files_to_the_engine(tmp_path: Path) -> None:
    plan = linear_plan().save(tmp_path / "flowers.plan")
    (tmp_path / "sitecustomize.py").write_text(CUSTOM)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / "src", ROOT)))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.plans.linear", str(plan), "2", json.dumps({}), "gpu"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(8) as clients:
            files = [damaged(n) if n % 7 == 3 else jpeg(n, (9 + n, 14, 3)) for n in range(70)]
            coming = clients.map(lambda content: in_words(http, content), files)
            # nobody's files are lost when the plan is loaded again
            assert http.post("/v2/repository/models/flowers/load").status_code == 200
            answers = list(coming)
        for n, (answer, content) in enumerate(zip(answers, files, strict=True)):
            assert answer.status_code == (400 if n % 7 == 3 else 200), answer.text
            assert n % 7 == 3 or is_right(answer, content)
        assert "cannot be decoded" in answers[3].json()["error"]
        whole = answers[0].headers["server-timing"]
        assert float(whole.split("decode;dur=")[1].split(",")[0]) > 0
    finally:
        server.terminate()
        server.communicate(timeout=60)


def test_errors_are_the_clients() -> None:
    """A damaged file is told as the client's fault, through both kinds of server."""
    queue = JpegQueue(Decoding(), most_waiting=2)
    told: list[Decoded] = []
    queue.submit(Files([damaged(1)], frames_of([damaged(1)]), told.append))
    queue.close()
    with pytest.raises(InputError):
        told[0].made()


@pytest.mark.parametrize(("error", "calls", "told"), [
    (ServeError("it does not start", status=503), 1, [4]),
    (KernelError("nvJPEG cannot decode a picture of this batch"), 7, [1, 1, 1, 1]),
])  # fmt: skip
def test_a_batch_is_halved_for_a_file_s_fault_alone(
    error: Exception, calls: int, told: list[int]
) -> None:
    sizes, answers = list[int](), list[Decoded]()

    def decode(files: Sequence[bytes | memoryview], frames: Sequence[Frame]) -> np.ndarray:
        sizes.append(len(files))
        raise error

    queue = JpegQueue(decode, most_waiting=9, threads=0)
    content = [jpeg(1)]
    queue._work([Files(content, frames_of(content), answers.append)] * 4)
    assert len(sizes) == calls
    assert [len(decoded.requests) for decoded in answers] == told


@pytest.mark.parametrize("fails", ["_begin", "check"])
def test_threads_decode_where_processes_do_not(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails:
        inputs, device, preprocess = (SimpleNamespace(dtype="uint8"),), torch.device("cpu"), RECORD

    def refused(*_: Any) -> None:
        raise KernelError("it decodes otherwise than the host")

    monkeypatch.setattr(decoding_process, "require_decoding", lambda *_, **__: None)
    monkeypatch.setattr(decoding_process.DecodingProcess, "_begin", lambda _: None)
    monkeypatch.setattr(decoding_process.DecodingProcess, "ready", lambda _: None)
    monkeypatch.setattr(decoding_process.DecodingProcess, fails, refused)
    monkeypatch.setattr(decoding_process, "gpu_decodes", lambda engine: engine)
    engine = Fails()
    assert decoding_process.decodes_apart(engine) is engine  # type: ignore[arg-type]
    assert "otherwise than the host" in caplog.text


def test_a_decoding_process_that_a_file_ends_comes_again() -> None:
    process = HostPlays(RECORD, torch.device("cpu"), pixels=False)
    process.ready()
    process.check()
    process._record = replace(RECORD, mean=(0.9,) * len(RECORD.mean))
    with pytest.raises(KernelError, match="otherwise than the host"):
        process.check()
    process._record = RECORD

    def is_right(made: np.ndarray, files: list[bytes]) -> bool:
        return np.array_equal(made, np.stack([RECORD(content) for content in files]))

    files = [jpeg(n) for n in range(MOST_TOGETHER + 3)]
    kept = process(files[:5], None)[1:]  # a view keeps the place
    assert is_right(process(files, None), files), "more than there is room for at once"
    assert is_right(process(files[5:10], None), files[5:10]), "in another place"
    with pytest.raises(KernelError, match="status 5"):
        process([files[0], damaged(1)], None)
    with pytest.raises(KernelError, match="none that a GPU decodes"):
        process([files[0][:-2]], None)
    with pytest.raises(ServeError, match="has ended") as told:
        process([jpeg(1)[:-2] + b"the end" + END], None)
    assert (told.value.status, told.value.retry_after_s) == (503, 1)
    assert "exit status 7" in str(told.value)
    assert is_right(process(files[5:7], None), files[5:7])
    assert is_right(kept, files[1:5]), "its memory is that of the first process"
    beside = HostPlays(RECORD, torch.device("cpu"), pixels=False, beside=process)
    assert beside._process is process._process
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda one: one(files[7:9], None), (process, beside))
        assert all(is_right(pixels, files[7:9]) for pixels in made)
    ended = process._process
    ended.kill()
    ended.wait(20)
    for one in (beside, process):
        assert is_right(one(files[9:], None), files[9:]), "both have the next process"
    assert beside._process is process._process is not ended
    process._shared._module = "tests.support.no_such_module"
    for one in (beside, process, process._shared):
        one._end()
    assert process._process.wait(20) == 0, "nobody is there any more"
    with pytest.raises(ServeError, match="does not start") as told:
        process(files[:1], None)
    assert told.value.status == 503, "no fault of a client's"
