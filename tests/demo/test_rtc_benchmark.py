"""A small instance of `python -m benchmarks.rtc`: chunks that continue the last one hand over without a jump."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import rtc


@pytest.mark.slow
def test_hand_offs_jump_less_with_real_time_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {name: rtc.WAYS[name] for name in ("plain", "guided, linear")}
    monkeypatch.setattr(rtc, "WAYS", ways)
    checkpoint = Path(__file__).resolve().parents[2] / "demo" / "checkpoint"
    plain, guided = rtc.measure(argparse.Namespace(checkpoint=checkpoint, episodes=2, delay=3))
    assert plain["hand_offs"] == guided["hand_offs"]
    assert guided["jump_mean_rad"] < 0.5 * plain["jump_mean_rad"]  # type: ignore[operator]
    assert guided["success"] == plain["success"] == 1.0
    assert "guided, linear" in rtc.table([plain, guided])
