"""Whose requests wait for an engine: where it cannot compute all, no client takes more of it than
another, however many requests and connections it has.

A client is an address. Those behind one proxy are one client, and all of one machine.
"""

from __future__ import annotations

import functools
import ipaddress
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessella.server.waiting import Request

# A request without a deadline, or with a later one, takes its turn as if it had this one, so that
# nobody waits for ever: clients of gRPC give deadlines of a minute.
PATIENCE_NS = 10**9


def client_of(peer: Sequence[Any] | None) -> int:
    """The client's number, by its address and port; 0 of one that has none."""
    return _number(str(peer[0])) if peer else 0


@functools.lru_cache(1024)
def _number(host: str) -> int:
    if ":" in host:  # of IPv6 everybody has 2**64 addresses
        whole = ipaddress.IPv6Address(host.partition("%")[0])
        host = str(whole.ipv4_mapped or int(whole) >> 64)
    return zlib.crc32(host.encode())


@dataclass(slots=True)
class _Client:
    """What waits of one client, and the last turn that one of its requests was given."""

    requests: int = 0
    samples: int = 0
    last_ns: int = 0


class Shares:
    """The clients whose requests wait for an engine."""

    def __init__(self) -> None:
        self._clients: dict[int, _Client] = {}

    def turn_ns(self, request: Request, now_ns: int, sample_ns: int) -> int:
        """When a request has its turn: of equal priority, those with earlier ones go first.

        One that has time is put behind what its client has waiting, as if each client had an equal
        part of the engine; so one client's requests stay in their order.

        Args:
            sample_ns: how long the engine takes for a sample.
        """
        turn_ns = now_ns + PATIENCE_NS
        client = self._clients.get(request.client)
        if client is not None:
            # Two at least: somebody else may come.
            ahead_ns = client.samples * sample_ns * max(2, len(self._clients))
            turn_ns = max(turn_ns + ahead_ns, client.last_ns)
        return turn_ns if request.deadline_ns is None else min(request.deadline_ns, turn_ns)

    def came(self, request: Request, turn_ns: int) -> None:
        """A request waits."""
        client = self._clients.setdefault(request.client, _Client())
        client.requests += request.members
        client.samples += request.batch - request.begun
        if turn_ns != request.deadline_ns:
            client.last_ns = turn_ns

    def went(self, request: Request) -> None:
        """It does not wait any more."""
        client = self._clients[request.client]
        client.requests -= request.members
        client.samples -= request.batch - request.begun
        if not client.requests:
            del self._clients[request.client]

    def greedier_than(self, request: Request) -> int | None:
        """The client that has most requests waiting, if those are more than this one's would be."""
        mine = self._clients.get(request.client, _Client()).requests + request.members
        most = max(self._clients, key=lambda one: self._clients[one].requests, default=None)
        return most if most is not None and self._clients[most].requests > mine else None

    def forget(self) -> None:
        """Nothing waits."""
        self._clients.clear()
