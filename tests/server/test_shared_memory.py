"""Shared memory: tritonclient's two clients, and regions that lie, shrink or are another's."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import cv2
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from tessella.core.errors import InputError, ServeError
from tessella.core.spec import TensorSpec
from tessella.server import Doors, Limits, Server
from tessella.server.shared_memory import BRIEF_BYTES, MOST_REGIONS, Place, Regions
from tests.support.engines import (
    BATCH,
    LABELS,
    FakeEngine,
    Pair,
    Scores,
    expected_scores,
    repository,
)

IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = repository({"flowers": Scores(), "pair": Pair(), "long": Long()})
    with Server(models, doors=Doors(grpc_port=0, shared_memory=True)) as running:
        yield running


@pytest.fixture
def key() -> str:
    return f"/tessella_test_{secrets.token_hex(8)}"


@pytest.fixture
def memory(key: str) -> Iterator[SharedMemory]:
    made = SharedMemory(key.removeprefix("/"), create=True, size=8192)
    yield made
    made.close()
    made.unlink()


@pytest.mark.parametrize("kind", [tritonclient.http, tritonclient.grpc])
def test_a_real_client(server: Server, key: str, kind) -> None:
    address = server.url.removeprefix("http://")
    if kind is tritonclient.grpc:
        address = server.grpc_address
    handle = shared_memory.create_shared_memory_region("both", key, 2 * IMAGES.nbytes)
    with kind.InferenceServerClient(address) as client:
        try:
            shared_memory.set_shared_memory_region(handle, [IMAGES])
            client.register_system_shared_memory("both", key, 2 * IMAGES.nbytes)
            assert "both" in str(client.get_system_shared_memory_status())
            tensor = kind.InferInput("image", list(IMAGES.shape), "FP32")
            tensor.set_shared_memory("both", IMAGES.nbytes)
            wanted = kind.InferRequestedOutput("scores")
            wanted.set_shared_memory("both", 32, offset=IMAGES.nbytes)
            for _ in range(3):
                result = client.infer("flowers", [tensor], outputs=[wanted])
            assert result.get_output("scores") is not None
            scores = shared_memory.get_contents_as_numpy(handle, np.float32, (2, 4), IMAGES.nbytes)
            np.testing.assert_allclose(scores, expected_scores(IMAGES), rtol=1e-4)
            with pytest.raises(InferenceServerException, match="registered already"):
                client.register_system_shared_memory("both", key, 10)
            client.unregister_system_shared_memory("both")
            with pytest.raises(InferenceServerException, match="no such region"):
                client.infer("flowers", [tensor])
            with pytest.raises(InferenceServerException, match="no such region"):
                client.get_system_shared_memory_status("both")
        finally:
            shared_memory.destroy_shared_memory_region(handle)


def test_a_request_that_was_read_before_is_checked_again(
    server: Server, memory: SharedMemory, key: str
) -> None:
    """What its JSON says is remembered; what lies at the places, and whether they are, is not."""
    root = "/v2/systemsharedmemory/region/again"
    body = {"inputs": [entry(region="again", byte_size=768)]}
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def register(offset: int, nbytes: int) -> None:
            asked = {"key": key, "offset": offset, "byte_size": nbytes}
            http.post(f"{root}/register", json=asked).raise_for_status()

        def infer() -> httpx.Response:
            return http.post("/v2/models/flowers/infer", json=body)

        register(0, 8192)
        for seed in range(3):
            image = np.random.default_rng(seed).normal(size=(1, 3, 8, 8)).astype(np.float32)
            memory.buf[:768] = image.tobytes()
            memory.buf[1024 : 1024 + 768] = (2 * image).tobytes()
            (scores,) = infer().json()["outputs"]
            np.testing.assert_allclose([scores["data"]], expected_scores(image), rtol=1e-4)
        http.post(f"{root}/unregister").raise_for_status()
        assert infer().status_code == 404
        register(1024, 1024)
        (scores,) = infer().json()["outputs"]
        np.testing.assert_allclose([scores["data"]], expected_scores(2 * image), rtol=1e-4)
        http.post(f"{root}/unregister").raise_for_status()
        register(0, 700)
        answer = infer()
        assert (answer.status_code, "no such bytes" in answer.text) == (400, True)
        http.post(f"{root}/unregister").raise_for_status()


LONG = 400_000  # elements of a sample: more than what is copied in the event loop


class Long(FakeEngine):
    """Twice a long vector, and how many of as many flags are set."""

    def __init__(self) -> None:
        super().__init__(
            (
                TensorSpec(name="values", dtype="float32", shape=(BATCH, LONG)),
                TensorSpec(name="flags", dtype="bool", shape=(BATCH, 4 * LONG)),
            ),
            (
                TensorSpec(name="twice", dtype="float32", shape=(BATCH, LONG)),
                TensorSpec(name="set", dtype="int64", shape=(BATCH, 1)),
            ),
        )

    def compute(self, values: np.ndarray, flags: np.ndarray) -> dict[str, np.ndarray]:
        return {"twice": 2 * values, "set": flags.sum(axis=1, keepdims=True)}


class Large:
    """A region with both inputs of ``Long`` and room for its longer output, and what is asked."""

    def __init__(self, http: httpx.Client, key: str) -> None:
        rng = np.random.default_rng(2)
        self.values = rng.normal(size=(1, LONG)).astype(np.float32)
        self.flags = rng.integers(0, 2, (1, 4 * LONG), np.uint8)
        size = self.values.nbytes
        self.memory = SharedMemory(key.removeprefix("/"), create=True, size=3 * size)
        self.memory.buf[:size] = self.values.tobytes()
        self.memory.buf[size : 2 * size] = self.flags.tobytes()
        self.http, self.key, self.size = http, key, size
        self.register()

    def register(self) -> None:
        asked = {"key": self.key, "byte_size": 3 * self.size}
        root = "/v2/systemsharedmemory"
        self.http.post(f"{root}/unregister").raise_for_status()
        self.http.post(f"{root}/region/large/register", json=asked).raise_for_status()

    def ask(self) -> httpx.Response:
        def place(n: int) -> dict[str, object]:
            told = {"region": "large", "offset": n * self.size, "byte_size": self.size}
            return {f"shared_memory_{name}": value for name, value in told.items()}

        body = {
            "inputs": [
                {"name": "values", "datatype": "FP32", "shape": [1, LONG], "parameters": place(0)},
                {"name": "flags", "datatype": "BOOL", "shape": [1, 4 * LONG],
                 "parameters": place(1)},
            ],
            "outputs": [{"name": "twice", "parameters": place(2)}, {"name": "set"}],
        }  # fmt: skip
        return self.http.post("/v2/models/long/infer", json=body)


@pytest.fixture
def large(server: Server, key: str) -> Iterator[Large]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        made = Large(http, key)
        yield made
        made.memory.close()
        made.memory.unlink()


def test_what_is_large_is_copied_beside_the_event_loop(
    large: Large, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    for name in ("preadv", "pwritev"):
        copy = getattr(os, name)

        def watched(*asked: object, copy=copy) -> int:
            threads.append(threading.current_thread().name)
            return copy(*asked)

        monkeypatch.setattr(os, name, watched)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        large.memory.buf[2 * large.size :] = bytes(large.size)
        answer = large.ask()
        twice, count = answer.raise_for_status().json()["outputs"]
        found = np.frombuffer(large.memory.buf[2 * large.size :], np.float32)
        np.testing.assert_array_equal(found, 2 * large.values[0])
        del found
        assert count["data"] == [int(large.flags.sum())]
        assert twice["parameters"]["shared_memory_byte_size"] == large.size
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the region's own, and the client's
    assert len(threads) >= 15
    assert "server" not in threads, "the event loop's"


def test_large_copies_are_checked_as_small_ones(large: Large) -> None:
    large.memory.buf[large.size + 7] = 2
    answer = large.ask()
    assert (answer.status_code, "neither 0 nor 1" in answer.text) == (400, True)
    large.memory.buf[large.size + 7] = 1
    for length in (2 * large.size + 1, large.size + 1, 1):
        os.truncate(f"/dev/shm{large.key}", length)
        answer = large.ask()
        assert (answer.status_code, "shorter" in answer.text) == (400, True)
    assert large.http.get("/v2/health/live").status_code == 200


def test_a_region_that_is_unregistered_while_it_is_copied(
    large: Large, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another file's by then: the copy has a descriptor of its own."""
    begun, goes_on, preadv = threading.Event(), threading.Event(), os.preadv

    def late(*asked: object) -> int:
        begun.set()
        assert goes_on.wait(60)
        return preadv(*asked)

    monkeypatch.setattr(os, "preadv", late)
    with ThreadPoolExecutor(1) as pool, ExitStack() as others:
        answer = pool.submit(large.ask)
        assert begun.wait(60)
        with httpx.Client(base_url=large.http.base_url, timeout=60) as other:
            assert other.get("/v2/health/live").status_code == 200, "nobody waits for the copy"
            other.post("/v2/systemsharedmemory/unregister").raise_for_status()
        (tmp_path / "other").write_bytes(bytes(3 * large.size))
        for _ in range(20):
            others.enter_context((tmp_path / "other").open("rb"))
        goes_on.set()
        told = answer.result()
    # Its inputs were read from the region; the place of its output is gone.
    assert (told.status_code, "no such region" in told.text) == (404, True)


