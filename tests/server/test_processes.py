"""A server of several processes: right answers, and what is lost when one of them is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.http as triton
from PIL import Image

from tessella.core.errors import ArtifactError, UsageError
from tessella.server import serve, tickets
from tessella.server.engine_process import _Known, _Room
from tessella.server.lane import make_memory
from tessella.server.tickets import Frames, Ticket
from tests.support.engines import LABELS, expected_scores, repository
from tests.support.plans.linear import linear_plan
from tests.support.wires import CONTINUE, until_refused

pytestmark = pytest.mark.timeout(280)  # a busy machine takes a minute to start four processes
ROOT = Path(__file__).parents[2]
ACCEPTORS = 2


class Running:
    """A server in processes of its own."""

    def __init__(self, folder: Path, *, wait: bool = True) -> None:
        self.plan = linear_plan().save(folder / "flowers.plan")
        self.sockets = folder / "tmp"
        self.sockets.mkdir()
        environment = {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.sockets),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.plans.linear", str(self.plan), str(ACCEPTORS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip() if wait else ""

    @property
    def watching(self) -> psutil.Process:
        return psutil.Process(self.process.pid).children()[0]

    def engine(self) -> psutil.Process:
        (engine,) = (p for p in self.watching.children() if p.name() == "tessella-engine")
        return engine

    def acceptors(self) -> list[psutil.Process]:
        found = []
        for process in self.watching.children():
            with suppress(psutil.NoSuchProcess):  # one that was killed, just now
                if process.name() == "tessella-http":
                    found.append(process)
        return found

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=False)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    server = Running(tmp_path_factory.mktemp("served"))
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
        _, err = server.process.communicate(timeout=90)
        print(err)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3, 8, 8)).astype(np.float32)


def infer(http: httpx.Client, batch: np.ndarray, model: str = "flowers") -> httpx.Response:
    return http.post(
        f"/v2/models/{model}/infer",
        content=batch.tobytes(),
        headers={"Inference-Header-Content-Length": "0"},
    )


def scores_of(answer: httpx.Response) -> np.ndarray:
    start = int(answer.headers["inference-header-content-length"])
    return np.frombuffer(answer.content[start:], np.float32).reshape(-1, 4)


def right(answer: httpx.Response, batch: np.ndarray, factor: float = 1.0) -> bool:
    assert answer.status_code == 200, answer.text
    return np.allclose(scores_of(answer), factor * expected_scores(batch), rtol=1e-3, atol=1e-3)


class Load:
    """Clients that ask on and on; ``see`` judges every answer, or the connection's error."""

    def __init__(
        self,
        running: Running,
        see: Callable[[np.ndarray, httpx.Response], None],
        model: str = "flowers",
    ) -> None:
        self._model = model
        self.lost = [0] * 6
        self.answered = [0] * 6
        self._running, self._see = running, see
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(6)

    def __enter__(self) -> Load:
        self._futures = [self._pool.submit(self._ask, i) for i in range(6)]
        self.until_all_answered()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()

    def until_all_answered(self) -> None:
        """Return when each client has had three more answers."""
        before = list(self.answered)
        until = time.monotonic() + 200
        while any(now < then + 3 for now, then in zip(self.answered, before, strict=True)):
            assert time.monotonic() < until, "somebody waits for ever"
            assert not any(f.done() for f in self._futures)
            time.sleep(0.01)

    def _ask(self, index: int) -> None:
        batch = images(1 + index % 3, index)
        while not self._stop.is_set():
            with self._running.client() as http:
                try:
                    while not self._stop.is_set():
                        self._see(batch, infer(http, batch, self._model))
                        self.answered[index] += 1
                except httpx.TransportError:
                    self.lost[index] += 1


def test_right_answers_of_any_size_in_joined_batches(running: Running) -> None:
    def ask(seed: int) -> None:
        with running.client() as http:
            for i in range(8):
                batch = images(1 + (seed + 5 * i) % 21, seed)
                assert right(infer(http, batch), batch)

    with running.client() as http:
        before = http.get("/v2/models/flowers/stats").json()["model_stats"][0]
        wanted = before["inference_stats"]["success"]["count"] + 64
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        until = time.monotonic() + 60
        count = 0
        while count < wanted and time.monotonic() < until:
            time.sleep(0.05)  # the other acceptor tells what it has counted every half second
            after = http.get("/v2/models/stats").json()["model_stats"][0]
            count = after["inference_stats"]["success"]["count"]
        page = http.get("/metrics").text
    assert count == wanted
    samples = sum(1 + (seed + 5 * i) % 21 for seed in range(8) for i in range(8))
    assert after["inference_count"] - before["inference_count"] == samples
    assert f'nv_inference_request_success{{model="flowers",version="1"}} {count:.1f}' in page
    assert re.search(rf'stage="queue",version="1"}} {count:.1f}', page)
    assert f'tessella_requests_total{{door="http",model="flowers",version="1"}} {count:.1f}' in page
    whole = f'tessella_request_seconds_count{{model="flowers",version="1"}} {count:.1f}'
    assert whole in page
    computed = (
        f'tessella_batch_size_sum{{model="flowers",version="1"}} {after["inference_count"]:.1f}'
    )
    assert computed in page


