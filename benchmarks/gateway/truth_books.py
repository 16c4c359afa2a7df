"""Compares three counts of one run to the request: the robots' own, the gateway's log, and its metrics."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from taktline import Chunk
from taktline_protocol import Timings, metrics

from benchmarks.gateway.truth_robots import Seen

OUTCOMES = {"answered", "deadline_missed", "request_refused", "client_gone"}
TERM_FIELDS = tuple(f"{term}_ms" for term in metrics.TERMS)
TOLERANCE_MS = 1.0
_BY_THE_SDK = ("gateway_unreachable", "deadline_expired", "overloaded")
SDK = "sdk-"
"""How the names of the SDK's robots begin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One statement about the run; `wrong` names what contradicts it."""

    claim: str
    checked: int
    wrong: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing contradicts it."""
        return not self.wrong


class Metrics:
    """Samples of one exposition."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples whose labels include `labels`."""
        wanted = labels.items()
        return sum(s.value for s in self._samples if s.name == name and wanted <= s.labels.items())

    def by(self, name: str, label: str) -> Counter[str]:
        """Sums by one label; what is 0 is left out."""
        sums: Counter[str] = Counter()
        for sample in self._samples:
            if sample.name == name and sample.value:
                sums[sample.labels[label]] += round(sample.value)
        return sums


def outcomes_in(log: Path) -> list[dict[str, Any]]:
    """The lines that tell what became of a request, each with the id by which its robot knows it."""
    found = []
    with log.open() as lines:
        for text in lines:
            line = json.loads(text) if text.startswith("{") else {}
            if line.get("message") in OUTCOMES:
                if str(line.get("robot", "")).startswith(SDK):
                    line["request_id"] = f"{line['robot']}#{line['seq']}"
                found.append(line)
    return found


def cause_of(budget_ms: float, timings: Timings) -> str | None:
    """The cause of a miss by its definition, written anew: the first term with which the budget was gone."""
    left = budget_ms - timings.actuate_ms
    for term in ("inference", "queue", "transfer"):
        left -= getattr(timings, f"{term}_ms")
        if left < 0:
            return term
    return None


def compare(seen: Iterable[Seen], lines: list[dict[str, Any]], found: Metrics) -> list[Finding]:
    """Every claim of a truthful gateway, with what contradicts it."""
    robots = {one.request_id: one for one in seen}
    for request_id in unsent(robots.values(), lines):
        del robots[request_id]
    logged: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        logged.setdefault(line["request_id"], []).append(line)
    first = {request_id: entries[0] for request_id, entries in logged.items()}
    ok = [line for line in lines if line["code"] == "ok"]
    answered = [(one, first[one.request_id]) for one in robots.values() if one.chunk and one.request_id in first]
    return [
        _claim("each request of a robot is in the log exactly once", robots, lambda i: len(logged.get(i, ())) == 1),
        _claim("the log has no request that no robot sent", logged, lambda i: i in robots),
        _claim(
            "robot and log agree on each outcome (of dropped ones only the gateway can tell)",
            [one for one in robots.values() if one.outcome != "dropped"],
            lambda one: one.outcome == first.get(one.request_id, {}).get("code"),
        ),
        _claim(
            "robot and log agree on each miss and its one cause",
            answered,
            lambda pair: cause_of(pair[0].budget_ms, _gateways_terms(*pair)) == pair[1].get("cause"),
        ),
        _claim(
            "the SDK adds to the gateway's terms what the network's two ways took and nothing else,"
            f" within {TOLERANCE_MS:g} ms",
            [pair for pair in answered if isinstance(pair[0].chunk, Chunk)],
            lambda pair: _adds_the_network(*pair),
        ),
        _claim(
            "a line has a cause if and only if the deadline was missed",
            lines,
            lambda line: ("cause" in line) == (_missed(line)) and line.get("cause", "queue") in metrics.MISS_CAUSES,
        ),
        _equal(
            "requests by code: log and metrics", Counter(x["code"] for x in lines), found.by(metrics.REQUESTS, "code")
        ),
        _equal(
            "misses by cause: log and metrics",
            Counter(line["cause"] for line in lines if "cause" in line),
            found.by(metrics.DEADLINE_MISSES, metrics.LABEL_CAUSE),
        ),
        _equal(
            "refused by code: log and metrics",
            Counter(line["code"] for line in lines if line.get("cause") == "refused"),
            found.by(metrics.REFUSED, metrics.LABEL_CODE),
        ),
        _equal(
            "chunks in time: log and metrics",
            Counter(goodput=sum("cause" not in line for line in ok)),
            Counter(goodput=round(found.total(metrics.GOODPUT))),
        ),
        _equal(
            "negative margins: log and histogram",
            Counter(late=sum(line["margin_ms"] < 0 for line in ok)),
            Counter(late=round(found.total(f"{metrics.MARGIN}_bucket", le="0.0"))),
        ),
        _equal("answers: log and the histogram of each term", *_term_counts(ok, found)),
        _claim(
            f"the sum of a term over all answers is the histogram's, within {TOLERANCE_MS:g} us an answer",
            metrics.TERMS,
            lambda term: (
                abs(sum(x[f"{term}_ms"] for x in ok) - found.total(f"{metrics.LATENCY_TERM}_sum", term=term))
                <= 1e-3 * TOLERANCE_MS * max(1, len(ok))
            ),
        ),
        _claim(
            f"the five terms are the path that the gateway's clock shows, within {TOLERANCE_MS:g} ms",
            ok,
            lambda x: abs(sum(x[field] for field in TERM_FIELDS) - _gateway_path_ms(x)) < TOLERANCE_MS,
        ),
        _claim(
            "the five terms and the network's two ways are the path that the robot's clock shows,"
            f" within {TOLERANCE_MS:g} ms",
            answered,
            lambda pair: abs(_robot_path_ms(*pair) - (pair[0].path_ms or 0.0)) < TOLERANCE_MS,
        ),
        _claim(
            "where robot and gateway differ on a miss, the network they cannot both see explains it",
            [pair for pair in answered if pair[0].late != ("cause" in pair[1])],
            lambda pair: pair[0].late and pair[1]["margin_ms"] <= sum(_network_ms(*pair)),
        ),
    ]