def test_a_large_picture_as_a_file(server: Server, key: str) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (700, 700, 3), np.uint8)
    file = cv2.imencode(".png", pixels)[1].tobytes()
    content = len(file).to_bytes(4, "little") + file
    assert len(content) > BRIEF_BYTES
    memory = SharedMemory(key.removeprefix("/"), create=True, size=len(content))
    memory.buf[: len(content)] = content
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            asked = {"key": key, "byte_size": len(content)}
            http.post("/v2/systemsharedmemory/region/p/register", json=asked).raise_for_status()
            picture = entry(region="p", byte_size=len(content))
            picture |= {"datatype": "BYTES", "shape": [1]}
            answers = [http.post("/v2/models/flowers/infer", json={"inputs": [picture]})]
            answers.append(http.post("/v2/models/flowers/classify", content=file))
            http.post("/v2/systemsharedmemory/unregister").raise_for_status()
    finally:
        memory.close()
        memory.unlink()
    scores = np.array(answers[0].raise_for_status().json()["outputs"][0]["data"])
    best = answers[1].raise_for_status().json()["predictions"][0][0]["label"]
    assert best == LABELS[int(scores.argmax())]


def entry(**place: object) -> dict[str, object]:
    names = {f"shared_memory_{name}": value for name, value in place.items()}
    return {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "parameters": names}


