"""A day of factory shifts under four autoscalers: misses and GPU-hours.

`python -m benchmarks.operator.scaling` simulates the same day, request by request, with the operator's own decisions
(with and without a shift calendar), with a HorizontalPodAutoscaler on CPU, one on queue length, and with the peak's
workers all day. Prints a table, writes rows and a plot.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
from taktline_operator import scaling
from taktline_operator.demand import DemandTracker
from taktline_operator.scaling_spec import Scaling, Shift
from taktline_protocol.measurements import Demand as Counted
from taktline_protocol.measurements import GatewayMeasurements, Outcomes, PolicyMeasurement

from benchmarks.operator.day import BUDGETS_MS, COLD_START_S, DAY_S, TIMES, Outcome, Scaler, View, simulate

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cpu"
MIDNIGHT = datetime.datetime(2026, 3, 2, tzinfo=datetime.UTC)
LOW, HIGH = 1, 12
CALENDAR = (
    Shift(name="early", start="06:00", end="14:00", min_replicas=4),
    Shift(name="late", start="14:00", end="22:00", min_replicas=3),
)


def operator_scaler(plan: Scaling) -> Scaler:
    """The operator's pure decision, fed as the operator feeds it."""
    state = scaling.State()
    tracker = DemandTracker()
    counts = {budget: Outcomes() for _, budget in BUDGETS_MS}

    def decide(view: View) -> int:
        nonlocal state
        for budget, count in view.arrivals.items():
            counts[budget].on_time += count
        next(iter(counts.values())).late += view.missed
        next(iter(counts.values())).on_time -= view.missed
        told = tuple(
            Counted(up_to_ms=budget, outcomes=msgspec.structs.replace(outcomes)) for budget, outcomes in counts.items()
        )
        policy = PolicyMeasurement(policy="day", demand=told)
        tracker.take([GatewayMeasurements(instance="one", seconds=view.now, policies=(policy,))], view.now)
        demand = tracker.of("day", view.now)
        now = (MIDNIGHT + datetime.timedelta(seconds=view.now)).strftime("%Y-%m-%dT%H:%M:%SZ")
        state = scaling.decide(state, plan, scaling.Room(LOW, HIGH), demand, TIMES, 8, 0.999, view.ready, now)
        return state.desired

    return decide


def hpa(metric: Callable[[View], float], target: float) -> Scaler:
    """A HorizontalPodAutoscaler with its defaults: tolerance 0.1, up by 100 % or 4 each period, down by the highest
    recommendation of 5 minutes.
    """
    recommended: deque[tuple[float, int]] = deque()

    def decide(view: View) -> int:
        ratio = metric(view) / target
        wanted = view.desired if abs(ratio - 1.0) <= 0.1 else math.ceil(max(1, view.ready) * ratio)
        wanted = min(wanted, max(2 * view.desired, view.desired + 4))
        recommended.append((view.now, wanted))
        while view.now - recommended[0][0] > 300.0:
            recommended.popleft()
        if wanted < view.desired:
            wanted = min(view.desired, max(count for _, count in recommended))
        return max(LOW, min(HIGH, wanted))

    return decide


def contenders(period_s: float) -> dict[str, tuple[Scaler, float]]:
    """Name -> (autoscaler, how often it is asked)."""
    plan = Scaling(lead_seconds=int(COLD_START_S))
    return {
        "taktline": (operator_scaler(plan), period_s),
        "taktline, shifts known": (
            operator_scaler(Scaling(lead_seconds=int(COLD_START_S) + 60, shifts=CALENDAR)),
            period_s,
        ),
        "HPA on CPU, 70 %": (hpa(lambda view: 0.9 * view.busy, 0.7), 15.0),
        "HPA on queue, 1 each": (hpa(lambda view: view.queued / max(1, view.ready), 1.0), 15.0),
        "HPA on queue, 4 each": (hpa(lambda view: view.queued / max(1, view.ready), 4.0), 15.0),
        "5 workers all day": (lambda view: 5, 15.0),
    }


def row(name: str, outcome: Outcome, seed: int) -> dict[str, object]:
    """One row of the results."""
    return {
        "bench": "operator_scaling",
        "autoscaler": name,
        "requests": outcome.requests,
        "missed": outcome.missed,
        "miss_share": round(outcome.missed / outcome.requests, 6),
        "gpu_hours": round(outcome.worker_hours, 2),
        "changes": outcome.changes,
        "cold_start_s": COLD_START_S,
        "t_sync_ms": {str(time.batch): time.median_ms for time in TIMES},
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m benchmarks.operator.scaling",
    }


def plot(outcomes: dict[str, Outcome], path: Path) -> None:
    """Workers and misses over the day, one row for each autoscaler."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(outcomes), 1, figsize=(9, 1.7 * len(outcomes)), sharex=True, sharey=True)
    for axis, (name, outcome) in zip(axes, outcomes.items(), strict=True):
        axis.step(outcome.minutes, outcome.workers, color="tab:blue", linewidth=1.2, where="post")
        axis.set_ylabel("workers", color="tab:blue")
        axis.set_ylim(0, 13)
        other = axis.twinx()
        other.bar(outcome.minutes, outcome.misses, width=1 / 60, color="tab:red")
        other.set_ylim(0, 400)
        other.set_ylabel("misses/min", color="tab:red")
        share = 100 * outcome.missed / outcome.requests
        axis.set_title(f"{name}: {share:.3f} % missed, {outcome.worker_hours:.0f} GPU-hours", fontsize=9, loc="left")
    axes[-1].set_xlabel("hour of the day")
    axes[-1].set_xlim(0, 24)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=24.0, help="of the day that are simulated")
    parser.add_argument("--output", type=Path, default=RESULTS / "operator_scaling.json")
    parser.add_argument("--plot", type=Path, default=RESULTS / "operator_scaling.png")
    options = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    print(f"{'autoscaler':<24} {'requests':>9} {'missed':>8} {'share':>9} {'GPU-hours':>10} {'changes':>8}")
    for name, (scaler, period_s) in contenders(5.0).items():
        start = 5 if "all day" in name else 1
        until_s = min(DAY_S, 3600 * options.hours)
        found = simulate(scaler, options.seed, period_s=period_s, start=start, until_s=until_s)
        outcomes[name] = found
        share = f"{100 * found.missed / found.requests:.3f} %"
        print(
            f"{name:<24} {found.requests:>9} {found.missed:>8} {share:>9} {found.worker_hours:>10.1f}"
            f" {found.changes:>8}",
            flush=True,
        )
    options.output.write_text(
        json.dumps([row(name, found, options.seed) for name, found in outcomes.items()], indent=1) + "\n"
    )
    plot(outcomes, options.plot)
    print(f"written: {options.output}, {options.plot}")


if __name__ == "__main__":
    main()
