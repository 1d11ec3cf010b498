"""``tessella studio``: the web pages on a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from tessella.cli.output import output
from tessella.studio.app import studio as run_studio


def register(app: typer.Typer) -> None:
    app.command("studio")(studio)


def studio(
    workspace: Annotated[Path, Argument(help="Folder with datasets, runs and plans.")] = Path("."),
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port; 0 takes a free one.")] = 8080,
    open_browser: Annotated[bool, Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Open the studio on a folder: data, train, monitor, explore, plan.

    Example: tessella studio my-work --open
    """
    with output():
        run_studio(workspace, host=host, port=port, open_browser=open_browser)
