"""``tessella kernels``: the catalog of kernels that plans are made of."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from tessella.cli.output import Json, grid, output
from tessella.kernels import catalog


def register(app: typer.Typer) -> None:
    app.command("kernels")(kernels)


def kernels(
    op: Annotated[str | None, Argument(help="Only kernels of this operation.")] = None,
    json: Json = False,
) -> None:
    """List the kernels: id, operation, where they run, who wrote them.

    Example: tessella kernels conv2d
    """
    with output(json_only=json) as out:
        found = [k for k in catalog.KERNELS if op is None or k.op in (op, "*")]
        rows = [(k.id, k.op, " ".join(k.targets), k.source) for k in found]
        plain = [
            {"id": k.id, "op": k.op, "targets": list(k.targets), "source": k.source} for k in found
        ]
        out.result({"kernels": plain}, grid(("kernel", "operation", "targets", "source"), rows))
