"""A real redis-server for one test, on a port of its own, in memory only."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time

import pytest
import redis

from tests.gateway.conftest import free_port


class RedisServer:
    def __init__(self) -> None:
        if shutil.which("redis-server") is None:
            pytest.fail("redis-server is missing: run `make test-tools`")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis.from_url(self.url)
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
                return
            except redis.RedisError:
                assert time.monotonic() < end, "redis-server did not start"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def commands(self) -> int:
        """Commands that it has served, those of tests included."""
        return self.client.info("stats")["total_commands_processed"]

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.kill()
