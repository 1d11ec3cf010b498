"""serve and deploy: plans over HTTP, from this process or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tessella import cluster, server
from tessella.cluster.front import Door
from tessella.core.errors import UsageError


def serve(
    models: Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    host_names: Sequence[str] = (),
    max_delay_us: int = 0,
    folder: str | Path | None = None,
    traffic: Sequence[str] = (),
    compiled: bool = True,
    device: str | None = None,
    acceptors: int = 0,
    grpc_port: int | None = None,
    tls: tuple[str | Path, str | Path] | None = None,
    shared_memory: bool = False,
    decode: Literal["host", "gpu"] = "host",
    trace: bool = False,
    instances: int | Sequence[str] = (),
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve plans over HTTP (Open Inference Protocol) until the process is told to stop.

    >>> serve({"flowers": "flowers.plan"}, port=8000)
    >>> serve({"flowers": "flowers.plan"}, instances=["flowers=1@cuda:0,cuda:1"])
    >>> serve({"flowers": "a.plan", "flowers@2": "b.plan"}, traffic=["flowers=1:90,2:10"])

    Args:
        models: plans by NAME (its version 1) or NAME@VERSION, or folders of VERSION/model.plan.
        token: what clients must send; needed unless ``host`` is this machine's own.
        host_names: further names under which clients reach this server; addresses need none.
        max_delay_us: how long a request may wait for others to share its batch.
        folder: NAME.plan files, and NAME/VERSION/model.plan, that clients may load too.
        traffic: rules ``NAME=1:90,2:10,shadow:3``: which share of the requests without a version
            each version answers, and which one gets copies for comparison.
        compiled, device: as for ``load``, for all plans.
        acceptors: processes that take HTTP, beside one that runs the engines; 0 is one process for
            all.
        grpc_port: where gRPC listens, too.
        tls: files of a certificate and its key (PEM), for HTTP and gRPC.
        shared_memory: clients on this host may put tensors into shared memory of this user.
        decode: who decodes JPEG files: the host, or the engine's GPU, which leaves the cores to all
            else (same bits where it has decoders of its own: A100, H100 and later).
        trace: export OpenTelemetry traces, as its own environment variables say: an extra,
            ``pip install tessella[tracing]``.
        instances: how many of each model run, each in a process of its own, with one queue for all;
            or rules ``NAME=2``, and ``NAME=1@cuda:0,cuda:1``: as many on each of these devices.
        ready: called with the server's URL when it takes requests.
    """
    server.serve(
        {name: Path(path) for name, path in models.items()},
        host=host,
        port=port,
        token=token,
        host_names=tuple(host_names),
        max_delay_us=max_delay_us,
        folder=None if folder is None else Path(folder),
        traffic=dict(map(server.parse_rule, traffic)),
        compiled=compiled,
        device=device,
        acceptors=acceptors,
        doors=server.Doors(
            grpc_port=grpc_port,
            tls_cert=str(Path(tls[0]).absolute()) if tls else None,
            tls_key=str(Path(tls[1]).absolute()) if tls else None,
            shared_memory=shared_memory,
        ),
        decode=decode,
        trace=trace,
        instances=_placements(instances),
        ready=ready,
    )


def _placements(instances: int | Sequence[str]) -> dict[str, server.Placement]:
    """Where the instances of each model run; raises ``UsageError``."""
    if isinstance(instances, str):
        raise UsageError(
            "instances are a number, or rules in a list", seen=instances[:140], fix="write ['m=2']"
        )
    placed: dict[str, server.Placement] = {}
    for rule in [str(instances)] if isinstance(instances, int) else instances:
        name, where = server.parse_instances(rule)
        if name in placed:
            raise UsageError(
                "two rules say how many instances of a model there are",
                seen=rule[:140],
                fix="give one rule for each model, and one without a name for all others",
            )
        placed[name] = where
    return placed


def deploy(
    models: Mapping[str, str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token_file: str | Path | None = None,
    host_names: Sequence[str] = (),
    max_delay_us: int = 0,
    traffic: Sequence[str] = (),
    compiled: bool = True,
    decode: Literal["host", "gpu"] = "host",
    replicas: str = "1",
    cpus: int = 1,
    gpus: int | None = None,
) -> str:
    """Let a Ray cluster that runs serve plans, in place of those that it serves, without a pause.

    >>> deploy({"flowers": "flowers.plan"}, replicas="2:8", host="0.0.0.0", token_file="token")

    Args:
        models: as for ``serve``; each file lies at the same path on every machine.
        host, port, token_file: of the proxies, on every machine; a token is needed unless ``host``
            is each machine's own.
        host_names, max_delay_us, traffic, compiled, decode: as for ``serve``.
        replicas: how many, ``4``, or ``2:8``: as many as the requests at hand need.
        cpus, gpus: of each replica; None is one GPU if a plan has programs for GPUs alone.

    Returns:
        The URL of the proxy on this machine; each machine with a replica has one at this port.
    """
    return cluster.deploy(
        {name: Path(path) for name, path in models.items()},
        door=Door(
            host=host,
            port=port,
            token_file=None if token_file is None else str(Path(token_file).absolute()),
            names=tuple(host_names),
        ),
        scale=cluster.Scale.parsed(replicas, cpus=cpus, gpus=gpus),
        traffic=dict(map(server.parse_rule, traffic)),
        max_delay_us=max_delay_us,
        compiled=compiled,
        decode=decode,
    )
