"""A real Prometheus on loopback with our rules, asked over its own API."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import yaml
from taktline_operator import slo_rules

from tests.ports import free_port

SCRAPE = "1s"
_FIRING = 'ALERTS{alertstate="firing",policy!=""}'


class PrometheusRun:
    """One server; `stop` it after use."""

    def __init__(self, programs: Path, folder: Path, jobs: Mapping[str, Sequence[str]], groups: Sequence[dict]) -> None:
        """`jobs` are scrape targets (host:port) by job name."""
        folder.mkdir(exist_ok=True)
        (folder / "rules.yaml").write_text(yaml.safe_dump(slo_rules.rule_file(groups)))
        configuration = {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {"job_name": name, "honor_labels": True, "static_configs": [{"targets": list(targets)}]}
                for name, targets in jobs.items()
            ],
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.began = time.time()
        self._http = httpx.Client(base_url=self.url, timeout=30, verify=False)
        self._log = folder / "prometheus.log"
        self.process = subprocess.Popen(
            [
                programs / "prometheus",
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--storage.tsdb.retention.time=1h",
                "--log.level=warn",
            ],
            stderr=self._log.open("w"),
        )
        self.until(self._ready, "Prometheus being ready")

    def _ready(self) -> bool:
        assert self.process.poll() is None, self._log.read_text()
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def query(self, expr: str) -> list[dict]:
        """The series of an instant query."""
        return self._get("/api/v1/query", {"query": expr})["result"]

    def query_range(self, expr: str, start: float, end: float, step_s: float) -> list[dict]:
        """The series of a range query; times are Unix seconds."""
        return self._get("/api/v1/query_range", {"query": expr, "start": start, "end": end, "step": step_s})["result"]

    def firing(self, name: str, **labels: str) -> list[dict[str, str]]:
        """Labels of the alerts of a name that fire now."""
        selector = "".join(f',{key}="{value}"' for key, value in labels.items())
        return [found["metric"] for found in self.query(f'ALERTS{{alertname="{name}",alertstate="firing"{selector}}}')]

    def fired(self, **labels: str) -> set[str]:
        """Names of all alerts that fired at any time so far."""
        selector = "".join(f',{key}="{value}"' for key, value in labels.items())
        span = f"{int(time.time() - self.began) + 5}s"
        found = self.query(f'count by (alertname) (max_over_time(ALERTS{{alertstate="firing"{selector}}}[{span}]))')
        return {series["metric"]["alertname"] for series in found}

    def targets_down(self) -> list[str]:
        """Scrape targets that do not answer, with the reason."""
        active = self._get("/api/v1/targets", {"state": "active"})["activeTargets"]
        return [f"{target['scrapeUrl']}: {target['lastError']}" for target in active if target["health"] != "up"]

    def until(self, condition, what: str, timeout_s: float = 120.0):
        """Waits for a condition that will come; fails naming `what` if it does not."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if found := condition():
                return found
            time.sleep(0.1)
        firing = sorted((found["metric"]["policy"], found["metric"]["alertname"]) for found in self.query(_FIRING))
        raise AssertionError(f"{what} did not happen within {timeout_s} s; firing: {firing}")

    def _get(self, path: str, parameters: dict) -> dict:
        answer = self._http.get(path, params=parameters)
        body = json.loads(answer.content)
        assert body["status"] == "success", body
        return body["data"]

    def stop(self) -> None:
        self._http.close()
        self.process.kill()
        self.process.wait()
