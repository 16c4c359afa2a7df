"""Rollouts under load on a real control plane: the same checkpoint, one within the tolerance, a broken one.

`python -m benchmarks.operator.rollout` starts etcd, kube-apiserver, controller-manager and scheduler, one process node,
the operator and a gateway as the manifests have them, and workers with the demo policy. Robots ask all the time while
three candidates are applied one after the other; every answer is counted. Needs the programs of `make control-plane`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from taktline_local.cluster import Cluster
from taktline_local.cluster_demo import MANIFESTS, gateway_address
from taktline_local.kubectl import wait_until
from taktline_protocol import Image, Observation
from taktline_protocol.codecs import MediaType, decode_chunk, decode_error, encode

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "demo" / "checkpoint"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "operator_rollout.json"
POLICY = "demo-reach"
NAMESPACE = "default"
BUDGET_MS = 10_000.0  # what is shown is that no answer is lost, on any machine; not how fast answers are
Json = dict[str, Any]


class Candidate(NamedTuple):
    """One checkpoint to roll out, and how its trial must end."""

    revision: str
    noise: float
    ends: str
    what: str


CANDIDATES = (
    Candidate("same", 0.0, "Complete", "the same weights"),
    Candidate("near", 1e-3, "Complete", "weights perturbed by a thousandth of their spread"),
    Candidate("broken", 1.0, "RolledBack", "weights drowned in noise"),
)


def perturbed(folder: Path, noise: float, seed: int = 0) -> None:
    """A copy of the demo checkpoint whose weights carry Gaussian noise of `noise` standard deviations each."""
    shutil.copytree(CHECKPOINT, folder)
    if noise == 0.0:
        return
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        if value.is_floating_point() and value.numel() > 1:
            spread = value.float().std() * torch.randn(value.shape, generator=generator)
            weights[name] = (value.float() + noise * spread).to(value.dtype)
    save_file(weights, file)


class Robots:
    """Robots that ask one after the other, all the time; every answer is kept with its instant."""

    def __init__(self, url: str, robots: int, pause_s: float) -> None:
        self.answers: list[tuple[float, str, str]] = []  # instant, revision or error code, robot
        self.latencies_ms: list[float] = []
        self._url = url
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(robots)]

    def __enter__(self) -> Robots:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _live(self, number: int) -> None:
        rng = np.random.default_rng(number)
        session = f"session-{number}"
        path = f"{self._url}/v1/policies/{POLICY}/act"
        with httpx.Client(timeout=30, trust_env=False) as client:
            for seq in range(1_000_000):
                if self._stop.is_set():
                    return
                frame = Image("raw", rng.integers(0, 256, (84, 84, 3), np.uint8).tobytes(), (84, 84, 3))
                now = time.monotonic()
                observation = Observation(
                    robot_id=f"arm-{number}",
                    session_id=session,
                    seq=seq,
                    captured_at=now,
                    sent_at=now,
                    budget_ms=BUDGET_MS,
                    images={"scene": frame, "wrist": frame},
                    state=[float(value) for value in rng.uniform(-1, 1, 4)],
                    instruction="reach the red block",
                )
                try:
                    answer = client.post(
                        path,
                        content=encode(observation, MediaType.MSGPACK),
                        headers={"content-type": "application/msgpack"},
                    )
                    if answer.status_code == 200:
                        word = decode_chunk(answer.content, MediaType.MSGPACK).revision
                        self.latencies_ms.append(1e3 * (time.monotonic() - now))
                    else:
                        word = f"error {decode_error(answer.content, MediaType.MSGPACK).code}"
                except httpx.HTTPError as error:
                    word = f"error {type(error).__name__}"
                self.answers.append((time.monotonic(), word, f"arm-{number}"))
                self._stop.wait(self._pause_s)


def policy_body(folder: Path, revision: str, step_s: int, observations: int) -> Json:
    """The demo policy with a progressive rollout."""
    return {
        "apiVersion": "taktline.dev/v1alpha1",
        "kind": "PolicyDeployment",
        "metadata": {"name": POLICY, "namespace": NAMESPACE},
        "spec": {
            "model": {"family": "pi05", "source": {"path": str(folder)}, "revision": revision},
            "engine": {"precision": "fp32", "buckets": [1, 2, 4]},
            "pools": [
                {
                    "name": "cpu",
                    "accelerator": "cpu",
                    "minReplicas": 1,
                    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                }
            ],
            "slo": {"controlBudgetMs": BUDGET_MS, "onTimeObjective": 0.99},
            "rollout": {
                "strategy": "Progressive",
                "shadow": {"percent": 50, "minObservations": observations},
                "parity": {"tolerance": 0.02},
                "stepSeconds": step_s,
                "stepMinObservations": observations,
                "sessionHoldSeconds": 2,
            },
        },
    }


def rolled_out(cluster: Cluster, robots: Robots, candidate: Candidate, body: Json, timeout_s: float) -> Json:
    """Apply one candidate and follow it to its end; returns a row."""
    kubectl = cluster.kubectl
    began, first = time.monotonic(), len(robots.answers)
    kubectl.apply(body)
    phases: dict[str, float] = {}

    def ended() -> Json | None:
        live = kubectl.get("pd", POLICY, NAMESPACE) or {}
        rollout: Json = live.get("status", {}).get("rollout", {})
        current = live.get("status", {}).get("observedGeneration") == live["metadata"]["generation"]
        phase = rollout.get("phase", "")
        if current:
            name = f"{phase} {rollout.get('weight', 0)} %" if phase == "Shifting" else phase
            phases.setdefault(name, round(time.monotonic() - began, 1))
        done = phase == "RolledBack" or (phase == "Complete" and len(phases) > 1)
        return live if current and done else None

    live = wait_until(ended, f"the rollout of {candidate.revision} ends", timeout_s=timeout_s)
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        time.sleep(0.1)
    answers = robots.answers[first:]
    words = Counter(word for _, word, _ in answers)
    errors = {word: count for word, count in words.items() if word.startswith("error")}
    rollout = live["status"]["rollout"]
    return {
        "candidate": candidate.revision,
        "what": candidate.what,
        "ended": rollout["phase"],
        "reason": rollout.get("reason", ""),
        "message": rollout.get("message", ""),
        "seconds": round(time.monotonic() - began, 1),
        "phases_s": phases,
        "requests": len(answers),
        "lost": sum(errors.values()),
        "errors": errors,
        "by_revision": {word: count for word, count in sorted(words.items()) if word not in errors},
        "moved_back": moves_back(answers, candidate.revision) if candidate.ends == "Complete" else 0,
    }


def moves_back(answers: list[tuple[float, str, str]], candidate: str) -> int:
    """How often a robot that the candidate had served was served by the old revision again: 0 where sessions stick."""
    count = 0
    for robot in {found[2] for found in answers}:
        words = [word for _, word, name in answers if name == robot]
        count += sum(1 for before, after in itertools.pairwise(words) if before == candidate != after)
    return count


def run(
    folder: Path, candidates: tuple[Candidate, ...], *, robots: int, step_s: int, observations: int, timeout_s: float
) -> list[Json]:
    """All candidates, one after the other; returns their rows."""
    base = folder / "checkpoint-base"
    perturbed(base, 0.0)
    rows = []
    with Cluster.open(folder / "logs") as cluster:
        cluster.start_node("process-node")
        kubectl = cluster.kubectl
        kubectl("apply", "--server-side", "-k", str(MANIFESTS))
        kubectl("wait", "--for=condition=Established", "crd/policydeployments.taktline.dev", "--timeout=60s")
        wait_until(lambda: "PolicyDeployment" in kubectl("explain", "pd", check=False), "kubectl knows pd")
        kubectl.apply(policy_body(base, "base", step_s, observations))
        kubectl("-n", NAMESPACE, "wait", "--for=condition=Available", f"pd/{POLICY}", "--timeout=180s")
        address = wait_until(lambda: gateway_address(kubectl), "the gateway is ready", timeout_s=180.0)
        with Robots(f"http://{address}:8080", robots, pause_s=0.1) as fleet:
            wait_until(lambda: len(fleet.answers) > 20, "robots are served", timeout_s=60.0)
            fleet.answers.clear()
            for candidate in candidates:
                source = folder / f"checkpoint-{candidate.revision}"
                perturbed(source, candidate.noise)
                body = policy_body(source, candidate.revision, step_s, observations)
                rows.append(rolled_out(cluster, fleet, candidate, body, timeout_s))
            spent = sorted(fleet.latencies_ms)
        for row in rows:
            row["latency_ms"] = {
                "median": round(statistics.median(spent), 1),
                "p99": round(spent[int(0.99 * (len(spent) - 1))], 1),
            }
    return rows


def main() -> None:
    """Run it, print a table, write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--robots", type=int, default=8)
    parser.add_argument("--step-s", type=int, default=10, help="shortest time of a step")
    parser.add_argument("--observations", type=int, default=50, help="observations each gate needs")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of one rollout")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taktline-rollout-") as folder:
        rows = run(
            Path(folder),
            CANDIDATES,
            robots=options.robots,
            step_s=options.step_s,
            observations=options.observations,
            timeout_s=options.timeout_s,
        )
    print(f"{'candidate':<10} {'ended':<11} {'reason':<14} {'seconds':>8} {'requests':>9} {'lost':>5}")
    for row in rows:
        print(
            f"{row['candidate']:<10} {row['ended']:<11} {row['reason'] or '-':<14} {row['seconds']:>8}"
            f" {row['requests']:>9} {row['lost']:>5}"
        )
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = "python -m benchmarks.operator.rollout"
    for row in rows:
        row |= {"bench": "operator_rollout", "policy": "pi05", "robots": options.robots, "date": date} | {
            "command": command
        }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(msgspec.to_builtins(rows), indent=1) + "\n")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
