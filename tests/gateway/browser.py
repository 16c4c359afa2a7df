"""Headless Chromium for tests, over its DevTools protocol: open a page, look at it, take its picture."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP = (1280, 1000, 1.0, False)
PHONE = (390, 844, 2.0, True)


def executable() -> str:
    """Path of a Chromium. Raises AssertionError where there is none: `make test-tools` brings it."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "no Chromium; run `make test-tools` (or tools/install-browser)"
    return found


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """What the page complained of: exceptions, console errors, requests that the security policy blocked."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=30))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def open(self, url: str, *, screen=DESKTOP, dark: bool = False, headers: dict[str, str] | None = None) -> None:
        """Goes to `url` on a screen of (width, height, device pixels a pixel, touch)."""
        width, height, scale, mobile = screen
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Network.setExtraHTTPHeaders", headers=headers or {})
        self.value("globalThis.stale = true")
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !globalThis.stale", f"{url} being loaded")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str = "body") -> str:
        """The text that a person sees; empty where nothing fits the selector."""
        return self.value(
            f"((node) => node?.checkVisibility() ? node.innerText : '')(document.querySelector({json.dumps(selector)}))"
        )

    def until(self, expression: str, what: str, timeout_s: float = 120.0) -> Any:
        """Waits until an expression is true."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            found = self.value(expression)
            if found:
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what} did not happen within {timeout_s} s; the page says: {self.text()[:2000]}")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Runtime.consoleAPICalled" and parameters["type"] == "error":
            self.problems.append(json.dumps(parameters["args"])[:500])
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["source"] in ("security", "javascript"):
            self.problems.append(parameters["entry"]["text"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser of its own with one empty tab; its profile is thrown away."""
    with tempfile.TemporaryDirectory(prefix="taktline-browser-", ignore_cleanup_errors=True) as profile:
        command = [
            executable(),
            "--headless=new",
            "--no-sandbox",  # the tests may run as root in a container
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(profile) / "DevToolsActivePort", process)
            with connect(_tab(port), max_size=None, proxy=None) as connection:
                yield Page(connection)
        finally:
            process.kill()
            process.wait()


def _tab(port: int) -> str:
    """Address of the first tab, which comes a moment after the port."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", timeout=60, trust_env=False).json()
        for tab in tabs:
            if tab["type"] == "page":
                return str(tab["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium showed no tab within 60 s")


def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        assert process.poll() is None, f"Chromium ended with {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("Chromium opened no DevTools port within 60 s")
