"""A collector of traces for tests: takes OTLP over HTTP as a real one does and keeps the spans."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Spans by id as (service, span), in `spans`."""

    def __init__(self) -> None:
        self.spans: dict[str, tuple[str, object]] = {}
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                for resource in request.resource_spans:
                    service = attributes(resource.resource)["service.name"]
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            collector.spans[span.span_id.hex()] = (service, span)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        """The standard variables that send a process's traces here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }

    def of_trace(self, trace_id: str) -> dict[str, list]:
        """Spans of one trace by `service name`."""
        found: dict[str, list] = {}
        for service, span in list(self.spans.values()):  # more may come meanwhile
            if span.trace_id.hex() == trace_id:
                found.setdefault(f"{service} {span.name}", []).append(span)
        return found

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes(owner) -> dict[str, object]:
    """Attributes of a span or a resource as a dict."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}
