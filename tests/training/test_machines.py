"""The places of machines: what options and torchrun's variables say, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

import pytest
from torch.distributed import TCPStore

from tessella import api
from tessella.cli.train import read_recipe
from tessella.core.errors import OutOfMemory, TrainError, UsageError
from tessella.core.events import silent
from tessella.core.record import to_plain
from tessella.training import loop, machines
from tessella.training.machines import (
    LOST,
    Meeting,
    Place,
    Started,
    error_of,
    place_of,
    settings_of,
    started,
)
from tessella.training.prepare import begin
from tests.support.training import free_port, recipe

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
}


def test_a_place_is_what_options_say():
    assert place_of(1, None, None) is None
    assert place_of(2, 1, "[fd00::1]:29500") == Place(nodes=2, rank=1, host="fd00::1", port=29500)


@pytest.mark.parametrize(
    ("nodes", "rank", "rendezvous", "said"),
    [
        (1, 1, None, "one machine has no rendezvous.*nodes=2"),
        (2, None, "a:1", "which one this is.*--node-rank 0 to 1"),
        (2, 0, None, "where they meet.*--rendezvous HOST:PORT"),
        (2, 2, "a:1", "no such machine.*node_rank=2"),
        (2, 0, "a", "a rendezvous is HOST:PORT.*Seen: a[.]"),
        (2, 0, "a:70000", "a rendezvous is HOST:PORT"),
    ],
)
def test_options_that_lack_something_say_what(nodes, rank, rendezvous, said):
    with pytest.raises(UsageError, match=said):
        place_of(nodes, rank, rendezvous)


def test_a_run_of_several_machines_does_not_go_on_alone_unless_it_is_said(
    dataset, tmp_path, monkeypatch
):
    settings = {"epochs": 1.0, "batch_size": 12}
    begin(recipe(dataset, nodes=2, **settings), tmp_path / "run", resume=False)
    with pytest.raises(UsageError, match=r"where they meet.*nodes=2.*--nodes 1"):
        api.train("lenet", dataset, out=tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match=r"where they meet.*nodes=2"):
        loop.train(recipe(dataset, nodes=2, **settings), tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(UsageError, match=r"processes was 2, is 1"):
        api.train("lenet", dataset, out=tmp_path / "run", resume=True, nodes=1)
    launched = []
    monkeypatch.setattr(loop, "launch", lambda out, count, **rest: launched.append((count, rest)))
    api.train("lenet", dataset, out=tmp_path / "run", resume=True, nodes=1, gpus=2)
    assert [(count, rest["resumed"], "meeting" in rest) for count, rest in launched] == [
        (2, True, False)
    ]


def test_what_fits_is_not_looked_for_by_several(dataset, tmp_path, monkeypatch):
    settings = {"out": tmp_path / "run", "batch_size": "auto"}
    said = r"found by one process.*batch_size='auto'.*--explain --batch-size auto"
    with pytest.raises(UsageError, match=said):
        api.train("lenet", dataset, nodes=2, **settings)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=said):
        api.train("lenet", dataset, **settings)
    assert not (tmp_path / "run").exists()


def test_torchruns_variables_are_a_place():
    found = started(TORCHRUN)
    assert found == Started(rank=5, size=8, local_size=4)
    assert settings_of(found, {"epochs": 3}) == {"epochs": 3, "gpus": 4, "nodes": 2}
    assert started({}) is started({**TORCHRUN, "WORLD_SIZE": "1"}) is None
    with pytest.raises(UsageError, match=r"gpus=8, WORLD_SIZE=8"):
        settings_of(found, {"gpus": 8})


def test_a_recipe_may_need_the_processes_that_are_said_elsewhere(monkeypatch):
    for needy in ('{"sync_norms": true}', '{"shard": true}', '{"compress": 2}'):
        with pytest.raises(UsageError, match=r"--recipe: one process.*gpus=1"):
            read_recipe(needy, gpus=None)
        assert read_recipe(needy, gpus=2) == json.loads(needy)
    assert read_recipe('{"gpus": 3}', batch_size=66) == {"gpus": 3}
    assert read_recipe('{"probe_epochs": 1}', init="pretrained") == {"probe_epochs": 1}
    assert read_recipe('{"epochs": 3}', gpus=3) == {"epochs": 3}  # the option's fault, told later
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_recipe('{"sync_norms": true}', gpus=None) == {"sync_norms": True}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"RANK": "abc"}, "RANK"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"RANK": "99"}, "RANK=99, WORLD_SIZE=8"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4, LOCAL_WORLD_SIZE=4"),
        ({"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE=16"),
    ],
)
def test_torchruns_variables_that_are_no_place_are_refused(wrong, said):
    with pytest.raises(UsageError, match=rf"{said}.*start it with torchrun"):
        started({**TORCHRUN, **wrong})


@pytest.mark.parametrize("name", ["Any", "annotations", "ServeError", "__doc__", "system", None])
def test_an_error_from_the_network_is_one_of_ours_whatever_its_name_is(name):
    error = error_of({"error": name, "wrong": "too large", "seen": None, "fix": "less"})
    assert (type(error), error.wrong, error.fix) == (TrainError, "too large", "less")


def together(ports: list[int], **nodes: int) -> list[object]:
    """Two commands that meet; what each has, or the error it got."""
    found: list[object] = [None, None]

    def come(rank: int) -> None:
        place = Place(nodes=nodes.get(f"at_{rank}", 2), rank=rank, host="127.0.0.1", port=ports[0])
        try:
            found[rank] = Meeting(place, silent)
        except (UsageError, TrainError) as error:
            found[rank] = error

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_failure_is_told_with_its_cause_and_where_it_was():
    first, second = together([free_port()])
    assert isinstance(first, Meeting)
    assert isinstance(second, Meeting)
    assert first.torchrun[2:] == second.torchrun[2:]
    cause = OutOfMemory("too large", seen="8 GiB", fix="use --batch-size 2")
    assert second.fail(cause) is cause
    lost = first.fail(TrainError(LOST, seen="Connection closed by peer"))
    assert type(lost) is OutOfMemory
    assert (lost.wrong, lost.seen, lost.fix) == (
        "too large",
        "on machine 1: 8 GiB",
        "use --batch-size 2",
    )
    ended = threading.Thread(target=second.close)
    ended.start()
    first.close()
    ended.join()


def test_a_command_that_was_killed_while_others_are_awaited_comes_back(monkeypatch):
    monkeypatch.setattr(machines, "_SILENT_BEATS", 2.0)
    port = free_port()
    place = Place(nodes=3, rank=1, host="127.0.0.1", port=port)
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
    store.set("nodes", "3")
    store.add("came/0", 1)
    store.add("came/1", 1)
    store.set("beat/1", "7")  # the last one of a command that was killed
    found: list[Meeting] = []
    again = threading.Thread(target=lambda: found.append(Meeting(place, silent)))
    again.start()
    while store.get("beat/1") in (b"7", b"here") and again.is_alive():
        time.sleep(0.01)
    with pytest.raises(UsageError, match=r"another command is this machine already"):
        Meeting(place, silent)  # while the other one beats
    store.set("port", "1")
    with pytest.raises(UsageError, match=r"already.*start all machines again"):
        Meeting(place, silent)
    assert store.get("beat/1") != b"failed"  # those that were refused leave it
    store.add("came/2", 1)
    again.join()
    assert found[0].torchrun[-1] == "--master-port=1"
    found[0].close()
    assert store.get("beat/1") == b"failed"


def test_machines_that_do_not_come_or_do_not_agree(monkeypatch):
    place = Place(nodes=2, rank=0, host="127.0.0.1", port=free_port())
    monkeypatch.setattr(machines, "SILENT_S", 0.0)
    monkeypatch.setattr(machines, "STILL_S", 0.0)
    monkeypatch.setattr(machines, "_BEAT_S", 0.0)  # who has not come is not missed meanwhile
    monkeypatch.setattr(machines, "WAIT_S", 0.5)
    with pytest.raises(TrainError, match=r"without node_rank 1.*its own --node-rank"):
        Meeting(place, silent)
    monkeypatch.undo()
    monkeypatch.setattr(machines, "WAIT_S", 0.0)
    place = Place(nodes=2, rank=1, host="127.0.0.1", port=free_port())
    with pytest.raises(TrainError, match=r"first machine does not answer.*--node-rank 0"):
        Meeting(place, silent)
    monkeypatch.undo()
    first, second = together([free_port()], at_1=3)
    assert "do not agree" in str(second)
    assert "do not agree" in str(first)


@pytest.mark.parametrize("told", [b"{not json", b"[" * 200_000, b" " * 2_000_000, b"{}", b"3"])
def test_a_recipe_that_cannot_be_read_is_said_to_be_so(told, dataset):
    first, second = together([free_port()])
    first._store.set("settings", json.dumps(to_plain(recipe(dataset))))
    assert second.recipe() == recipe(dataset)
    first._store.set("settings", told)
    first._store.get("settings")  # a store answers one caller in order: it has it now
    with pytest.raises(TrainError, match=r"first machine says .* cannot be read.*same version"):
        second.recipe()
    first.fail(TrainError("ended"))
    second.close()
    first.close()


def test_a_first_machine_that_goes_silent_is_missed(monkeypatch):
    """Its store then neither answers nor breaks the connection."""
    first, second = together([free_port()])
    silent_for_good = threading.Event()
    monkeypatch.setattr(second, "_store", Silent(silent_for_good))
    second.look()  # begins a call that waits
    monkeypatch.setattr(machines, "SILENT_S", 0.5)

    def look_on() -> None:
        while True:
            second.look()

    with pytest.raises(TrainError, match=r"machine 0 has ended, or cannot be reached.*0[.]5 s"):
        look_on()
    cause = TrainError("failed here")
    assert second.fail(cause) is cause  # nobody can be told, and nobody is waited for
    second.close()
    silent_for_good.set()
    monkeypatch.undo()
    first.fail(cause)
    monkeypatch.setattr(machines, "END_S", 0.0)
    first.close()


def test_a_machine_that_goes_silent_is_missed_sooner_where_nothing_goes_on(monkeypatch):
    first, second = together([free_port()])
    monkeypatch.setattr(first, "_exchange", lambda beat: None)  # hears nothing more

    def looked(*, quiet_s: float, still_s: float) -> None:
        now = time.monotonic()
        first._heard[1], first._advanced_at = (b"7", now - quiet_s), now - still_s
        first._asked, first._beat_at = None, 0.0
        first.look()
        while first._asked is not None:
            first.look()

    looked(quiet_s=machines.SILENT_S - 10, still_s=machines.STILL_S - 6)
    looked(quiet_s=machines.STILL_S - 6, still_s=1000)
    with pytest.raises(TrainError, match=r"machine 1 has ended.*nothing for 12 s"):
        looked(quiet_s=machines.STILL_S + 1, still_s=machines.STILL_S + 1)
    second.close()
    first.close()


class Silent:
    """A store whose calls wait until ``over``."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: self._over.wait(60) and None
