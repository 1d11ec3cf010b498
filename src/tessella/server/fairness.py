"""The requests that wait for an engine, in the order of their turns.

Of equal priority, who has to be answered within ``PATIENCE_NS`` goes by that deadline, and the
others as if they had it, so that nobody waits for ever. Among these, each client has an equal part
of the engine, however many requests and connections it has: start-time fair queueing (Goyal, Vin
and Cheng, 1996), with samples for the bytes of packets.

A client is an address. Those behind one proxy are one client, and all of one machine.
"""

from __future__ import annotations

import functools
import heapq
import ipaddress
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tessella.server.waiting import Request

PATIENCE_NS = 10**9
MOST_IDLE = 64  # clients with nothing waiting that are remembered


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
    """What waits of one client, and the sample with which its next request begins."""

    requests: int = 0
    next: int = 0


# Priority, deadline or first sample, arrival, and when its turn is at the latest.
_Entry = tuple[int, int, int, int, Request]


class Waiting:
    """The requests that wait.

    Attributes:
        samples: of them, that have not begun.
        members: how many clients' requests they are.

    Args:
        most: samples of an execution. A larger request counts as this many, again with each piece.
    """

    def __init__(self, most: int) -> None:
        self.samples = self.members = 0
        self._most = most
        self._arrivals = 0
        self._urgent: list[_Entry] = []  # heaps
        self._others: list[_Entry] = []
        self._clients: dict[int, _Client] = {}
        self._reached = 0  # the first sample of what was taken last: no client begins before it

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def __iter__(self) -> Iterator[Request]:
        yield from (entry[-1] for entry in self._urgent)
        yield from (entry[-1] for entry in self._others)

    @property
    def first(self) -> Request:
        """Whose turn is next."""
        return (self._urgent if self._urgent and self._is_urgent() else self._others)[0][-1]

    def push(self, request: Request, now_ns: int) -> None:
        """Let a request wait, or the rest of one that has begun, behind what waits by now."""
        self._arrivals += 1
        left = request.batch - request.begun
        self.samples += left
        self.members += request.members
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = _Client()
        client.requests += 1
        urgent_ns = None if request.deadline_ns is None else _urgent_ns(request, now_ns)
        if urgent_ns is not None:
            entry = request.priority, urgent_ns, self._arrivals, urgent_ns, request
            heapq.heappush(self._urgent, entry)
            return
        begin = client.next if client.next > self._reached else self._reached
        client.next = begin + (left if left < self._most else self._most)
        entry = request.priority, begin, self._arrivals, now_ns + PATIENCE_NS, request
        heapq.heappush(self._others, entry)

    def pop(self) -> Request:
        """Take the request whose turn is next."""
        if self._urgent and self._is_urgent():
            request = heapq.heappop(self._urgent)[-1]
        else:
            _, begin, _, _, request = heapq.heappop(self._others)
            if begin > self._reached:
                self._reached = begin
        self._went(request)
        return request

    def drop(self, requests: Collection[Request]) -> None:
        """Take out those of the requests that wait."""
        gone, urgent, others = set(requests), self._urgent, self._others
        self._urgent = [entry for entry in urgent if entry[-1] not in gone]
        self._others = [entry for entry in others if entry[-1] not in gone]
        heapq.heapify(self._urgent)
        heapq.heapify(self._others)
        for *_, request in others:
            if request in gone:  # its client had nothing of the engine for it
                client = self._clients[request.client]
                left = min(request.batch - request.begun, self._most)
                client.next = max(self._reached, client.next - left)
        for *_, request in (*urgent, *others):
            if request in gone:
                self._went(request)

    def clear(self) -> None:
        """Nothing waits any more."""
        self._urgent, self._others, self.samples, self.members = [], [], 0, 0
        self._clients.clear()

    def is_before(self, request: Request, now_ns: int) -> bool:
        """Whether what waits has its turn before a request that comes now."""
        if not len(self):
            return False
        priority, urgent_ns = request.priority, _urgent_ns(request, now_ns)
        first = (self._urgent if self._is_urgent() else self._others)[0]
        if urgent_ns is not None or self._is_urgent():
            limit_ns = now_ns + PATIENCE_NS if urgent_ns is None else urgent_ns
            return (first[0], first[3]) <= (priority, limit_ns)
        client = self._clients.get(request.client)
        begin = self._reached if client is None else max(self._reached, client.next)
        return first[:2] <= (priority, begin)

    def last_of_greediest(self, request: Request) -> Request | None:
        """The last request, none that has begun, of the client that has most of them waiting: if it
        has more than this one's would have.
        """
        mine = self._clients.get(request.client, _Client()).requests + 1
        greediest = max(self._clients, key=lambda one: self._clients[one].requests, default=None)
        if greediest is None or self._clients[greediest].requests <= mine:
            return None
        entries = [*self._urgent, *self._others]
        theirs = [(n, r) for *_, n, _, r in entries if r.client == greediest and not r.begun]
        return max(theirs, key=itemgetter(0))[1] if theirs else None

    def _is_urgent(self) -> bool:
        """Whether the turn is that of one with a deadline."""
        if not self._urgent or not self._others:
            return bool(self._urgent)
        one, other = self._urgent[0], self._others[0]
        return (one[0], one[3]) < (other[0], other[3])

    def _went(self, request: Request) -> None:
        self.samples -= request.batch - request.begun
        self.members -= request.members
        client = self._clients[request.client]
        client.requests -= 1
        if not self.members:
            self._clients.clear()
        elif not client.requests and client.next <= self._reached:
            del self._clients[request.client]
        elif len(self._clients) > len(self) + MOST_IDLE:
            self._clients = {
                number: client
                for number, client in self._clients.items()
                if client.requests or client.next > self._reached
            }


def _urgent_ns(request: Request, now_ns: int) -> int | None:
    """The deadline by which a request goes; None if it has none, a late one, or has begun."""
    deadline_ns = request.deadline_ns
    if deadline_ns is None or request.begun or deadline_ns >= now_ns + PATIENCE_NS:
        return None
    return deadline_ns
