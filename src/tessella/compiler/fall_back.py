"""Layers that int8 or fp8 do not suit compute like the rest instead, and the plan says which."""

from __future__ import annotations

from dataclasses import replace

from tessella.compiler import verify
from tessella.compiler.passes import Request, run
from tessella.compiler.precision import most_harmed
from tessella.compiler.verify import Expected
from tessella.core.events import Emit, phase
from tessella.graph.graph import Graph

# MobileNetV3-L, trained on digits: at 14.8 dB 96.9 % of the classes were float32's, at 19.0 98.5 %
QUIET_DB = 19.0  # of the answers over what rounding adds to them
MOST_FOR_QUIET = 4  # of so many layers one


def fallen_back(
    exact: Graph, request: Request, answers: Expected, judge: str, emit: Emit
) -> tuple[Request, Graph, Expected]:
    """The graph with its roundings, and what it answers.

    Where layers in int8 or fp8 say something else than the network, those that rounding harms most
    compute like the rest instead, at most half of all: more means a calibration of other data. On a
    CPU a noisy answer is not enough either: then it is tried what each layer alone does to the
    answers, and the loudest compute like the rest. On a GPU what that costs has not been measured.

    Args:
        exact: the network, optimized.
        request: with the precision that each layer is to have.
        answers: what the network says of some samples.
        judge: the device that interprets it.
    """
    made = _alike(exact, request, answers, judge, emit)
    request, _, found = made
    if request.target != "cpu" or request.calibration is None or found.snr_db >= QUIET_DB:
        return made
    loud = _loudest(exact, request, answers, found.snr_db, judge)
    if not loud:
        return made
    emit(phase("rounding", _told(request, loud)))
    request = request.assigned(exact, request.decided.without(loud))
    return _alike(exact, request, answers, judge, emit)


def _alike(
    exact: Graph, request: Request, answers: Expected, judge: str, emit: Emit
) -> tuple[Request, Graph, Expected]:
    """As ``fallen_back``, but for noise: one, two, four … layers fall, until the answers are like
    the network's. None falls that the user has named.
    """
    assignment, calibration = request.decided, request.calibration
    fallen: list[str] = []
    most = len(assignment.kinds) // 2
    while True:
        request = request.assigned(exact, assignment)
        graph = run(exact, request, after="optimize", until="lower")
        if not assignment.kinds and not assignment.pruned:
            return request, graph, answers
        try:
            found = verify.rounded(
                answers,
                graph,
                emit,
                target=judge,
                alike=not assignment.pruned,
                snr_db=None if calibration is None else calibration.snr_of(exact, assignment.kinds),
            )
            return request, graph, found
        except verify.RoundedAway:
            harmed = (
                []
                if calibration is None
                else most_harmed(assignment, calibration, request.precisions)
            )
            fallen += harmed[: max(1, len(fallen))]
            if not harmed or len(fallen) > most:
                raise
            assignment = assignment.without(fallen)
            emit(phase("rounding", _told(request, fallen)))


def _told(request: Request, layers: list[str]) -> str:
    return f"computed in {request.decided.rest} instead: {', '.join(layers)}"


def _loudest(
    exact: Graph, request: Request, answers: Expected, snr_db: float, judge: str
) -> list[str]:
    """The layers without which the answers are quiet, the loudest first; as many as may fall.

    Each is taken to have that share of the noise which it has of all that they make alone.
    """
    assignment = request.decided
    power = {}
    for name, kind in assignment.kinds.items():
        if name not in request.precisions:
            alone = request.assigned(exact, replace(assignment, kinds={name: kind}))
            graph = run(exact, alone, after="prune", until="round")
            power[name] = _power(verify.deviation_db(graph, answers, judge))
    loud, left, share = list[str](), 1.0, sum(power.values())
    for name in sorted(power, key=lambda n: -power[n])[: len(assignment.kinds) // MOST_FOR_QUIET]:
        if left <= _power(QUIET_DB - snr_db):
            break
        loud.append(name)
        left -= power[name] / share
    return loud


def _power(snr_db: float) -> float:
    return float(10 ** (-snr_db / 10))
