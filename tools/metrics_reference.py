"""Prints the reference of all metrics as Markdown, for docs/observability.md: python tools/metrics_reference.py."""

from __future__ import annotations

from taktline_protocol import metrics

PARTS = (
    ("Gateway", "GATEWAY_METRICS"),
    ("Streams", "STREAM_METRICS"),
    ("Worker", "WORKER_METRICS"),
    ("Operator", "OPERATOR_METRICS"),
)


def reference() -> str:
    """One table a part of the platform."""
    parts = []
    for title, name in PARTS:
        rows = [
            f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {metric.help} |"
            for metric in getattr(metrics, name, ())
        ]
        if rows:
            parts.append("\n".join([f"### {title}", "", "| name | kind | labels | meaning |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
