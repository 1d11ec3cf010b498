"""The next searches of a network, prepared while earlier ones run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tessella.core.device import torch_device
from tessella.kernels.catalog import Kernel
from tessella.operations.problem import Problem
from tessella.search.allowance import Allowance
from tessella.search.compile_ahead import Compiling, Request, compile_ahead
from tessella.search.evidence import Candidate, Evidence
from tessella.search.find import Search, SearchOptions
from tessella.search.tuning import TimingCache

AHEAD = 16  # problems that are preselected before the first search: some hundred to compile


class Prefetch:
    """The candidates of a network's next searches, compiled while earlier searches run.

    One search after another would leave most of the compiling processes idle. Not all problems are
    preselected before the first search: where the allowance ends, something was measured.

    Args:
        problems: each with its constants, by a name, in the order of their searches.
        evidence: what searches have shown that are done: of a problem of a kind that was searched,
            only what may win is compiled.
    """

    def __init__(
        self,
        problems: Mapping[str, tuple[Problem, Mapping[int, torch.Tensor]]],
        *,
        target: str,
        cache: TimingCache,
        options: SearchOptions,
        evidence: Evidence | None = None,
    ) -> None:
        self._target, self._allowance = target, options.allowance or Allowance()
        self._waiting: dict[str, tuple[Search, list[Kernel], Compiling]] = {}
        self._ready: dict[str, tuple[list[Candidate], Compiling]] = {}
        if torch_device(target).type != "cuda":
            return
        self._problems = {name: problem for name, (problem, _) in problems.items()}
        wanted = {}
        for name, one in problems.items():
            search = Search(*one, target, cache, options, None, evidence=evidence)
            rows = search.unknown_rows()
            if listed := search.shortlist(rows) if rows else None:
                requests = self._requests(name, listed)
                self._ready[name] = listed, compile_ahead(requests, target)
            elif rows:
                wanted[name] = search, rows, self._requests(name, search.first_candidates(rows))
        compile_ahead([request for *_, requests in wanted.values() for request in requests], target)
        for name, (search, rows, requests) in wanted.items():  # they have been asked for
            self._waiting[name] = search, rows, compile_ahead(requests, target)

    def _requests(self, name: str, candidates: Sequence[Candidate]) -> list[Request]:
        return [(self._problems[name], *candidate) for candidate in candidates]

    def candidates(self, name: str) -> list[Candidate] | None:
        """The candidates that a search shall run, compiled if there was time.

        None if they were not preselected, as the cache has the answer or the time is over.
        """
        if name not in self._waiting and name not in self._ready:
            return None
        while self._waiting and (name in self._waiting or len(self._ready) < AHEAD):
            first = next(iter(self._waiting))
            search, rows, compiling = self._waiting[first]
            if not compiling.wait(self._allowance.left_s) or self._allowance.left_s == 0.0:
                break
            del self._waiting[first]
            found = search.preselect(rows)
            self._ready[first] = found, compile_ahead(self._requests(first, found), self._target)
        if name not in self._ready:
            return None
        found, compiling = self._ready.pop(name)
        compiling.wait(self._allowance.left_s)
        return found