def test_all_routes_answer_as_in_one_process(running: Running, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "black.png")
    with running.client() as http:
        assert http.get("/v2/health/ready").status_code == 200
        assert http.get("/").status_code == http.get("/docs").status_code == 200
        assert running.url in http.get("/v2/models").json()["models"][0]["curl"]
        assert http.get("/v2/models/flowers/config").json()["max_batch_size"] == 8
        assert http.post("/v2/repository/index").json()[0]["state"] == "READY"
        found = http.post(
            "/v2/models/flowers/classify?top=4", files={"i": (tmp_path / "black.png").read_bytes()}
        ).json()["predictions"][0]
        assert {p["label"] for p in found} == set(LABELS)
        scores = expected_scores(np.full((1, 3, 8, 8), -2.0))[0]
        assert [p["index"] for p in found] == np.argsort(-scores).tolist()
        for path in ("weeds/infer", "weeds/ready/x", "flowers/versions/2/infer", "flowers/x"):
            assert http.post(f"/v2/models/{path}").status_code == 404, path
        assert infer(http, images(1)[:, :, :7]).status_code == 400
        assert http.get("/v2", headers={"Host": "evil.example"}).status_code == 421
        answer = infer(http, images(1))
        stages = [float(ms) for ms in re.findall(r"dur=([\d.]+)", answer.headers["server-timing"])]
        assert len(stages) == 6
        assert min(stages) >= 0
        assert stages[4] > 0, "compute"
        address = httpx.URL(running.url)
        for _ in range(2 * ACCEPTORS):  # who shuts its writing side behind a request reads on
            with socket.create_connection((address.host, address.port), timeout=60) as half:
                half.sendall(
                    b"POST /v2/models/flowers/infer HTTP/1.1\r\nHost: localhost\r\n"
                    b"Inference-Header-Content-Length: 0\r\nContent-Length: 768\r\n\r\n"
                    + images(1).tobytes()
                )
                half.shutdown(socket.SHUT_WR)
                with half.makefile("rb") as said:
                    assert said.read().startswith(b"HTTP/1.1 200 OK")
        nans = np.full((1, 3, 8, 8), np.nan, np.float32)
        assert np.isnan(scores_of(infer(http, nans))).all()
    client = triton.InferenceServerClient(running.url.removeprefix("http://"))
    tensor = triton.InferInput("image", [5, 3, 8, 8], "FP32")
    tensor.set_data_from_numpy(images(5))
    result = client.infer("flowers", [tensor], request_id="x", priority=1, timeout=6 * 10**7)
    np.testing.assert_allclose(result.as_numpy("scores"), expected_scores(images(5)), rtol=1e-3,
                               atol=1e-3)  # fmt: skip
    with pytest.raises(triton.InferenceServerException, match="no time"):
        client.infer("flowers", [tensor], timeout=1)
    client.close()


def test_reloading_under_load_loses_and_mixes_nothing(running: Running) -> None:
    seen: set[float] = set()

    def see(batch: np.ndarray, answer: httpx.Response) -> None:
        factor = 1.0 if right(answer, batch) else 2.0
        assert right(answer, batch, factor)
        seen.add(factor)

    with Load(running, see) as load, running.client() as http:
        for scale in (2.0, 1.0):
            linear_plan(scale=scale).save(running.plan)
            assert http.post("/v2/repository/models/flowers/load").status_code == 200
            assert right(infer(http, images(2)), images(2), scale)
            load.until_all_answered()
    assert seen == {1.0, 2.0}
    assert load.lost == [0] * 6


