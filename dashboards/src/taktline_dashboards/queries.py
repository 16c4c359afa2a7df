"""PromQL building blocks: every name comes from the protocol's metric and SLO names, none is typed twice."""

from __future__ import annotations

from taktline_protocol import metrics

RATE = "$__rate_interval"
"""Grafana's window for rates: at least four scrapes."""


def selected(**labels: str) -> str:
    """A selector of equal labels; a value with `$` is a dashboard variable and matches as a pattern."""
    parts = [f'{name}=~"{value}"' if "$" in value else f'{name}="{value}"' for name, value in labels.items()]
    return f"{{{','.join(parts)}}}" if parts else ""


def rate(name: str, by: str = "", selector: str = "", window: str = RATE) -> str:
    """The summed rate of a counter, a second; `by` are labels to keep."""
    return f"sum{_by(by)}(rate({name}{selector}[{window}]))"


def increase(name: str, by: str = "", selector: str = "", window: str = "$__range") -> str:
    """How often a counter counted within `window`."""
    return f"sum{_by(by)}(increase({name}{selector}[{window}]))"


def quantile(share: float, histogram: str, by: str = "", selector: str = "", window: str = RATE) -> str:
    """A quantile of a histogram, interpolated within its bucket."""
    kept = ", ".join(part for part in ("le", by) if part)
    return f"histogram_quantile({share}, sum by ({kept}) (rate({histogram}_bucket{selector}[{window}])))"


def mean(histogram: str, by: str = "", selector: str = "", window: str = RATE) -> str:
    """The mean of a histogram; no series where nothing was counted."""
    total = rate(f"{histogram}_sum", by, selector, window)
    count = rate(f"{histogram}_count", by, selector, window)
    return f"{total} / ({count} > 0)"


def share(part: str, whole: str) -> str:
    """A ratio that has no value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def roofline_x(selector: str) -> str:
    """X = L_env / L_inference by policy: below 1 the engine bounds the pace, above it the robots' own motion."""
    inference = mean(metrics.LATENCY_TERM, "policy", f'{selector[:-1]},{metrics.LABEL_TERM}="inference"}}')
    return f"{mean(metrics.ENVIRONMENT_TIME, 'policy', selector)} / ({inference})"


def roofline_y(selector: str) -> str:
    """Y = L_env / L_control by policy: the share of its cycle in which a robot moves; 1 is a robot that never waits."""
    return (
        f"{mean(metrics.ENVIRONMENT_TIME, 'policy', selector)} / ({mean(metrics.CONTROL_PERIOD, 'policy', selector)})"
    )


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""
