"""Connections: taken at once, however long a turn of the event loop is, and let go for others."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from tessella.server.listening import Accepting, HttpServer, bind, make_room
from tests.support.certificates import self_signed

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


async def closed_before_their_handshake(tls: ssl.SSLContext) -> list[bytes]:
    """What silent clients hear when room is made for others."""
    loop = asyncio.get_running_loop()
    accepting = Accepting(bind("127.0.0.1", 0), asyncio.Protocol, set(), tls=tls)
    address = accepting._listener.getsockname()
    clients = [socket.create_connection(address) for _ in range(4)]
    while len(list(accepting.shared())) < len(clients):
        await asyncio.sleep(0.001)
    assert make_room(accepting.shared(), most=3) == 3
    heard = []
    for client in clients[:3]:
        client.setblocking(False)
        heard.append(await loop.sock_recv(client, 100))
    while len(list(accepting.shared())) > 1:
        await asyncio.sleep(0.001)
    accepting.stop()
    await accepting.arrived()
    for client in clients:
        client.close()
    return heard


def test_who_never_shakes_hands_gives_way_to_others(tmp_path: Path) -> None:
    """Else who opens as many connections as there are descriptors, and says nothing, shuts
    everybody out of a server with TLS.
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*self_signed(tmp_path))
    assert uvloop.run(asyncio.wait_for(closed_before_their_handshake(tls), 9)) == 3 * [b""]
