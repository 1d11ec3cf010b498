"""A collector of OpenTelemetry: what it is sent over HTTP lies in memory."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Listens from its beginning to the end of its block.

    Attributes:
        spans: each with the attributes of who sent it.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[dict[str, Any], Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                for sent in ExportTraceServiceRequest.FromString(body).resource_spans:
                    who = attributes_of(sent.resource)
                    spans = [span for scope in sent.scope_spans for span in scope.spans]
                    collector.spans += [(who, span) for span in spans]
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def attributes_of(message: Any) -> dict[str, Any]:
    """The attributes of a span, or of a resource."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in message.attributes}
