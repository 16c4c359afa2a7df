"""The benchmark of the stream's bytes, on few frames: the stream is never larger, and far smaller at rest."""

from __future__ import annotations

from benchmarks.gateway.stream_bytes import measured_bytes


def test_the_stream_takes_fewer_bytes_than_posts_on_every_sequence():
    rows = {row["sequence"]: row for row in measured_bytes(1)}
    assert set(rows) == {"recorded", "moving", "with rests", "noisy", "planner"}
    for row in rows.values():
        assert row["ratio"] > 1.0
        assert row["peer_up_bytes"] > row["image_bytes"]
    for name in ("recorded", "moving", "noisy"):
        assert rows[name]["up_bytes"] > rows[name]["image_bytes"], "every camera changed every time"
    assert rows["with rests"]["up_bytes"] < rows["with rests"]["image_bytes"]
    assert rows["planner"]["up_bytes"] < rows["planner"]["image_bytes"]