def unsent(seen: Iterable[Seen], lines: list[dict[str, Any]]) -> set[str]:
    """Requests that the SDK answered by itself, so that no gateway can know of them.

    It does so where the budget was spent before there was a connection (`gateway_unreachable`, or `deadline_expired`
    while one is made anew), and where the gateway has asked it to pause (`overloaded`).
    """
    logged = {line["request_id"] for line in lines}
    own = (one for one in seen if one.request_id.startswith(SDK) and one.request_id not in logged)
    return {one.request_id for one in own if one.outcome in _BY_THE_SDK}


def network_ms(seen: Iterable[Seen], lines: list[dict[str, Any]]) -> list[float]:
    """What of each answered request's path the gateway could not see, ms."""
    first = {line["request_id"]: line for line in lines}
    return [sum(_network_ms(one, first[one.request_id])) for one in seen if one.chunk and one.request_id in first]


def _missed(line: dict[str, Any]) -> bool:
    return bool(line["margin_ms"] < 0) if line["code"] == "ok" else line["code"] in _MISSED


# Written anew, so that the gateway's own list is checked by it.
_MISSED = {
    "deadline_expired",
    "deadline_unreachable",
    "overloaded",
    "draining",
    "worker_unavailable",
    "worker_failed",
    "internal",
}


def _network_ms(one: Seen, line: dict[str, Any]) -> tuple[float, float]:
    return 1e3 * (line["received_at_s"] - one.sent_at), 1e3 * (one.received_at - line["answered_at_s"])


def _gateway_path_ms(line: dict[str, Any]) -> float:
    handled_ms = 1e3 * (line["answered_at_s"] - line["received_at_s"])
    return float(line["observe_ms"] + handled_ms + line["actuate_ms"])


def _robot_path_ms(one: Seen, line: dict[str, Any]) -> float:
    return _gateways_terms(one, line).critical_ms + sum(_network_ms(one, line))


def _gateways_terms(one: Seen, line: dict[str, Any]) -> Timings:
    """The terms by which the gateway judges the answer; of the SDK's, without what that has added."""
    assert one.chunk is not None
    terms = one.chunk.timings
    if not isinstance(one.chunk, Chunk):
        return terms
    told: Timings = msgspec.structs.replace(terms, transfer_ms=line["transfer_ms"])
    return told


def _adds_the_network(one: Seen, line: dict[str, Any]) -> bool:
    assert one.chunk is not None
    added = {term: getattr(one.chunk.timings, f"{term}_ms") - line[f"{term}_ms"] for term in metrics.TERMS}
    transfer_ms = added.pop("transfer")
    there_ms, back_ms = _network_ms(one, line)
    # It looks at its clock once it has the answer, which is after the gateway sent it and before the robot looks.
    within = there_ms - TOLERANCE_MS < transfer_ms < there_ms + back_ms + TOLERANCE_MS
    return within and all(abs(ms) < 1e-3 for ms in added.values())


def _term_counts(ok: list[dict[str, Any]], found: Metrics) -> tuple[Counter[str], Counter[str]]:
    counts = Counter({term: round(found.total(f"{metrics.LATENCY_TERM}_count", term=term)) for term in metrics.TERMS})
    return Counter(dict.fromkeys(metrics.TERMS, len(ok))), counts


def _claim(claim: str, items: Iterable[Any], true_of: Callable[[Any], bool]) -> Finding:
    checked = list(items)
    return Finding(claim, len(checked), tuple(_name(item) for item in checked if not true_of(item)))


def _equal(claim: str, one: Counter[str], other: Counter[str]) -> Finding:
    wrong = [f"{key}: {one[key]} and {other[key]}" for key in sorted(one | other) if one[key] != other[key]]
    return Finding(claim, sum(one.values()), tuple(wrong))


def _name(item: Any) -> str:
    return str(item)[:400]
