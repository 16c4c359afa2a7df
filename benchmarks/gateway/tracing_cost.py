"""What tracing costs the gateway: CPU time a request, off, at 1% and with every request traced.

    python -m benchmarks.gateway.tracing_cost

The spans of one request are made and exported (OTLP over HTTP to a collector process that throws them away); nothing
else of a request is done, so the figures are the difference that tracing makes. The exporter's thread is counted.
"""

from __future__ import annotations

import http.server
import multiprocessing
import os
import time

from taktline_gateway.tracing.requests import RequestTraces, begin_batch
from taktline_protocol.tracing import tracing_from_environment

SETTINGS = {
    "off": {},
    "1% of the requests": {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"},
    "every request": {"OTEL_TRACES_SAMPLER": "parentbased_always_on"},
}


class _Sink(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def cpu_us(settings: dict[str, str], port: int, requests: int) -> float:
    """CPU time of one request's traces in microseconds, at 1000 requests a second at most, so that none is dropped."""
    environment = {**settings, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"} if settings else {}
    os.environ.update(environment)
    tracing = tracing_from_environment("bench", "0", environment)
    traces = RequestTraces(tracing)
    began = time.process_time()
    for number in range(requests):
        now = time.monotonic()
        trace = None
        if traces.tracing is not None:
            about = {"policy": "reach", "robot": "arm-1", "request_id": "q", "seq": number, "budget_ms": 100.0}
            trace = traces.begin("", now, **about)  # type: ignore[arg-type]
        begin_batch([trace], now, "10.0.0.1:50051").end()
        if trace is not None:
            trace.answered(now, now, now, now, code="ok", margin_ms=1.0, cause="", worker="10.0.0.1:50051")
            if number % 100 == 99:
                time.sleep(0.1)
    traces.close()
    return 1e6 * (time.process_time() - began) / requests


def main() -> None:
    """Prints one line a setting."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    collector = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    collector.start()
    for name, settings in SETTINGS.items():
        spent = cpu_us(settings, server.server_port, 4000 if name == "every request" else 40_000)
        print(f"{name:20} {spent:8.2f} us of CPU a request")
    collector.terminate()


if __name__ == "__main__":
    main()
