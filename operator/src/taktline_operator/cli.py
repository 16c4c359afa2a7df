"""The `taktline-operator` command: run, plan, rules, crd."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from taktline_protocol.errors import ErrorCode, TaktlineError

from taktline_operator import __version__, accelerators, planfile, reference, rulefile, schema, slo_rules, slo_windows
from taktline_operator.plan import Settings
from taktline_operator.spec import WorkerTls


def _parser() -> argparse.ArgumentParser:
    defaults = Settings()
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--image",
        default=os.environ.get("TAKTLINE_WORKER_IMAGE", defaults.image),
        help="worker image of pools that name none (env TAKTLINE_WORKER_IMAGE; default %(default)s)",
    )
    shared.add_argument(
        "--gateway-namespace",
        metavar="NS",
        default=os.environ.get("TAKTLINE_GATEWAY_NAMESPACE", defaults.gateway_namespace),
        help="where the gateways run and read their routes (env TAKTLINE_GATEWAY_NAMESPACE; default %(default)s)",
    )
    shared.add_argument(
        "--gateway-scheme",
        choices=["http", "https"],
        default=os.environ.get("TAKTLINE_GATEWAY_SCHEME", defaults.gateway_scheme),
        help="https where the gateways serve TLS (env TAKTLINE_GATEWAY_SCHEME; default %(default)s)",
    )
    shared.add_argument(
        "--model-cache",
        metavar="FOLDER",
        default=os.environ.get("TAKTLINE_MODEL_CACHE", defaults.model_cache),
        help="folder of each node that keeps fetched checkpoints, for policies without spec.delivery.cache; user 10001"
        " has to own it (env TAKTLINE_MODEL_CACHE; default: each pod fetches for itself)",
    )
    shared.add_argument(
        "--kernel-cache",
        metavar="FOLDER",
        default=os.environ.get("TAKTLINE_KERNEL_CACHE", defaults.kernel_cache),
        help="folder of each node that keeps the GPU kernels that workers compile at start, in one for each"
        " namespace that user 10001 has to own (env TAKTLINE_KERNEL_CACHE; default: each pod compiles for itself)",
    )
    shared.add_argument(
        "--worker-image-for",
        metavar="CLASS=IMAGE",
        action="append",
        default=[],
        help="worker image of pools of this accelerator class that name none, for example jetson-thor=IMAGE; repeatable"
        " (env TAKTLINE_WORKER_IMAGES: the same, separated by commas)",
    )
    shared.add_argument(
        "--worker-tls-secret",
        metavar="NAME",
        default=os.environ.get("TAKTLINE_WORKER_TLS_SECRET", ""),
        help="Secret in each policy's namespace with the workers' tls.crt, tls.key and ca.crt: gateways then reach them"
        " over TLS (env TAKTLINE_WORKER_TLS_SECRET; default: plain text)",
    )
    shared.add_argument(
        "--worker-tls-client-auth",
        action="store_true",
        default=os.environ.get("TAKTLINE_WORKER_TLS_CLIENT_AUTH", "") == "true",
        help="workers serve only gateways with a certificate of the issuer in ca.crt (env"
        " TAKTLINE_WORKER_TLS_CLIENT_AUTH=true)",
    )
    shared.add_argument(
        "--runbook-url",
        metavar="URL",
        default=os.environ.get("TAKTLINE_RUNBOOK_URL", defaults.runbooks),
        help="where the pages of docs/runbooks are, which alerts link to (env TAKTLINE_RUNBOOK_URL;"
        " default %(default)s)",
    )
    parser = argparse.ArgumentParser(
        prog="taktline-operator",
        description="Turns PolicyDeployments into workers and gateway routes.",
    )
    parser.add_argument("--version", action="version", version=f"taktline-operator {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", parents=[shared], help="watch the cluster and reconcile until SIGTERM")
    scope = run.add_mutually_exclusive_group()
    scope.add_argument("--namespace", action="append", metavar="NS", help="serve this namespace only; may be repeated")
    scope.add_argument("--all-namespaces", action="store_true", help="serve every namespace (the default)")
    run.add_argument(
        "--gateway-ca",
        type=Path,
        metavar="PEM",
        default=os.environ.get("TAKTLINE_GATEWAY_CA") or None,
        help="issuer of the gateways' certificates (env TAKTLINE_GATEWAY_CA); where they ask for an API key, one with"
        " the right `observe` comes in the environment, TAKTLINE_GATEWAY_KEY",
    )
    run.add_argument("--kubeconfig", type=Path, help="credentials; default: the pod's own, else $KUBECONFIG")
    run.add_argument(
        "--health-listen",
        default="0.0.0.0:8081",  # the kubelet probes the address of the pod
        metavar="HOST:PORT",
        help="where /healthz and /readyz answer (default %(default)s)",
    )

    run.add_argument(
        "--lease",
        default="",
        metavar="NAME",
        help="of several operators that name one Lease (in the gateway's namespace) only one works; default: none",
    )

    run.add_argument(
        "--resync-seconds",
        type=_resync_s,
        metavar="S",
        default=60.0,
        help="time between two lists that find what a silent watch missed, and products installed meanwhile:"
        " 1 to 60 (default %(default)s)",
    )

    hook = run.add_argument_group(
        "admission webhook", "answers `kubectl apply` with what the CRD's rules cannot check; every replica answers"
    )
    hook.add_argument(
        "--webhook-listen", metavar="HOST:PORT", help="serve it, over TLS, at POST /validate; default: no"
    )
    hook.add_argument(
        "--webhook-host",
        action="append",
        metavar="NAME",
        help="name or address that the API server calls it by; may be repeated",
    )
    hook.add_argument(
        "--webhook-secret",
        metavar="NAME",
        default="taktline-webhook",
        help="Secret in the gateway's namespace, empty at first, that keeps the certificate (default %(default)s)",
    )
    hook.add_argument(
        "--webhook-configuration",
        metavar="NAME",
        default="taktline-policydeployments",
        help="ValidatingWebhookConfiguration that is told whom to trust (default %(default)s)",
    )
    hook.add_argument(
        "--webhook-cert-dir",
        type=Path,
        metavar="DIR",
        help="take tls.crt and tls.key from here, as cert-manager renews them, and manage no certificate",
    )
    hook.add_argument(
        "--webhook-look-seconds",
        type=float,
        metavar="S",
        default=60.0,
        help="time between two looks at the certificate (default %(default)s)",
    )

    plan = commands.add_parser(
        "plan",
        parents=[shared],
        help="print what a PolicyDeployment file becomes, as a JSON List; nothing is applied",
    )
    plan.add_argument("-f", "--file", type=Path, required=True, help="YAML file with one or more PolicyDeployments")
    plan.add_argument("--observed", type=Path, metavar="JSON", help="a JSON List of what runs, pods included")

    rules = commands.add_parser(
        "rules",
        help="print Prometheus rules: the SLO of each PolicyDeployment of a file, and the installation's own alerts",
        description="Prints a rule file for a Prometheus without the Prometheus operator (where its kinds exist, the"
        " operator applies the same rules by itself). Check it with: promtool check rules.",
    )
    rules.add_argument("-f", "--file", type=Path, help="YAML file with one or more PolicyDeployments")
    rules.add_argument("--platform", action="store_true", help="add the alerts of gateways, operator and GPUs")
    rules.add_argument(
        "--period-days",
        type=int,
        choices=sorted(slo_windows.PERIODS),
        help="days over which the on-time objective counts (default: each policy's slo.windowDays)",
    )
    rules.add_argument(
        "--runbooks",
        metavar="URL",
        default=slo_rules.RUNBOOKS,
        help="where the pages of docs/runbooks are; alerts link to them (default %(default)s)",
    )

    crd = commands.add_parser("crd", help="print the CustomResourceDefinition as YAML")
    crd.add_argument("--markdown", action="store_true", help="print its field reference instead")
    return parser


def _authority(path: Path | str | None) -> str:
    """The issuer's file where there is one: a Secret without ca.crt leaves the system's issuers."""
    return str(path) if path is not None and Path(path).is_file() else ""


def _webhook(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `service.WebhookOptions`.

    Raises:
        TaktlineError: CONFIG_INVALID; nobody could trust the certificate.
    """
    if not options.webhook_host and options.webhook_cert_dir is None:
        raise TaktlineError(
            ErrorCode.CONFIG_INVALID,
            "the webhook's certificate needs the name that the API server calls it by",
            "give --webhook-host SERVICE.NAMESPACE.svc, or a certificate by --webhook-cert-dir",
        )
    return {
        "listen": options.webhook_listen,
        "hosts": tuple(options.webhook_host or ()),
        "secret": options.webhook_secret,
        "configuration": options.webhook_configuration,
        "folder": options.webhook_cert_dir,
        "look_s": options.webhook_look_seconds,
    }


