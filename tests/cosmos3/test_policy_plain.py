"""The plain statement that the benchmark measures against is the same model as the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from taktline_worker.models.cosmos3 import synthetic
from taktline_worker.models.cosmos3.runner import Cosmos3Runner
from taktline_worker.models.cosmos3.weights import pack_weights

from benchmarks.plain_cosmos3 import PlainCosmos3
from tests.cosmos3.tiny_policy import (
    ACTION_WIDTH,
    DOMAINS,
    EDGE_TINY,
    OFFICIAL_TINY,
    PAPER_TINY,
    VOCABULARY,
    fake_encoder,
    make_request,
)

SIZE = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "mlp": 96,
    "vocabulary": VOCABULARY,
    "sections": (4, 2, 2),
    "action_width": ACTION_WIDTH,
    "domains": DOMAINS,
}


@pytest.mark.parametrize(
    ("published", "settings"),
    [
        (synthetic.NANO, OFFICIAL_TINY),
        (synthetic.NANO, PAPER_TINY),
        (synthetic.EDGE, EDGE_TINY),
        (synthetic.NANO, replace(OFFICIAL_TINY, steps=7)),
    ],
)
def test_the_plain_statement_and_the_engine_agree(published, settings):
    a = replace(published, **SIZE)
    cpu, tensors = torch.device("cpu"), dict(synthetic.random_tensors(replace(published, **SIZE), torch.device("cpu")))
    runner = Cosmos3Runner(pack_weights(tensors.items(), a, settings, torch.float32, cpu), a, settings, fake_encoder)
    rows = [make_request(settings, seed, 12) for seed in (1, 2)]
    inputs = runner.prepare(rows)
    ours = torch.stack([outcome.actions for outcome in runner.run(rows)])
    plain = PlainCosmos3(tensors.items(), a, settings, torch.float32)
    prompts = torch.tensor(inputs.conditional), torch.tensor(inputs.unconditional)
    theirs = plain(inputs.clean[:, :, None], inputs.state, inputs.video, inputs.actions, prompts)
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
