"""What `taktline profile` says of Cosmos3: phases, their work, and random weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_protocol import TaktlineError
from taktline_worker.models.cosmos3 import synthetic, work
from taktline_worker.models.cosmos3.config import expected_shapes, parameters
from taktline_worker.models.cosmos3.request import OFFICIAL, PAPER
from taktline_worker.profiling import report
from taktline_worker.profiling.subject import Request, open_subject

from tests.cosmos3.served_folders import save_policy
from tests.cosmos3.tiny_policy import ACTION_WIDTH, DOMAINS, OFFICIAL_TINY, VOCABULARY


@pytest.mark.parametrize(
    ("a", "settings", "text", "tflop"),
    [
        # Published counts of one pass; they count the last layer whole, which here is a part of it.
        (synthetic.NANO, PAPER, 96, 56.8),
        (synthetic.NANO, OFFICIAL, 200, 49.0),
        (synthetic.EDGE, OFFICIAL, 200, 11.05),
    ],
)
def test_a_pass_agrees_with_the_published_counts(a, settings, text, tflop):
    found = work.pass_flops(a, settings, text) / 1e12
    assert tflop * 0.98 < found < tflop * 1.005
    assert 0.95 < work.pass_flops(a, settings, text, actions_only=True) / 1e12 / found < 1 - 0.8 / a.layers


def test_text_and_video_coder_agree_with_the_published_counts():
    assert work.text_work(synthetic.NANO, 200, 2.0).flops / 1e12 == pytest.approx(2.80, rel=0.05)
    assert work.text_work(synthetic.NANO, 200, 2.0).bytes / 1e9 == pytest.approx(13.9, rel=0.05)
    # Of the three frames that a convolution sees, the two before the first are padding and cost nothing here.
    assert work.encode_flops(synthetic.VAE, PAPER) / 1e12 == pytest.approx(1.9 / 3, rel=0.05)
    whole = replace(PAPER, encoded_frames=33)
    assert work.encode_flops(synthetic.VAE, whole) / 1e12 == pytest.approx(46.5, rel=0.1)


def test_random_policies_have_the_published_sizes():
    towers = 2 * synthetic.NANO.layers * work.layer_weights(synthetic.NANO)
    assert towers / 2e9 == pytest.approx(6.946, rel=1e-3)
    # The published total has the output head, which is not read.
    head = synthetic.NANO.vocabulary * synthetic.NANO.width
    assert (parameters(expected_shapes(synthetic.NANO)) + head) / 1e9 == pytest.approx(15.17, rel=2e-3)


def test_a_request_by_phase(monkeypatch):
    tiny = replace(
        synthetic.NANO,
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=96,
        vocabulary=VOCABULARY,
        sections=(4, 2, 2),
        action_width=ACTION_WIDTH,
        domains=DOMAINS,
    )
    small = replace(
        synthetic.VAE,
        encoder=tuple(replace(s, inputs=s.inputs // 20, outputs=s.outputs // 20) for s in synthetic.VAE.encoder),
    )
    monkeypatch.setattr(synthetic, "VAE", small)
    monkeypatch.setitem(synthetic.POLICIES, "cosmos3-nano", (tiny, OFFICIAL_TINY))
    subject = open_subject(Request("random:cosmos3-nano", (1, 2), device="cpu", prompt_tokens=20))
    assert subject.shape == {
        "tokens": 36,
        "action_rows": 9,
        "prompt_tokens": 20,
        "encoded_frames": 1,
        "steps": 4,
        "passes": 8,
    }
    rows = report.profile(subject, [1, 2], lambda said: None, runs=3, limit_s=0.5)
    assert [[phase.name for phase in row.phases] for row in rows] == [["encode", "denoise"]] * 2
    for one, two in zip(rows[0].phases, rows[1].phases, strict=True):
        assert two.gflop == pytest.approx(2 * one.gflop)
        assert two.mbytes == pytest.approx(one.mbytes)
    state = subject.whole(2)()
    assert isinstance(state, torch.Tensor)
    actions = state[:, -OFFICIAL_TINY.actions * OFFICIAL_TINY.raw_dims :]
    assert 0.1 < float(actions.std()) < 30.0
    for bad in ({"precision": "fp8"}, {"views": 2}):  # FP8 needs a GPU that has it
        with pytest.raises(TaktlineError):
            open_subject(Request("random:cosmos3-nano", (1,), device="cpu", **bad))


def test_a_folder_is_profiled_as_the_family_that_it_is(tmp_path):
    subject = open_subject(Request(str(save_policy(tmp_path)), (1,), device="cpu", prompt_tokens=20))
    assert subject.policy == "cosmos3-nano"
    (row,) = report.profile(subject, [1], lambda said: None, runs=3, limit_s=0.1)
    assert [phase.name for phase in row.phases] == ["encode", "denoise"]
    assert all(0 < phase.mfu <= 1.001 * phase.of_roof for phase in row.phases)
