"""A plan served over HTTP: started and stopped as a job, with a request to try."""

from __future__ import annotations

import shlex
from pathlib import Path

from nicegui import ui
from nicegui.element import Element

from tessella.artifacts.files import write_atomic
from tessella.artifacts.outline import Outline
from tessella.jobs import commands
from tessella.jobs.job import Job, JobSpec
from tessella.studio import parts
from tessella.studio.context import Context
from tessella.studio.plan_front import title_of
from tessella.studio.theme import text
from tessella.studio.workspace import open_dataset, plain_name, readable
from tessella.tasks import of


class Service:
    """The card; it shows the job that serves the plan, whoever started that job."""

    def __init__(self, context: Context, plan: Outline, ref: str) -> None:
        self._context, self._plan, self._ref = context, plan, ref
        with parts.card("Serve", "Open Inference Protocol over HTTP"):
            with parts.box("row-line"):
                self._port = parts.field(
                    ui.number("Port", value=8000, precision=0, min=1, max=65_535)
                )
                self._port.style("width:120px")
                self._start = parts.button("Serve", self._serve, icon="cloud_upload")
                self._stop = parts.plain_button("Stop", self._stop_serving, "stop")
                self._state = parts.badge("waiting")
                self._watch = parts.link("/serve", "small")
                with self._watch:
                    text("span", "Watch it")
                self._try = parts.link("/", "small")
                self._try.props["target"] = "_blank"
                with self._try:
                    text("span", "Try a picture")
            self._line = parts.Command()
            self._curl = parts.Command()
        self._shown = ""
        self._example = self._write_example()
        self._refresh()
        ui.timer(1.0, self._refresh)

    def _name(self) -> str:
        return plain_name(title_of(Path(self._ref))) or "model"

    def _write_example(self) -> str:
        """The ref of a picture for the request: one of the plan's own dataset, if that is here."""
        space = self._context.workspace
        source = Path(space.ref(self._plan.manifest.built_from))
        runs = readable(space.runs()).items()
        run = next((run for ref, run in runs if source.is_relative_to(ref)), None)
        data = None if run is None else space.find_dataset(run.info.dataset_hash)
        record = self._plan.manifest.preprocess
        if data is None or record is None or record.volume is not None:
            return ""
        dataset = open_dataset(data)
        path = space.own("examples") / f"{dataset.info.content_hash[:16]}.png"
        if not path.exists():
            split = "val" if "val" in dataset.info.splits else next(iter(dataset.info.splits))
            write_atomic(path, dataset.split(split)[0].content)
        return space.ref(path)

    def _serve_spec(self) -> JobSpec:
        gpus = 1 if self._plan.manifest.fingerprint.target.startswith("sm_") else 0
        port = int(self._port.value or 8000)
        return commands.serve({self._name(): self._ref}, port=port, gpus=gpus)

    def _serving(self) -> Job | None:
        """The running job that serves this plan."""
        ending = f"={self._ref}"
        return next(
            (j for j in self._context.store.jobs()
             if j.kind == "serve" and not j.ended and any(a.endswith(ending) for a in j.argv)),
            None,
        )  # fmt: skip

    def _refresh(self) -> None:
        job = self._serving()
        self._start.set_visibility(job is None)
        self._stop.set_visibility(job is not None)
        self._state.set_visibility(job is not None)
        for link in (self._watch, self._try):
            link.set_visibility(job is not None and job.status == "running")
        port = int(self._port.value or 8000)
        if job is not None:
            parts.show_status(self._state, job.state)
            port = int(job.argv[job.argv.index("--port") + 1])
            url = f"http://127.0.0.1:{port}"
            self._lead(self._watch, parts.address("/serve", address=url))
            self._lead(self._try, f"{url}/")
        verb = of(self._plan.manifest.task).answers.VERB
        lines = commands.shown(self._serve_spec()), curl(self._name(), port, verb, self._example)
        if self._shown != str(lines):
            self._shown = str(lines)
            self._line.show(lines[0])
            self._curl.show(lines[1])

    @staticmethod
    def _lead(link: Element, to: str) -> None:
        if link.props["href"] != to:
            link.props["href"] = to
            link.update()

    def _serve(self) -> None:
        with parts.errors_shown():
            self._context.store.submit(self._serve_spec())
        self._refresh()

    def _stop_serving(self) -> None:
        job = self._serving()
        if job is not None:
            with parts.errors_shown():
                self._context.store.abort(job.id)


def curl(name: str, port: int, verb: str, picture: str) -> str:
    """A request to try: a picture where there is one that the plan takes, its metadata if not.

    Args:
        verb: what a server of the plan's task answers pictures at.
    """
    url = f"http://127.0.0.1:{port}/v2/models/{name}"
    if not picture:
        return f"curl -s {url}"
    return f"curl -s {url}/{verb} --data-binary {shlex.quote(f'@{picture}')}"
