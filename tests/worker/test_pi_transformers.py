"""SigLIP and Gemma of this worker against the modules of `transformers`, on random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from taktline_kernels import ops
from taktline_worker.models.pi import modules
from taktline_worker.models.pi.weights import GemmaLayer, VisionLayer, VisionWeights
from torch import Tensor
from transformers import GemmaConfig, GemmaModel, SiglipVisionConfig, SiglipVisionModel

Distance = Callable[[Tensor, Tensor], float]


def _randomise(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)


def _state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("vision_model."): value.detach() for name, value in model.state_dict().items()}


def test_siglip_matches_transformers(distance: Distance) -> None:
    config = SiglipVisionConfig(
        hidden_size=72, intermediate_size=96, num_hidden_layers=3, num_attention_heads=3, image_size=56, patch_size=14,
        vision_use_head=False, attn_implementation="eager",
    )  # fmt: skip
    assert config.layer_norm_eps == 1e-6
    assert config.hidden_act == "gelu_pytorch_tanh"
    model = SiglipVisionModel(config).eval()
    _randomise(model, 1)
    state = _state(model)

    def layer(index: int) -> VisionLayer:
        base = f"encoder.layers.{index}"
        joined = {
            kind: torch.cat([state[f"{base}.self_attn.{part}_proj.{kind}"] for part in "qkv"])
            for kind in ("weight", "bias")
        }
        return VisionLayer(
            state[f"{base}.layer_norm1.weight"], state[f"{base}.layer_norm1.bias"], joined["weight"], joined["bias"],
            state[f"{base}.self_attn.out_proj.weight"], state[f"{base}.self_attn.out_proj.bias"],
            state[f"{base}.layer_norm2.weight"], state[f"{base}.layer_norm2.bias"],
            state[f"{base}.mlp.fc1.weight"], state[f"{base}.mlp.fc1.bias"],
            state[f"{base}.mlp.fc2.weight"], state[f"{base}.mlp.fc2.bias"],
        )  # fmt: skip

    weights = VisionWeights(
        patch_weight=state["embeddings.patch_embedding.weight"].flatten(1),
        patch_bias=state["embeddings.patch_embedding.bias"],
        position=state["embeddings.position_embedding.weight"],
        layers=tuple(layer(index) for index in range(3)),
        norm_weight=state["post_layernorm.weight"],
        norm_bias=state["post_layernorm.bias"],
        projector_weight=torch.eye(72),
        projector_bias=torch.zeros(72),
    )
    pixels = torch.rand(2, 3, 56, 56, generator=torch.Generator().manual_seed(2)) * 2 - 1
    with torch.no_grad():
        expected = model(pixels).last_hidden_state
    assert distance(modules.vision_tower(weights, pixels, 3), expected) <= 2e-6


@pytest.fixture(scope="module")
def gemma() -> GemmaModel:
    config = GemmaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=80, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=1, head_dim=16, hidden_activation="gelu_pytorch_tanh", attn_implementation="eager",
    )  # fmt: skip
    assert config.rms_norm_eps == 1e-6
    model = GemmaModel(config).eval()
    _randomise(model, 3)
    return model


def _layers(model: GemmaModel) -> tuple[GemmaLayer, ...]:
    state = _state(model)
    return tuple(
        GemmaLayer(
            qkv_weight=torch.cat([state[f"layers.{i}.self_attn.{part}_proj.weight"] for part in "qkv"]),
            out_weight=state[f"layers.{i}.self_attn.o_proj.weight"],
            gate_up_weight=torch.cat([state[f"layers.{i}.mlp.{part}_proj.weight"] for part in ("gate", "up")]),
            down_weight=state[f"layers.{i}.mlp.down_proj.weight"],
            norm1_weight=state[f"layers.{i}.input_layernorm.weight"],
            norm2_weight=state[f"layers.{i}.post_attention_layernorm.weight"],
        )
        for i in range(4)
    )


def _official(model: GemmaModel, x: Tensor, lengths: list[int]) -> Any:
    """Hidden states and cache of the official model with bidirectional attention over the valid tokens."""
    slots = x.shape[1]
    valid = torch.arange(slots)[None] < torch.tensor(lengths)[:, None]
    mask = torch.where(valid[:, None, None, :], 0.0, torch.finfo(torch.float32).min).expand(-1, 1, slots, -1)
    with torch.no_grad():
        return model(
            inputs_embeds=x, attention_mask=mask, use_cache=True, output_hidden_states=True,
            position_ids=torch.arange(slots)[None].expand(len(lengths), -1),
        )  # fmt: skip


def test_gemma_prefix_matches_transformers(gemma: GemmaModel, distance: Distance) -> None:
    lengths = [24, 9]
    x = torch.randn(2, 24, 48, generator=torch.Generator().manual_seed(4))
    keys, values = torch.zeros(4, 2, 24, 16), torch.zeros(4, 2, 24, 16)
    last = modules.prefix_pass(_layers(gemma), x, torch.tensor(lengths, dtype=torch.int32), keys, values, 8)
    official = _official(gemma, x, lengths)
    for row, length in enumerate(lengths):
        assert distance(last[row, :length], official.hidden_states[3][row, :length]) <= 2e-6
        for index in range(4):
            cached = official.past_key_values.layers[index]
            assert distance(keys[index, row, :length], cached.keys[row, 0, :length]) <= 2e-6
            assert distance(values[index, row, :length], cached.values[row, 0, :length]) <= 2e-6


def test_gemma_embedding_scale_matches_transformers(gemma: GemmaModel, distance: Distance) -> None:
    tokens = torch.tensor([[2, 5, 63]])
    with torch.no_grad():
        expected = gemma.embed_tokens(tokens)
    ours = modules.text_features(_state(gemma)["embed_tokens.weight"], tokens)
    assert distance(ours, expected) <= 1e-6


def test_gemma_expert_step_matches_transformers(gemma: GemmaModel, distance: Distance) -> None:
    """A suffix that attends a cached prefix: positions go on after the valid tokens, padding is never seen."""
    from taktline_worker.models.pi.weights import ActionHeads, PiWeights

    length, suffix, slots = 9, 5, 16
    generator = torch.Generator().manual_seed(5)
    prefix = torch.randn(1, length, 48, generator=generator)
    actions = torch.randn(1, suffix, 48, generator=generator)
    official = _official(gemma, prefix, [length])
    with torch.no_grad():
        expected = gemma(
            inputs_embeds=actions, past_key_values=official.past_key_values,
            attention_mask=torch.zeros(1, 1, suffix, length + suffix),
            position_ids=torch.arange(length, length + suffix)[None],
        ).last_hidden_state  # fmt: skip

    layers = _layers(gemma)
    keys, values = torch.randn(4, 1, slots, 16) * 100, torch.randn(4, 1, slots, 16) * 100
    lengths = torch.tensor([length], dtype=torch.int32)
    modules.prefix_pass(layers, prefix, lengths, keys, values, 8)
    eye, zero = torch.eye(48), torch.zeros(48)
    heads = ActionHeads(eye, torch.zeros(1, 48), eye, zero, eye, zero, None, None)
    norm = _state(gemma)["norm.weight"]
    weights = PiWeights(None, torch.zeros(1, 48), layers, norm, layers, norm, None, heads, torch.ones(1))  # type: ignore[arg-type]
    cos, sin = ops.rope_table(lengths[:, None] + torch.arange(suffix), 16)
    hidden = modules._plain_expert(weights, actions, keys, values, lengths, cos, sin, 8)
    assert distance(hidden, expected) <= 2e-6
