"""What people see who open the server's address: ``/``, ``/docs``, and ``/v2/models`` for programs.

Each model is shown with a line of curl that works as it stands. The pages load nothing and run no
script, and whatever a plan's author wrote is escaped.
"""

from __future__ import annotations

import json
import shlex
from html import escape
from typing import Any

from tessella.core.dtype import dtype
from tessella.core.version import VERSION
from tessella.server.answers import Answer
from tessella.server.descriptions import jpeg_decoder, model_metadata
from tessella.server.repository import Model, Repository
from tessella.tasks import verbs

# What ``app`` answers itself, here and in the API's description: method, path, what it does.
INFERENCE_ROUTES = (
    ("get", "/", "What is served, with a page to try a picture"),
    ("get", "/docs", "All routes"),
    ("get", "/v2/health/live", "Whether the process answers"),
    ("get", "/v2/health/ready", "Whether it takes requests"),
    ("get", "/v2", "Name, version and extensions of the server"),
    ("get", "/v2/models", "The loaded models, their versions, each with a line of curl"),
    ("get", "/v2/models/stats", "Statistics of all models"),
    ("get", "/v2/models/{model}", "Inputs and outputs of a model"),
    ("get", "/v2/models/{model}/ready", "Whether a model takes requests"),
    ("get", "/v2/models/{model}/config", "Configuration of a model"),
    ("get", "/v2/models/{model}/stats", "Statistics of a model's versions"),
    ("get", "/v2/models/{model}/versions/{version}", "A version; its ready, config, stats, infer"),
    ("post", "/v2/models/{model}/infer", "Inference on tensors or encoded images"),
    *(
        ("post", f"/v2/models/{{model}}/{verb}", "The answer to an image file (?top=5)")
        for verb in sorted(verbs())
    ),
)
MANAGEMENT_ROUTES = (
    ("post", "/v2/repository/index", "All models, their state and why"),
    ("post", "/v2/repository/models/{name}/load", "Load the newest version, or load it again"),
    ("post", "/v2/repository/models/{name}/versions/{version}/load", "Load a version"),
    ("post", "/v2/repository/models/{name}/unload", "Take a model out of service"),
    ("post", "/v2/repository/models/{name}/versions/{version}/unload", "Take out a version"),
    ("get", "/v2/repository/models/{name}/traffic", "Which versions answer, and how it goes"),
    ("post", "/v2/repository/models/{name}/traffic", "Share requests among versions"),
    ("get", "/v2/systemsharedmemory/status", "The registered regions of shared memory"),
    ("get", "/v2/systemsharedmemory/region/{name}/status", "A region of shared memory"),
    ("post", "/v2/systemsharedmemory/region/{name}/register", "Register a region"),
    ("post", "/v2/systemsharedmemory/region/{name}/unregister", "Forget a region"),
    ("post", "/v2/systemsharedmemory/unregister", "Forget all regions"),
    ("get", "/metrics", "Metrics in Prometheus' text format"),
)
_PARAMETERS = (
    ("binary_data_output", "answer with binary tensors", "true"),
    ("classification", "of an output: its best classes as score:index:label", "3"),
    ("labels", "the labels of the scores, in their order, beside the outputs", "true"),
    ("timeout", "microseconds within which an answer is of use; else 429 at once", "20000"),
    ("priority", "1 runs before 2, the default, and 2 before 3", "1"),
)
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f3f3f3;padding:.7rem;overflow-x:auto}td{padding:.15rem 1rem .15rem 0}"
    "h2{margin-top:2rem}"
)
_HEADERS = (
    (b"content-type", b"text/html; charset=utf-8"),
    (
        b"content-security-policy",
        b"default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; base-uri 'none';"
        b" frame-ancestors 'none'",
    ),
)


def models(repository: Repository, url: str, *, token: bool) -> dict[str, Any]:
    """The loaded models: their tensors, labels, and a line of curl each; and which versions answer
    the requests that name none.
    """
    return {
        "models": [
            model_metadata(model, repository.versions(model.name))
            | {
                "labels": list(model.signature.labels),
                "jpeg_decoder": jpeg_decoder(model),
                "traffic": repository.traffic(model.name)["in_force"],
                "curl": curl(model, url, token=token),
            }
            for model in repository.defaults
        ]
    }


