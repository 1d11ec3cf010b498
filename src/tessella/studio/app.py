"""The studio: a FastAPI application with NiceGUI pages mounted on it, and no engine inside.

Pages read artifacts and the job store. Every piece of work is a command, run as a job or, when it
is quick, as a subprocess. So a restart of the studio loses nothing, and a training never waits for
a page.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import warnings
import webbrowser
from collections.abc import Callable
from pathlib import Path

import nicegui
import uvicorn
from fastapi import FastAPI, Request
from nicegui import ui
from starlette.responses import JSONResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from tessella.core.errors import TessellaError, UsageError
from tessella.jobs.scheduler import Scheduler
from tessella.jobs.store import Store
from tessella.studio import parts, pictures, trials, uploads
from tessella.studio.context import Context
from tessella.studio.guard import Guard, read_or_make_token
from tessella.studio.labels import Labels
from tessella.studio.pages import (
    compare,
    data,
    diff,
    evaluate,
    explore,
    home,
    image,
    label,
    monitor,
    plan,
    search,
    serve,
    train,
    trash,
)
from tessella.studio.theme import SITE, STATIC, frame
from tessella.studio.trash import Trash
from tessella.studio.uploads import Uploads
from tessella.studio.warm import Answers
from tessella.studio.workspace import Workspace

PAGES = (
    home, data, train, search, monitor, compare, explore, evaluate, plan, serve, diff, image, label,
    trash,
)  # fmt: skip

log = logging.getLogger("tessella.studio")


def create_app(
    context: Context, *, token: str, host: str = "127.0.0.1", port: int = 8080
) -> ASGIApp:
    """The studio as an ASGI application, guarded. NiceGUI allows one a process."""
    app = FastAPI(title="Tessella studio", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(TessellaError, _error_response)
    app.include_router(uploads.router(context.uploads))
    app.include_router(trials.router(context.workspace))
    app.include_router(pictures.router(context.workspace, context.uploads))
    app.mount("/static", StaticFiles(directory=STATIC))
    if SITE is not None:
        app.mount("/site", StaticFiles(directory=SITE, html=True))
    for page in PAGES:
        page.register(context)
    nicegui.app.on_shutdown(context.answers.close)
    nicegui.app.on_page_exception(lambda error: _show_error(error, context.workspace.root))
    ui.run_with(
        app,
        title="Tessella",
        favicon=STATIC / "logo.svg",
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        show_welcome_message=False,
        reconnect_timeout=20.0,
    )
    return Guard(app, token=token, host=host, port=port)


def studio(
    workspace: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    open_browser: bool = False,
    scheduler: bool = True,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Run the studio on a workspace until it is stopped (Ctrl-C).

    Args:
        workspace: folder with datasets, runs and plans; made if missing.
        port: 0 takes a free one.
        token: the secret of the address; by default the workspace's own.
        open_browser: open the address in the browser of this machine.
        scheduler: also start queued jobs; False if another process does.
        ready: called with the address as soon as the studio answers.

    Raises:
        UsageError: the port is taken or the address is not this machine's.
    """
    space = Workspace(workspace)
    listening = _listen(host, port)
    port = listening.getsockname()[1]
    secret = token or read_or_make_token(space.own() / "token")
    store = Store(space.root / "jobs.db")
    context = Context(
        workspace=space,
        store=store,
        uploads=Uploads(space),
        answers=Answers(space.root),
        labels=Labels(space.own()),
        trash=Trash(space, store),
    )
    app = create_app(context, token=secret, host=host, port=port)
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/?token={secret}"

    def announce() -> None:
        if ready is not None:
            ready(address)
        else:
            print(f"Tessella studio on {space.root}\n{address}", flush=True)
        if open_browser:
            webbrowser.open(address)

    running = Scheduler(store, space.root) if scheduler else None
    # NiceGUI inspects every object of the process, and some of torch's warn when inspected.
    warnings.filterwarnings("ignore", category=FutureWarning, module="nicegui")
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.on_ready = announce
    if running is not None:
        running.start()
    try:
        server.run(sockets=[listening])
    finally:
        if running is not None:
            running.stop()
        store.close()


class _Server(uvicorn.Server):
    """uvicorn with a callback for the moment from which it answers."""

    on_ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_ready()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, made first: a taken port is an error before anything else starts."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with contextlib.ExitStack() as on_failure:
            listening = on_failure.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            on_failure.pop_all()  # it is ours now, open
    except OSError as error:
        raise UsageError(
            f"the studio cannot listen on {host}, port {port}",
            seen=error.strerror or error,
            fix="choose another port (--port 0 takes a free one) or an address of this machine",
        ) from error
    return listening


async def _error_response(request: Request, error: Exception) -> JSONResponse:
    """An error that we raised as JSON, for scripts and for ``studio.js``."""
    return JSONResponse({"error": str(error)}, status_code=400)


def _show_error(error: Exception, root: Path) -> None:
    """Show a page in place of one that could not be built: what is wrong and where to go on."""
    if not isinstance(error, TessellaError):
        log.exception("a page could not be built", exc_info=error)
    with frame("Not found", "This page could not be shown.", root):
        with parts.card("What went wrong"):
            parts.note(str(error) or type(error).__name__, "bad")
            with parts.link("/"):
                ui.label("Back to the overview")
