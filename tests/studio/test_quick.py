import asyncio
import socket

import pytest

from tessella.core.errors import UsageError
from tessella.studio.app import studio
from tessella.studio.quick import NoAnswer, ask


def test_the_commands_own_words_are_told(tmp_path):
    with pytest.raises(NoAnswer) as caught:
        asyncio.run(ask(("show", "nothing-here"), folder=tmp_path))
    assert "nothing of ours lies here" in str(caught.value)
    assert "nothing-here" in str(caught.value)


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    with pytest.raises(NoAnswer, match="did not answer"):
        asyncio.run(ask(("show", "networks"), folder=tmp_path, timeout_s=0.05))


def test_a_name_cannot_smuggle_in_an_option_or_a_shell(tmp_path):
    with pytest.raises(NoAnswer):
        asyncio.run(ask(("show", "$(touch evil)"), folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_taken_port_is_told_before_anything_starts(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen"):
            studio(tmp_path / "work", port=taken.getsockname()[1])
