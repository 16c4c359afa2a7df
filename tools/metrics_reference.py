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
        rows = []
        for metric in getattr(metrics, name, ()):
            labels = ", ".join(f"`{label}`" for label in metric.labels)
            rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
        if rows:
            head = [f"### {title}", "", "| name | kind | labels | meaning |", "|---|---|---|---|"]
            parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
