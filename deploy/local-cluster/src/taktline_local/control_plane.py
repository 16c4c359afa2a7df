"""A real Kubernetes control plane as local processes: etcd, kube-apiserver, kube-controller-manager, kube-scheduler.

Everything is the released code with RBAC, admission and CEL validation on; only the nodes are pretended (`node.py`).
Ports are random, data is temporary, all listeners are on loopback and none is open to other users.
"""

from __future__ import annotations

import csv
import json
import secrets
import shutil
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import httpx
from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_local.child import Child, tail
from taktline_local.folders import owned_folder
from taktline_local.kubectl import Kubectl
from taktline_local.network import free_port
from taktline_local.pki import Authority, signing_key, write_private
from taktline_local.rbac import process_node_rbac

START_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
PROXY = "front-proxy"  # the API server's name when it passes a request on
# user name -> groups. Each user gets a random token.
USERS = {
    "admin": ["system:masters"],
    "system:kube-controller-manager": [],
    "system:kube-scheduler": [],
    "taktline-process-node": [],
}
# Who asked for which change, without the objects themselves; reads are left out.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "Metadata", "verbs": ["create", "update", "patch", "delete", "deletecollection"]},
        {"level": "None"},
    ],
}


class ControlPlane:
    """One control plane, usable as a context manager.

    Attributes:
        kubeconfig: administrator's kubeconfig.
        node_kubeconfig: the process node's, with only the rights that `rbac.py` grants.
        url: the API server's address.
        kubectl: runs kubectl as administrator.
        certificate_authority, node_tls: CA file, and certificate and key files for the nodes' log endpoints.
        audit_log: every change that anybody asked the API server for, as audit events, one JSON object a line.
        folder: temporary folder with data, certificates and `logs/`; removed by `stop`.
    """

    def __init__(self, programs: Path, *, log_folder: Path | None = None) -> None:
        """`programs` holds the executables; logs go to `log_folder`, which outlives the control plane if given."""
        self.programs = programs
        self._given_log_folder = log_folder
        self._children: dict[str, Child] = {}
        self._http: httpx.Client | None = None
        self._tokens = {user: secrets.token_urlsafe(32) for user in USERS}

    def __enter__(self) -> ControlPlane:
        """Start and wait until the API answers."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop everything and remove the data."""
        self.stop()

    def start(self) -> None:
        """Start all processes; returns when the API is ready and a Pod can be made. Raises TaktlineError."""
        self.folder = owned_folder("taktline-control-plane-")
        self.log_folder = self._given_log_folder or self.folder / "logs"
        self.audit_log = self.log_folder / "audit.log"
        try:
            self._write_credentials()
            self._start_etcd()
            self._choose_address()
            self._start_apiserver()
            self._wait("kube-apiserver", lambda: self._get("/readyz").status_code == 200)
            self._grant_node_rights()
            self._start_controllers()
            self._wait(
                "kube-controller-manager",
                lambda: self._get("/api/v1/namespaces/default/serviceaccounts/default").status_code == 200,
            )
            self._wait("kube-scheduler", lambda: self._health(self._scheduler_port))
        except BaseException:
            self.stop()
            raise

    def restart_apiserver(self, *, compacted: bool = False) -> None:
        """Stop the API server and start it at the same address; returns when it is ready. Raises TaktlineError.

        Args:
            compacted: have etcd forget all history in between: what was before is known as it is now, or not at all.
        """
        self._children.pop("kube-apiserver").stop_blocking(STOP_GRACE_S)
        if compacted:
            self._compact()
        self._start_apiserver()
        self._wait("kube-apiserver", lambda: self._get("/readyz").status_code == 200)

    def _compact(self) -> None:
        """Through etcd's JSON gateway, which needs no client program."""
        trust = ssl.create_default_context(cafile=str(self.certificate_authority))
        trust.load_cert_chain(*self._client_tls)
        with httpx.Client(base_url=self._etcd_url, verify=trust, trust_env=False) as etcd:
            header = etcd.post("/v3/kv/range", json={"key": "AA=="}).raise_for_status().json()["header"]
            body = {"revision": header["revision"], "physical": True}
            etcd.post("/v3/kv/compaction", json=body).raise_for_status()

    def stop(self) -> None:
        """End all processes in reverse order and remove the folder. May be called twice."""
        for child in reversed(self._children.values()):
            child.stop_blocking(STOP_GRACE_S)
        self._children.clear()
        if self._http is not None:
            self._http.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_credentials(self) -> None:
        certificates = self.folder / "pki"
        certificates.mkdir(mode=0o700)
        authority = Authority(certificates)
        self.certificate_authority = authority.certificate
        self._etcd_tls = authority.issue("etcd", hosts=["localhost"], addresses=["127.0.0.1"])
        self._serving_tls = authority.issue(
            "kube-apiserver", hosts=["localhost", "kubernetes.default.svc"], addresses=["127.0.0.1"]
        )
        self._client_tls = authority.issue("apiserver-client")
        self._proxy_tls = authority.issue(PROXY)
        self.node_tls = authority.issue("process-node")
        self._signing_key, self._signing_public = signing_key(certificates, "service-account")
        rows = [[token, user, user, ",".join(USERS[user])] for user, token in self._tokens.items()]
        table = self.folder / "tokens.csv"
        write_private(table, b"")
        with table.open("w", newline="") as handle:
            csv.writer(handle).writerows(rows)
        self._tokens_file = table

    def _write_kubeconfigs(self) -> None:
        paths = {}
        for user, token in self._tokens.items():
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [
                    {
                        "name": "local",
                        "cluster": {"server": self.url, "certificate-authority": str(self.certificate_authority)},
                    }
                ],
                "users": [{"name": user, "user": {"token": token}}],
                "contexts": [{"name": "local", "context": {"cluster": "local", "user": user}}],
                "current-context": "local",
            }
            name = user.removeprefix("system:")
            paths[user] = write_private(self.folder / f"{name}.kubeconfig", json.dumps(config, indent=2).encode())
        self.kubeconfig = paths["admin"]
        self.kubectl = Kubectl(self.programs / "kubectl", self.kubeconfig, self.folder / "kubectl-cache")
        self.node_kubeconfig = paths["taktline-process-node"]
        self._controller_kubeconfig = paths["system:kube-controller-manager"]
        self._scheduler_kubeconfig = paths["system:kube-scheduler"]

    def _run(self, name: str, *flags: str) -> None:
        self._children[name] = Child(
            [str(self.programs / name), *flags], log=self.log_folder / f"{name}.log", cwd=self.folder
        )

    def _start_etcd(self) -> None:
        client, peer = f"https://127.0.0.1:{free_port()}", f"https://127.0.0.1:{free_port()}"
        certificate, key = self._etcd_tls
        self._etcd_url = client
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            f"--cert-file={certificate}",
            f"--key-file={key}",
            f"--trusted-ca-file={self.certificate_authority}",
            "--client-cert-auth",
            f"--peer-cert-file={certificate}",
            f"--peer-key-file={key}",
            f"--peer-trusted-ca-file={self.certificate_authority}",
            "--peer-client-cert-auth",
            "--unsafe-no-fsync",  # the data lives as long as the process
            "--log-level=warn",
        )

    def _choose_address(self) -> None:
        self._port = free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self._write_kubeconfigs()
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {self._tokens['admin']}"},
            verify=ssl.create_default_context(cafile=str(self.certificate_authority)),
            trust_env=False,
        )

    def _start_apiserver(self) -> None:
        certificate, key = self._serving_tls
        client_certificate, client_key = self._client_tls
        proxy_certificate, proxy_key = self._proxy_tls
        audit_policy = write_private(self.folder / "audit-policy.json", json.dumps(AUDIT_POLICY).encode())
        self._run(
            "kube-apiserver",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--etcd-servers={self._etcd_url}",
            f"--etcd-cafile={self.certificate_authority}",
            f"--etcd-certfile={client_certificate}",
            f"--etcd-keyfile={client_key}",
            f"--kubelet-client-certificate={client_certificate}",
            f"--kubelet-client-key={client_key}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--token-auth-file={self._tokens_file}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={self._signing_key}",
            f"--service-account-key-file={self._signing_public}",
            "--service-cluster-ip-range=10.96.0.0/16",
            # Requests to APIs that other servers add are passed on in the name of who asks.
            f"--requestheader-client-ca-file={self.certificate_authority}",
            f"--requestheader-allowed-names={PROXY}",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={proxy_certificate}",
            f"--proxy-client-key-file={proxy_key}",
            # Endpoints may not hold loopback addresses, so the `kubernetes` Service stays without one.
            "--endpoint-reconciler-type=none",
            # Pods leave a dead node after seconds rather than minutes.
            "--default-not-ready-toleration-seconds=5",
            "--default-unreachable-toleration-seconds=5",
            "--profiling=false",
            f"--audit-policy-file={audit_policy}",
            f"--audit-log-path={self.audit_log}",
            "--audit-log-maxsize=2000",  # MB: one file, so that a reader counts all of it
        )

    def _start_controllers(self) -> None:
        self._scheduler_port = free_port()
        shared = ("--leader-elect=false", "--bind-address=127.0.0.1", "--profiling=false")
        self._run(
            "kube-controller-manager",
            *shared,
            *credentials(self._controller_kubeconfig),
            f"--secure-port={free_port()}",
            f"--cert-dir={self.folder / 'pki' / 'controller-manager'}",
            f"--root-ca-file={self.certificate_authority}",
            f"--service-account-private-key-file={self._signing_key}",
            "--use-service-account-credentials",
            # A node that stops renewing its Lease is noticed within ten seconds.
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=10s",
            "--node-startup-grace-period=10s",
        )
        self._run(
            "kube-scheduler",
            *shared,
            *credentials(self._scheduler_kubeconfig),
            f"--secure-port={self._scheduler_port}",
            f"--cert-dir={self.folder / 'pki' / 'scheduler'}",
        )

    def _get(self, path: str) -> httpx.Response:
        assert self._http is not None
        return self._http.get(path)

    def _health(self, port: int) -> bool:
        # These two serve with self-signed certificates; the question holds no secret.
        url = f"https://127.0.0.1:{port}/healthz"
        return httpx.get(url, verify=False, trust_env=False).status_code == 200  # noqa: S501

    def _grant_node_rights(self) -> None:
        assert self._http is not None
        for resource, document in process_node_rbac("taktline-process-node"):
            self._http.post(f"/apis/rbac.authorization.k8s.io/v1/{resource}", json=document).raise_for_status()

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if ready():
                    return
            except httpx.TransportError:
                pass  # not listening yet
            for child_name, child in self._children.items():
                if child.exit_code() is not None:
                    raise TaktlineError(
                        ErrorCode.INTERNAL,
                        f"{child_name} ended while starting: {tail(child.log, max_lines=3)}",
                        f"read {child.log} and start again",
                    )
            if time.monotonic() > deadline:
                last_words = tail(self._children[name].log, max_lines=3)
                raise TaktlineError(
                    ErrorCode.INTERNAL,
                    f"{name} was not ready after {START_TIMEOUT_S:.0f} s: {last_words}",
                    "try again when the machine is less busy",
                )
            time.sleep(0.1)


def credentials(kubeconfig: Path) -> tuple[str, str, str]:
    """The three flags by which a component uses one kubeconfig for its work and for checking its own callers."""
    return (
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
    )
