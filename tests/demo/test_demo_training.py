"""Training at toy size: it runs, it learns something, and what it writes can be read back."""

import numpy as np
import pytest
import torch
from taktline_demo.jpeg import encode_jpeg
from taktline_demo.policy.architecture import Architecture
from taktline_demo.policy.checkpoint import load_checkpoint
from taktline_demo.policy.inference import DirectPolicy
from taktline_demo.policy.network import DemoPolicy, flow_matching_loss
from taktline_demo.policy.normalisation import Statistics
from taktline_demo.policy.training import TrainingOptions, train
from taktline_demo.recording import record

SMALL = Architecture(
    vision_layers=1,
    vision_width=32,
    vision_mlp=32,
    depth=2,
    head_dim=8,
    prefix_width=32,
    prefix_mlp=32,
    expert_width=32,
    expert_mlp=32,
)


def test_loss_falls_on_one_batch():
    torch.manual_seed(0)
    a = SMALL
    policy = DemoPolicy(a)
    pixels = torch.rand(2, 2, 3, a.image_size, a.image_size) * 2 - 1
    tokens, actions = torch.randint(4, a.vocabulary, (2, 12)), torch.zeros(2, a.horizon, a.action_width)
    actions[..., : a.action_dim] = torch.tensor([-0.5, 0.5])[:, None, None]
    times, noise = torch.tensor([0.3, 0.8]), torch.randn(actions.shape)
    optimiser = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        prefix = policy.encode(pixels, tokens, torch.ones_like(tokens, dtype=torch.bool))
        loss = flow_matching_loss(policy, prefix, actions, times, noise)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_prompt_padding_changes_nothing():
    torch.manual_seed(0)
    a = SMALL
    policy = DemoPolicy(a).eval()
    pixels, tokens = torch.rand(1, 2, 3, a.image_size, a.image_size), torch.randint(4, a.vocabulary, (1, 9))
    padded = torch.cat([tokens, torch.zeros(1, 5, dtype=torch.int64)], dim=1)
    noise = torch.randn(1, a.horizon, a.action_width)
    with torch.no_grad():
        plain = policy.sample(policy.encode(pixels, tokens, tokens != 0), noise)
        with_padding = policy.sample(policy.encode(pixels, padded, padded != 0), noise)
    assert torch.allclose(plain, with_padding, atol=1e-5)


def test_a_short_training_writes_a_checkpoint_that_acts(tmp_path):
    demonstrations = record(3, 70)
    demonstrations.save(tmp_path / "data.npz")
    lines = []
    options = TrainingOptions(steps=2, batch=4, draws=2, warmup=1)
    train(tmp_path / "data.npz", tmp_path / "out", options, torch.device("cpu"), lines.append)
    assert any("held-out tip error" in line for line in lines)
    policy, statistics = load_checkpoint(tmp_path / "out")
    assert set(statistics) == {"observation.state", "action"}
    assert all(torch.isfinite(value).all() for value in policy.state_dict().values())
    images = {name: encode_jpeg(frames[0]) for name, frames in demonstrations.frames.items()}
    chunk = DirectPolicy(tmp_path / "out").act(images, demonstrations.states[0], "reach the red block", 1)
    assert chunk.shape == demonstrations.chunks.shape[2:]
    assert np.isfinite(chunk).all()


def test_equal_seeds_give_equal_actions(tmp_path):
    demonstrations = record(2, 80)
    demonstrations.save(tmp_path / "data.npz")
    options = TrainingOptions(steps=1, batch=2, draws=1, warmup=1)
    images = {name: encode_jpeg(frames[0]) for name, frames in demonstrations.frames.items()}
    chunks = []
    for out in ("a", "b"):
        train(tmp_path / "data.npz", tmp_path / out, options, torch.device("cpu"), lambda line: None)
        chunks.append(DirectPolicy(tmp_path / out).act(images, demonstrations.states[0], "go to the blue block", 3))
    assert np.array_equal(*chunks)


def test_normalisation_maps_the_quantiles_to_one_and_back():
    samples = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)
    statistics = Statistics.of(samples)
    normalised = statistics.normalise(samples)
    assert np.quantile(normalised, 0.01, axis=0) == pytest.approx(-1, abs=1e-3)
    assert np.quantile(normalised, 0.99, axis=0) == pytest.approx(1, abs=1e-3)
    assert statistics.restore(normalised) == pytest.approx(samples, abs=1e-5)
