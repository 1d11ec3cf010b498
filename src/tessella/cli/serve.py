"""``tessella serve``: plans over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from tessella import api
from tessella.cli.output import Events, output
from tessella.core.errors import UsageError
from tessella.core.events import phase


def register(app: typer.Typer) -> None:
    app.command("serve")(serve)


def serve(
    models: Annotated[
        list[str], Argument(help="NAME=FILE.plan, NAME@VERSION=FILE.plan, NAME=FOLDER, or FILE.")
    ],
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, Option(help="File with a token that clients must send (Bearer).")
    ] = None,
    max_delay_us: Annotated[
        int, Option(help="How long a request may wait for others to share its batch.")
    ] = 0,
    folder: Annotated[
        Path | None,
        Option(help="Folder of NAME.plan and NAME/VERSION/model.plan that clients may load too."),
    ] = None,
    traffic: Annotated[
        list[str] | None,
        Option(help="Shares of versions and a shadow: NAME=1:90,2:10,shadow:3."),
    ] = None,
    recompile: Annotated[
        bool, Option("--recompile", help="Do not run the machine code that a plan carries.")
    ] = False,
    acceptors: Annotated[
        int, Option(help="Processes that take HTTP, beside the engine's; 0 is one for all.")
    ] = 0,
    grpc_port: Annotated[
        int | None, Option(help="Port for gRPC (pip install 'tessella[grpc]'); none without.")
    ] = None,
    tls_cert: Annotated[Path | None, Option(help="Certificate (PEM), with --tls-key.")] = None,
    tls_key: Annotated[Path | None, Option(help="Key of the certificate (PEM).")] = None,
    shared_memory: Annotated[
        bool, Option("--shared-memory", help="Take tensors in this user's shared memory.")
    ] = False,
    decode: Annotated[
        Literal["host", "gpu"],
        Option(help="Where JPEG files are decoded."),
    ] = "host",
    events: Events = None,
) -> None:
    """Serve plans (Open Inference Protocol: /v2/models/NAME/infer), with /metrics.

    Example: tessella serve flowers=flowers.plan --port 8000

    Two versions: tessella serve flowers=a.plan flowers@2=b.plan --traffic flowers=1:90,2:10
    """
    with output(events=events) as out:
        if (tls_cert is None) != (tls_key is None):
            fix = "give --tls-cert and --tls-key"
            raise UsageError("TLS needs a certificate and its key", fix=fix)
        api.serve(
            parse_models(models),
            host=host,
            port=port,
            token=None if token_file is None else read_token(token_file),
            max_delay_us=max_delay_us,
            folder=folder,
            traffic=traffic or (),
            compiled=not recompile,
            acceptors=acceptors,
            grpc_port=grpc_port,
            tls=(tls_cert, tls_key) if tls_cert and tls_key else None,
            shared_memory=shared_memory,
            decode=decode,
            ready=lambda url: out.emit(phase("serving", url)),
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


def read_token(path: Path) -> str:
    """The token in a file, which only its owner may read."""
    if not path.is_file() or not (token := path.read_text().strip()):
        raise UsageError("there is no token here", seen=path, fix="write one line into the file")
    return token
