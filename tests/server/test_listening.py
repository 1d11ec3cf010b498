"""Connections that come at once are taken at once, however long a turn of the event loop is."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
import uvloop

from tessella.server.listening import HttpServer, bind

CLIENTS = 40


async def app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("nobody asks")


async def turns_until_all_are_taken() -> int:
    config = uvicorn.Config(app, lifespan="off", log_config=None)
    config.load()
    server = HttpServer(config, bind("127.0.0.1", 0))
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    clients = [socket.create_connection(server.listener.getsockname()) for _ in range(CLIENTS)]
    turns = 0
    while len(server.server_state.connections) < CLIENTS and turns < 1000:
        await asyncio.sleep(0)
        turns += 1
    for client in clients:
        client.close()
    await server.shutdown([server.listener])
    return turns


def test_all_that_wait_are_taken_in_a_few_turns() -> None:
    """libuv alone takes one a turn: the last of these would wait for 40 turns, of 4 ms each where
    a network runs in the loop.
    """
    assert uvloop.run(turns_until_all_are_taken()) < CLIENTS // 2
