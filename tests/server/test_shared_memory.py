"""Shared memory: tritonclient's two clients, and regions that lie, shrink or are another's."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, shared_memory

from tessella.core.errors import InputError, ServeError
from tessella.server import Doors, Limits, Server
from tessella.server.shared_memory import MOST_REGIONS, Place, Regions
from tests.support.engines import Pair, Scores, expected_scores, repository

IMAGES = np.random.default_rng(1).normal(size=(2, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    models = repository({"flowers": Scores(), "pair": Pair()})
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


def entry(**place: object) -> dict[str, object]:
    names = {f"shared_memory_{name}": value for name, value in place.items()}
    return {"name": "image", "datatype": "FP32", "shape": [1, 3, 8, 8], "parameters": names}


def test_places_that_are_none(server: Server, memory: SharedMemory, key: str) -> None:
    with httpx.Client(base_url=server.url) as http:
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
    with httpx.Client(base_url=server.url) as http:
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
    assert list(folder.iterdir()) == []
    regions.register("r", "/tessella-a", 10, 90)
    with pytest.raises(ServeError, match="larger than 50") as caught:
        regions.read(Place(region="r", offset=0, byte_size=51))
    assert caught.value.status == 413
    held = regions.read(Place(region="r", offset=0, byte_size=50))
    with pytest.raises(ServeError, match="as many request bytes"):
        regions.read(Place(region="r", offset=0, byte_size=20))
    del held
    assert len(regions.read(Place(region="r", offset=0, byte_size=20))) == 20
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
    assert len(os.listdir("/proc/self/fd")) == before
    regions.unregister()
    assert regions.status() == []


def test_without_the_flag_there_is_no_shared_memory(tmp_path: Path) -> None:
    with Server(repository({"flowers": Scores()})) as server, httpx.Client() as http:
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
