"""Which version of a model answers a request that names none, and which one gets a copy of it.

Without a rule that is the newest version. A *split* shares requests out by weights, by a hash of
the request's id or else by chance; a *shadow* is a version that answers a copy, for comparison.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

from tessella.core.errors import ArtifactError, InputError, UsageError
from tessella.core.record import from_plain
from tessella.server.protocol import Signature
from tessella.server.versions import check_name, check_version

MOST_SHARES, MOST_WEIGHT = 8, 1000
_EXAMPLE = 'send {"split": {"1": 90, "2": 10}, "shadow": "3"}, or {} for the newest version'
_ID_CHARACTERS = 256  # of a request's id count: enough to tell ids apart, and quick to hash


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A rule for the requests that name no version of a model.

    Attributes:
        split: weights by version; none is the newest version alone.
        shadow: the version that gets copies; None is no copies.
        shadow_percent: how many of a hundred requests are copied.
        seed: of the hash and of chance, so that a split can be had again.

    Raises:
        UsageError: weights, versions or a percentage that cannot be.
    """

    split: dict[str, int] = field(default_factory=dict)
    shadow: str | None = None
    shadow_percent: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for version in (*self.split, *([] if self.shadow is None else [self.shadow])):
            check_version(version)
        weights = self.split.values()
        fits = all(type(w) is int and 0 <= w <= MOST_WEIGHT for w in weights)
        if not fits or len(weights) > MOST_SHARES or (weights and not sum(weights)):
            raise UsageError(
                "this is no split of traffic",
                seen=repr(self.split)[:140],
                fix=f"give up to {MOST_SHARES} versions a weight from 0 to {MOST_WEIGHT}, one of"
                ' them above 0, for example {"1": 90, "2": 10}',
            )
        if self.split.get(self.shadow or ""):
            raise UsageError(
                "a version cannot answer requests and be their shadow, too",
                seen=self.shadow,
                fix="take it out of the split, or let another version be the shadow",
            )
        if not 1 <= self.shadow_percent <= 100 or not 0 <= self.seed < 1 << 32:
            raise UsageError(
                "shadow_percent or seed is out of range",
                seen=f"{self.shadow_percent}, {self.seed}"[:80],
                fix="send a shadow_percent from 1 to 100 and a seed from 0 to 4294967295",
            )


def read_traffic(document: Mapping[str, Any]) -> Traffic:
    """The rule in a request's JSON.

    Raises:
        InputError: it is none.
    """
    try:
        return from_plain(Traffic, document, where="the rule")
    except ArtifactError as error:
        raise InputError(error.wrong, seen=error.seen, fix=_EXAMPLE) from error


def parse_rule(text: str) -> tuple[str, Traffic]:
    """Name and rule in ``NAME=1:90,2:10,shadow:3``, as a command line gives it.

    Raises:
        UsageError: it is none.
    """
    name, _, rule = text.partition("=")
    split, shadow = {}, None
    for part in rule.split(","):
        what, _, value = part.partition(":")
        if what == "shadow":
            shadow = value
        elif value.isascii() and value.isdigit() and len(value) < 6 and what not in split:
            split[what] = int(value)
        else:
            raise UsageError(
                "this is no rule of traffic", seen=text[:140], fix="write lenet=1:90,2:10,shadow:3"
            )
    return check_name(name), Traffic(split=split, shadow=shadow)


class Routed(Protocol):
    """What a route asks of a model."""

    version: str
    signature: Signature


M = TypeVar("M", bound=Routed)


class Route(Generic[M]):
    """A rule with the models that it means in this process: those of them that are ready and take
    and give the same tensors.

    Attributes:
        first: the model against whose tensors a request is checked before it has its version.
        shares: the models that answer, each with the share up to which requests are its own.
        shadow: the model that gets copies.
    """

    def __init__(self, traffic: Traffic, models: Mapping[str, M]) -> None:
        ready = sorted(models.values(), key=lambda m: int(m.version), reverse=True)
        sharing = [m for m in ready if traffic.split.get(m.version)]
        if sharing:
            self.first = sharing[0]
            sharing = [m for m in sharing if takes_same(m, self.first)]
        else:  # the newest, or whoever is left; the shadow only if there is nobody else
            self.first = next((m for m in ready if m.version != traffic.shadow), ready[0])
            sharing = [self.first]
        same = sorted(sharing, key=lambda m: int(m.version))  # ids move as little as can be
        weights = [traffic.split.get(m.version) or 1 for m in same]
        total = sum(weights)
        self.shares = [(w / total, m) for w, m in zip(accumulate(weights), same, strict=True)]
        shadow = None if traffic.shadow is None else models.get(traffic.shadow)
        is_other = shadow is not None and shadow is not self.first
        self.shadow = shadow if shadow and is_other and takes_same(shadow, self.first) else None
        self._copied = traffic.shadow_percent / 100
        self._key = traffic.seed.to_bytes(4, "little")
        self._random = random.Random(traffic.seed)

    def choose(self, request_id: str | None = None) -> M:
        """The model that answers a request: for the same id always the same."""
        if len(self.shares) == 1:
            return self.first
        if request_id:
            text = request_id[:_ID_CHARACTERS].encode("utf-8", "surrogatepass")
            digest = blake2b(text, digest_size=8, key=self._key).digest()
            place = int.from_bytes(digest, "little") / 2**64
        else:
            place = self._random.random()
        return next((m for upto, m in self.shares if place < upto), self.shares[-1][1])

    def copies(self) -> bool:
        """Whether the shadow, if there is one, gets a copy of this request."""
        return self.shadow is not None and (
            self._copied == 1 or self._random.random() < self._copied
        )

    def to_json(self) -> dict[str, Any]:
        """What is in force: shares by version, and the shadow."""
        below, shares = 0.0, {}
        for upto, model in self.shares:
            shares[model.version] = round(upto - below, 6)
            below = upto
        return {"shares": shares, "shadow": self.shadow.version if self.shadow else None}


def takes_same(one: Routed, other: Routed) -> bool:
    """Whether two versions take and give the same tensors."""
    a, b = one.signature, other.signature
    return (a.inputs, a.outputs, a.image_input) == (b.inputs, b.outputs, b.image_input)


def settled(traffic: Traffic | None, models: Mapping[str, M]) -> tuple[M, Route[M] | None]:
    """The model that answers requests without a version, and the route if there is a rule.

    Args:
        models: the ready versions of one name, at least one.
    """
    if traffic is None:
        return max(models.values(), key=lambda m: int(m.version)), None
    route = Route(traffic, models)
    return route.first, route
