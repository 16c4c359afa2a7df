"""`taktline rollout`: look at the rollout of a PolicyDeployment, hold it, let it through, take it back; its history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from taktline_protocol.errors import ErrorCode, TaktlineError

Json = dict[str, Any]
T = TypeVar("T")

Name = Annotated[str, typer.Argument(help="Name of the PolicyDeployment.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", help="Its namespace; the kubeconfig's own where not given.", metavar="NS")
]
Kubeconfig = Annotated[Path | None, typer.Option("--kubeconfig", help="Credentials; default: $KUBECONFIG.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Print every change until the rollout has ended.")]

WATCH_S = 1.0

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Progressive rollouts of a PolicyDeployment: see docs/rollout.md.",
)


@app.command()
def status(
    name: Name,
    namespace: Namespace = "",
    kubeconfig: Kubeconfig = None,
    watch: Watch = False,
    as_json: AsJson = False,
) -> None:
    """Say which revision serves, which one is on trial, how far it is, and what it waits for."""

    async def show() -> None:
        async with _Cluster(kubeconfig, namespace) as cluster:
            before = ""
            while True:
                live = await cluster.policy(name)
                text = json.dumps(_facts(live), indent=2) if as_json else describe(live)
                if text != before:
                    typer.echo(text)
                    before = text
                if not watch or _ended(live):
                    return
                await asyncio.sleep(WATCH_S)

    _run(show())


@app.command()
def pause(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None) -> None:
    """Hold the rollout where it is; a candidate that turns out bad is still taken back."""
    _run(_say("pause", name, namespace, kubeconfig))


@app.command()
def resume(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None) -> None:
    """Go on with a held rollout."""
    _run(_say("resume", name, namespace, kubeconfig))


@app.command()
def promote(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None) -> None:
    """Skip the gates that are left: all robots move as soon as the candidate has enough workers."""
    _run(_say("promote", name, namespace, kubeconfig))


@app.command()
def abort(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None) -> None:
    """Take the candidate back now."""
    _run(_say("abort", name, namespace, kubeconfig))


@app.command()
def retry(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None) -> None:
    """Try a candidate again that was taken back."""
    _run(_say("retry", name, namespace, kubeconfig))


@app.command()
def history(name: Name, namespace: Namespace = "", kubeconfig: Kubeconfig = None, as_json: AsJson = False) -> None:
    """List the revisions that this PolicyDeployment has had, the newest first."""

    async def show() -> None:
        from taktline_operator import naming

        async with _Cluster(kubeconfig, namespace) as cluster:
            live = await cluster.policy(name)
            selector = f"{naming.LABEL_MANAGED_BY}={naming.MANAGER},{naming.LABEL_POLICY}={name}"
            stored = await cluster.api.list("ControllerRevision", cluster.namespace, selector)
            rows = past(live, stored)
            if as_json:
                typer.echo(json.dumps(rows, indent=2))
                return
            line = "{:>6}  {:<24} {:<12} {:<21} {}"
            typer.echo(line.format("NUMBER", "REVISION", "HASH", "CREATED", "STATE"))
            for row in rows:
                typer.echo(line.format(*(row[key] for key in ("number", "revision", "hash", "created", "state"))))

    _run(show())


def past(live: Json, stored: list[Json]) -> list[Json]:
    """Rows of the history: number, revision, hash, creation time, and what it is now."""
    from taktline_operator import naming

    rollout = live.get("status", {}).get("rollout", {})
    states = {
        rollout.get("rejected"): f"taken back: {rollout.get('reason', '')}",
        rollout.get("candidate"): "on trial",
        rollout.get("stable"): "serves",
    }
    rows = []
    for found in sorted(stored, key=lambda item: -int(item.get("revision", 0))):
        metadata = found["metadata"]
        hash_ = metadata["name"].rpartition("-")[2]
        rows.append(
            {
                "number": int(found.get("revision", 0)),
                "revision": metadata.get("annotations", {}).get(naming.ANNOTATION_REVISION, ""),
                "hash": hash_,
                "created": metadata.get("creationTimestamp", ""),
                "state": states.get(hash_, ""),
            }
        )
    return rows


def describe(live: Json) -> str:
    """The rollout in a few lines."""
    facts = _facts(live)
    lines = [f"{facts['policy']}: {facts['phase']}" + (" (paused)" if facts["paused"] else "")]
    ready = f"{facts['readyWorkers']} worker{'' if facts['readyWorkers'] == 1 else 's'} ready"
    lines.append(f"  serves     {facts['currentRevision'] or 'nothing yet'}, {ready}")
    if facts["candidateRevision"]:
        steps = f", {facts['weight']} % of the robots" if facts["phase"] == "Shifting" else ""
        lines.append(f"  candidate  {facts['candidateRevision']}{steps}")
    if facts["message"]:
        reason = f"{facts['reason']}: " if facts["reason"] else ""
        lines.append(f"  {'why' if facts['reason'] else 'now':<10} {reason}{facts['message']}")
    if facts["fault"] and not facts["reason"]:
        lines.append(f"  fault      {facts['fault']}")
    if facts["since"]:
        lines.append(f"  since      {facts['since']}")
    if facts["phase"] == "RolledBack":
        metadata = live["metadata"]
        lines.append(
            f"  next       correct the spec, or: taktline rollout retry {metadata['name']} -n {metadata['namespace']}"
        )
    return "\n".join(lines)


def _facts(live: Json) -> Json:
    status = live.get("status", {})
    rollout = status.get("rollout", {})
    conditions: dict[str, Json] = {condition["type"]: condition for condition in status.get("conditions", [])}
    progressing, degraded = conditions.get("Progressing", {}), conditions.get("Degraded", {})
    strategy = live.get("spec", {}).get("rollout", {}).get("strategy", "RollingUpdate")
    phase = rollout.get("phase", "Complete")
    if strategy == "RollingUpdate" and progressing.get("status") == "True":
        phase = progressing.get("reason", phase)
    return {
        "policy": live["metadata"]["name"],
        "strategy": strategy,
        "phase": phase,
        "paused": bool(rollout.get("paused")),
        "currentRevision": status.get("currentRevision", ""),
        "candidateRevision": status.get("candidateRevision", ""),
        "readyWorkers": status.get("readyReplicas", 0),
        "weight": rollout.get("weight", 0),
        "reason": rollout.get("reason", ""),
        "message": rollout.get("message", "") or progressing.get("message", ""),
        "fault": degraded.get("message", "") if degraded.get("status") == "True" else "",
        "since": rollout.get("since", ""),
    }


def _ended(live: Json) -> bool:
    observed = live.get("status", {}).get("observedGeneration") == live["metadata"].get("generation")
    return observed and _facts(live)["phase"] in ("Complete", "RolledBack")


def said(word: str, live: Json) -> str:
    """What a word to the rollout of a policy brings about, in one line.

    Raises:
        TaktlineError: CONFIG_INVALID; nothing, as the spec is not accepted.
    """
    status, metadata = live.get("status", {}), live["metadata"]
    accepted: Json = next((c for c in status.get("conditions", []) if c["type"] == "Accepted"), {})
    if accepted.get("status") == "False":
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            f"the spec of {metadata['name']} is not accepted, so its rollout stands still: {accepted['message']}",
            "correct the spec, or apply the one before, then say it again",
        )
    rollout = status.get("rollout", {})
    candidate = f"candidate {status.get('candidateRevision') or rollout.get('candidate', '')}"
    after = {
        "pause": f"{candidate} is held where it is; go on with: taktline rollout resume {metadata['name']}"
        f" -n {metadata['namespace']}",
        "resume": f"{candidate} goes on",
        "promote": f"all robots move to {candidate} as soon as it has enough workers",
        "abort": f"{candidate} is taken back",
        "retry": "the candidate that was taken back is tried again",
    }
    return f"{metadata['name']}: {after[word]}"


async def _say(word: str, name: str, namespace: str, kubeconfig: Path | None) -> None:
    """Write the word, with the revision it is meant for, so that it never hits a later one."""
    from taktline_operator import naming

    async with _Cluster(kubeconfig, namespace) as cluster:
        live = await cluster.policy(name)
        rollout = live.get("status", {}).get("rollout", {})
        subject = rollout.get("rejected" if word == "retry" else "candidate", "")
        if not subject:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"{name} has no candidate {'that was taken back' if word == 'retry' else 'on trial'}",
                f"see `taktline rollout status {name}`; spec.rollout.strategy must be Progressive",
            )
        if word == "resume" and not rollout.get("paused"):
            typer.echo(f"{name} is not paused")
            return
        brings = said(word, live)
        # The time makes a word that is said twice another one.
        text = f"{word} {subject} {rollout.get('since', '')}".strip()
        await cluster.api.annotate("PolicyDeployment", cluster.namespace, name, {naming.ANNOTATION_ROLLOUT: text})
        typer.echo(brings)


class _Cluster:
    """The API server with the user's own credentials."""

    def __init__(self, kubeconfig: Path | None, namespace: str) -> None:
        self._kubeconfig = kubeconfig
        self.namespace = namespace

    async def __aenter__(self) -> _Cluster:
        from kubernetes import config

        from taktline_operator.kube import KubeApi, load_configuration

        self.api = KubeApi(load_configuration(self._kubeconfig))
        if not self.namespace:
            file = str(self._kubeconfig) if self._kubeconfig else None
            try:
                _, active = config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
                self.namespace = active["context"].get("namespace") or "default"
            except (config.ConfigException, TypeError):
                self.namespace = "default"  # in a pod there is no kubeconfig
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.api.close()

    async def policy(self, name: str) -> Json:
        """The live object. Raises TaktlineError `unknown_policy`."""
        live = await self.api.get("PolicyDeployment", self.namespace, name)
        if live is None:
            raise TaktlineError(
                ErrorCode.UNKNOWN_POLICY,
                f"there is no PolicyDeployment {name!r} in namespace {self.namespace!r}",
                "kubectl get pd --all-namespaces",
            )
        return live


def _run(work: Coroutine[Any, Any, T]) -> T:
    from taktline_operator.kube import ApiError

    try:
        return asyncio.run(work)
    except ApiError as error:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID, f"the API server refused: {error}", "check --kubeconfig and your rights"
        ) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
