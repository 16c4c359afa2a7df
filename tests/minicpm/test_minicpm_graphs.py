"""The bucketed runner and the profile of MiniCPM-Robot: padding changes no answer, work agrees with known counts."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from taktline_protocol import TaktlineError
from taktline_worker.bucket_graphs import TEXT_ROOM
from taktline_worker.models.minicpm_robot import modules, synthetic
from taktline_worker.models.minicpm_robot.batch import lay_out
from taktline_worker.models.minicpm_robot.config import expected_shapes
from taktline_worker.models.minicpm_robot.graphs import MiniCpmGraphs
from taktline_worker.models.minicpm_robot.runner import MAX_SLOTS, MiniCpmRunner
from taktline_worker.models.minicpm_robot.weights import pack_weights
from taktline_worker.models.minicpm_robot.work import phase_work
from taktline_worker.profiling import report
from taktline_worker.profiling.subject import Request, open_subject
from torch import Tensor

HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def eager(kit: Any, folder: Path) -> MiniCpmRunner:
    return kit.runner(folder)


def alone(eager: MiniCpmRunner, rows: list[Any]) -> Tensor:
    return torch.cat([eager.run([one]) for one in rows])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_padding_changes_no_answer(kit: Any, eager: MiniCpmRunner, count: int) -> None:
    graphs = MiniCpmGraphs(eager, kit.row(2, 4), (1, 2, 4))
    rows = [kit.row(2, 5 + 7 * index, seed=index) for index in range(count)]
    assert graphs.bucket_for(rows) is not None
    assert kit.distance(graphs.run(rows), alone(eager, rows)) < 2e-6
    # What a larger batch left in the buffers reaches no later one.
    assert kit.distance(graphs.run(rows[:1]), alone(eager, rows[:1])) < 2e-6


def test_the_smallest_bucket_that_holds_a_batch(kit: Any, eager: MiniCpmRunner) -> None:
    graphs = MiniCpmGraphs(eager, kit.row(2, 4), (4, 1))
    assert [bucket.rows for bucket in graphs.buckets] == [1, 1, 1, 4, 4, 4]
    short = graphs.bucket_for([kit.row(2, 4)])
    long = graphs.bucket_for([kit.row(2, 4), kit.row(2, TEXT_ROOM[0])])
    assert short is not None
    assert long is not None
    assert (short.rows, long.rows, long.slots - short.slots) == (1, 4, TEXT_ROOM[1] - TEXT_ROOM[0])


def test_what_no_graph_holds_runs_eagerly_and_is_named(
    kit: Any, eager: MiniCpmRunner, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = MiniCpmGraphs(eager, kit.row(2, 4), (2,))
    many, other, views = [kit.row(2, 4)] * 3, [kit.row(2, 4, embodiment=2)], [kit.row(1, 4)]
    long = [kit.row(2, TEXT_ROOM[-1] + 1)]
    with caplog.at_level(logging.WARNING):
        for rows in (many, other, views, long, long):
            assert graphs.bucket_for(rows) is None
            assert kit.distance(graphs.run(rows), alone(eager, rows)) < 2e-6
    named = [record for record in caplog.records if "no captured graph" in record.message]
    assert [record.reason for record in named] == ["rows", "layout", "layout", "tokens"]


def test_a_longer_row_leaves_the_tables_that_graphs_read_where_they_are(
    kit: Any, eager: MiniCpmRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, read = MiniCpmGraphs(eager, kit.row(2, 4), (1,)), []
    encode_text = modules.encode_text

    def watched(*given: Any) -> Tensor:
        read.append([table.data_ptr() for table in given[-2:]])
        return encode_text(*given)

    monkeypatch.setattr(modules, "encode_text", watched)
    for rows in ([kit.row(2, 4)], [kit.row(2, TEXT_ROOM[-1] + 1)], [kit.row(2, 4)]):
        graphs.run(rows)
    assert read == [read[0]] * 3


def test_rows_beyond_the_tables_are_refused(kit: Any, eager: MiniCpmRunner) -> None:
    with pytest.raises(ValueError, match=f"up to {MAX_SLOTS} slots"):
        eager.run([kit.row(2, MAX_SLOTS)])


def test_the_published_size_is_the_published_count() -> None:
    shapes = expected_shapes(synthetic.PUBLISHED)
    head = {name: shape for name, shape in shapes.items() if name.startswith("action_head.")}
    assert len(head) == 244
    assert sum(math.prod(shape) for shape in head.values()) == 235_809_280
    assert sum(math.prod(shape) for name, shape in shapes.items() if name not in head) == 1_300_428_016


@pytest.mark.parametrize(("views", "text"), [(1, 86), (2, 92), (3, 98)])
def test_work_agrees_with_the_known_counts(views: int, text: int) -> None:
    """GFLOP and GB as counted from the published shapes: 480 a view; about 1.04 a token; 60 for the head at 220."""
    found = phase_work(synthetic.PUBLISHED, batch=1, images=views, text=text, weight_bytes=2.0)
    slots = 64 * views + text
    assert found["vision"].flops == pytest.approx(views * 480e9, rel=0.01)
    assert found["vision"].bytes == pytest.approx(1.10e9, rel=0.02)  # biases, norms and positions are left out
    assert found["text"].flops == pytest.approx(1.04e9 * slots, rel=0.02)
    assert found["text"].bytes == pytest.approx(1.00e9, rel=0.01)
    if slots == 220:
        assert found["head"].flops == pytest.approx(60e9, rel=0.02)
    twice = phase_work(synthetic.PUBLISHED, batch=2, images=views, text=text, weight_bytes=2.0)
    assert all(twice[name].flops == 2 * one.flops and twice[name].bytes == one.bytes for name, one in found.items())


def test_a_served_folder_by_phase(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_bytes(msgspec.json.encode(kit.config(kit.served(tmp_path / "policy"))))
    subject = open_subject(Request(str(path), (1, 2), device="cpu"))
    assert (subject.policy, subject.shape["views"], subject.captured) == ("minicpm-robot", 2, False)
    said: list[str] = []
    rows = report.profile(subject, [1, 2], said.append, runs=3, limit_s=1.0)
    assert [[phase.name for phase in row.phases] for row in rows] == [["vision", "text", "head"]] * 2
    with pytest.raises(TaktlineError, match="leave --views"):
        open_subject(Request(str(path), (1,), device="cpu", views=1))


def test_random_weights_keep_their_scale(kit: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "PUBLISHED", kit.architecture(folder))
    monkeypatch.setattr(synthetic, "IMAGE_TOKEN", kit.image_token)
    subject = open_subject(Request("random:minicpm-robot", (1, 2), device="cpu", views=2, prompt_tokens=4))
    assert subject.shape["tokens"] == 2 * (4 + 5) + 4
    for batch in (1, 2):
        actions = subject.whole(batch)()
        assert isinstance(actions, torch.Tensor)
        assert actions.shape[0] == batch
        assert 0.05 < float(actions.std()) < 30.0
    with pytest.raises(TaktlineError, match="needs a Hopper GPU"):
        open_subject(Request("random:minicpm-robot", (1,), device="cpu", precision="fp8"))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
def test_replays_equal_the_eager_answer_and_allocate_nothing() -> None:
    """At the published size, where every width is what the kernels are made for."""
    a, device = synthetic.PUBLISHED, torch.device("cuda")
    tensors = synthetic.random_tensors(a, device)
    eager = MiniCpmRunner(pack_weights(tensors, a, [0], torch.bfloat16, device), a, synthetic.IMAGE_TOKEN)
    graphs = MiniCpmGraphs(eager, synthetic.random_row(a, 2, 28), (1, 4))
    graphs.capture()
    assert set(graphs.captured) == set(graphs.buckets)
    rows = [synthetic.random_row(a, 2, 20 + 3 * index, seed=index) for index in range(3)]
    first = graphs.run(rows)
    held = torch.cuda.memory_stats()["allocation.all.allocated"]
    again = [graphs.run(rows) for _ in range(3)]
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == held
    assert all(torch.equal(first, other) for other in again)
    # A prompt longer than any bucket runs eagerly between two replays; what it frees is written over.
    graphs.run([synthetic.random_row(a, 2, TEXT_ROOM[-1] + 9)])
    over = [torch.full((1 << size,), torch.nan, device=device) for size in range(7, 19)]
    assert torch.equal(first, graphs.run(rows))
    del over
    exact = alone(MiniCpmRunner(pack_weights(tensors, a, [0], torch.float32, device), a, synthetic.IMAGE_TOKEN), rows)
    assert float((first - exact).norm() / exact.norm()) < 0.1


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize("views", [1, 2, 3])
def test_the_heads_chain_answers_as_its_layers_do(views: int) -> None:
    """At the published size, from the same features: as near to fp32 as the layers one by one, and bit by bit again."""
    a, device = synthetic.PUBLISHED, torch.device("cuda")
    tensors = synthetic.random_tensors(a, device)
    exact, narrow = (
        MiniCpmRunner(pack_weights(tensors, a, [0], dtype, device), a, synthetic.IMAGE_TOKEN)
        for dtype in (torch.float32, torch.bfloat16)
    )
    rows = [synthetic.random_row(a, views, 28, seed=seed) for seed in range(2)]
    batch, both = (lay_out(some, synthetic.IMAGE_TOKEN, device) for some in (rows[:1], rows))
    generator = torch.Generator().manual_seed(views)
    features = torch.randn(1, batch.tokens.shape[1], a.text.width, generator=generator).bfloat16().to(device)
    assert exact._chain is None
    assert narrow._chain is not None
    assert (narrow._chain.covers(batch.valid), narrow._chain.covers(both.valid)) == (True, False)
    expected = exact.solve(batch, features.float())
    chain, again = (narrow.solve(batch, features) for _ in range(2))
    assert torch.equal(chain, again)
    narrow._chain = None
    layers = narrow.solve(batch, features)
    apart = [float((found - expected).norm() / expected.norm()) for found in (chain, layers)]
    assert apart[0] < 1.25 * apart[1] < 0.02
