"""Layers that int8 or fp8 do not suit compute like the rest instead, and the plan says which."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from tessella.compiler import verify
from tessella.compiler.calibration import Calibration
from tessella.compiler.passes import Request, run
from tessella.compiler.precision import most_harmed
from tessella.compiler.problems import problem_of
from tessella.compiler.rewrites import insert_quantization
from tessella.compiler.verify import Expected
from tessella.core.events import Emit, phase, warning
from tessella.graph.graph import Dim, Graph, Value, shape_at
from tessella.operations.tensor_meta import TensorMeta

# MobileNetV3-L, trained on digits: at 14.8 dB 96.9 % of the classes were float32's, at 19.0 98.5 %
QUIET_DB = 19.0  # of the answers over what rounding adds to them
MOST_FOR_QUIET = 4  # of so many layers one
# At 4.1 dB a MobileNetV3 of two epochs said another class for a quarter of its pictures.
NOISY_DB = 14.0
NOISY = (
    "rounding to int8 or fp8 changes the answers of this network by much: {:.1f} dB are left of the"
    f" {NOISY_DB:.0f} that usually keep its decisions. Compare it with tessella verify --data, or"
    " let tessella compile --budget choose the layers that round"
)
# Of all products: in float32 they take four to ten times as long. An Inception-v3 with random
# weights, in which 12 of 95 layers fell whatever they cost, took 11.5 ms for 5.7 on AMX. A trained
# MobileNetV3-L wants six layers to be quiet, more than a tenth: 91.8 % of digits for 91.3.
MOST_WORK = 0.15
# Floating-point operations of asking layers alone, each a pass of the network: Inception-v3's 95
# are 1.1e12, 10 to 37 s. By work, not by the clock: the same network gets the same plan.
MOST_ASKING = 2e12


def fallen_back(
    exact: Graph, request: Request, answers: Expected, judge: str, emit: Emit
) -> tuple[Request, Graph, Expected]:
    """The graph with its roundings, and what it answers.

    On a CPU a network whose answers rounding makes noisy is asked what each layer alone does to
    them, and the loudest compute like the rest instead. On a GPU what that costs has not been
    measured. Where layers in int8 or fp8 then still say something else than the network, those with
    the most noise of their own follow, up to half of all: more means a calibration of other data.
    None falls that the user has named.

    Args:
        exact: the network, optimized.
        request: with the precision that each layer is to have.
        answers: what the network says of some samples.
        judge: the device that interprets it.
    """
    assignment, calibration = request.decided, request.calibration
    loud: list[str] = []
    if request.target == "cpu" and calibration is not None and assignment.kinds:
        loud = _loudest(exact, request, calibration, answers, judge)
    if loud:
        emit(phase("rounding", _told(request, loud)))
        assignment = assignment.without(loud)
    return _alike(exact, request.assigned(exact, assignment), answers, judge, emit)


def _alike(
    exact: Graph, request: Request, answers: Expected, judge: str, emit: Emit
) -> tuple[Request, Graph, Expected]:
    """As ``fallen_back``, but for noise: one, two, four … layers fall, until the answers are like
    the network's.
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
            left_db = verify.deviation_db(found.outputs, answers)
            if left_db < NOISY_DB and not assignment.pruned:
                emit(warning(NOISY.format(left_db)))
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
    exact: Graph, request: Request, calibration: Calibration, answers: Expected, judge: str
) -> list[str]:
    """The layers without which the answers are quiet, the loudest first; none where these are more
    than may fall, or cost more: the answers would be noisy still.

    Each is taken to have that share of the noise which it has of all that they make alone. Those
    with the most noise of their own are asked, as many as ``MOST_ASKING`` allows.
    """
    kinds = request.decided.kinds

    def power(kinds: Mapping[str, str]) -> float:
        graph = exact.copy()
        insert_quantization.apply(graph, kinds, calibration.suiting(request.target))
        made = verify.interpreted(graph, answers.inputs, judge)
        return _power(verify.deviation_db(made, answers))

    noise = power(kinds)
    if noise <= _power(QUIET_DB):
        return []
    if all(isinstance(v.shape[0], Dim) for v in exact.inputs):
        answers = answers.at(1)  # for shares one has numbers enough
    work = _flops(exact, kinds)
    free = [name for name in kinds if name not in request.precisions]
    free.sort(key=lambda n: calibration.snr_db.get(kinds[n], {}).get(n, math.inf))
    asked = free[: int(MOST_ASKING // max(1, sum(work.values())))]
    alone = {name: power({name: kinds[name]}) for name in asked}
    share = noise / (sum(alone.values()) or 1.0)
    loud, left, room = list[str](), noise, MOST_WORK * sum(work.values())
    for name in sorted(alone, key=lambda n: -alone[n]):
        if left <= _power(QUIET_DB) or len(loud) == len(kinds) // MOST_FOR_QUIET:
            break
        if work[name] <= room:
            loud.append(name)
            left -= share * alone[name]
            room -= work[name]
    return loud if left <= _power(QUIET_DB) else []


def _flops(exact: Graph, names: Collection[str]) -> dict[str, int]:
    """Of one sample, by layer."""

    def meta(value: Value) -> TensorMeta:
        return TensorMeta(shape=shape_at(value.shape, 1), dtype=value.dtype)

    return {
        node.outputs[0].name: problem_of(node, meta, ()).flops or 0
        for node in exact.nodes
        if node.outputs[0].name in names
    }


def _power(snr_db: float) -> float:
    return float(10 ** (-snr_db / 10))