def test_places_that_are_none(server: Server, memory: SharedMemory, key: str) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        root = "/v2/systemsharedmemory/region"
        asked = {"key": key, "offset": 64, "byte_size": 1000}
        assert http.post(f"{root}/r/register", json=asked).status_code == 200
        for place in (
            {"region": "r"},
            {"region": "r", "byte_size": 768, "offset": 300},
            {"region": "r", "byte_size": 1 << 47, "offset": 1 << 47},
            {"region": "r", "byte_size": 768, "offset": -1},
            {"region": "r", "byte_size": True},
            {"region": "r", "byte_size": 767},
            {"region": 7, "byte_size": 768},
            {"region": "r", "byte_size": 768, "offset": "0"},
        ):
            answer = http.post("/v2/models/flowers/infer", json={"inputs": [entry(**place)]})
            assert answer.status_code == 400, answer.text
        for name in ("../r", "/dev/shm/x", "", ".new", "r\x00", "s"):
            place = {"region": name, "byte_size": 768}
            answer = http.post("/v2/models/flowers/infer", json={"inputs": [entry(**place)]})
            assert answer.status_code == 404, answer.text
        twice = entry(region="r", byte_size=768) | {"data": [0.0] * 192}
        answer = http.post("/v2/models/flowers/infer", json={"inputs": [twice]})
        assert answer.status_code == 400
        room = {"shared_memory_region": "r", "shared_memory_byte_size": 15}
        small = {
            "inputs": [entry(region="r", byte_size=768)],
            "outputs": [{"name": "scores", "parameters": room}],
        }
        answer = http.post("/v2/models/flowers/infer", json=small)
        assert (answer.status_code, "does not fit" in answer.text) == (400, True)
        assert http.post("/v2/systemsharedmemory/unregister").status_code == 200
        assert http.get("/v2/systemsharedmemory/status").json() == []


def test_a_region_that_shrinks_or_is_replaced_stops_nobody(
    server: Server, memory: SharedMemory, key: str
) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        asked = {"key": key, "offset": 0, "byte_size": 8192}
        http.post("/v2/systemsharedmemory/region/r/register", json=asked).raise_for_status()
        outputs = [
            {
                "name": "scores",
                "parameters": {
                    "shared_memory_region": "r",
                    "shared_memory_byte_size": 16,
                    "shared_memory_offset": 4096,
                },
            }
        ]
        body = {"inputs": [entry(region="r", byte_size=768)], "outputs": outputs}
        assert http.post("/v2/models/flowers/infer", json=body).status_code == 200
        for length in (1000, 100, 0):
            os.truncate(f"/dev/shm{key}", length)
            answer = http.post("/v2/models/flowers/infer", json=body)
            assert (answer.status_code, "shorter" in answer.text) == (400, True)
            assert os.stat(f"/dev/shm{key}").st_size == length, "an answer makes nothing longer"
        assert http.get("/v2/health/live").status_code == 200
        http.post("/v2/systemsharedmemory/unregister").raise_for_status()