def test_versions_come_share_shadow_and_go_under_load(running: Running) -> None:
    """No answer is lost, and each is of the version that it names."""
    seen: set[str] = set()

    def see(batch: np.ndarray, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        length = int(answer.headers["inference-header-content-length"])
        version = json.loads(answer.content[:length])["model_version"]
        assert right(answer, batch, float(version))
        seen.add(version)

    second = running.plan.parent / "flowers" / "2"
    second.mkdir(parents=True)
    linear_plan(scale=2.0).save(second / "model.plan")
    root = "/v2/repository/models/flowers"
    with Load(running, see) as load, running.client() as http:
        for step, body in (
            ("versions/2/load", {}),
            ("traffic", {"split": {"1": 50, "2": 50}}),
            ("traffic", {"shadow": "2"}),
            ("traffic", {}),
            ("versions/2/unload", {}),
        ):
            assert http.post(f"{root}/{step}", json=body).status_code == 200, step
            load.until_all_answered()
    assert seen == {"1", "2"}
    assert load.lost == [0] * 6
    with running.client() as http:
        http.post(f"{root}/versions/2/load").raise_for_status()
        http.post(f"{root}/traffic", json={"shadow": "2"}).raise_for_status()
        until = time.monotonic() + 60
        shadow: dict[str, float] = {}
        while not shadow.get("requests") and time.monotonic() < until:
            assert right(infer(http, images(1)), images(1)), "the shadow answers nobody"
            stats = http.get("/v2/models/flowers/versions/2/stats").json()["model_stats"][0]
            shadow = stats.get("shadow", {})
        assert shadow["agreement"] == 1
        http.post(f"{root}/traffic", json={}).raise_for_status()
        http.post(f"{root}/versions/2/unload").raise_for_status()
    shutil.rmtree(second.parent)


def test_an_unloaded_model_is_gone_on_all_acceptors(running: Running) -> None:
    with running.client() as http:
        assert http.post("/v2/repository/models/flowers/unload").status_code == 200
        statuses = set()
        for _ in range(8):
            with running.client() as other:
                statuses.add(infer(other, images(1)).status_code)
        assert statuses <= {404, 503}
        assert http.post("/v2/repository/models/flowers/load").status_code == 200
    for _ in range(8):
        with running.client() as other:
            assert right(infer(other, images(1)), images(1))


def test_a_killed_acceptor_takes_its_own_connections_alone(running: Running) -> None:
    def see(batch: np.ndarray, answer: httpx.Response) -> None:
        assert right(answer, batch)

    before = running.acceptors()
    with Load(running, see) as load:
        before[0].kill()
        load.until_all_answered()
        until = time.monotonic() + 120
        while len(running.acceptors()) < ACCEPTORS and time.monotonic() < until:
            time.sleep(0.05)
        load.until_all_answered()
    assert max(load.lost) <= 2, "the connection, and one that waited at the killed one's door"
    after = running.acceptors()
    assert len(after) == ACCEPTORS
    assert before[1] in after


def test_a_killed_engine_is_503_and_comes_back(running: Running) -> None:
    refused: list[httpx.Response] = []

    def see(batch: np.ndarray, answer: httpx.Response) -> None:
        if answer.status_code == 503:
            refused.append(answer)
            time.sleep(0.01)
        else:
            assert right(answer, batch)

    engine = running.engine()
    acceptors = running.acceptors()
    with Load(running, see) as load, running.client() as http:
        engine.kill()
        until = time.monotonic() + 200
        while True:
            ready, answer = http.get("/v2/health/ready"), infer(http, images(1))
            # an acceptor is ready, too, as long as it has not noticed
            if refused and (ready.status_code, answer.status_code) == (200, 200):
                assert right(answer, images(1))
                break
            assert time.monotonic() < until
            time.sleep(0.01)
        load.until_all_answered()
    assert load.lost == [0] * 6
    assert all(a.headers["retry-after"] == "1" for a in refused)
    assert running.acceptors() == acceptors
    assert running.engine() != engine
    for _ in range(2 * len(acceptors)):  # by turns; each finds the new engine by itself
        with running.client() as http:
            while infer(http, images(1)).status_code == 503:
                assert time.monotonic() < until
                time.sleep(0.01)


def test_an_engine_that_ends_takes_no_model_out_of_service(running: Running) -> None:
    """Acceptors may be there still, as the watching process was killed: they would say 404."""
    memory = make_memory(1 << 16)
    frames, told = Frames(), list[bytes]()
    with socket.socket(socket.AF_UNIX) as acceptor, running.client() as http:
        acceptor.settimeout(60)
        acceptor.connect(str(next(running.sockets.glob("tessella-*/engine"))))
        socket.send_fds(acceptor, [b"lane"], [memory])
        while data := acceptor.recv(1 << 16):
            told += [content for letter, content in frames.feed(data) if letter == b"d"]
            if len(told) == 1:
                running.engine().terminate()
        assert [len(json.loads(one)["models"]) for one in told] == [1]
        until = time.monotonic() + 200
        while (answer := infer(http, images(1))).status_code != 200:
            assert answer.status_code == 503
            assert time.monotonic() < until
            time.sleep(0.01)
    os.close(memory)


def test_who_is_no_acceptor_disturbs_nobody(running: Running) -> None:
    (door,) = running.sockets.glob("tessella-*/engine")
    assert door.parent.stat().st_mode & 0o077 == 0
    open_memory = os.memfd_create("not sealed")
    os.ftruncate(open_memory, 1 << 16)
    with running.client() as http:
        for say in (
            lambda s: s.sendall(b"lane"),
            lambda s: s.sendall(b"\xff" * 1000),
            lambda s: socket.send_fds(s, [b"lane"], [open_memory]),
        ):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(60)
                stranger.connect(str(door))
                say(stranger)
                with suppress(ConnectionResetError):
                    assert stranger.recv(100) == b"", "it is shown the door"
            assert right(infer(http, images(1)), images(1))
    os.close(open_memory)


def test_who_does_not_read_or_asks_for_no_model_holds_up_nobody(running: Running) -> None:
    """Answers that nobody takes: the engine gives such an acceptor up, as one that was stopped."""
    (door,) = running.sockets.glob("tessella-*/engine")
    unknown = Ticket(1, 12345, 2, 0, 0, 4096, (1, 3, 8, 8)).pack()
    memory = make_memory(1 << 16)
    with socket.socket(socket.AF_UNIX) as deaf, running.client() as http:
        deaf.settimeout(60)
        deaf.connect(str(door))
        socket.send_fds(deaf, [b"lane"], [memory])
        deaf.sendall(unknown)
        frames, letters = Frames(), {}
        while b"e" not in letters:
            letters |= dict(frames.feed(deaf.recv(1 << 16)))
        assert tickets.unpack_error(letters[b"e"])[1].status == 503
        with suppress(ConnectionError):
            for _ in range(200):
                deaf.sendall(100 * unknown)
        assert right(infer(http, images(1)), images(1))
    os.close(memory)


def test_a_ticket_is_for_the_tensors_that_its_acceptor_knew(running: Running) -> None:
    """It is answered by a plan with the same ones, and never by one with others."""
    memory = make_memory(1 << 16)
    frames = Frames()

    def hears(acceptor: socket.socket, letter: bytes) -> bytes:
        while data := acceptor.recv(1 << 16):
            if content := dict(frames.feed(data)).get(letter):
                return content
        raise AssertionError("the engine hung up")

    with (
        socket.socket(socket.AF_UNIX) as acceptor,
        running.client() as http,
        ThreadPoolExecutor(1) as pool,
    ):
        acceptor.settimeout(60)
        acceptor.connect(str(next(running.sockets.glob("tessella-*/engine"))))
        socket.send_fds(acceptor, [b"lane"], [memory])
        (described,) = json.loads(hears(acceptor, b"d"))["models"]
        ticket = Ticket(7, described["number"], 2, 0, 0, 4096, (1, 3, 8, 8)).pack()
        for plan, letter in (
            (linear_plan(scale=2.0), b"o"),
            (linear_plan(output="votes"), b"e"),
            (linear_plan(), b"e"),
        ):
            plan.save(running.plan)
            loading = pool.submit(http.post, "/v2/repository/models/flowers/load")
            told = json.loads(hears(acceptor, b"d"))
            acceptor.sendall(tickets.pack_understood(told["number"]))
            assert loading.result().status_code == 200
            acceptor.sendall(ticket)
            answer = hears(acceptor, letter)
            if letter == b"o":
                assert tickets.unpack_done(answer)[2] == (1, 4)
            else:
                assert tickets.unpack_error(answer)[1].status == 503
        assert right(infer(http, images(1)), images(1))
    os.close(memory)


@pytest.mark.parametrize("killed", ["watching", "outermost"])
def test_nothing_is_left_of_a_server_that_is_killed(killed: str, tmp_path: Path) -> None:
    running = Running(tmp_path)
    family = psutil.Process(running.process.pid).children(recursive=True)
    assert len(family) == 2 + ACCEPTORS
    if killed == "watching":
        running.watching.kill()
    else:
        running.process.kill()
    _, err = running.process.communicate(timeout=90)
    assert running.process.returncode != 0
    assert ("the processes of the server have ended" in err) == (killed == "watching")
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list(running.sockets.iterdir()) == []


def test_nothing_is_left_of_a_server_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    running = Running(tmp_path, wait=False)
    while not list(running.sockets.glob("tessella-*/engine")):
        time.sleep(0.001)
    family = psutil.Process(running.process.pid).children(recursive=True)
    running.process.kill()
    running.process.communicate(timeout=90)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list(running.sockets.iterdir()) == []


def test_what_is_wrong_with_the_settings_is_told_as_in_one_process(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no plan here"):
        serve({"flowers": tmp_path / "nothing.plan"}, port=0, acceptors=1)
    with pytest.raises(UsageError, match="from 0 to 64"):
        serve({}, port=0, acceptors=-1)
    with pytest.raises(UsageError, match="nothing to serve"):
        serve({}, port=0)


def spread(running: Running) -> list[psutil.Process]:
    """The two instances of a model of that name, which is loaded if it is not."""
    with running.client() as http:
        if http.get("/v2/models/spread/ready").status_code != 200:
            shutil.copy(running.plan, running.plan.with_name("spread.plan"))
            answer = http.post("/v2/repository/models/spread/load", timeout=90)
            assert answer.status_code == 200, answer.text
    return [p for p in running.engine().children() if p.name() == "tessella-inst"]


def test_an_instance_that_is_killed_takes_no_answer_along(running: Running) -> None:
    def counts() -> list[dict]:
        with running.client() as http:
            found = http.get("/v2/models/spread/stats").json()["model_stats"][0]
        assert sum(i["executions"] for i in found["instances"]) == found["execution_count"]
        assert sum(i["samples"] for i in found["instances"]) == found["inference_count"]
        return found["instances"]

    wrong = []

    def see(batch: np.ndarray, answer: httpx.Response) -> None:
        if not right(answer, batch):
            wrong.append(batch)

    one, two = spread(running)
    with Load(running, see, "spread") as load:
        one.kill()
        load.until_all_answered()
        until = time.monotonic() + 90
        while len(found := spread(running)) < 2 or one in found:
            assert time.monotonic() < until
            time.sleep(0.05)
        load.until_all_answered()
    assert wrong == []
    assert sum(load.lost) == 0
    assert two in found
    assert [i["restarts"] for i in counts()] in ([1, 0], [0, 1], [0, 0])  # that comes up still
    with running.client() as http:
        group = http.get("/v2/models/spread/config").json()["instance_group"]
    assert group[0]["count"] == 2


def test_sigterm_answers_what_was_accepted_and_leaves_nothing(running: Running) -> None:
    """The last test of this file, as it ends the server."""
    instances = len(spread(running))
    family = psutil.Process(running.process.pid).children(recursive=True)
    assert len(family) == 2 + ACCEPTORS + instances
    host, _, port = running.url.removeprefix("http://").partition(":")
    body = images(1).tobytes()
    with socket.create_connection((host, int(port)), timeout=60) as late:
        late.sendall(
            b"POST /v2/models/spread/infer HTTP/1.1\r\nHost: localhost\r\n"
            b"Inference-Header-Content-Length: 0\r\nContent-Length: %d\r\n"
            b"Expect: 100-continue\r\n\r\n" % len(body) + body[:100]
        )
        assert late.recv(100) == CONTINUE, "its body is waited for"
        running.process.send_signal(signal.SIGTERM)
        until_refused(host, int(port))
        late.sendall(body[100:])
        answer = b""
        while chunk := late.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 200")
    np.testing.assert_allclose(
        np.frombuffer(answer[-16:], np.float32), expected_scores(images(1))[0], rtol=1e-3, atol=1e-3
    )
    assert running.process.wait(60) == 0
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert list(running.sockets.iterdir()) == []


def test_a_model_is_known_before_an_acceptor_hears_of_it() -> None:
    """An acceptor that is quicker than the engine's next line sends a ticket for it at once."""
    model = SimpleNamespace(signature="of flowers")
    known = _Known(name="flowers", version="1", model=model)
    room = _Room.__new__(_Room)
    room.repository, room._lock = repository({}), threading.Lock()
    room._models, room.leaving, room._descriptions = {}, {}, 1
    room._described = lambda: ({7: known}, b"")
    found = []
    room._acceptors = [SimpleNamespace(tell=lambda *_: found.append(room.model(7)))]
    room._tell()
    assert found == [model]
