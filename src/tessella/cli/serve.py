"""``tessella serve``: plans over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Events, output
from tessella.core.access_token import read_token
from tessella.core.errors import UsageError
from tessella.core.events import phase

HostName = Annotated[
    list[str] | None,
    Option(help="Name under which clients reach this server, if they use no address; repeat."),
]
Folder = Annotated[
    Path | None,
    Option(help="Folder of NAME.plan and NAME/VERSION/model.plan that clients may load too."),
]
TrafficRules = Annotated[
    list[str] | None,
    Option(help="Shares of versions and a shadow: NAME=1:90,2:10,shadow:3."),
]
Instances = Annotated[
    list[str] | None,
    Option(help="Processes that run a model, with one queue: 2, NAME=2, NAME=1@cuda:0,cuda:1."),
]
Acceptors = Annotated[
    int, Option(help="Processes that take HTTP, beside the engine's; 0 is one for all.")
]
Traces = Annotated[
    bool, Option("--trace", help="Export OpenTelemetry traces (pip install 'tessella\\[tracing]').")
]
GrpcPort = Annotated[int | None, Option(help="Port for gRPC; none without.")]
Decode = Annotated[Literal["host", "gpu"], Option(help="Where JPEG files are decoded.")]
On = Annotated[
    Literal["here", "ray"],
    Option(help="This machine, or a Ray cluster that runs (pip install 'tessella\\[ray]')."),
]
Replicas = Annotated[
    str, Option(help="With --on ray: how many, 4, or as many as requests need, 2:8.")
]
Gpus = Annotated[
    int | None,
    Option(help="GPUs of each replica, with --on ray; one if a plan runs on GPUs alone."),
]


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    models: Annotated[
        list[str], Argument(help="NAME=FILE.plan, NAME@VERSION=FILE.plan, NAME=FOLDER, or FILE.")
    ],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8000,
    host_name: HostName = None,
    token_file: Annotated[
        Path | None, Option(help="File with a token that clients must send (Bearer).")
    ] = None,
    max_delay_us: Annotated[
        int, Option(help="How long a request may wait for others to share its batch.")
    ] = 0,
    folder: Folder = None,
    traffic: TrafficRules = None,
    recompile: Annotated[
        bool, Option("--recompile", help="Do not run the machine code that a plan carries.")
    ] = False,
    instances: Instances = None,
    acceptors: Acceptors = 0,
    grpc_port: GrpcPort = None,
    tls_cert: Annotated[Path | None, Option(help="Certificate (PEM), with --tls-key.")] = None,
    tls_key: Annotated[Path | None, Option(help="Key of the certificate (PEM).")] = None,
    shared_memory: Annotated[
        bool, Option("--shared-memory", help="Take tensors in this user's shared memory.")
    ] = False,
    decode: Decode = "host",
    trace: Traces = False,
    on: On = "here",
    replicas: Replicas = "1",
    cpus: Annotated[int, Option(help="Cores of each replica, with --on ray.")] = 1,
    gpus: Gpus = None,
    events: Events = None,
) -> None:
    """Serve plans (Open Inference Protocol: /v2/models/NAME/infer), with /metrics.

    Example: tessella serve flowers=flowers.plan --port 8000

    Two versions: tessella serve flowers=a.plan flowers@2=b.plan --traffic flowers=1:90,2:10

    On two GPUs: tessella serve flowers=flowers.plan --instances flowers=1@cuda:0,cuda:1

    On several machines: tessella serve --on ray flowers=flowers.plan --replicas 2:8
    """
    with output(events=events) as out:
        shared: dict[str, Any] = {
            "host": host, "port": port, "host_names": host_name or (), "traffic": traffic or (),
            "max_delay_us": max_delay_us, "compiled": not recompile, "decode": decode,
        }  # fmt: skip
        plans = parse_models(models)
        if on == "ray":
            _refuse_on_ray(
                folder, acceptors, grpc_port, tls_cert, tls_key, shared_memory, trace, instances
            )
            shared |= {"replicas": replicas, "cpus": cpus, "gpus": gpus}
            out.emit(phase("deployed", api.deploy(plans, token_file=token_file, **shared)))
            return
        _refuse_here((replicas, cpus, gpus), folder, port, grpc_port)
        here: dict[str, Any] = {
            "folder": folder, "instances": instances or (), "acceptors": acceptors,
            "grpc_port": grpc_port, "shared_memory": shared_memory, "trace": trace,
        }  # fmt: skip
        api.serve(
            plans,
            token=None if token_file is None else read_token(token_file),
            tls=_both(tls_cert, tls_key),
            ready=lambda url: out.emit(phase("serving", url)),
            **here,
            **shared,
        )


def _both(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if certificate and key:
        return certificate, key
    if certificate or key:
        raise UsageError("TLS needs a certificate and its key", fix="give --tls-cert and --tls-key")
    return None


def _refuse_on_ray(*here_only: object) -> None:
    if any(value not in (None, False, 0) for value in here_only):
        raise UsageError(
            "these are for one machine: folder, acceptors, gRPC, TLS, shared memory, traces,"
            " instances",
            fix="leave their options out with --on ray, and let a balancer in front end TLS;"
            " --replicas is how many run a model",
        )


def _refuse_here(
    of_ray: tuple[str, int, int | None], folder: Path | None, port: int, grpc_port: int | None
) -> None:
    if of_ray != ("1", 1, None):
        raise UsageError(
            "replicas, and their cores and GPUs, are Ray's",
            fix="add --on ray, or run a model several times on this machine: --instances",
        )
    if folder is not None and not folder.is_dir():
        raise UsageError(
            "there is no such folder to take models from", seen=str(folder), fix="make it first"
        )
    if port == grpc_port != 0:
        raise UsageError(
            "HTTP and gRPC need ports of their own", seen=port, fix="give --grpc-port another"
        )


def parse_models(models: list[str]) -> dict[str, Path]:
    """``NAME=FILE``, ``NAME@VERSION=FILE`` or ``FILE`` (its stem is the name) as paths by name."""
    paths: dict[str, Path] = {}
    for model in models:
        name, found, path = model.rpartition("=")
        name = name if found else Path(path).stem
        if name in paths:
            raise UsageError("two models have the same name", seen=name, fix="write NAME=FILE")
        paths[name] = Path(path)
    return paths
