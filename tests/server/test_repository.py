"""Load, load again, unload: who serves meanwhile, and what may be loaded at all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest

from tessella.core.errors import ArtifactError, CorruptArtifact, ServeError, UsageError
from tessella.server import Repository
from tests.support.engines import FakeEngine, Scores

pytestmark = pytest.mark.timeout(30)
IMAGE = np.ones((1, 3, 8, 8), np.float32)


class Shelf:
    """Opens a new engine each time, or fails when told to."""

    def __init__(self) -> None:
        self.opened: list[FakeEngine] = []
        self.error: Exception | None = None

    def __call__(self, path: Path) -> FakeEngine:
        if self.error is not None:
            raise self.error
        self.opened.append(Scores())
        return self.opened[-1]


def states(repository: Repository) -> dict[str, tuple[str, str]]:
    return {m["name"]: (m["state"], m["reason"]) for m in repository.index()}


def test_a_failed_start_says_why() -> None:
    shelf = Shelf()
    shelf.error = CorruptArtifact("the plan is broken")
    repository = Repository({"a": Path("a.plan")}, open_engine=shelf)  # type: ignore[arg-type]
    with pytest.raises(CorruptArtifact, match="broken"):
        repository.load_all()


def test_a_failed_reload_keeps_the_old_one() -> None:
    async def test() -> None:
        shelf = Shelf()
        repository = Repository({"a": Path("a.plan")}, open_engine=shelf)  # type: ignore[arg-type]
        repository.load_all()
        old = repository.get("a")
        shelf.error = CorruptArtifact("the plan is broken")
        with pytest.raises(CorruptArtifact):
            await repository.load("a")
        assert repository.get("a") is old
        assert not shelf.opened[0].closed
        state, reason = states(repository)["a"]
        assert state == "READY"
        assert "loading it again failed" in reason
        assert "broken" in reason
        shelf.error = None
        await repository.load("a")
        assert repository.get("a") is not old
        assert shelf.opened[0].closed
        assert states(repository) == {"a": ("READY", "")}

    asyncio.run(test())


def test_a_failed_first_load_is_unavailable_with_the_reason() -> None:
    async def test() -> None:
        shelf = Shelf()
        repository = Repository({"a": Path("a.plan")}, open_engine=shelf)  # type: ignore[arg-type]
        shelf.error = RuntimeError("no memory")
        with pytest.raises(RuntimeError):
            await repository.load("a")
        assert states(repository) == {"a": ("UNAVAILABLE", "no memory")}
        with pytest.raises(ServeError, match="no memory") as caught:
            repository.get("a")
        assert caught.value.status == 503

    asyncio.run(test())


@pytest.mark.parametrize("change", ["load", "unload"])
def test_requests_in_flight_finish_on_the_old_engine(change: str) -> None:
    async def test() -> None:
        shelf = Shelf()
        repository = Repository({"a": Path("a.plan")}, open_engine=shelf)  # type: ignore[arg-type]
        repository.load_all()
        old = shelf.opened[0]
        old.gate = threading.Event()
        model = repository.get("a")

        async def request() -> np.ndarray:
            with model:
                return (await model.batcher.infer({"image": IMAGE}))["scores"]

        flying = asyncio.create_task(request())
        while not old.batches:
            await asyncio.sleep(0.001)
        changing = asyncio.create_task(getattr(repository, change)("a"))
        await asyncio.sleep(0.05)
        assert not changing.done()
        assert not old.closed
        if change == "load":
            assert repository.get("a") is not model  # new requests already go to the new one
        else:
            assert states(repository)["a"][0] == "UNLOADING"
            with pytest.raises(ServeError, match="not ready"):
                repository.get("a")
        old.gate.set()
        assert (await flying).shape == (1, 4)
        await changing
        assert old.closed

    asyncio.run(test())


def test_two_loads_at_once_leave_one_engine_open() -> None:
    async def test() -> None:
        shelf = Shelf()
        repository = Repository({"a": Path("a.plan")}, open_engine=shelf)  # type: ignore[arg-type]
        await asyncio.gather(*(repository.load("a") for _ in range(4)), repository.unload("a"))
        await repository.load("a")
        assert [e.closed for e in shelf.opened].count(False) == 1
        await repository.close()
        assert all(e.closed for e in shelf.opened)

    asyncio.run(test())


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "../a", "a\\b", "a b", "a\n", "a\0", "é", "a" * 129, "stats", "%2e"],
)
def test_names_that_no_model_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="name of a model"):
        Repository({name: Path("a.plan")})
    repository = Repository({}, folder=tmp_path)
    with pytest.raises(UsageError, match="name of a model"):
        asyncio.run(repository.load(name))


def test_only_plans_in_the_folder_itself_can_be_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    (folder / "deeper").mkdir(parents=True)
    for path in ("secret.plan", "plans/a.plan", "plans/deeper/b.plan", "plans/c.txt"):
        (tmp_path / path).write_bytes(b"")
    (folder / "linked.plan").symlink_to(tmp_path / "secret.plan")
    (folder / "inside.plan").symlink_to(folder / "a.plan")
    shelf = Shelf()
    repository = Repository({}, folder=folder, open_engine=shelf)  # type: ignore[arg-type]
    assert [m["name"] for m in repository.index()] == ["a", "inside"]
    assert repository.index(ready=True) == []
    for name in ("secret", "linked", "b", "c", "c.txt", "deeper", "nothing"):
        with pytest.raises(ServeError, match="no such model") as caught:
            asyncio.run(repository.load(name))
        assert caught.value.status == 404
    assert shelf.opened == []

    async def load() -> None:
        await repository.load("a")
        assert [m["name"] for m in repository.index(ready=True)] == ["a"]

    asyncio.run(load())


def test_versions_and_unknown_names() -> None:
    repository = Repository({"a": Path("a.plan")}, open_engine=Shelf())  # type: ignore[arg-type]
    repository.load_all()
    assert repository.get("a", None) is repository.get("a", "1") is repository.get("a", "")
    for name, version in [("a", "2"), ("a", "01"), ("b", None)]:
        with pytest.raises(ServeError) as caught:
            repository.get(name, version)
        assert caught.value.status == 404


def test_a_missing_plan_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no plan here"):
        Repository({"a": tmp_path / "a.plan"}).load_all()


def test_beside_a_gpu_a_model_on_the_cpu_computes_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without, whoever runs the GPU's models would have to compute it between them."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    async def test() -> None:
        shelf = Shelf()
        repository = Repository(
            {"a": Path("a.plan")},
            open_engine=shelf,  # type: ignore[arg-type]
            threads=False,
        )
        repository.load_all()
        answer = await repository.get("a").batcher.infer({"image": IMAGE})  # nobody calls ``step``
        assert list(answer) == ["scores"]
        await repository.close()

    asyncio.run(test())
