import asyncio
import socket

import pytest

from tessella.core.errors import UsageError
from tessella.jobs import commands
from tessella.studio import networks
from tessella.studio.app import studio
from tessella.studio.quick import NoAnswer, ask


def test_the_commands_own_words_are_told_and_a_name_is_no_shell_s(tmp_path):
    with pytest.raises(NoAnswer) as caught:
        asyncio.run(ask(("show", "$(touch evil)"), folder=tmp_path))
    assert "nothing of ours lies here" in str(caught.value)
    assert "$(touch evil)" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(NoAnswer, match="did not answer"):
        asyncio.run(ask(("show", "networks"), folder=tmp_path, timeout_s=0.05))


def test_the_networks_are_asked_for_once(tmp_path, monkeypatch):
    asked, told = [], [{"name": "lenet", "title": "LeNet", "tasks": ["classification"]}]

    async def answer(argv, *, folder):
        asked.append((argv, folder))
        return {"networks": told}

    monkeypatch.setattr(networks, "_told", [])
    monkeypatch.setattr(networks, "ask", answer)
    assert [asyncio.run(networks.every_network(tmp_path)) for _ in range(2)] == [told, told]
    assert asked == [(commands.show_networks().argv, tmp_path)]


def test_a_taken_port_is_told_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen"):
            studio(tmp_path / "work", port=taken.getsockname()[1])
