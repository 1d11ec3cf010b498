"""The trials of a sweep as JSON by URL: ``static/trials.js`` draws them, and asks for changes.

A thousand trials are 100 KB; as elements of the page they would be ten thousand, all through its
socket.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tessella.artifacts.sweep import Axis, Sweep, SweepInfo, Trial
from tessella.core.record import canonical_json, digest, to_plain
from tessella.studio import parts
from tessella.studio.workspace import Workspace, sweep_stamp


def router(workspace: Workspace) -> APIRouter:
    """``/api/sweep``; errors of ours become 400 with a JSON body (see ``app``)."""
    routes = APIRouter(prefix="/api")

    @routes.get("/sweep")
    def trials(ref: str, known: str = "") -> Response:
        """The trials; 204 where they are still those of the answer with the stamp ``known``."""
        stamp = digest(sweep_stamp(workspace.path(ref)))[:16]
        if stamp == known:
            return Response(status_code=204)
        plain = described(*workspace.sweep(ref)) | {"stamp": stamp, "ref": ref}
        return Response(canonical_json(plain), media_type="application/json")

    return routes


def described(info: SweepInfo, sweep: Sweep) -> dict[str, Any]:
    """What the browser draws: axes, and of each trial a row of values in their order."""
    return {
        "axes": [_axis(axis, sweep) for axis in info.axes],
        "score": info.score,
        "percent": info.score.rpartition("/")[2] in parts.PERCENT,
        "trials": [_row(trial, info.axes) for trial in sweep.trials],
    }


def _axis(axis: Axis, sweep: Sweep) -> dict[str, Any]:
    return {**to_plain(axis), "importance": sweep.importance.get(axis.path)}


def _row(trial: Trial, axes: tuple[Axis, ...]) -> list[Any]:
    score = None if trial.score is None else float(f"{trial.score:.6g}")
    values = [trial.values.get(axis.path) for axis in axes]
    return [
        trial.number, trial.state, score, trial.validations, round(trial.seconds, 1),
        trial.error, values,
    ]  # fmt: skip