def curl(model: Model, url: str, *, token: bool) -> str:
    """A shell command that gets an answer of the model: for a picture if it takes one, else for
    inputs of nothing but zeros, answered in JSON.
    """
    access = ' -H "Authorization: Bearer $TOKEN"' if token else ""
    where = f"{url}/v2/models/{model.name}"
    inputs = model.signature.inputs.values()
    if model.signature.image_input is not None and len(inputs) == 1:
        verb = model.signature.answers.VERB
        return f"curl{access} -F image=@picture.png {shlex.quote(f'{where}/{verb}')}"
    entries = [
        {
            "name": spec.name,
            "datatype": dtype(spec.dtype).wire,
            "shape": spec.at(1),
            "parameters": {"binary_data_size": spec.nbytes(1)},
        }
        for spec in inputs
    ]
    text = json.dumps({"inputs": entries}, separators=(",", ":"))
    zeros = sum(spec.nbytes(1) for spec in inputs)
    return (
        f"(printf %s {shlex.quote(text)}; head -c {zeros} /dev/zero) |"
        f" curl{access} -H 'Inference-Header-Content-Length: {len(text)}'"
        f" --data-binary @- {shlex.quote(f'{where}/infer')}"
    )


def front_page(repository: Repository, url: str, *, token: bool) -> Answer:
    """The page ``/``."""
    shown = "".join(_section(repository, m, url, token=token) for m in repository.defaults)
    return _page(
        f"<h1>Tessella {VERSION}</h1>"
        f"<p>{len(repository.models)} loaded. <a href=/docs>All routes</a> ·"
        " <a href=/v2/models>models as JSON</a> · <a href=/metrics>metrics</a></p>"
        f"{shown or '<p>No model is loaded: POST /v2/repository/models/NAME/load loads one.</p>'}"
    )


def _section(repository: Repository, model: Model, url: str, *, token: bool) -> str:
    inputs = ", ".join(map(str, model.signature.inputs.values()))
    outputs = ", ".join(map(str, model.signature.outputs.values()))
    labels = model.signature.labels
    classes = f"<p>{len(labels)} classes: {escape(', '.join(labels[:20]))}</p>" if labels else ""
    verb = model.signature.answers.VERB
    takes_picture = model.signature.image_input is not None and len(model.signature.inputs) == 1
    form = (
        f'<form method=post enctype=multipart/form-data action="/v2/models/{escape(model.name)}'
        f'/{verb}"><input type=file name=image accept="image/*" required>'
        f" <button>{verb.capitalize()}</button></form>"
        if takes_picture and not token  # a form cannot send the token
        else ""
    )
    return (
        f"<h2>{escape(model.name)}</h2><p>{escape(inputs)} → {escape(outputs)}</p>{classes}"
        f"{_versions(repository, model)}"
        f"<pre>{escape(curl(model, url, token=token))}</pre>{form}"
    )


def _versions(repository: Repository, model: Model) -> str:
    """The versions of a name with their shares of the requests; nothing if it is one alone."""
    versions = [other.version for other in repository.versions(model.name)]
    if len(versions) == 1:
        return ""
    in_force = repository.traffic(model.name)["in_force"]
    told = []
    for version in versions:
        share = in_force["shares"].get(version, 0)
        told.append(f"{version} answers {100 * share:.3g} %")
        if version == in_force["shadow"]:
            told[-1] = f"{version} is a shadow"
    return f"<p>Versions, for requests that name none: {escape(', '.join(told))}</p>"


def routes_page() -> Answer:
    """The page ``/docs``."""
    rows = "".join(
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(meaning)}"
        for method, path, meaning in (*INFERENCE_ROUTES, *MANAGEMENT_ROUTES)
    )
    parameters = "".join(
        f"<tr><td><code>{name}</code><td>{escape(meaning)}<td><code>{example}</code>"
        for name, meaning, example in _PARAMETERS
    )
    return _page(
        "<h1>Routes</h1><p><a href=/>What is served</a> ·"
        f" <a href=/openapi.json>this list for programs</a></p><table>{rows}</table>"
        f"<h2>Parameters of /infer</h2><table>{parameters}</table>"
        "<p>The protocol is the Open Inference Protocol with Triton's binary tensors.</p>"
    )


def _page(body: str) -> Answer:
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Tessella</title>"
        f"<style>{_STYLE}</style>{body}"
    )
    return Answer(body=text.encode(), headers=_HEADERS)