def _images(given: Sequence[str]) -> dict[str, str]:
    from_environment = os.environ.get("TAKTLINE_WORKER_IMAGES", "").split(",")
    found = {}
    for word in [*filter(None, from_environment), *given]:
        accelerator, _, image = word.partition("=")
        if accelerator not in accelerators.CLASSES or not image:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                f"--worker-image-for {word} is not CLASS=IMAGE",
                f"accelerator classes are {', '.join(accelerators.CLASSES)}",
            )
        found[accelerator] = image
    return found


def _worker_tls(options: argparse.Namespace) -> WorkerTls | None:
    if not options.worker_tls_secret:
        if options.worker_tls_client_auth:
            raise TaktlineError(
                ErrorCode.CONFIG_INVALID,
                "--worker-tls-client-auth needs --worker-tls-secret",
                "name the Secret with the workers' certificates",
            )
        return None
    return WorkerTls(secret=options.worker_tls_secret, client_auth=options.worker_tls_client_auth)


def _resync_s(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1.0 <= value <= 60.0:  # after four minutes without a list the process counts as dead
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 60")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 when `run` fails, 2 for bad input."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "crd":
            sys.stdout.write(reference.markdown() if options.markdown else schema.crd_text())
            return 0
        if options.command == "rules":
            if options.file is None and not options.platform:
                raise TaktlineError(ErrorCode.CONFIG_INVALID, "nothing to print rules of", "give -f FILE or --platform")
            sys.stdout.write(
                rulefile.text(
                    options.file, platform=options.platform, period_days=options.period_days, runbooks=options.runbooks
                )
            )
            return 0
        settings = Settings(
            image=options.image,
            gateway_namespace=options.gateway_namespace,
            gateway_scheme=options.gateway_scheme,
            model_cache=options.model_cache,
            kernel_cache=options.kernel_cache,
            runbooks=options.runbook_url,
            images=_images(options.worker_image_for),
            worker_tls=_worker_tls(options),
        )
        if options.command == "plan":
            notes: list[str] = []
            bodies = planfile.read_policies(options.file, notes.append)
            planned = planfile.planned_list(bodies, planfile.read_observed(options.observed), settings)
            sys.stderr.writelines(f"taktline-operator: {note}\n" for note in notes)
            json.dump(planned, sys.stdout, indent=1)
            sys.stdout.write("\n")
            return 0
        from taktline_operator.service import (
            RunOptions,
            WebhookOptions,
            run,
        )  # kopf and the client are slow to import; plan and crd need neither

        return run(
            settings,
            RunOptions(
                namespaces=tuple(options.namespace or ()),
                kubeconfig=options.kubeconfig,
                health_listen=options.health_listen,
                lease=options.lease,
                resync_s=options.resync_seconds,
                gateway_scheme=options.gateway_scheme,
                gateway_key=os.environ.get("TAKTLINE_GATEWAY_KEY", ""),
                gateway_authority=_authority(options.gateway_ca),
                webhook=WebhookOptions(**_webhook(options)) if options.webhook_listen else None,
            ),
        )
    except TaktlineError as error:
        sys.stderr.write(f"taktline-operator: {error}\n")
        return 2
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    sys.exit(main())
