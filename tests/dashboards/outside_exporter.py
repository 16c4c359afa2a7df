"""A fake exporter for what this machine cannot have: DCGM's GPU series and kube-state-metrics'. Values are constants.

A panel that lives on these series alone is shown to return data, not to be right.
"""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from taktline_protocol import outside

_VALUES = {
    outside.DCGM_GPU_UTIL: 71,
    outside.DCGM_ENGINE_ACTIVE: 0.68,
    outside.DCGM_TENSOR_ACTIVE: 0.31,
    outside.DCGM_DRAM_ACTIVE: 0.55,
    outside.DCGM_FB_USED: 21000,
    outside.DCGM_FB_FREE: 120000,
    outside.DCGM_SM_CLOCK: 1755,
    outside.DCGM_GPU_TEMP: 62,
    outside.DCGM_MEMORY_TEMP: 70,
    outside.DCGM_POWER: 412,
    outside.DCGM_XID: 0,
    outside.DCGM_PCIE_REPLAY: 0,
    outside.DCGM_ROW_REMAP_FAILURE: 0,
    outside.DCGM_UNCORRECTABLE: 0,
    outside.DCGM_NVLINK: 1200,
}
_KUBE = f"""
{outside.KUBE_ALLOCATABLE}{{node="gpu-1",resource="{outside.GPU_RESOURCE}"}} 2
{outside.KUBE_REQUESTS}{{namespace="factory",pod="slow-a-7c9-x",resource="{outside.GPU_RESOURCE}"}} 1
{outside.KUBE_POD_PHASE}{{namespace="factory",pod="slow-a-7c9-x",phase="Running"}} 1
{outside.KUBE_POD_PHASE}{{namespace="factory",pod="slow-a-7c9-y",phase="Pending"}} 1
{outside.KUBE_RESTARTS}{{namespace="factory",pod="slow-a-7c9-x",container="worker"}} 3
{outside.KUBE_WAITING}{{namespace="factory",pod="slow-a-7c9-y",container="worker",reason="ContainerCreating"}} 1
"""


def text() -> str:
    """The exposition."""
    gpus = [
        f'{name}{{gpu="{gpu}",Hostname="gpu-1",modelName="NVIDIA H200"}} {value * (1 - 0.05 * gpu)}'
        for name, value in _VALUES.items()
        for gpu in (0, 1)
    ]
    return "\n".join(gpus) + _KUBE


class OutsideExporter:
    """Serves `text` on loopback until stopped."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                with contextlib.suppress(BrokenPipeError):  # Prometheus ended while it asked
                    self._answer(text().encode())

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