def test_what_may_be_registered(tmp_path: Path) -> None:
    objects, folder = tmp_path / "shm", tmp_path / "regions"
    objects.mkdir()
    folder.mkdir()
    (objects / "tessella-a").write_bytes(bytes(100))
    (objects / "secret").write_bytes(bytes(100))
    (objects / "tessella-link").symlink_to(objects / "secret")
    (objects / "tessella-folder").mkdir()
    os.mkfifo(objects / "tessella-fifo")
    regions = Regions(folder, Limits(body_bytes=50, held_bytes=60), objects=str(objects))
    for key in (
        "secret", "/tessella/../secret", "../tessella", "tessella-a/", "tessella a",
        "tessella" + 201 * "a", "", None, 7, "tessella-a\n", "//tessella-a",
    ):  # fmt: skip
        with pytest.raises(InputError):
            regions.register("r", key, 0, 10)
    for key in ("tessella-link", "tessella-folder", "tessella-fifo"):
        with pytest.raises(ServeError) as caught:
            regions.register("r", key, 0, 10)
        assert caught.value.status == 403
    for name in ("a/b", "..", ".hidden", "", "x" * 129, "ü", "a\n"):
        with pytest.raises(InputError):
            regions.register(name, "tessella-a", 0, 10)
    for offset, size in ((0, 101), (91, 10), (-1, 10), (0, 0), (0, -1), (0, 1.5), (1 << 60, 1)):
        with pytest.raises(InputError):
            regions.register("r", "tessella-a", offset, size)
    assert regions.status() == []
    regions.register("r", "/tessella-a", 10, 90)
    with pytest.raises(ServeError, match="larger than 50") as caught:
        regions.read(Place(region="r", offset=0, byte_size=51))
    assert caught.value.status == 413
    held = regions.read(Place(region="r", offset=0, byte_size=50))
    with pytest.raises(ServeError, match="as many request bytes"):
        regions.read(Place(region="r", offset=0, byte_size=20))
    del held
    assert len(regions.read(Place(region="r", offset=0, byte_size=20)).make()) == 20
    # Another process of the server knows the region, too, and sees that its object was replaced.
    (objects / "new").write_bytes(bytes(100))
    (objects / "new").rename(objects / "tessella-a")
    other = Regions(folder, Limits(), objects=str(objects))
    with pytest.raises(ServeError, match="replaced"):
        other.read(Place(region="r", offset=0, byte_size=20))
    regions.close()


def test_objects_of_other_users_are_refused(
    memory: SharedMemory, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server as another user than the one whose object it is."""
    user = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: user + 1)
    with pytest.raises(ServeError) as caught:
        Regions(tmp_path, Limits()).register("r", key, 0, 10)
    assert caught.value.status == 403


def test_a_flood_of_registrations_is_bounded(
    tmp_path: Path, memory: SharedMemory, key: str
) -> None:
    regions = Regions(tmp_path, Limits())
    before = len(os.listdir("/proc/self/fd"))
    for i in range(MOST_REGIONS):
        regions.register(f"r{i}", key, i, 1)
    with pytest.raises(ServeError, match="too many regions"):
        regions.register("one_more", key, 0, 1)
    assert len(os.listdir("/proc/self/fd")) <= before
    regions.unregister()
    assert regions.status() == []


def test_without_the_flag_there_is_no_shared_memory(tmp_path: Path) -> None:
    with Server(repository({"flowers": Scores()})) as server, httpx.Client(timeout=60) as http:
        url = f"{server.url}/v2"
        register = f"{url}/systemsharedmemory/region/r/register"
        for answer in (
            http.post(register, json={"key": "/tessella", "byte_size": 4}),
            http.get(f"{url}/systemsharedmemory/status"),
            http.post(
                f"{url}/models/flowers/infer", json={"inputs": [entry(region="r", byte_size=768)]}
            ),
        ):
            assert (answer.status_code, "--shared-memory" in answer.text) == (501, True)


REGISTER = """
import sys
from pathlib import Path
from tessella.server.limits import Limits
from tessella.server.shared_memory import Regions
folder, key, first = sys.argv[1:]
regions = Regions(Path(folder), Limits())
print("ready", flush=True)
input()
for n in range(int(first), int(first) + 100):
    regions.register(f"r{n}", key, n, n + 1)
"""


def test_processes_that_register_at_once(memory: SharedMemory, key: str, tmp_path: Path) -> None:
    """Acceptors share the folder: none may name what another is just writing."""
    command = [sys.executable, "-c", REGISTER, str(tmp_path), key]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, first], **pipes) for first in ("0", "100")]
    assert [process.stdout.readline() for process in started] == ["ready\n"] * 2
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        process.communicate(timeout=60)
    assert [process.returncode for process in started] == [0, 0]
    told = Regions(tmp_path, Limits()).status()
    assert sorted((r["name"], r["offset"], r["byte_size"]) for r in told) == sorted(
        (f"r{n}", n, n + 1) for n in range(200)
    )
